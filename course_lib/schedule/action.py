"""What a rank does, as data: an `Action` is one thing, a `Schedule` is a list of them for each rank.

The text form is what one writes on a whiteboard: `F0 F1 B0 B1` is the forward and backward of micro-batches
0 and 1. A rank that holds several stages says which: `F0@2` is the forward of micro-batch 0 through stage 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property


class ScheduleError(ValueError):
    """A schedule that cannot be run. `cycle` holds the actions that wait for each other, where there are any."""

    def __init__(self, message: str, cycle: Sequence[tuple[int, Action]] = ()) -> None:
        self.cycle = tuple(cycle)
        super().__init__(message)


class Op(Enum):
    """The kinds of action. `B` is a whole backward; `I` is its half that gives the gradient of the stage's input,
    `W` the half that gives the gradients of its weights. `recv_F` posts a receive and does not wait for it."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the field's own letter
    W = "W"
    SEND_F = "send_F"
    RECV_F = "recv_F"
    SEND_B = "send_B"
    RECV_B = "recv_B"
    GATHER = "gather"
    FREE = "free"
    REDUCE = "reduce"
    STEP = "step"

    __hash__ = object.__hash__  # members are single objects; the inherited one hashes their names again and again


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
BACKWARD = frozenset({Op.B, Op.I})
"""What gives the gradient of a stage's input, which the stage before waits for."""
LAST_USE = frozenset({Op.B, Op.W})
"""What uses the activations of a micro-batch last and completes its share of the weights' gradient."""
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})
MESSAGES = SENDS | RECEIVES
WHOLE = -1
"""The index of a gather, free or step that is of all buckets of its stage."""
_INDEXED = COMPUTE | MESSAGES | {Op.REDUCE}
_BY_BUCKET = frozenset({Op.REDUCE, Op.GATHER, Op.STEP})
_TEXT = re.compile(r"([A-Za-z_]+?)(\d+)?(?:@(\d+))?")


@dataclass(frozen=True, repr=False)
class Action:
    """`index` is the micro-batch of compute and messages and the bucket of a reduction, 0 if not given. A gather or a
    step is of one bucket too, or, as `free` always is, of the whole stage (`WHOLE`) if not given.

    `send_F` sends what `stage` put out to the stage after it, `send_B` the gradient of what it took in to the
    stage before; `recv_F` and `recv_B` are for the input of `stage` and for the gradient of its output.
    """

    op: Op
    stage: int
    index: int = WHOLE

    def __post_init__(self) -> None:
        if self.index == WHOLE and self.op in _INDEXED:
            object.__setattr__(self, "index", 0)

    def __str__(self) -> str:
        return self.short() + f"@{self.stage}"

    __repr__ = __str__

    def short(self) -> str:
        """Without the stage, for a rank that holds only one."""
        return f"{self.op.value}{'' if self.index == WHOLE else self.index}"

    @classmethod
    def parse(cls, text: str, stage: int | None = None) -> Action:
        """The inverse of `str`; `stage` is used where the text names none. Raises `ScheduleError`."""
        match = _TEXT.fullmatch(text)
        try:
            op = Op(match[1])
        except (TypeError, ValueError):
            raise ScheduleError(f"{text!r} is not an action; write for example F0, B0@2, send_F0, reduce0@1, one of "
                                f"{', '.join(op.value for op in Op)}") from None
        if (match[2] is None and op in _INDEXED) or (match[2] is not None and op is Op.FREE):
            raise ScheduleError(f"{text!r}: {op.value} takes {'a' if op in _INDEXED else 'no'} number, as in "
                                f"{cls(op, 0)}")
        if match[3] is None and stage is None:
            raise ScheduleError(f"{text!r} is on a rank with several stages or none; name the stage, as in {text}@0")
        return cls(op, stage if match[3] is None else int(match[3]), WHOLE if match[2] is None else int(match[2]))

    def partner(self) -> Action:
        """The receive that belongs to a send, or the send to a receive."""
        op, ahead = {Op.SEND_F: (Op.RECV_F, 1), Op.RECV_F: (Op.SEND_F, -1),
                     Op.SEND_B: (Op.RECV_B, -1), Op.RECV_B: (Op.SEND_B, 1)}[self.op]
        return Action(op, self.stage + ahead, self.index)


