"""Between a schedule and the words that a learner writes: "F0", "send_F0@1", "reduce0"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from course_lib.schedule.action import Action, Schedule, ScheduleError


def words_of(schedule: Schedule) -> list[list[str]]:
    """A list of words for each rank. A rank that holds several stages names them: "F0@2"."""
    return [[schedule.name(action) for action in actions] for actions in schedule.ranks]


def is_words(value: Any) -> bool:
    """Whether this is what one rank does: a list of words (a tuple will do)."""
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


def schedule_of(lists: Iterable[Sequence[str]], rank_of: Sequence[int] | None = None,
                micro_batches: int | None = None, reduces: bool = False) -> Schedule:
    """The schedule that the words say. By default stage r lies on rank r. With `reduces`, each stage's gradient is
    reduced in one bucket. Raises `ScheduleError` for a word that is none, or that names a stage of another rank."""
    lists = [list(words) for words in lists]
    holds = list(range(len(lists))) if rank_of is None else list(rank_of)
    ranks = []
    for rank, words in enumerate(lists):
        if not is_words(words):
            raise ScheduleError(f"rank {rank} has {words!r}; write a list of words, as in ['F0', 'B0']")
        only = holds.index(rank) if holds.count(rank) == 1 else None
        ranks.append([Action.parse(word, only) for word in words])
    return Schedule.of(ranks, holds, micro_batches, [1] * len(holds) if reduces else ())
