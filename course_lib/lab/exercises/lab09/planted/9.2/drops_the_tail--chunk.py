def two_level_all_reduce(flat, node_of, wire):
    mates = [r for r in range(wire.ranks) if node_of[r] == node_of[wire.rank]]
    place = mates.index(wire.rank)
    peers = [[r for r in range(wire.ranks) if node_of[r] == node][place] for node in set(node_of)]
    inner, inter = wire.group(mates), wire.group(peers)
    inner.reduce_scatter(flat)
    inter.all_reduce(flat.chunk(inner.ranks)[place])
    inner.all_gather(flat)
