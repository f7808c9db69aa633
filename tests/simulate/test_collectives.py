"""The α-β models against a message-by-message replay, and the reconstruction against its own answer."""

from __future__ import annotations

import pytest

from course_lib.link_cost import LinkCost
from course_lib.simulate.buckets import MB, predict, uniform_plan
from course_lib.simulate.collectives import (
    Nodes,
    best_equal_bucket,
    bytes_for_share,
    doubling,
    flat_ring,
    hierarchical,
    reduce_scatter,
    ring,
)
from course_lib.simulate.reconstruct import even_profile, reconstruct, speedup_of

MESSAGE = LinkCost(50e-6, 8e-9)


def replayed_ring(n: int, size: float, message: LinkCost) -> float:
    """2(n−1) rounds in which every rank sends one segment as soon as it has the one before."""
    has = [0.0] * n
    for _ in range(2 * (n - 1)):
        has = [max(has[r], has[r - 1]) + message.cost(size / n) for r in range(n)]
    return max(has)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
def test_a_ring_takes_what_its_messages_take(n) -> None:
    assert ring(n, MESSAGE).cost(MB) == pytest.approx(replayed_ring(n, MB, MESSAGE))
    assert reduce_scatter(n, MESSAGE).cost(MB) == pytest.approx(ring(n, MESSAGE).cost(MB) / 2)


@pytest.mark.parametrize(("n", "steps"), [(1, 0), (2, 1), (3, 3), (4, 2), (5, 4), (8, 3), (12, 5)])
def test_doubling_has_few_steps_of_the_whole(n, steps) -> None:
    assert doubling(n, MESSAGE).cost(MB) == pytest.approx(steps * MESSAGE.cost(MB))


def test_ring_for_large_messages_doubling_for_small() -> None:
    assert doubling(8, MESSAGE).cost(1024) < ring(8, MESSAGE).cost(1024)
    assert doubling(8, MESSAGE).cost(16 * MB) > ring(8, MESSAGE).cost(16 * MB)


def test_hierarchical_pays_where_the_wire_between_is_slow_and_not_where_all_are_alike() -> None:
    slow, same = (Nodes(2, 4, LinkCost(0, 4e-9), LinkCost(0, beta)) for beta in (80e-9, 4e-9))
    gain = [flat_ring(nodes).cost(MB) / hierarchical(nodes).cost(MB) for nodes in (slow, same)]
    assert gain[0] == pytest.approx((2 * 7 / 8 * 80) / (2 * 3 / 4 * 4 + 80)) and gain[1] < 1
    own = Nodes(2, 4, LinkCost(0, 4e-9), LinkCost(0, 80e-9), shared=False)
    assert flat_ring(own).cost(MB) / hierarchical(own).cost(MB) == pytest.approx(1.75 * 80 / (6 + 20))
    assert hierarchical(own).beta_s_per_byte < hierarchical(slow).beta_s_per_byte


def test_one_node_or_one_rank_a_node_is_a_plain_ring() -> None:
    one, single = Nodes(1, 4, MESSAGE, LinkCost(1, 1)), Nodes(4, 1, LinkCost(0, 0), MESSAGE)
    for nodes in (one, single):
        assert flat_ring(nodes) == hierarchical(nodes) == ring(4, MESSAGE)


def test_ninety_percent_of_the_rate_takes_nine_n_alpha_over_beta() -> None:
    """64 ranks, 10 µs a hop, 20 GB/s: 115 MB of 10⁶ bytes."""
    cost = ring(64, LinkCost(10e-6, 1 / 20e9))
    size = bytes_for_share(0.9, cost)
    assert size == pytest.approx(9 * 64 * 10e-6 * 20e9) == pytest.approx(115.2e6)
    assert cost.beta_s_per_byte * size / cost.cost(size) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="share=1"):
        bytes_for_share(1, cost)


