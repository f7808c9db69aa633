"""What a rank holds, as bars, above the steps that it takes. The static twin of `explore_schedules` with bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from course_lib.lab.errors import LabError

if TYPE_CHECKING:
    from course_lib.show.picture import Picture
    from course_lib.show.style import Theme
    from course_lib.timeline import Timeline

BAR, ROW, TOP = 22, 36, 16

Parts = Mapping[str, float]
"""Bytes by part, those of `show.memory`."""


def held_above(rows: Mapping[str, Parts], timelines: Mapping[str, Timeline], *, dark: bool = False) -> Picture:
    """A bar for each of `rows`, all on one scale, above rank 0's typical step of each timeline. Raises `LabError` where
    one of the two is empty."""
    from course_lib.lab.pictures.side_by_side import BELOW, WIDTH, draw_lanes, height_px, numbers
    from course_lib.show.memory import said
    from course_lib.show.picture import Picture
    from course_lib.show.scene import scene
    from course_lib.show.style import theme

    if not rows or not timelines:
        raise LabError("held_above: give at least one bar, {name: {part: bytes}}, and one timeline")
    look, scenes, top = theme(dark), {name: scene(one) for name, one in timelines.items()}, TOP + ROW * len(rows)
    words = [f"{name} holds {said(sum(parts.values()))}" for name, parts in rows.items()]
    words += [f"{name}: {numbers(one)}" for name, one in scenes.items()]
    picture = Picture(WIDTH, top + height_px(len(scenes)) + BELOW, look, "; ".join(words))
    _bars(picture, rows, look)
    draw_lanes(picture, scenes, top, look)
    picture.text_px(14, picture.pixels[1] - 14, next(iter(timelines.values())).provenance, 10, color=look.muted)
    return picture


def _bars(picture: Picture, rows: Mapping[str, Parts], look: Theme) -> None:
    """One stacked bar a row, all on one scale, each part with its name where there is room."""
    from course_lib.lab.pictures.side_by_side import LEFT, WIDTH
    from course_lib.show.memory import TINTS, said
    from course_lib.show.picture import points

    end = WIDTH - LEFT - 90
    axes = picture.axes_px(LEFT, TOP, end, ROW * len(rows))
    most = max(sum(parts.values()) for parts in rows.values())
    axes.set_xlim(0, most)
    axes.set_ylim(ROW * len(rows), 0)
    axes.axis("off")
    for place, (name, parts) in enumerate(rows.items()):
        at, top = 0.0, ROW * place
        for part, (fill, ink) in TINTS.items():
            if not (wide := parts.get(part, 0.0)):
                continue
            axes.broken_barh([(at, wide)], (top, BAR), facecolors=fill, edgecolors=look.paper, linewidth=0.8)
            if wide / most * end > 7 * len(part):
                axes.text(at + wide / 2, top + BAR / 2, part, color=ink, ha="center", va="center_baseline",
                          fontsize=points(10))
            at += wide
        picture.text_px(LEFT - 8, TOP + top + BAR / 2, name, 11, va="center", ha="right", weight="bold")
        picture.text_px(LEFT + at / most * end + 6, TOP + top + BAR / 2, said(at), 11, va="center")
