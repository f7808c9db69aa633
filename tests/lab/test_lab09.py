"""Exercises 9.1 to 9.3: right answers of several kinds pass, odd ones are told what is odd; the runs on ranks."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab import CheckFailed, LabError, evaluate
from course_lib.lab.pictures.hops import flat_hops, hops, measured_hops, two_level_hops
from course_lib.lab.workbench.buckets import OwnRunFailed
from course_lib.lab.workbench.wires import reduce_runs, train_runs
from course_lib.launch import Fabric
from course_lib.link_cost import LinkCost
from course_lib.simulate.collectives import Nodes, best_equal_bucket, flat_ring, hierarchical
from course_lib.train.emulated import equal

seeds = st.integers(0, 10**6)
MB = 2**20


def leftwards(flat, wire):
    """The other way around the circle, with bounds of its own, every receive posted before anything is sent."""
    n, r = wire.ranks, wire.rank
    bounds = [i * flat.numel() // n for i in range(n + 1)]
    parts = [flat[a:b] for a, b in pairwise(bounds)]
    room = [torch.empty_like(parts[(r + k + 1) % n]) for k in range(n - 1)]
    coming = [wire.recv(buffer, (r + 1) % n) for buffer in room]
    for k in range(n - 1):
        going = wire.send(parts[(r + k) % n], (r - 1) % n)
        coming[k].wait()
        going.wait()
        parts[(r + k + 1) % n].add_(room[k])
    for k in range(n - 1):
        one = wire.recv(parts[(r + k) % n], (r + 1) % n)
        wire.send(parts[(r - 1 + k) % n], (r - 1) % n).wait()
        one.wait()


def in_turns(flat, wire):
    """Blocking: even ranks send first, odd ones receive first."""
    n, r = wire.ranks, wire.rank
    parts = flat.chunk(n) if flat.numel() % n == 0 else flat.tensor_split(n)

    def hop(out, into):
        first, second = (lambda: wire.send(out, (r + 1) % n).wait()), (lambda: wire.recv(into, (r - 1) % n).wait())
        for step in (first, second) if r % 2 == 0 else (second, first):
            step()

    for k in range(n - 1):
        into = torch.zeros(parts[r - k - 1].numel())
        hop(parts[r - k], into)
        parts[r - k - 1][:] += into
    for k in range(n - 1):
        into = torch.zeros(parts[r - k].numel())
        hop(parts[(r + 1 - k) % n], into)
        parts[r - k].copy_(into)


def directly(flat, wire):
    """No circle: each segment goes straight to its owner, and the sum straight back. As many bytes."""
    n, r = wire.ranks, wire.rank
    others, parts = [q for q in range(n) if q != r], flat.tensor_split(n)
    for send, receive, add in ((lambda q: parts[q], lambda q: parts[r], True),
                               (lambda q: parts[r], lambda q: parts[q], False)):
        rooms = {q: torch.empty_like(receive(q)) for q in others}
        handles = [wire.recv(rooms[q], q) for q in others] + [wire.send(send(q), q) for q in others]
        for handle in handles:
            handle.wait()
        for q in others:
            receive(q).add_(rooms[q]) if add else receive(q).copy_(rooms[q])


def by_zip(flat, node_of, wire):
    nodes = {}
    for r, node in enumerate(node_of):
        nodes.setdefault(node, []).append(r)
    inner = wire.group(nodes[node_of[wire.rank]])
    inter = next(wire.group(peers) for peers in zip(*nodes.values()) if wire.rank in peers)
    inner.reduce_scatter(flat)
    part = flat.tensor_split(inner.ranks)[inner.rank].clone()
    inter.all_reduce(part)
    flat.tensor_split(inner.ranks)[inner.rank].copy_(part)
    inner.all_gather(flat)


def halves_between(flat, node_of, wire):
    """The all-reduce between nodes in its two halves."""
    place = sum(node_of[r] == node_of[wire.rank] for r in range(wire.rank))
    inner = wire.group({r for r in range(wire.ranks) if node_of[r] == node_of[wire.rank]})
    inter = wire.group([r for r in range(wire.ranks) if node_of[:r].count(node_of[r]) == place])
    inner.reduce_scatter(flat)
    mine = flat.tensor_split(inner.ranks)[place]
    inter.reduce_scatter(mine)
    inter.all_gather(mine)
    inner.all_gather(flat)


def by_the_library(G_bytes, Tb_s, nodes, per_node, inner, uplink):
    wires = Nodes(nodes, per_node, LinkCost(*inner), LinkCost(*uplink))
    found = []
    for name, cost in (("flat", flat_ring(wires)), ("hierarchical", hierarchical(wires))):
        S = best_equal_bucket(G_bytes, Tb_s, cost)
        found.append((max(Tb_s * S / G_bytes + cost.a_s * G_bytes / S + cost.beta_s_per_byte * G_bytes,
                          Tb_s + cost.cost(S)), [name, torch.tensor(S)]))
    return min(found, key=lambda one: one[0])[1]


def by_search(G_bytes, Tb_s, nodes, per_node, inner, uplink):
    """All sizes on a grid, no formula."""
    g, m, n = per_node, nodes, per_node * nodes
    a = {"flat": 2 * (n - 1) * max(inner[0], uplink[0]),
         "hierarchical": 2 * (g - 1) * inner[0] + 2 * (m - 1) * uplink[0]}
    b = {"flat": 2 * (n - 1) / n * max(inner[1], uplink[1]),
         "hierarchical": 2 * (g - 1) / g * inner[1] + 2 * (m - 1) / m * max(uplink[1], inner[1] / g)}
    return min(((name, G_bytes / 1.02**k) for name in a for k in range(700)), key=lambda one: max(
        Tb_s * one[1] / G_bytes + a[one[0]] * G_bytes / one[1] + b[one[0]] * G_bytes,
        Tb_s + a[one[0]] + b[one[0]] * one[1]))


@settings(max_examples=4, deadline=None)
@given(seeds)
@pytest.mark.parametrize(("number", "answer"), [
    ("9.1", leftwards), ("9.1", in_turns), ("9.1", directly), ("9.2", by_zip), ("9.2", halves_between),
    ("9.3", by_the_library), ("9.3", by_search)])
def test_right_answers_pass_whatever_is_drawn(number: str, answer, seed: int) -> None:
    result = evaluate(number, answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


@pytest.mark.parametrize(("number", "answer", "seen"), [
    ("9.1", lambda flat, wire: wire.send(flat, wire.rank), "called send with rank"),
    ("9.1", lambda flat, wire: wire.send(3.0, 1), "takes a tensor"),
    ("9.1", lambda flat: None, "raised TypeError"),
    ("9.1", lambda flat, wire: [h.wait() for h in (wire.send(flat, 1 - wire.rank),
                                                   wire.recv(torch.empty(1), 1 - wire.rank))], "receives into 1"),
    ("9.2", lambda flat, node_of, wire: wire.group([1 - wire.rank]), "asked for the group"),
    ("9.2", lambda flat, node_of, wire: wire.group([wire.rank]).all_reduce(3), "takes a 1-D tensor"),
    ("9.2", lambda flat, node_of, wire: getattr(wire.group(range(4)), ("all_reduce", "all_gather")[wire.rank % 2])(
        flat), "in one group at one time"),
    ("9.3", lambda *arguments: None, "gave None"),
    ("9.3", lambda *arguments: "flat", "gave 'flat'"),
    ("9.3", lambda *arguments: ("tree", 1e6), "gave 'tree'"),
    ("9.3", lambda *arguments: ("flat", 0), "gave 'flat', 0 MB"),
])
def test_odd_answers(number: str, answer, seen: str) -> None:
    result = evaluate(number, answer, seed=0)
    assert not result.ok and seen in " ".join(row.seen for row in result.rows if not row.ok)


@pytest.mark.parametrize("number", ["9.1", "9.2", "9.3"])
def test_stubs_say_so(number: str) -> None:
    def stub(*arguments):
        raise NotImplementedError("exercise")

    with pytest.raises(CheckFailed, match=f"exercise {number} is not written yet"):
        evaluate(number, stub)


def test_a_deadlock_is_told_with_who_waits_for_whom() -> None:
    result = evaluate("9.1", lambda flat, wire: wire.recv(flat, (wire.rank - 1) % wire.ranks).wait()
                      if wire.ranks > 1 else None, seed=0)
    assert result.mistake == "deadlock"
    assert "rank 0 waits for a message from rank 1" in " ".join(row.seen for row in result.rows)


# on ranks

TWO = Fabric(gbit=1.0, latency_us=200, nodes=2, inter_gbit=0.2, inter_latency_us=1000, kind="paced")


@pytest.mark.slow
def test_the_learners_collectives_on_two_nodes() -> None:
    found = reduce_runs(leftwards, by_zip, mb=0.25, fabric=TWO, repeats=2)
    reduced = found.reduced
    assert list(reduced) == ["your ring", "your two levels", "gloo", "doubling"]
    assert all(one.from_reference < 1e-6 for one in reduced.values())
    assert reduced["your ring"].sent_between == pytest.approx(1.5 * 0.25 * MB, rel=1e-3)
    assert reduced["your two levels"].sent_between == pytest.approx(0.25 * MB, rel=1e-3)
    ring, two = (measured_hops(reduced[name].timeline) for name in ("your ring", "your two levels"))
    assert [hop.between for hop in ring] == [False] * 6  # leftwards, rank 0 receives from its own node
    assert [hop.between for hop in two] == [False, True, True, False]
    picture = hops({"two": two_level_hops(found.nodes, 0.25 * MB)}, {"two": two}, dark=True)
    assert "measured" in picture.words and picture.png()[:4] == b"\x89PNG"


def test_what_goes_wrong_on_a_rank_is_one_sentence() -> None:
    with pytest.raises(OwnRunFailed, match=r"rank \d: ring_all_reduce\(flat, wire\) raised ZeroDivisionError"):
        reduce_runs(lambda flat, wire: 1 / 0, mb=0.1, fabric=TWO, repeats=2)
    with pytest.raises(OwnRunFailed, match=r"asked for the group \[0, 1, 2, 3\]"):
        reduce_runs(leftwards, lambda flat, node_of, wire: wire.group(range(4)), mb=0.1, fabric=TWO, repeats=2)


@pytest.mark.slow
def test_ddp_through_two_levels_has_the_gradients_of_ddp() -> None:
    found = train_runs(partial(equal, layers=4, mb=0.02, forward_ms=1.0, backward_ms=2.0), 0.04, fabric=TWO, repeats=2)
    assert list(found) == ["DDP", "DDP, flat ring", "DDP, two levels"]
    assert all(one.from_stock < 1e-6 for one in found.values())


# the picture


@pytest.mark.parametrize(("m", "g"), [(2, 2), (1, 4), (4, 1), (3, 2)])
def test_predicted_hops_are_those_of_the_model(m: int, g: int) -> None:
    nodes = Nodes(m, g, LinkCost(1e-3, 1e-8), LinkCost(3e-3, 5e-8))
    flat, two = flat_hops(nodes, MB), two_level_hops(nodes, MB)
    assert flat[-1].stop == pytest.approx(flat_ring(nodes).cost(MB))
    assert two[-1].stop == pytest.approx(hierarchical(nodes).cost(MB))
    assert len(flat) == 2 * (m * g - 1) and len(two) == 2 * (g - 1) + 2 * (m - 1)
    assert all(hop.between == (m > 1) for hop in flat) and sum(hop.between for hop in two) == 2 * (m - 1)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(LabError, match="at least one all-reduce"):
        hops({})
