def run_pass(order, wire, compute, ahead):
    last = {u: i for i, u in enumerate(order)}
    coming = {order[0]: wire.gather(order[0])}
    for i, u in enumerate(order):
        if i + 1 < len(order) and order[i + 1] not in coming:
            coming[order[i + 1]] = wire.gather(order[i + 1])
        coming[u].wait()
        compute(u)
        if last[u] == i:
            wire.free(u)
