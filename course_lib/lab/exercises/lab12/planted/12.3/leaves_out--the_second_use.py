def run_pass(order, wire, compute, ahead):
    coming = {}
    units = list(dict.fromkeys(order))
    for i, u in enumerate(units):
        for v in units[i:i + 1 + ahead]:
            if v not in coming:
                coming[v] = wire.gather(v)
        coming[u].wait()
        compute(u)
        wire.free(u)
