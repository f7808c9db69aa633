def union(spans):
    out = []
    for start, stop in sorted(spans):
        if start == stop:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def sends(name):
    return "nccl" in name.lower() or name.startswith("wire::")


def exposed_hidden(events, steps):
    found = {}
    for (rank, step), (begin, end) in steps.items():
        mine = [(name, start, stop) for r, category, name, start, stop in events if r == rank]
        comm = union([(start, stop) for name, start, stop in mine if sends(name) and begin <= start < end])
        compute = union([(start, stop) for name, start, stop in mine if not sends(name)])
        hidden = sum(max(0, min(b, d) - max(a, c)) for a, b in comm for c, d in compute)
        found[rank, step] = (sum(b - a for a, b in comm) - hidden, hidden) if comm else None
    return found
