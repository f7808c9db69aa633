def choose(G_bytes, Tb_s, nodes, per_node, inner, uplink):
    late = uplink[0] > 40e-6
    return "flat" if uplink[1] < 1.5 * inner[1] else "hierarchical", (3 if late else 25) * 2**20
