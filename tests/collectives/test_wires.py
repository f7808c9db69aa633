"""What the collectives put on the wires, and how long that takes against the α-β model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import (
    all_gather_ring,
    all_reduce_doubling,
    all_reduce_hierarchical,
    all_reduce_ring,
    node_groups,
    reduce_scatter_ring,
)
from course_lib.collectives.measure import measure_message, measure_nodes
from course_lib.launch import Fabric, RankFailed, current_wire, run
from course_lib.launch.fabric import shaped_works
from course_lib.launch.netns import kernel_bytes
from course_lib.record import now
from course_lib.simulate.collectives import flat_ring, hierarchical

needs_shaped = pytest.mark.skipif(not shaped_works(), reason="ip and tc do not work in a user namespace here")
MB = 2**20


def bytes_sent():
    """Bytes of each collective on 1 MB, counted by the Wire."""
    flat, traffic, out = torch.zeros(MB // 4), current_wire().traffic, {}
    for way in (reduce_scatter_ring, all_gather_ring, all_reduce_ring, all_reduce_doubling):
        traffic.reset()
        way(flat)
        out[way.__name__] = traffic.bytes["send"], set(traffic.calls)
    return out


@pytest.mark.parametrize("ranks", [3, 4])
def test_bytes_are_those_of_the_formula(ranks) -> None:
    shares = {"reduce_scatter_ring": (ranks - 1) / ranks, "all_gather_ring": (ranks - 1) / ranks,
              "all_reduce_ring": 2 * (ranks - 1) / ranks}
    for rank, out in enumerate(run(bytes_sent, ranks=ranks, fabric="loopback")):
        for name, share in shares.items():
            assert out[name] == (pytest.approx(share * MB, abs=16), {"send", "recv"})
        messages = {3: (2, 1, 1), 4: (2, 2, 2, 2)}[ranks][rank]
        assert out["all_reduce_doubling"][0] == messages * MB


def levels_sent():
    inner, inter = node_groups()
    inner.traffic.reset(), inter.traffic.reset()
    all_reduce_hierarchical(torch.zeros(MB // 4), inner, inter)
    return inner.traffic.total_bytes, inter.traffic.total_bytes


def test_only_a_part_crosses_between_nodes() -> None:
    assert run(levels_sent, ranks=4, fabric=Fabric("loopback", nodes=2)) == [(MB, MB / 2)] * 4


def kernel_sent():
    """Bytes that the kernel counted for 4 MB: ours and gloo's reduce-scatter, our all-gather."""
    size, n = 4 * MB, dist.get_world_size()
    flat, part = torch.zeros(size // 4), torch.empty(size // 4 // n)
    ways = {"reduce_scatter": lambda: reduce_scatter_ring(flat), "all_gather": lambda: all_gather_ring(flat),
            "gloo's reduce_scatter": lambda: dist.reduce_scatter_tensor(part, flat)}
    out = {}
    for name, way in ways.items():
        dist.barrier()
        before = kernel_bytes()[1]
        way()
        dist.barrier()
        out[name] = (kernel_bytes()[1] - before) / size
    return out


@needs_shaped
def test_the_kernel_counts_half_of_what_gloo_sends_for_a_reduce_scatter() -> None:
    for out in run(kernel_sent, ranks=4, fabric=Fabric(gbit=1.0, kind="shaped")):
        assert out["reduce_scatter"] == pytest.approx(0.75, rel=0.05)
        assert out["all_gather"] == pytest.approx(0.75, rel=0.05)
        assert out["gloo's reduce_scatter"] > 1.9 * out["reduce_scatter"]


def flat_and_hierarchical(shared):
    """The wires as measured, and the fastest of each all-reduce of 2 MB in seconds, in alternation."""
    inner, inter = node_groups()
    nodes, tensor = measure_nodes(inner, inter, shared), torch.zeros(2 * MB // 4)
    ways = {"flat": lambda: all_reduce_ring(tensor, chunks=1),
            "hierarchical": lambda: all_reduce_hierarchical(tensor, inner, inter, chunks=1)}
    seconds = {name: [] for name in ways}
    for _ in range(7):
        for name, way in ways.items():
            dist.barrier()
            start = now()
            way()
            took = torch.tensor([(now() - start) / 1e9], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[name].append(float(took))
    return nodes, {name: min(values) for name, values in seconds.items()}


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("shaped", marks=needs_shaped), "paced"])
def test_hierarchical_beats_the_flat_ring_by_the_factor_of_the_model(kind) -> None:
    fabric = Fabric(gbit=1.0, latency_us=200, nodes=2, inter_gbit=0.1, inter_latency_us=1000, kind=kind)
    nodes, seconds = run(flat_and_hierarchical, kind == "shaped", ranks=4, fabric=fabric)[0]
    expected = flat_ring(nodes).cost(2 * MB) / hierarchical(nodes).cost(2 * MB)
    assert expected > 1.25
    assert seconds["flat"] / seconds["hierarchical"] == pytest.approx(expected, rel=0.15)


def wires():
    inner, inter = node_groups()
    return measure_nodes(inner, inter)


@pytest.mark.parametrize("kind", [pytest.param("shaped", marks=needs_shaped), "paced"])
def test_the_latency_of_a_message_is_found(kind) -> None:
    """A message cannot take less than the wire makes it wait, however much a shaped one lets pass at once then."""
    fabric = Fabric(gbit=1.0, latency_us=200, nodes=2, inter_gbit=0.1, inter_latency_us=1000, kind=kind)
    nodes = run(wires, ranks=4, fabric=fabric)[0]
    assert nodes.inner.a_s >= 200e-6 and nodes.uplink.a_s >= 1000e-6
    assert 8e-9 / nodes.uplink.beta_s_per_byte == pytest.approx(0.1, rel=0.1)


def alone():
    measure_message()


def test_one_rank_has_no_message_to_measure() -> None:
    with pytest.raises(RankFailed, match="sends no message"):
        run(alone, ranks=1, fabric="loopback")
