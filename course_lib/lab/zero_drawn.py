"""A ZeRO stage as one picture: what a rank holds, above the step that it takes. Both are computed, nothing is run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from course_lib.show.picture import Picture
    from course_lib.show.style import Theme
    from course_lib.simulate.link import LinkCost
    from course_lib.simulate.zero import Units

BAR, ROW, HEAD = 22, 40, 44


def held_bytes(units: Units, ranks: int, stage: int, ahead: int) -> dict[str, float]:
    """Bytes of one rank by part, in fp32 with Adam: what `plan.memory.states` says, and what is whole for a moment. In
    stage 3 those are the units in use and ahead, in stages 2 and 3 the gradients of two units: one is computed while
    the other travels."""
    from course_lib.plan.memory import FP32, states

    parameters, gradients, optimizer = states(round(units.count * units.bytes / 4), FP32, stage, ranks)
    if stage == 3:
        parameters += min(1 + ahead, units.count) * units.bytes
    if stage > 1:
        gradients += min(2, units.count) * units.bytes
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}


def zero_drawn(units: Units, N: int, gather: LinkCost, reduce: LinkCost, *, ranks: int, stage: int, ahead: int,
               note: str = "", dark: bool = False) -> Picture:
    """Memory of this stage under that of plain data parallelism, and the predicted window of N micro-steps."""
    from course_lib.lab.side_by_side import BELOW, WIDTH, draw_lanes, height_px, numbers
    from course_lib.show.memory import said
    from course_lib.show.picture import Picture
    from course_lib.show.scene import scene
    from course_lib.show.style import theme
    from course_lib.simulate.zero import predict_zero

    look = theme(dark)
    name = f"stage {stage}" + (f", {ahead} ahead" if stage == 3 else "")
    rows = {"DDP": held_bytes(units, ranks, 0, 0), name: held_bytes(units, ranks, stage, ahead)}
    one = scene(predict_zero(units, N, gather, reduce, stage, ahead).timeline)
    top = HEAD + ROW * len(rows)
    words = "; ".join(f"{row} holds {said(sum(parts.values()))}" for row, parts in rows.items())
    picture = Picture(WIDTH, top + height_px(1) + BELOW, look, f"{words}; {name}: {numbers(one)}")
    picture.text_px(14, 12, f"What one of {ranks} ranks holds, and the step with N = {N}", 13, weight="bold")
    _bars(picture, rows, look)
    draw_lanes(picture, {name: one}, top, look)
    picture.text_px(14, picture.pixels[1] - 14, "  ·  ".join(filter(None, ["simulated", note])), 10, color=look.muted)
    return picture


def _bars(picture: Picture, rows: dict[str, dict[str, float]], look: Theme) -> None:
    """One stacked bar a row, all on one scale, each part with its name where there is room."""
    from course_lib.lab.side_by_side import LEFT, WIDTH
    from course_lib.show.memory import TINTS, said
    from course_lib.show.picture import points

    end = WIDTH - LEFT - 90
    axes = picture.axes_px(LEFT, HEAD, end, ROW * len(rows))
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
        picture.text_px(LEFT - 8, HEAD + top + BAR / 2, name, 11, va="center", ha="right", weight="bold")
        picture.text_px(LEFT + at / most * end + 6, HEAD + top + BAR / 2, said(at), 11, va="center")
