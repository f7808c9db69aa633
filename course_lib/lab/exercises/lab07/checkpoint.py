"""Exercise 7.4: keep the residual in the checkpoint.

The learner writes two methods:

    class Checkpoint:
        def save(self, residuals, buckets, sizes, rank, gather): ...    # what goes into the checkpoint's file
        def load(self, saved, buckets, sizes, rank): ...                # this rank's residuals, a flat tensor a bucket

- `buckets[b]` lists the names of bucket b in order, `residuals[b]` is this rank's flat residual of it, and
  `sizes[name]` the entries of a parameter.
- `gather(value)` returns the values of all ranks. It is a collective.
- Rank 0 writes what its `save` returns, and every rank reads that one file. Buckets may be other ones by then.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from course_lib.lab.exercises.lab02.replay import Exchange, Outcome, calls_text, replay
from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

if TYPE_CHECKING:
    from torch import Tensor

Buckets = list[list[str]]
NAMES = [f"layer{i}.weight" for i in range(6)]

HINTS = (
    "Two things change between save and load: the process (only rank 0's file is there) and the buckets. What about a "
    "residual stays the same?",
    "A residual belongs to a rank and to a parameter. In save, cut each flat residual into its parameters by `sizes`, "
    "under their names, and gather these from all ranks. In load take this rank's, and join the parameters of each "
    "bucket.",
    "save: mine = {}; for flat, names in zip(residuals, buckets): mine.update(zip(names, flat.split([sizes[n] for n in "
    "names]))); return gather(mine). load: return [torch.cat([saved[rank][n] for n in names]) for names in buckets].",
)

MISTAKES = {
    "no_result": "One of your methods returned None. Is there a `return` at its end?",
    "rank_zero": "Every rank comes back with the residuals of rank 0. Only rank 0 writes the file, so it has to hold "
    "what the others kept: gather it.",
    "mean": "Every rank comes back with the mean over ranks. Nothing was sent of a residual, so it is each rank's own.",
    "by_bucket": "You keep residuals by the number of their bucket. Buckets are rebuilt after the first window, and "
    "then the same number holds other parameters. Keep them by name.",
    "dropped": "Your residuals start at zero again. What was not sent yet is lost at every restart.",
    "one_size": "It works where all parameters have the same number of entries, and not elsewhere. Cut each flat "
    "residual by `sizes`, in the order of its bucket.",
    "hangs": "Some ranks call gather and others do not. They wait for each other for ever. Every rank saves, although "
    "only one writes.",
}


class Case(NamedTuple):
    """One checkpoint: what each rank held, by name, and what it held after loading; `changed` if the buckets did."""

    before: list[dict[str, Tensor]]
    after: list[dict[str, Tensor]]
    outcomes: list[Outcome]
    changed: bool

    @property
    def hangs(self) -> bool:
        return any(o.hangs for o in self.outcomes) or len({o.calls for o in self.outcomes}) > 1

    def holds(self, right: Callable[[int, str], Tensor]) -> bool:
        """Whether `right(rank, name)` is what every rank has."""
        import torch
        return not self.hangs and all(torch.allclose(value.float(), right(rank, name), atol=1e-6)
                                      for rank, held in enumerate(self.after) for name, value in held.items())

    @property
    def ok(self) -> bool:
        return self.holds(lambda rank, name: self.before[rank][name])

    def __str__(self) -> str:
        if self.hangs:
            return calls_text(self.outcomes)
        import torch
        for rank, held in enumerate(self.after):
            for name, value in held.items():
                if not torch.allclose(value.float(), self.before[rank][name], atol=1e-6):
                    return (f"rank {rank}, {name!r}: saved {_short(self.before[rank][name])}, loaded {_short(value)}")
        return f"the same on {len(self.after)} ranks"


@exercise("7.4", title="keep the residual", minutes=8, needs="Checkpoint", hints=HINTS, mistakes=MISTAKES, kind="class")
def keep_the_residual(answer: type, draw: random.Random) -> Verdict:
    """Rows over checkpoints whose buckets are the same afterwards, and over others whose are not. In these all
    parameters have one size, and new buckets as many entries as the old ones had, so that nothing but the numbers shows
    a mix-up. Whoever gets these right is given parameters of several sizes."""
    cases = []
    for changed in (False, False, True, True, True):
        case = _played(answer, draw, changed, dict.fromkeys(NAMES, 3))
        if isinstance(case, Verdict):
            return case
        cases.append(case)
    rows = (
        _row("every rank calls gather alike", "the same number of calls", cases, lambda c: not c.hangs),
        _row("the same buckets", "each rank has its own residuals again", [c for c in cases if not c.changed],
             lambda c: c.ok),
        _row("other buckets", "each parameter has its own residual again", [c for c in cases if c.changed],
             lambda c: c.ok),
    )
    if not all(row.ok for row in rows):
        return Verdict(rows, _mistake(cases))
    several = _several_sizes(answer, draw)
    return Verdict((*rows, several), "" if several.ok else "one_size")


def _several_sizes(answer: type, draw: random.Random) -> Row:
    name, expected, cases = "parameters of several sizes", "each has its own residual again", []
    for _ in range(3):
        sizes = dict(zip(NAMES, draw.sample((1, 2, 3, 4, 5, 6), len(NAMES))))
        try:
            case = _played(answer, draw, True, sizes)
        except Broke as broke:
            return Row(name, False, expected, str(broke))
        if isinstance(case, Verdict):
            return replace(case.rows[0], name=name)
        cases.append(case)
    return _row(name, expected, cases, lambda c: c.ok)


def _mistake(cases: list[Case]) -> str:
    if any(c.hangs for c in cases):
        return "hangs"
    if all(c.holds(lambda rank, name, c=c: c.before[0][name]) for c in cases):
        return "rank_zero"
    if all(c.holds(lambda rank, name, c=c: sum(held[name] for held in c.before) / len(c.before)) for c in cases):
        return "mean"
    if all(c.holds(lambda rank, name, c=c: c.before[rank][name] * 0) for c in cases):
        return "dropped"
    same = [c for c in cases if not c.changed]
    return "by_bucket" if all(c.ok for c in same) else ""


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    broken = [c for c in cases if not holds(c)]
    return Row(name, not broken, expected, str(broken[0]) if broken else f"held in {len(cases)} checkpoints")


def _layout(draw: random.Random, names: list[str], lengths: list[int]) -> Buckets:
    """The names, shuffled, in buckets of these lengths."""
    shuffled, buckets = draw.sample(names, len(names)), []
    for length in lengths:
        buckets.append(shuffled[:length])
        shuffled = shuffled[length:]
    return buckets


def _played(answer: type, draw: random.Random, changed: bool, sizes: dict[str, int]) -> Case | Verdict:
    """All ranks save, rank 0's is written and read, all ranks load."""
    import torch

    ranks, lengths = draw.randint(2, 4), draw.choice(([2, 2, 2], [1, 2, 3], [3, 3]))
    old = _layout(draw, NAMES, lengths)
    new = old
    while changed and [set(b) for b in new] == [set(b) for b in old]:
        new = _layout(draw, NAMES, lengths)
    before = [{n: torch.tensor([draw.uniform(0.5, 2) for _ in range(size)]) for n, size in sizes.items()}
              for _ in range(ranks)]  # fmt: skip

    def save(rank: int, exchange: Exchange) -> Any:
        flats = [torch.cat([before[rank][n] for n in bucket]) for bucket in old]

        def gather(value: Any) -> list:
            return exchange(pickle.loads(pickle.dumps(value)))

        return call(call(answer, shown="Checkpoint()").save, flats, [list(b) for b in old], dict(sizes), rank, gather,
                    shown=f"save({len(old)} residuals, {old}, …, rank {rank}, gather)")  # fmt: skip

    outcomes = replay(save, ranks)
    if any(o.hangs for o in outcomes) or len({o.calls for o in outcomes}) > 1:
        return Case(before, [], outcomes, changed)
    if outcomes[0].result is None:
        return Verdict((Row("save returns what is to be written", False, "something that load understands",
                            "save(…) on rank 0 gave None"),), "no_result")  # fmt: skip
    after, parts = [], [[sizes[n] for n in bucket] for bucket in new]
    for rank in range(ranks):
        saved = pickle.loads(pickle.dumps(outcomes[0].result))
        shown = f"load(saved, {new}, …, rank {rank})"
        flats = call(call(answer, shown="Checkpoint()").load, saved, [list(b) for b in new], dict(sizes), rank,
                     shown=shown)  # fmt: skip
        flats = list(flats) if isinstance(flats, Iterable) else flats
        if odd := _odd(flats, [sum(each) for each in parts], shown):
            return odd
        after.append({n: part for flat, bucket, each in zip(flats, new, parts)
                      for n, part in zip(bucket, flat.split(each))})  # fmt: skip
    return Case(before, after, outcomes, changed)


def _odd(flats: Any, entries: list[int], shown: str) -> Verdict | None:
    """A verdict where load did not return one flat tensor for each bucket."""
    import torch

    expected = f"flat tensors of {', '.join(map(str, entries))} entries"
    try:
        fits = [tuple(f.shape) for f in flats] == [(n,) for n in entries] and all(
            isinstance(f, torch.Tensor) for f in flats)  # fmt: skip
    except (TypeError, AttributeError):
        fits = False
    if fits:
        return None
    return Verdict((Row("load returns a residual for each bucket", False, expected, f"{shown} gave {flats!r}"),),
                   "no_result" if flats is None else "")  # fmt: skip


def _short(x: Tensor) -> str:
    return "[" + ", ".join(f"{float(v):.3g}" for v in x) + "]"
