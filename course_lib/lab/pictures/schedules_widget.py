"""Schedules side by side under sliders that need no kernel: every position is predicted beforehand, the browser draws.

The static twin is `side_by_side`; both take what they draw from `show.scene`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.lab.errors import LabError
from course_lib.lab.pictures.held_above import held_above
from course_lib.lab.pictures.side_by_side import side_by_side

if TYPE_CHECKING:
    from course_lib.timeline import Timeline

ESM = Path(__file__).with_name("schedules_widget.js")

Draw = Callable[..., Mapping[str, "Timeline"]]
Holds = Callable[..., Mapping[str, Mapping[str, float]]]


def explore_schedules(draw: Draw, labels: Mapping[str, str], holds: Holds | None = None,
                      **positions: tuple[Any, Sequence[Any]]) -> Any:
    """`draw(name=value, …)` gives timelines by name; a slider for each name, `(where it starts, all its positions)`,
    with its label beside it. `holds(name=value, …)` gives what a rank holds, in bytes by name and part (those of
    `show.memory`): bars above the timelines.

    A widget that also works in a stored notebook; without anywidget, sliders that are drawn by the kernel. Raises
    `LabError` for a start that is none of the positions, or a name without a label.
    """
    for name, (start, stops) in positions.items():
        if start not in stops:
            raise LabError(f"explore_schedules: {name} starts at {start!r}, which is none of its positions "
                           f"{list(stops)}")
        if name not in labels:
            raise LabError(f"explore_schedules: {name} has no label; those are for {', '.join(labels)}")

    def picture(**at: Any):
        return side_by_side(draw(**at)) if holds is None else held_above(holds(**at), draw(**at))

    try:
        from course_lib.lab.pictures.positions_anywidget import SchedulesWidget
    except ImportError:
        from course_lib.lab.pictures.sliders import sliders
        return sliders(picture, labels, **positions)
    stops = {name: list(all_) for name, (_, all_) in positions.items()}
    starts = {name: start for name, (start, _) in positions.items()}
    return SchedulesWidget(predicted(draw, labels, stops, holds), starts, picture)


def predicted(draw: Draw, labels: Mapping[str, str], stops: Mapping[str, Sequence[Any]],
              holds: Holds | None = None) -> dict:
    """What the browser draws from. For each position, by the numbers of its stops, and each schedule there: its name,
    its step and exposed time in ns, and the pieces of its two lanes as look, start, length and so on in one row, in
    units of `unit` ns. With `holds`, `held` are the bars: name, total in words, and part and bytes of each piece."""
    from course_lib.show.memory import TINTS, said
    from course_lib.show.scene import scene
    from course_lib.show.style import LOOKS

    order, runs, provenance = list(LOOKS), {}, ""
    for places in product(*(range(len(all_)) for all_ in stops.values())):
        at = {name: all_[k] for (name, all_), k in zip(stops.items(), places)}
        timelines, bars = draw(**at), holds(**at) if holds else {}
        scenes = {name: scene(one) for name, one in timelines.items()}
        unit = max(1, max(one.step_ns for one in scenes.values()) // 20_000)  # far finer than a screen
        runs["|".join(map(str, places))] = {"unit": unit, "schedules": [
            {"name": name, "step": one.step_ns, "exposed": one.exposed_ns or 0,
             "lanes": [[part for bar in row.bars for piece in bar.pieces for part in
                        (order.index(piece.look), piece.start // unit, (piece.stop - piece.start) // unit)]
                       for row in one.rows[:2]]} for name, one in scenes.items()],
            "held": [{"name": name, "said": said(sum(parts.values())),
                      "parts": [[part, round(parts[part])] for part in TINTS if parts.get(part)]}
                     for name, parts in bars.items()]}
        provenance = next(iter(scenes.values())).provenance
    held = {part for run in runs.values() for bar in run["held"] for part, _ in bar["parts"]}
    looks = [{"fill": look.fill, "hatched": bool(look.hatch), "words": look.words} for look in LOOKS.values()]
    return {"controls": [{"name": name, "label": labels[name], "stops": list(all_)} for name, all_ in stops.items()],
            "looks": looks, "tints": {part: TINTS[part].fill for part in TINTS if part in held}, "runs": runs,
            "provenance": provenance}
