"""What a collective made of messages costs: the α-β model, on one kind of wire and on two.

A message of S bytes occupies a wire for α + β·S. `LinkCost(a_s, beta_s_per_byte)` holds the α of *one message* and
the β of one rank's wire here, and what comes back from `ring()` is the `LinkCost` of *one collective*, as the models
of gradient buckets want it. (Thakur, Rabenseifner and Gropp, 2005; metrics of this course: a = 2(n−1)·α.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from course_lib.link_cost import LinkCost


@dataclass(frozen=True)
class Nodes:
    """`count` nodes of `ranks` ranks each. `inner` is a rank's wire inside its node and `uplink` the wire of a whole
    node to the others, which its ranks share (`shared=False`: each rank has one of its own, as a network card for
    each device gives it). Raises `ValueError` for less than one node or rank."""

    count: int
    ranks: int
    inner: LinkCost
    uplink: LinkCost
    shared: bool = True

    def __post_init__(self) -> None:
        if self.count < 1 or self.ranks < 1:
            raise ValueError(f"{self.count} nodes of {self.ranks} ranks: give at least one of each")

    @property
    def size(self) -> int:
        """All ranks."""
        return self.count * self.ranks


def reduce_scatter(n: int, message: LinkCost, chunks: int = 1) -> LinkCost:
    """Ring reduce-scatter or all-gather over n ranks, segments sent in `chunks` messages:
    (n−1)·chunks·α + (n−1)/n·S·β."""
    if n < 1 or chunks < 1:
        raise ValueError(f"{n} ranks, {chunks} chunks: give at least one of each")
    return LinkCost((n - 1) * chunks * message.a_s, (n - 1) / n * message.beta_s_per_byte)


def ring(n: int, message: LinkCost, chunks: int = 1) -> LinkCost:
    """Ring all-reduce: 2(n−1)·chunks·α + 2(n−1)/n·S·β."""
    half = reduce_scatter(n, message, chunks)
    return LinkCost(2 * half.a_s, 2 * half.beta_s_per_byte)


def doubling(n: int, message: LinkCost) -> LinkCost:
    """Recursive doubling: ⌊log₂ n⌋ messages of the whole tensor, two more where n is no power of two."""
    if n < 1:
        raise ValueError(f"{n} ranks: give at least one")
    steps = n.bit_length() - 1 + (0 if n & (n - 1) == 0 else 2)
    return LinkCost(steps * message.a_s, steps * message.beta_s_per_byte)


def flat_ring(nodes: Nodes, chunks: int = 1) -> LinkCost:
    """A ring over all ranks of all nodes, neighbours next to each other. Every hop is as slow as its slowest
    message: the one that leaves a node, which has the uplink to itself."""
    if nodes.count == 1:
        return ring(nodes.size, nodes.inner, chunks)
    slowest = LinkCost(max(nodes.inner.a_s, nodes.uplink.a_s),
                       max(nodes.inner.beta_s_per_byte, nodes.uplink.beta_s_per_byte))
    return ring(nodes.size, slowest, chunks)


def hierarchical(nodes: Nodes, chunks: int = 1) -> LinkCost:
    """Reduce-scatter inside, all-reduce of a part of S/ranks between the nodes, all-gather inside, one after the
    other. All ranks of a node send between nodes at once: on a shared uplink each has 1/ranks of its rate."""
    inside = ring(nodes.ranks, nodes.inner, chunks)
    beta = nodes.uplink.beta_s_per_byte * (nodes.ranks if nodes.shared else 1)
    between = ring(nodes.count, LinkCost(nodes.uplink.a_s, max(beta, nodes.inner.beta_s_per_byte)), chunks)
    return LinkCost(inside.a_s + between.a_s, inside.beta_s_per_byte + between.beta_s_per_byte / nodes.ranks)


def bytes_for_share(share: float, cost: LinkCost) -> float:
    """Bytes from which a collective has `share` of the rate it would have without latency: share/(1−share)·a/β. For
    a ring and 90 % that is 9·n·α/β, with α and β of a message. Raises `ValueError` unless 0 < share < 1."""
    if not 0 < share < 1:
        raise ValueError(f"share={share}: give a part of the full rate, between 0 and 1")
    if cost.beta_s_per_byte == 0:
        return 0.0 if cost.a_s == 0 else math.inf
    return share / (1 - share) * cost.a_s / cost.beta_s_per_byte


def best_equal_bucket(total_bytes: float, backward_s: float, cost: LinkCost) -> float:
    """Bytes of the best equal buckets of a gradient that becomes ready evenly over a backward pass.

    While the wire is the slower one the step ends at Tb·S/G + (G/S)·a + G·β: the first bucket fills, then the wire
    never rests. S = G·√(a/Tb) is best, whatever β is. A slow wire therefore wants larger buckets only where its
    latency is larger. While backward is the slower one, what counts is the last bucket, c(S): the smallest S of which
    the wire can keep up, c(S) ≤ Tb·S/G. Raises `ValueError` on a gradient or a time that is not above 0.
    """
    if not (total_bytes > 0 and backward_s > 0):
        raise ValueError(f"{total_bytes} bytes in {backward_s} s: give a gradient and a backward pass above 0")
    spare = backward_s / total_bytes - cost.beta_s_per_byte
    busy = total_bytes * math.sqrt(cost.a_s / backward_s)
    keeps_up = cost.a_s / spare if spare > 0 else math.inf
    return min(max(busy, 1.0), total_bytes) if busy <= keeps_up else min(max(keeps_up, 1.0), total_bytes)
