def run_pass(order, wire, compute, ahead):
    coming = {}
    for i, u in enumerate(order):
        for v in order[i:i + 1 + ahead]:
            if v not in coming:
                coming[v] = wire.gather(v)
        coming.pop(u).wait()
        compute(u)
        if u not in coming:
            wire.free(u)
