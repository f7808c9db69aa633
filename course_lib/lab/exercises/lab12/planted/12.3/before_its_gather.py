def run_pass(order, wire, compute, ahead):
    last = {u: i for i, u in enumerate(order)}
    coming = {}
    for i, u in enumerate(order):
        for v in order[i:i + 1 + ahead]:
            if v not in coming:
                coming[v] = wire.gather(v)
        compute(u)
        coming[u].wait()
        if last[u] == i:
            wire.free(u)
