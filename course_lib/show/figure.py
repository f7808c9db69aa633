"""`figure(timeline)`: one step as a static picture, the prediction as an outline above the measurement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from course_lib.show import frame, words
from course_lib.show.frame import MARGIN
from course_lib.show.scene import Bar, Piece, Row, Scene, coarse, same_on_every_rank, scene
from course_lib.show.style import LANES, LOOKS, Theme, theme
from course_lib.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from course_lib.show.picture import Picture

LABELS, AXIS, LEGEND, CAPTION = 124, 48, 22, 20


class Slot(NamedTuple):
    """Where a row is drawn: its upper edge and height in pixels below the first lane, and how."""

    row: Row
    top: float
    height: float
    outline: bool
    first: bool


def figure(timeline: Timeline, *, predicted: Timeline | None = None, step: int | None = None,
           limit_ns: float | None = None, title: str | None = None, dark: bool = False,
           fair: float | None = None, width_px: int = 700) -> Figure:
    """One step of a timeline: a compute and a wire lane per rank, time from left to right.

    `predicted` is drawn as an outline above what was measured (once when it is the same for every
    rank). `step` is the step's number (default: the one of median time). `limit_ns` is the physical
    limit max(Tc, Tm) of the step in nanoseconds, `fair` its score F; both come from
    `course_lib.overlap`. Raises `ValueError` when there is nothing to draw or no such step.
    """
    from course_lib.show.picture import Picture

    measured = scene(timeline, step)
    if not measured.rows:
        raise ValueError("nothing to draw: the timeline has no compute, copy or communication spans")
    outline = scene(predicted) if predicted is not None and len(predicted) else None
    slots, body = _stack(measured, outline)
    head = MARGIN + (24 if title else 0) + (58 if outline else 44)
    lines = 15 * (1 + (limit_ns is not None))
    height = round(head + lines + body + AXIS + LEGEND + CAPTION + MARGIN / 2)
    look = theme(dark)
    picture = Picture(width_px, height, look, words.sentence(measured, outline, fair))
    frame.header(picture, title, words.stats(measured, outline, fair))
    axes = picture.axes_px(LABELS, head + lines, width_px - LABELS - MARGIN, body)
    until = max(measured.step_ns, outline.step_ns if outline else 0, limit_ns or 0)
    _prepare(axes, until, body, look)
    for slot in slots:
        _draw_row(picture, axes, slot, head + lines, look)
    _marks(axes, slots, limit_ns, until, look)
    frame.legend(picture, measured, outline, height - CAPTION - LEGEND - MARGIN / 2)
    frame.caption(picture, measured, outline, height - CAPTION - MARGIN / 2)
    return picture


def _stack(measured: Scene, outline: Scene | None) -> tuple[list[Slot], float]:
    """Rows from top to bottom: a prediction above the rank it is for, or once above all ranks."""
    lanes: list[tuple[Row, bool]] = []
    shared = outline is not None and same_on_every_rank(outline)
    guesses = list(outline.rows) if outline else []
    if shared:
        lanes += [(row, True) for row in guesses[:2]]
    for row in measured.rows:
        if not shared and row.role == "compute":
            lanes += [(guess, True) for guess in guesses if guess.rank == row.rank]
        lanes.append((row, False))
    slots, top = [], 0.0
    for i, (row, ghost) in enumerate(lanes):
        first = row.role == "compute"
        if i:
            top += LANES.ranks if first else LANES.between
        height = LANES.predicted if ghost else getattr(LANES, row.role)
        slots.append(Slot(row, top, height, ghost, first))
        top += height
    return slots, top


def _prepare(axes: Axes, until: float, body: float, look: Theme) -> None:
    """Milliseconds to the right, pixels downwards, no frame: the lanes themselves are the frame."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, until / 1e6 * 1.005 or 1)
    axes.set_ylim(body, 0)
    axes.set_facecolor("none")
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.tick_params(axis="x", colors=look.muted, labelsize=8, length=3, width=0.8, pad=3)
    axes.set_xlabel("milliseconds since the step began", fontsize=8, color=look.muted, labelpad=2)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(look.grid)
    axes.spines["bottom"].set_position(("outward", 4))


def _draw_row(picture: Picture, axes: Axes, slot: Slot, head: float, look: Theme) -> None:
    row = slot.row
    axes.broken_barh([(0, row.stop / 1e6)], (slot.top, slot.height), facecolors="none" if slot.outline else look.lane,
                     edgecolors=look.grid if slot.outline else "none", linewidth=0.6, zorder=1, label="_lane")
    per_track = slot.height / row.tracks
    left, right = axes.get_xlim()
    pixel = (right - left) * 1e6 / (axes.get_position().width * axes.figure.pixels[0])
    for look_name, track, pieces in _by_look(row, pixel):
        _bars(axes, look_name, [(p.start / 1e6, (p.stop - p.start) / 1e6) for p in pieces],
              (slot.top + track * per_track, per_track), slot.outline, look)
    if not slot.outline:
        _edges(axes, slot, per_track, 3 * pixel, look)
    _numbers(axes, slot, per_track, look)
    middle = head + slot.top + slot.height / 2
    if slot.first:
        name = "predicted" if slot.outline else f"rank {row.rank}"
        picture.text_px(MARGIN, middle, name, 11, va="center", weight="normal" if slot.outline else "bold",
                        style="italic" if slot.outline else "normal")
    picture.text_px(LABELS - 8, middle, row.role, 10, va="center", ha="right", color=look.muted)


