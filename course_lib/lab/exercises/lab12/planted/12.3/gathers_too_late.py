def run_pass(order, wire, compute, ahead):
    last = {u: i for i, u in enumerate(order)}
    there = set()
    for i, u in enumerate(order):
        if u not in there:
            wire.gather(u).wait()
            there.add(u)
        compute(u)
        if last[u] == i:
            wire.free(u)
