"""Between a schedule and the words that a learner writes: "F0", "send_F0@1", "reduce0"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from course_lib.schedule.action import BACKWARD, RECEIVES, SENDS, Action, Op, Schedule, ScheduleError
from course_lib.schedule.messages import add_messages


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


def with_words(schedule: Schedule, lists: Iterable[Sequence[str]]) -> Schedule:
    """The same pipeline, each rank doing what its words say. Raises `ScheduleError` for a word that is none."""
    ranks = []
    for rank, words in enumerate(lists):
        held = schedule.stages_of(rank) if rank < len(schedule.ranks) else ()
        ranks.append([Action.parse(word, held[0] if len(held) == 1 else None) for word in words])
    return schedule.with_ranks(ranks)


def placed(schedule: Schedule, place_receives: Callable) -> Schedule:
    """A schedule of compute, with sends and with the receives that `place_receives` (exercise 10.2) places.
    Raises `ScheduleError` for words that are none."""
    lists, receive_of, needs = without_receives(schedule)
    found = place_receives(lists, receive_of, needs)
    return schedule_of(found, schedule.rank_of, schedule.micro_batches, bool(schedule.buckets))


def without_receives(schedule: Schedule) -> tuple[list[list[str]], Callable, Callable]:
    """What `place_receives` is called with: the words of compute and sends, each naming its stage; `receive_of(send)`,
    which gives (rank, receive); `needs(compute)`, the receive whose message it takes in, or None."""
    full = add_messages(schedule)
    known = {str(a): a for actions in full.ranks for a in actions}

    def receive_of(send: str) -> tuple[int, str]:
        action = known.get(send)
        if action is None or action.op not in SENDS:
            raise ValueError(f"receive_of({send!r}): that is no send of this schedule")
        return full.rank_of[action.partner().stage], str(action.partner())

    def needs(word: str) -> str | None:
        if word not in known:
            raise ValueError(f"needs({word!r}): that is no word of this schedule")
        receive = message_of(full, known[word])
        return None if receive is None else str(receive)

    return [[str(a) for a in actions if a.op not in RECEIVES] for actions in full.ranks], receive_of, needs


def message_of(schedule: Schedule, action: Action) -> Action | None:
    """The receive that a compute takes its message from, where it takes one."""
    if action.op is Op.F and action.stage - 1 in schedule.boundaries:
        return Action(Op.RECV_F, action.stage, action.index)
    if action.op in BACKWARD and action.stage in schedule.boundaries:
        return Action(Op.RECV_B, action.stage, action.index)
    return None
