def shared(a, b):
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def diagnose(spans):
    ranks = sorted({rank for rank, *_ in spans})
    comm, compute, backward_end = {}, {}, {}
    for rank in ranks:
        mine = [(kind, start, stop) for r, kind, start, stop in spans if r == rank]
        comm[rank] = [(start, stop) for kind, start, stop in mine if kind == "comm"]
        compute[rank] = [(start, stop) for kind, start, stop in mine if kind != "comm"]
        backward_end[rank] = max(stop for kind, _, stop in mine if kind == "backward")
    M = sum(stop - start for rank in ranks for start, stop in comm[rank])
    C = sum(stop - start for rank in ranks for start, stop in compute[rank])
    W = 0
    for same in zip(*comm.values()):
        last = max(start for start, _ in same)
        W += sum(last - start for start, _ in same)
    E = M - sum(shared(a, b) for rank in ranks for a in comm[rank] for b in compute[rank])
    T = max(stop for *_, stop in spans) - min(start for _, _, start, _ in spans)
    if W > M / 2:
        return "late rank", W / M
    if any(comm[rank][0][0] >= backward_end[rank] for rank in ranks):
        return "held back", E / (len(ranks) * T)
    if M - W > C:
        return "slow wire", (M - W) / C
    return "nothing to gain", E / (len(ranks) * T)
