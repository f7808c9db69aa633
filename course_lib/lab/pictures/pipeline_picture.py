"""Pipelines on one time axis: a lane for each rank, a bar for each action, empty where the rank waits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_lib.lab.errors import LabError
from course_lib.simulate.pipeline import bubble
from course_lib.timeline import Timeline

if TYPE_CHECKING:
    from course_lib.show.picture import Picture

WIDTH, LEFT, RIGHT, TOP, GAP, LANE, OUTLINE, BELOW = 700, 66, 64, 62, 26, 18, 11, 58
INK = {"F": ("#0072B2", "#FFFFFF"), "B": ("#56B4E9", "#0B0B0B"), "I": ("#56B4E9", "#0B0B0B"),
       "W": ("#BFDDF2", "#0B0B0B")}  # shades of the blue of compute  # fmt: skip
WORDS = {"F": "forward F", "B": "backward B", "I": "half I of B", "W": "half W of B"}
_NAME = re.compile(r"([FBIW])(\d+)(?:@(\d+))?")


class Bar(NamedTuple):
    """An action of a rank, in nanoseconds since the first action of any."""

    op: str
    index: int
    stage: int
    start: int
    stop: int


class Drawn(NamedTuple):
    """One pipeline to draw: predicted, measured, or both; and the most activations that each rank keeps."""

    predicted: Timeline | None = None
    measured: Timeline | None = None
    kept: Sequence[int] = ()


def typical(timeline: Timeline) -> Timeline:
    """The step that took as long as the median one. Raises `LabError` where nothing is computed."""
    if not timeline.select(kind="compute").spans:
        raise LabError("pipelines: this timeline has no compute to draw")
    took = sorted((max(s.stop for s in one) - min(s.start for s in one), step) for step in timeline.steps
                  if (one := timeline.select(step=step, kind="compute").spans))  # fmt: skip
    return timeline.select(step=took[(len(took) - 1) // 2][1]) if took else timeline


def bars(timeline: Timeline) -> dict[int, list[Bar]]:
    """What each rank of one step computes. Halves of one action that follow each other are one bar."""
    compute = sorted(timeline.select(kind="compute"), key=lambda s: (s.rank, s.start))
    origin, out = min(s.start for s in compute), {rank: [] for rank in timeline.ranks}
    for span in compute:
        found = _NAME.fullmatch(span.name)
        if found is None:
            continue
        bar = Bar(found[1], int(found[2]), int(found[3] or span.rank), span.start - origin, span.stop - origin)
        last = out[span.rank][-1] if out[span.rank] else None
        if last is not None and last[:3] == bar[:3]:
            out[span.rank][-1] = last._replace(stop=bar.stop)
        else:
            out[span.rank].append(bar)
    return out


def pipelines(drawn: Mapping[str, Drawn], *, provenance: str | None = None, dark: bool = False) -> Picture:
    """One pipeline below the other. Outlines are predicted, filled bars measured; where nothing was measured the
    prediction is filled. Micro-batch numbers stand in the bars where there is room. On the right: the activations that
    a rank keeps. Raises `LabError` where there is nothing to draw."""
    from course_lib.show.picture import Picture
    from course_lib.show.style import theme

    if not drawn or any(one.predicted is None and one.measured is None for one in drawn.values()):
        raise LabError("pipelines: give at least one pipeline, {name: Drawn(predicted, measured)}")
    look, scenes = theme(dark), {}
    for name, one in drawn.items():
        shown = [typical(line) if line is not None else None for line in (one.predicted, one.measured)]
        scenes[name] = _Scene(*shown, one.kept)
    body = sum(GAP + scene.height for scene in scenes.values())
    said = "; ".join(f"{name}: {scene.sentence}" for name, scene in scenes.items())
    picture = Picture(WIDTH, TOP + body + BELOW, look, said)
    axes = picture.axes_px(LEFT, TOP, WIDTH - LEFT - RIGHT, body)
    axes.set_xlim(0, max(scene.stop for scene in scenes.values()) / 1e6 * 1.005)
    axes.set_ylim(body, 0)
    top = 0.0
    for name, scene in scenes.items():
        picture.text_px(14, TOP + top + 4, name, 12, weight="bold")
        picture.text_px(WIDTH - 14, TOP + top + 5, scene.sentence, 11, ha="right", color=look.muted)
        top += GAP
        scene.draw(picture, axes, top, look)
        top += scene.height
    _frame(picture, axes, look)
    _legend(picture, list(scenes.values()), look)
    first = next(iter(drawn.values()))
    line = provenance or (first.measured or first.predicted).provenance
    picture.text_px(14, picture.pixels[1] - 16, line, 10, color=look.muted)
    return picture


class _Scene:
    """One pipeline, ready to be drawn."""

    def __init__(self, predicted: Timeline | None, measured: Timeline | None, kept: Sequence[int]) -> None:
        both = measured is not None and predicted is not None
        self.outline = bars(predicted) if both else {}
        self.filled = bars(measured if measured is not None else predicted)
        self.kept, self.ranks = list(kept), sorted(self.filled)
        self.lane = LANE + (OUTLINE + 2 if both else 0) + 5
        self.height = self.lane * len(self.ranks) + 6
        parts = []
        for word, line in (("predicted" if both else "", predicted), ("measured", measured)):
            if line is not None:
                parts.append(f"{word} {_step_ms(line):.0f} ms, bubble {bubble(line):.0%}".strip())
        self.sentence = "; ".join(parts) + (f"; keeps at most {max(self.kept):g}" if self.kept else "")
        self.stop = max(b.stop for rows in (self.outline, self.filled) for row in rows.values() for b in row)

    def draw(self, picture, axes, top: float, look) -> None:
        for k, rank in enumerate(self.ranks):
            y = top + k * self.lane
            if self.outline:
                _lane(axes, self.outline[rank], y, OUTLINE, look, rank, filled=False)
                y += OUTLINE + 2
            axes.broken_barh([(0, self.stop / 1e6)], (y, LANE), facecolors=look.lane)
            _lane(axes, self.filled[rank], y, LANE, look, rank, filled=True)
            picture.text_px(LEFT - 8, TOP + y + LANE / 2, f"rank {rank}", 10, va="center", ha="right")
            if self.kept:
                picture.text_px(WIDTH - RIGHT + 6, TOP + y + LANE / 2, f"keeps {self.kept[k]:g}", 10, va="center",
                                color=look.muted)  # fmt: skip


def _step_ms(line: Timeline) -> float:
    """From the first compute of any rank to the end of the last."""
    compute = line.select(kind="compute").spans
    return (max(s.stop for s in compute) - min(s.start for s in compute)) / 1e6


def _lane(axes, row: Sequence[Bar], top: float, height: float, look, rank: int, filled: bool) -> None:
    from course_lib.show.picture import points

    left, right = axes.get_xlim()
    px_per_ms = axes.get_position().width * axes.figure.pixels[0] / (right - left)
    first = min((bar.stage for bar in row), default=0)
    for op, (fill, _) in INK.items():
        spans = [(b.start / 1e6, (b.stop - b.start) / 1e6) for b in row if b.op == op]
        if filled:
            axes.broken_barh(spans, (top, height), facecolors=fill, edgecolors=look.paper, linewidth=0.6)
            later = [(b.start / 1e6, (b.stop - b.start) / 1e6) for b in row if b.op == op and b.stage != first]
            axes.broken_barh(later, (top + height - 3, 3), facecolors=look.ink)
        else:
            axes.broken_barh(spans, (top, height), facecolors="none", edgecolors=INK["F"][0], linewidth=0.8)
    for b in row if filled else ():
        text, wide = str(b.index), (b.stop - b.start) / 1e6 * px_per_ms
        if wide > 6 * len(text) + 2:
            axes.text((b.start + b.stop) / 2e6, top + height / 2, text, color=INK[b.op][1], ha="center",
                      va="center_baseline", fontsize=points(9.5))  # fmt: skip


def _frame(picture, axes, look) -> None:
    axes.set_facecolor("none")
    axes.set_yticks([])
    axes.tick_params(axis="x", colors=look.muted, labelsize=8, length=3, width=0.8)
    axes.set_xlabel("milliseconds since the first action", fontsize=8, color=look.muted, labelpad=2)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(look.grid)


def _legend(picture, scenes: Sequence[_Scene], look) -> None:
    from matplotlib.patches import Patch

    rows = [bar for scene in scenes for row in scene.filled.values() for bar in row]
    words = {op: WORDS[op] for op in WORDS if any(b.op == op for b in rows)}
    if "B" in words and "I" in words:  # one colour: what the stage before waits for
        words["B"] = "backward B, or its half I"
        del words["I"]
    keys = [Patch(facecolor=INK[op][0], edgecolor=look.paper, label=said) for op, said in words.items()]
    keys.append(Patch(facecolor=look.lane, edgecolor=look.grid, label="waits"))
    if any(len({b.stage for b in row}) > 1 for scene in scenes for row in scene.filled.values()):
        keys.append(Patch(facecolor=look.ink, edgecolor=look.paper, label="underlined: a later stage of the rank"))
    if any(scene.outline for scene in scenes):
        keys.append(Patch(facecolor="none", edgecolor=INK["F"][0], label="predicted"))
    across, down = picture.pixels
    picture.legend(handles=keys, loc="upper left", bbox_to_anchor=(14 / across, 1 - 32 / down), ncols=len(keys),
                   frameon=False, fontsize=7.6, labelcolor=look.ink, borderpad=0, borderaxespad=0, handlelength=1.4,
                   handletextpad=0.5, columnspacing=1.2)  # fmt: skip
    picture.text_px(14, 12, "What each rank computes; numbers are micro-batches", 13, weight="bold")
