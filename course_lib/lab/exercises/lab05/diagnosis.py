"""Exercise 5.4: diagnose three given traces.

The learner writes `diagnose(spans)`:

- `spans` lists (rank, kind, start, stop) of one step of all ranks, in nanoseconds; kind is `forward`, `backward` or
  `comm`. The communications of a rank come in the order in which it issued them, and do not overlap each other. The
  k-th of every rank is the same collective.
- M and C add up all communication and all compute (forward and backward) of all ranks. W adds up, for each collective
  and rank, last arrival − own start: the waiting. T runs from the first start to the last stop.
- The result is (cause, number), by the first rule that fits:
  1. `late rank`, if more than half of M is waiting; the number is W / M.
  2. `held back`, if no rank begins to communicate before its own backward ends; the number is E / (n·T), where E adds
     up the exposed communication of the n ranks.
  3. `slow wire`, if what is not waiting takes longer than compute, M − W > C; the number is (M − W) / C.
  4. `nothing to gain`; the number is E / (n·T).

`steps_drawn` reads a step by these rules, and by the wrong ones that people write.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from course_lib.lab.exercises.lab05.given import given_steps
from course_lib.lab.exercises.lab05.steps_drawn import Reading, Spans, drawn_step, read_step
from course_lib.lab.guard import call
from course_lib.lab.model import Row, Verdict, exercise

CAUSES = ("late rank", "held back", "slow wire", "nothing to gain")

HINTS = (
    "Collect per rank first: its communications, its compute, and when its backward ends. Then work out M, C, W, E and "
    "T, print them for the three traces, and only then write the rules.",
    "zip over the ranks' lists of communications gives one collective at a time. Its last arrival is the latest of the "
    "starts. For E, subtract from each communication what it shares with compute of the same rank.",
    "last = max(start for start, stop in same); W += sum(last - start for start, stop in same). Held back: all(comm[r]"
    "[0][0] >= backward_end[r] for r in ranks). Rules in order: W > M / 2, held back, M - W > C, else.",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end, for every cause?",
    "busy_for_useful": "You take a busy device for a useful one. In a trace that is busy nearly all the time, half of "
    "it may be a collective that spins. Leave communication out, and look at what is exposed.",
    "wait_for_transfer": "You count waiting as transfer, so a late rank looks like a slow wire. A faster wire would "
    "not make the late rank come sooner: subtract W, and ask for the late rank first.",
    "knows_only_the_given": "Your answers for the three given traces are right, and those for other steps of the same "
    "kinds are not. Derive cause and number from the spans.",
    "other_ranks": "You let the compute of one rank hide the communication of another. Compare spans of one rank only.",
    "wrong_order": "Two rules fit, and you take the later one. A late rank comes first: while ranks wait, neither the "
    "order of launches nor the wire can be judged.",
    "first_rank_only": "You look at one rank. Its own spans cannot tell whether it waited or for whom: compare all "
    "ranks.",
    "one_for_all": "You say \"held back\" when one rank begins to communicate after its backward. The rule asks for "
    "all of them: where the others have begun before, the wire was in use.",
    "per_collective": "Your wait is measured from the *first* arrival. Who comes first waits longest: last arrival − "
    "own start.",
    "percent": "Your numbers are percentages. Return the fraction: 0.8 for 80 %.",
}

WRONG: dict[str, tuple[Reading, ...]] = {
    "busy_for_useful": tuple(Reading(busy=limit) for limit in (0.8, 0.85, 0.9, 0.95)),
    "wait_for_transfer": (Reading(wait="none"), Reading(transfer="all communication")),
    "one_for_all": (Reading(held="not every rank"),),
    "other_ranks": (Reading(other_ranks=True),),
    "wrong_order": (Reading(order="held first"), Reading(order="wire first")),
    "first_rank_only": (Reading(ranks="first"),),
    "per_collective": (Reading(wait="first arrival"),),
    "percent": (Reading(scale=100),),
}


@exercise("5.4", title="diagnose three traces", minutes=12, needs="diagnose", hints=HINTS, mistakes=MISTAKES)
def diagnose_traces(answer: Callable[[Spans], tuple[str, float]], draw: random.Random) -> Verdict:
    """A row for each given trace, and one for each cause over steps drawn by chance."""
    sets: dict[str, list[Spans]] = {f"trace {name}": [spans] for name, spans in given_steps().items()}
    sets |= {cause: [drawn_step(draw, cause) for _ in range(4)] for cause in CAUSES}
    sets["one rank sends late"] = [drawn_step(draw, "one rank sends late") for _ in range(4)]
    sets["two at once"] = [drawn_step(draw, both) for both in ("late and held back", "held back, slow wire") * 2]
    played: dict[str, list[tuple[Spans, tuple[str, float]]]] = {}
    for kind, steps in sets.items():
        played[kind] = []
        for spans in steps:
            shown = f"diagnose({spans if len(spans) < 9 else f'{len(spans)} spans of {kind}'})"
            got = call(answer, list(spans), shown=shown)
            if got is None:
                row = Row("returns a diagnosis", False, '("slow wire", 1.3)', f"{shown} gave None")
                return Verdict((row,), "no_result")
            if (plain := _plain(got)) is None:
                said = f"a pair of one of {', '.join(CAUSES)} and a number"
                return Verdict((Row("returns (cause, number)", False, said, f"{shown} gave {got!r}"),))
            played[kind].append((spans, plain))
    rows = tuple(_row(kind, some) for kind, some in played.items())
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(played, rows))


def _mistake(played: dict[str, list], rows: tuple[Row, ...]) -> str:
    every = [one for some in played.values() for one in some]
    for mistake, readings in WRONG.items():
        if any(all(_same(got, read_step(spans, reading)) for spans, got in every) for reading in readings):
            return mistake
    causes = {mistake: readings for mistake, readings in WRONG.items() if mistake in ("busy_for_useful",
              "wait_for_transfer", "wrong_order", "first_rank_only")}  # fmt: skip
    for mistake, readings in causes.items():  # the same causes, whatever number stands beside them
        if any(all(got[0] == read_step(spans, reading)[0] for spans, got in every) for reading in readings):
            return mistake
    given = [row.ok for row in rows if row.name.startswith("trace")]
    return "knows_only_the_given" if all(given) and sum(row.ok for row in rows) == len(given) else ""


def _plain(got: Any) -> tuple[str, float] | None:
    try:
        cause, number = got
        number = float(number)
    except (TypeError, ValueError):
        return None
    return (cause, number) if cause in CAUSES and math.isfinite(number) else None


def _same(a: tuple[str, float], b: tuple[str, float]) -> bool:
    return a[0] == b[0] and math.isclose(a[1], b[1], rel_tol=1e-3, abs_tol=1e-6)


def _row(kind: str, played: list[tuple[Spans, tuple[str, float]]]) -> Row:
    name = kind if kind.startswith("trace") else f"steps with: {kind}"
    for spans, got in sorted(played, key=lambda one: len(one[0])):
        right = read_step(spans, Reading())
        if not _same(got, right):
            shown = f"; the step was {spans}" if len(spans) < 9 else ""
            # For a given trace the answer is the learner's to find.
            expected = "another" if name == kind else f"{right[0]}, {right[1]:.4g}"
            return Row(name, False, expected, f"{got[0]}, {got[1]:.4g}{shown}")
    return Row(name, True, "cause and number", ", ".join(dict.fromkeys(f"{got[0]}, {got[1]:.2f}" for _, got in
                                                                       played[:2])))
