"""Sliders for pipelines that need no kernel: every position is predicted beforehand and drawn in the browser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from course_lib.lab.pictures.pipeline_picture import Drawn, pipelines
from course_lib.link_cost import LinkCost
from course_lib.schedule.action import COMPUTE, Schedule
from course_lib.schedule.check import check
from course_lib.schedule.messages import with_messages
from course_lib.simulate.pipeline import Costs, predict

UNIT = 100
"""What the forward of everything a rank holds takes, in the browser's whole numbers; I and W take as long."""

ESM = Path(__file__).with_name("pipeline_widget.js")

Makers = Mapping[str, Callable[[int, int], Schedule]]


def explore_pipelines(makers: Makers, *, p: tuple[int, Sequence[int]], m: tuple[int, Sequence[int]],
                      message: tuple[float, Sequence[float]], schedule: str) -> Any:
    """A pipeline with controls for its schedule, ranks, micro-batches and the time of a message (in F of a rank).

    `makers` give a schedule for (p, m); the rest are (where it starts, all positions). A widget that also works in a
    stored notebook; without anywidget, sliders that are drawn by the kernel.
    """
    starts = {"schedule": (schedule, list(makers)), "p": p, "m": m, "message": message}

    def draw(schedule: str, p: int, m: int, message: float):
        made = makers[schedule](p, m)
        return pipelines({f"{schedule}, p = {p}, m = {m}": Drawn(predict(made, _costs(made, message, 0.01)).timeline,
                                                                kept=_kept(made))},
                         provenance=f"simulated; F, I and W of a rank take 10 ms each, a message {10 * message:g} ms")

    try:
        from course_lib.lab.pictures.positions_anywidget import PipelineWidget
    except ImportError:
        from course_lib.lab.pictures.sliders import sliders
        return sliders(draw, {"p": "ranks p", "m": "micro-batches m", "message": "a message, in F"}, **starts)
    at = {name: first for name, (first, _) in starts.items()}
    return PipelineWidget(positions(makers, p[1], m[1], message[1]), at, draw)


def positions(makers: Makers, ps: Sequence[int], ms: Sequence[int], messages: Sequence[float]) -> dict:
    """What the browser draws from: for each schedule, p and m the words of each rank, and for each message time how
    long the rank waits before each word, the step (in `UNIT`) and the bubble."""
    runs = {}
    for (name, make), p, m in product(makers.items(), ps, ms):
        made = with_messages(make(p, m))
        found = [predict(made, _costs(made, message, UNIT * 1e-9)) for message in messages]
        runs[f"{name}|{p}|{m}"] = {
            "v": made.stages // p, "kept": _kept(made), "step": [round(one.step_s * 1e9) for one in found],
            "bubble": [round(one.bubble, 5) for one in found],
            "words": [" ".join(made.name(a) for a in actions if a.op in COMPUTE) for actions in made.ranks],
            "gaps": [[_gaps(one.timeline, rank) for rank in range(p)] for one in found]}
    return {"unit": UNIT, "schedule": list(makers), "p": list(ps), "m": list(ms), "message": list(messages),
            "runs": runs}


def _costs(made: Schedule, message: float, forward_s: float) -> Costs:
    v = made.stages // len(made.ranks)
    return Costs(*[forward_s / v] * 3, link=LinkCost(forward_s * message, 0.0))


def _kept(made: Schedule) -> list[float]:
    """In micro-batches of everything a rank holds."""
    v = made.stages // len(made.ranks)
    return [peak / v for peak in check(made).peak_activations]


def _gaps(timeline, rank: int) -> list[int]:
    spans = sorted(timeline.select(rank=rank, kind="compute"), key=lambda s: s.start)
    return [spans[0].start, *(after.start - before.stop for before, after in pairwise(spans))]
