def run_pass(order, wire, compute, ahead):
    last = {u: i for i, u in enumerate(order)}
    coming = {}
    for i in range(len(order) - 1):
        u = order[i]
        for v in order[i:i + 1 + ahead]:
            if v not in coming:
                coming[v] = wire.gather(v)
        coming[u].wait()
        compute(u)
        if last[u] == i:
            wire.free(u)