def _by_look(row: Row, pixel: float) -> Iterator[tuple[str, int, list[Piece]]]:
    """Pieces grouped by look and track, so that a row is a handful of artists however many spans it has."""
    groups: dict[tuple[str, int], list[Piece]] = {}
    for track in range(row.tracks):
        pieces = [p for bar in row.bars if bar.track == track for p in bar.pieces]
        waits = [p for p in pieces if p.look == "wait"]
        for p in (*coarse((p for p in pieces if p.look != "wait"), pixel), *coarse(waits, pixel)):
            groups.setdefault((p.look, track), []).append(p)
    for name in LOOKS:
        for (look_name, track), pieces in groups.items():
            if look_name == name:
                yield name, track, pieces


def _bars(axes: Axes, name: str, spans: list[tuple[float, float]], band: tuple[float, float], outline: bool,
          look: Theme) -> None:
    fill, _, hatch, _ = LOOKS[name]
    if name == "wait":
        # Paper over the bar, then a yellow frame with a dark hairline: yellow alone vanishes on white.
        inset = (band[0] + 1.5, band[1] - 3)
        axes.broken_barh(spans, band, facecolors=look.paper, alpha=0.72, linewidth=0, zorder=4)
        axes.broken_barh(spans, inset, facecolors="none", edgecolors=look.muted, linewidth=2.6, zorder=4)
        axes.broken_barh(spans, inset, facecolors="none", edgecolors=fill, linewidth=1.7, zorder=5, label=name)
    elif outline:
        axes.broken_barh(spans, band, facecolors="none", edgecolors=fill, hatch=hatch or None, linewidth=1.1,
                         zorder=3, label=f"predicted {name}")
    else:
        axes.broken_barh(spans, band, facecolors=fill, edgecolors=look.paper, hatch=hatch or None, linewidth=0,
                         zorder=3, label=name)


def _edges(axes: Axes, slot: Slot, per_track: float, least: float, look: Theme) -> None:
    """Hairlines between bars, not between the pieces of one: a transfer stays one bar."""
    for track in range(slot.row.tracks):
        bars = [(b.start / 1e6, (b.stop - b.start) / 1e6) for b in slot.row.bars
                if b.track == track and b.stop - b.start > least]
        axes.broken_barh(bars, (slot.top + track * per_track, per_track), facecolors="none", edgecolors=look.paper,
                         linewidth=0.5, zorder=3.5, label="_edges")


def _numbers(axes: Axes, slot: Slot, per_track: float, look: Theme) -> None:
    """Bucket numbers, where the bar is wide enough to hold one; on stripes they get a plate, and stripes beside it."""
    from course_lib.show.picture import points

    left, right = axes.get_xlim()
    px_per_ms = axes.get_position().width * axes.figure.pixels[0] / (right - left)
    for bar in slot.row.bars:
        if bar.bucket < 0 or bar.stop == bar.start or per_track < 9:
            continue
        text, (begin, look_name) = str(bar.bucket), _moving(bar)
        room = 7 * len(text) + (14 if look_name == "exposed" else 4)
        if (bar.stop - begin) / 1e6 * px_per_ms < room:
            continue
        fill, ink = (look.paper, look.ink) if slot.outline else LOOKS[look_name][:2]
        axes.text((begin + bar.stop) / 2e6, slot.top + (bar.track + 0.5) * per_track, text, color=ink, weight="bold",
                  fontsize=points(10.5 if per_track > 18 else 9), ha="center", va="center_baseline", zorder=6,
                  bbox={"facecolor": fill, "edgecolor": "none", "pad": 0.8} if look_name == "exposed" else None,
                  clip_on=True)


def _moving(bar: Bar) -> tuple[int, str]:
    """When bytes begin to move (after the wait for a late rank), and the look of most of what follows."""
    begin = max((p.stop for p in bar.pieces if p.look == "wait"), default=bar.start)
    after = [p for p in bar.pieces if p.look != "wait" and p.stop > begin]
    return begin, max(after or bar.pieces, key=lambda p: p.stop - max(begin, p.start)).look


def _marks(axes: Axes, slots: list[Slot], limit_ns: float | None, until: float, look: Theme) -> None:
    """A thin line where each rank's backward ends and a dashed one at the physical limit."""
    from course_lib.show.picture import points

    def say(x: float, words_: str, line: int) -> None:
        late = x > 0.75 * until / 1e6
        axes.annotate(words_ + " " if late else " " + words_, (x, 0), (0, 3 + 15 * line), textcoords="offset points",
                      ha="right" if late else "left", va="bottom", fontsize=points(10), color=look.ink,
                      annotation_clip=False)

    if limit_ns is not None:
        bottom = slots[-1].top + slots[-1].height
        axes.plot([limit_ns / 1e6] * 2, [-24, bottom], color=look.ink, linewidth=1.2, linestyle=(0, (4, 3)), zorder=7,
                  clip_on=False, label="physical limit")
        say(limit_ns / 1e6, f"physical limit {words.ms(limit_ns)}", 1)
    said = False
    for above, below in zip(slots[::2], slots[1::2], strict=True):
        if above.row.backward is None:
            continue
        x = above.row.backward / 1e6
        axes.plot([x, x], [above.top - (0 if said else 9), below.top + below.height], color=look.ink, linewidth=0.9,
                  zorder=7, clip_on=False, label="end of backward")
        if not said:
            say(x, "end of backward", 0)
        said = True
