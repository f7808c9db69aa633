def run_pass(order, wire, compute, ahead):
    last = {u: i for i, u in enumerate(order)}
    coming = {u: wire.gather(u) for u in dict.fromkeys(order)}
    for i, u in enumerate(order):
        coming[u].wait()
        compute(u)
        if last[u] == i:
            wire.free(u)
