def two_level_all_reduce(flat, node_of, wire):
    wire.group(range(wire.ranks)).all_reduce(flat)
