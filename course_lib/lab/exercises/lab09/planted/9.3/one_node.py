from course_lib.simulate.collectives import best_equal_bucket
from course_lib.link_cost import LinkCost


def choose(G_bytes, Tb_s, nodes, per_node, inner, uplink):
    n = nodes * per_node
    alpha, beta = max(inner[0], uplink[0]), max(inner[1], uplink[1])
    between = max(per_node * uplink[1], inner[1])
    costs = {
        "flat": (2 * (n - 1) * alpha, 2 * (n - 1) / n * beta),
        "hierarchical": (2 * (per_node - 1) * inner[0] + 2 * (nodes - 1) * uplink[0],
                         2 * (per_node - 1) / per_node * inner[1] + 2 * (nodes - 1) / nodes / per_node * between),
    }
    if nodes == 1:
        del costs["hierarchical"]
    candidates = []
    for name, (a, b) in costs.items():
        S = best_equal_bucket(G_bytes, Tb_s, LinkCost(a, b))
        arrival = max(Tb_s * S / G_bytes + a * G_bytes / S + b * G_bytes, Tb_s + a + b * S)
        candidates.append((arrival, name, S))
    _, name, S = min(candidates)
    return name, S
