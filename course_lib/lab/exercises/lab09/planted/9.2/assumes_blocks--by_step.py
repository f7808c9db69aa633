def two_level_all_reduce(flat, node_of, wire):
    mates = [r for r in range(wire.ranks) if node_of[r] == node_of[wire.rank]]
    place = mates.index(wire.rank)
    peers = range(wire.rank % len(mates), wire.ranks, len(mates))
    inner, inter = wire.group(mates), wire.group(peers)
    inner.reduce_scatter(flat)
    inter.all_reduce(flat.tensor_split(inner.ranks)[inner.rank])
    inner.all_gather(flat)
