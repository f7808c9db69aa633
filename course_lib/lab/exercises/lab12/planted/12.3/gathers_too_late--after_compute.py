def run_pass(order, wire, compute, ahead):
    last = {u: i for i, u in enumerate(order)}
    coming = {order[0]: wire.gather(order[0])}
    for i, u in enumerate(order):
        coming[u].wait()
        compute(u)
        for v in order[i + 1:i + 1 + max(1, ahead)]:
            if v not in coming:
                coming[v] = wire.gather(v)
        if last[u] == i:
            wire.free(u)
