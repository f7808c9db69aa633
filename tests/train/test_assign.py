"""Parameters to buckets: caps, order, dtypes, plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.train.assign import MB, Gradient, assign_by_plan, assign_by_size


def gradients(*megabytes: float, kinds: str = "") -> list[Gradient]:
    kinds = kinds or "f" * len(megabytes)
    return [Gradient(f"p{i}", round(mb * MB), kind) for i, (mb, kind) in enumerate(zip(megabytes, kinds))]


def test_the_layouts_that_ddp_reports_for_sixty_linears() -> None:
    """60 Linear(512, 512) in reverse order, weight 1 MiB and bias 2 KiB each."""
    sixty = gradients(*(size for _ in range(60) for size in (1, 2 / 1024)))
    order = range(len(sixty) - 1, -1, -1)

    def layout(*caps: float | None) -> list[float]:
        return [round(sum(sixty[i].bytes for i in bucket) / MB, 2) for bucket in assign_by_size(sixty, order, *caps)]

    assert layout(25, 1) == [1.0, 25.05, 25.05, 9.02]
    assert layout(25, None) == [25.05, 25.05, 10.02]
    assert layout(10) == [10.02] * 6


def test_a_bucket_closes_when_it_reaches_its_cap_and_never_splits_a_parameter() -> None:
    assert assign_by_size(gradients(1, 1, 5, 1), [3, 2, 1, 0], 2) == [[3, 2], [1, 0]]
    assert assign_by_size(gradients(2, 2), [1, 0], 2) == [[1], [0]]


def test_dtypes_do_not_mix_and_buckets_are_ordered_by_their_last_gradient() -> None:
    mixed = gradients(1, 1, 1, 1, kinds="fhfh")
    assert assign_by_size(mixed, [0, 1, 2, 3], 10) == [[0, 2], [1, 3]]
    assert assign_by_size(mixed, [1, 0, 2, 3], 2) == [[0, 2], [1, 3]]
    assert assign_by_size(mixed, [0, 1, 3, 2], 2) == [[1, 3], [0, 2]]


@given(st.lists(st.tuples(st.integers(0, 3 * MB), st.sampled_from("fh")), min_size=1), st.floats(0.01, 4),
       st.none() | st.floats(0.01, 4), st.randoms())
def test_every_gradient_is_in_one_bucket_and_only_the_last_of_a_kind_is_small(sizes, cap, first, random) -> None:
    given_ = [Gradient(f"p{i}", size, kind) for i, (size, kind) in enumerate(sizes)]
    order = list(range(len(given_)))
    random.shuffle(order)
    buckets = assign_by_size(given_, order, cap, first)
    assert sorted(i for b in buckets for i in b) == list(range(len(given_)))
    assert all(len({given_[i].kind for i in b}) == 1 for b in buckets)
    last = [order.index(b[-1]) for b in buckets]
    assert last == sorted(last), "a bucket is full with its last gradient, so that is the order to launch in"
    for kind in "fh":
        mine = [sum(given_[i].bytes for i in b) for b in buckets if given_[b[0]].kind == kind]
        caps = [min(cap, first or cap)] + [cap] * len(mine)
        assert all(size >= at_least * MB for size, at_least in zip(mine[:-1], caps))


@pytest.mark.parametrize("caps", [(0,), (-1,), (25, 0)])
def test_a_cap_must_be_above_zero(caps) -> None:
    with pytest.raises(ValueError, match=r"above 0"):
        assign_by_size(gradients(1), [0], *caps)


def test_a_plan_is_taken_as_written() -> None:
    assert assign_by_plan(gradients(1, 1, 1), [["p2"], ["p0", "p1"]]) == [[2], [0, 1]]
    assert assign_by_plan(gradients(1, 1), [["tied", "p1"]], {"tied": "p0"}) == [[0, 1]]


@pytest.mark.parametrize(("plan", "said"), [
    ([["p0"], []], "bucket 1 of the plan is empty"),
    ([["p0", "p9"]], "'p9', which is not a trainable parameter"),
    ([["p0"], ["p1", "p0"]], "'p0' is in bucket 0 and again in bucket 1"),
    ([["p0"], ["tied", "p1"]], "'tied' is in bucket 0 and again in bucket 1"),
    ([["p1"]], "leaves out p0"),
])
def test_a_wrong_plan_is_refused_by_name(plan, said) -> None:
    with pytest.raises(ValueError, match=said):
        assign_by_plan(gradients(1, 1), plan, {"tied": "p0"})


def test_a_plan_may_not_mix_dtypes() -> None:
    with pytest.raises(ValueError, match=r"bucket 0 of the plan mixes f, h"):
        assign_by_plan(gradients(1, 1, kinds="fh"), [["p0", "p1"]])
