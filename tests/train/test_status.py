"""The judgement on what ranks say they have done: who is at fault, and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from course_lib.train.status import Call, Status, verdict

FINE = Status(Call.FINISH, window=7, forwards=3, backwards=3, synced=1, loose=0, broken=0, launched=2, steps=7, seen=3)
NAMES = ["embed.weight", "head.weight"]


def judge(*statuses: Status, find_unused: bool = False) -> str | None:
    return verdict(list(range(len(statuses))), statuses, NAMES, find_unused)


def test_a_whole_window_is_fine() -> None:
    assert judge(FINE) is None
    assert judge(FINE, FINE, FINE) is None


def test_a_status_survives_the_wire() -> None:
    for seen in (0, 1, 3, (1 << 130) - 1):
        status = replace(FINE, seen=seen, call=Call.GIVE_UP)
        assert Status.unpack(status.pack(130)) == status
    assert len(FINE.pack(130)) == len(replace(FINE, seen=0).pack(130))


@pytest.mark.parametrize(("change", "said"), [
    ({"backwards": 2}, r"rank 1 skipped a backward pass .*rank 1: 2 backward of 3 forward"),
    ({"backwards": 0, "synced": 0}, r"rank 1 skipped a backward pass"),
    ({"call": Call.STEP}, r"the optimizer of rank 1 was about to step"),
    ({"call": Call.GIVE_UP}, r"an exception ended the backward pass of rank 1"),
    ({"broken": 1}, r"an exception ended the backward pass of rank 1"),
    ({"synced": 0}, r"every forward pass of rank 1 ran under no_sync"),
    ({"loose": 1}, r"the last forward pass of rank 1 ran under no_sync"),
    ({"loose": 2}, r"rank 1 ran two backward passes without a forward pass between them"),
    ({"loose": 2, "forwards": 0, "synced": 0}, r"backward passes of rank 1 had no forward pass of the wrapper"),
    ({"touched": 1}, r"a gradient of rank 1 was changed while it was on the wire"),
    ({"synced": 0, "armed": 1}, r"the last forward pass of rank 1 ran outside no_sync\(\) but had no backward pass"),
    ({"loose": 1, "armed": 1}, r"the last forward pass of rank 1 ran outside no_sync\(\) but had no backward pass"),
    ({"synced": 2}, r"synchronised different micro-steps \(rank 0: 1 of 3, rank 1: 2 of 3"),
    ({"call": Call.SYNC}, r"synchronised different micro-steps"),
    ({"steps": 6}, r"not at the same update \(rank 0: 7 steps in 7 windows, rank 1: 6 steps"),
    ({"places": 5}, r"sent their buckets at different places among other collectives .* a process group of their own"),
    ({"seen": 1}, r"no gradient for 'head\.weight' on rank 1"),
    ({"seen": 0}, r"no gradient for 'embed\.weight' on rank 1, 'head\.weight' on rank 1"),
])
def test_a_fault_of_one_rank_is_named(change: dict, said: str) -> None:
    problem = judge(FINE, replace(FINE, **change))
    assert problem is not None and problem.startswith("window 7: ")
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(problem)


def test_a_fault_of_all_ranks_names_all() -> None:
    assert "ranks 0, 1 and 2 skipped" in judge(*[replace(FINE, backwards=0)] * 3)
    assert "'head.weight' on ranks 0 and 1" in judge(*[replace(FINE, seen=1)] * 2)


def test_a_forward_pass_beside_the_window_is_fine() -> None:
    assert judge(replace(FINE, forwards=4, armed=1)) is None


def test_unused_parameters_are_fine_where_they_are_allowed() -> None:
    assert judge(replace(FINE, seen=1), replace(FINE, seen=2), find_unused=True) is None
