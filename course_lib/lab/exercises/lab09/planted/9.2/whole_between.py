def two_level_all_reduce(flat, node_of, wire):
    mates = [r for r in range(wire.ranks) if node_of[r] == node_of[wire.rank]]
    place = mates.index(wire.rank)
    nodes = sorted(set(node_of))
    peers = [[r for r in range(wire.ranks) if node_of[r] == node][place] for node in nodes]
    inner, inter = wire.group(mates), wire.group(peers)
    inner.all_reduce(flat)
    inter.all_reduce(flat)
