def union(spans):
    moments = sorted({t for start, stop in spans if stop > start for t in range(start, stop + 1)})
    out = []
    for t in moments:
        if out and t == out[-1][1] + 1:
            out[-1] = (out[-1][0], t)
        else:
            out.append((t, t))
    return out
