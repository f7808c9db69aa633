def run_pass(order, wire, compute, ahead):
    coming = {}
    for i, u in enumerate(order):
        for v in order[i:i + 1 + ahead]:
            if v not in coming:
                coming[v] = wire.gather(v)
        coming[u].wait()
        compute(u)
        wire.free(u)
