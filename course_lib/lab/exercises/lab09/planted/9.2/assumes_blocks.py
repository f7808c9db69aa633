def two_level_all_reduce(flat, node_of, wire):
    nodes = len(set(node_of))
    size = wire.ranks // nodes
    first = wire.rank // size * size
    inner = wire.group(range(first, first + size))
    inter = wire.group(range(wire.rank % size, wire.ranks, size))
    inner.reduce_scatter(flat)
    inter.all_reduce(flat.tensor_split(size)[inner.rank])
    inner.all_gather(flat)