@dataclass(frozen=True)
class Schedule:
    """One pass of `micro_batches` micro-batches through a pipeline.

    `ranks[r]` is what rank r does, in order. `rank_of[s]` is the rank that holds stage s. `buckets[s]` is the number
    of buckets that the gradient of stage s is reduced in, or empty where the schedule has no reductions.
    Raises `ScheduleError` for an action of a stage, micro-batch or bucket that is not there; whether the whole can
    run is for `check` to say.
    """

    ranks: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]
    micro_batches: int
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.micro_batches < 1 or not self.rank_of:
            raise ScheduleError(f"{self.micro_batches} micro-batches through {len(self.rank_of)} stages; a schedule "
                                "needs at least one of each")
        _require_a_list_a_rank(self.rank_of, len(self.ranks))
        if self.buckets and (len(self.buckets) != len(self.rank_of) or min(self.buckets) < 1):
            raise ScheduleError(f"buckets {self.buckets} for {len(self.rank_of)} stages; give at least one a stage")
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                self._refuse(rank, action)

    def _refuse(self, rank: int, action: Action) -> None:
        if not 0 <= action.stage < self.stages or self.rank_of[action.stage] != rank:
            raise ScheduleError(f"rank {rank} has {action}, but holds only stages {list(self.stages_of(rank))}")
        if action.op in COMPUTE | MESSAGES and not 0 <= action.index < self.micro_batches:
            raise ScheduleError(f"rank {rank} has {action}, but the schedule has micro-batches 0 to "
                                f"{self.micro_batches - 1}")
        one = action.op in _BY_BUCKET and action.index != WHOLE
        if one and not (self.buckets and 0 <= action.index < self.buckets[action.stage]):
            raise ScheduleError(f"rank {rank} has {action}, but the schedule names buckets {list(self.buckets)}")

    @classmethod
    def of(cls, ranks: Iterable[Iterable[Action]], rank_of: Sequence[int] | None = None,
           micro_batches: int | None = None, buckets: Sequence[int] = ()) -> Schedule:
        """From lists. By default stage r lies on rank r, and the micro-batches are those that have a forward."""
        lists = tuple(tuple(actions) for actions in ranks)
        if micro_batches is None:
            micro_batches = len({a.index for actions in lists for a in actions if a.op is Op.F})
        return cls(lists, tuple(range(len(lists)) if rank_of is None else rank_of), micro_batches, tuple(buckets))

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """The stages whose next stage lies on another rank."""
        return tuple(s for s in range(self.stages - 1) if self.rank_of[s] != self.rank_of[s + 1])

    @cached_property
    def has_messages(self) -> bool:
        """Does it say when to send and receive, or only when to compute?"""
        return any(a.op in MESSAGES for actions in self.ranks for a in actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, first to last."""
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)

    def with_ranks(self, ranks: Iterable[Iterable[Action]], buckets: Sequence[int] | None = None) -> Schedule:
        """The same pipeline with other lists: how a pass returns its result."""
        return replace(self, ranks=tuple(tuple(actions) for actions in ranks),
                       buckets=self.buckets if buckets is None else tuple(buckets))

    def name(self, action: Action) -> str:
        """The action as `text` writes it."""
        return action.short() if len(self.stages_of(self.rank_of[action.stage])) == 1 else str(action)

    def text(self) -> str:
        """A heading and a line for each rank; `parse` reads it back."""
        heading = f"stages on ranks {' '.join(map(str, self.rank_of))}; {self.micro_batches} micro-batches"
        heading += f"; buckets {' '.join(map(str, self.buckets))}" if self.buckets else ""
        return "\n".join((heading, *(f"rank {rank}: {' '.join(self.name(a) for a in actions)}".rstrip()
                                     for rank, actions in enumerate(self.ranks))))

    __str__ = text

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read `text()` back. The heading and the `rank 0:` may be left out where stage r lies on rank r, as in
        `F0 F1 B0 B1`. Raises `ScheduleError`."""
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        rank_of = micro_batches = None
        buckets: list[int] = []
        if lines and lines[0].startswith("stages"):
            found = re.fullmatch(r"stages on ranks ([\d ]+); (\d+) micro-batches(?:; buckets ([\d ]+))?", lines.pop(0))
            if found is None:
                raise ScheduleError("the heading cannot be read; write it like 'stages on ranks 0 1; 4 micro-batches' "
                                    "or leave it out")
            rank_of, micro_batches = [int(r) for r in found[1].split()], int(found[2])
            buckets = [int(b) for b in (found[3] or "").split()]
        holds = list(range(len(lines))) if rank_of is None else rank_of
        _require_a_list_a_rank(holds, len(lines))
        ranks = []
        for rank, line in enumerate(lines):
            only = holds.index(rank) if holds.count(rank) == 1 else None
            ranks.append([Action.parse(word, only) for word in re.sub(r"^rank \d+:", "", line).split()])
        return cls.of(ranks, rank_of, micro_batches, buckets)


def _require_a_list_a_rank(rank_of: Sequence[int], lists: int) -> None:
    if sorted(set(rank_of)) != list(range(lists)):
        raise ScheduleError(f"the stages lie on ranks {list(rank_of)}, but there are {lists} lists of actions; give "
                            "one list for each rank and each rank at least one stage")