@pytest.mark.parametrize("a_ms", [0.5, 2, 8, 32])
@pytest.mark.parametrize("ms_per_mb", [0.5, 4, 8, 16])
def test_the_best_equal_bucket_is_the_best_of_all_sizes(a_ms, ms_per_mb) -> None:
    """Up to the number of buckets being a whole one: either side of the formula's."""
    profile = even_profile(64, layers=512, Tb=0.3)
    cost = LinkCost(a_ms / 1e3, ms_per_mb / 1e3 / MB)
    chosen = best_equal_bucket(64 * MB, 0.3, cost)
    count = max(1, min(255, int(64 * MB / chosen)))
    steps = {k: predict(profile, cost, uniform_plan(profile, 64 * MB / k)).step_s
             for k in (*range(1, 16), 20, 24, 32, 48, 64, 96, 128, 192, 256, count, count + 1)}
    assert min(steps[count], steps[count + 1]) <= 1.03 * min(steps.values())


def test_latency_asks_for_larger_buckets_and_bandwidth_does_not() -> None:
    base, slower, later = (best_equal_bucket(1400 * MB, 0.3, ring(64, m)) for m in (
        LinkCost(10e-6, 1e-10), LinkCost(10e-6, 4e-10), LinkCost(90e-6, 4e-10)))
    assert slower == pytest.approx(1400 * MB * (126 * 10e-6 / 0.3) ** 0.5)
    assert later == pytest.approx(3 * slower)
    assert base <= slower


def test_the_published_case() -> None:
    case = reconstruct(even_profile(1400, layers=56, Tb=0.3, parameters=5))
    assert case.shares == pytest.approx((0.37, 0.12), abs=1e-6)
    assert case.speedup == pytest.approx(speedup_of(0.37, 0.12)) == pytest.approx(1.397, abs=1e-3)
    assert 0.3 < case.r < 0.6
    hop = case.message(64)
    assert 20e-6 < hop.a_s < 100e-6 and 50 < 8e-9 / hop.beta_s_per_byte < 200
    assert ring(64, hop).a_s == pytest.approx(case.link.a_s)


def test_a_link_that_was_put_in_is_found_again() -> None:
    profile, link = even_profile(100, layers=40, Tb=0.2), LinkCost(3e-3, 1.2e-9)
    steps = [predict(profile, link, uniform_plan(profile, cap * MB)) for cap in (5, 20)]
    found = reconstruct(profile, (5, 20), tuple(s.exposed_s / s.step_s for s in steps)).link
    assert found.a_s == pytest.approx(link.a_s, rel=1e-6)
    assert found.beta_s_per_byte == pytest.approx(link.beta_s_per_byte, rel=1e-6)


def test_the_case_keeps_its_shares_on_another_link() -> None:
    case, link = reconstruct(even_profile(1400, layers=56, Tb=0.3, parameters=5)), LinkCost(4e-3, 8e-9)
    here = case.on(link)
    scale = 0.999 * here.bytes[0] / case.profile.bytes[0]
    for cap, share in zip((25, 60), case.shares):
        step = predict(here, link, uniform_plan(here, cap * scale * MB))
        assert step.exposed_s / step.step_s == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize("shares", [(0.9, 0.02), (0.12, 0.37)])
def test_shares_that_no_link_gives_are_refused(shares) -> None:
    with pytest.raises(ValueError, match="no link exposes"):
        reconstruct(even_profile(1400, layers=56, Tb=0.3, parameters=5), shares=shares)


@pytest.mark.parametrize("call", [lambda: ring(0, MESSAGE), lambda: doubling(0, MESSAGE),
                                  lambda: Nodes(0, 1, MESSAGE, MESSAGE), lambda: best_equal_bucket(0, 1, MESSAGE),
                                  lambda: speedup_of(1.0, 0.1),
                                  lambda: reconstruct(even_profile(10, 4, 1)).on(LinkCost(0, 1))])
def test_impossible_numbers_are_refused(call) -> None:
    with pytest.raises(ValueError):
        call()
