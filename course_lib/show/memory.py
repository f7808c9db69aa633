"""`memory(...)`: what fills a rank's memory, one bar a configuration, the formula as an outline above the measurement.

The parts are four tints of Okabe–Ito's reddish purple, which stands for nothing else in the course; their order is
always the same and each is labelled, so that the tint alone never carries the meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_lib.show.frame import MARGIN
from course_lib.show.style import Theme, theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from course_lib.show.picture import Picture


class Tint(NamedTuple):
    """How a part is drawn: fill, and the ink that is readable on it."""

    fill: str
    ink: str


TINTS = {
    "parameters": Tint("#6E2F57", "#FFFFFF"),
    "gradients": Tint("#A65C8A", "#FFFFFF"),
    "optimizer": Tint("#CC79A7", "#0B0B0B"),
    "activations": Tint("#E3B3CE", "#0B0B0B"),
}
Bars = Mapping[str, Mapping[str, float]]
_LABELS, _TOTAL, _BAR, _OUTLINE, _GAP, _AXIS, _LEGEND, _CAPTION = 150, 84, 26, 16, 12, 46, 22, 20


def memory(measured: Bars | None = None, formula: Bars | None = None, *, limit_bytes: float | None = None,
           title: str | None = None, notes: Sequence[str] = (), provenance: str = "", dark: bool = False,
           width_px: int = 700) -> Picture:
    """Stacked bars of bytes by part. Both arguments map a name to {part: bytes}; the parts are those of `TINTS`.

    What `formula` says about a name is drawn without fill, above what was measured of it. `limit_bytes` is the
    memory of the device, a dashed line; `notes` are lines of text under the title. Raises `ValueError` when there is
    nothing to draw, for an unknown part, and for bytes below 0.
    """
    from course_lib.show.picture import Picture

    filled, outlined = dict(measured or {}), dict(formula or {})
    names = list(dict.fromkeys((*filled, *outlined)))
    _refuse((*filled.values(), *outlined.values()))
    look = theme(dark)
    below_title = MARGIN + (24 if title else 0)
    top = below_title + 16 * len(notes) + (6 if notes else 0) + (20 if limit_bytes else 0)
    height = sum(_height(name, filled, outlined) + _GAP for name in names)
    picture = Picture(width_px, round(top + height + _AXIS + _LEGEND + _CAPTION), look, _words(filled, outlined))
    if title:
        picture.text_px(MARGIN, MARGIN, title, 15, weight="bold")
    for line, text in enumerate(notes):
        picture.text_px(MARGIN, below_title + 16 * line, text, 11)
    axes = picture.axes_px(_LABELS, top, width_px - _LABELS - _TOTAL, height)
    most = max(sum(parts.values()) for parts in (*filled.values(), *outlined.values()))
    size, unit = _unit(max(most, limit_bytes or 0))
    _prepare(axes, max(most, limit_bytes or 0) / size * 1.01 or 1, height, unit, look)
    at = 0.0
    for name in names:
        middle = top + at + _height(name, filled, outlined) / 2
        picture.text_px(MARGIN, middle, name, 11, va="center", weight="bold", linespacing=1.2)
        for bars, tall, outline in ((outlined, _OUTLINE, True), (filled, _BAR, False)):
            if name in bars:
                _draw(axes, bars[name], (at, tall), size, outline, look)
                words = said(sum(bars[name].values()))
                picture.text_px(width_px - _TOTAL + 6, top + at + tall / 2, words, 10 if outline else 12, va="center",
                                weight="normal" if outline else "bold", style="italic" if outline else "normal")
                at += tall
        at += _GAP
    if limit_bytes:
        _limit(axes, limit_bytes, size, height, look)
    _legend(picture, look, bool(filled), bool(outlined), top + height + _AXIS)
    picture.text_px(MARGIN, top + height + _AXIS + _LEGEND, provenance, 10, color=look.muted, label="provenance")
    return picture


def said(count: float) -> str:
    """Bytes in the unit that suits them, decimal as on a memory's data sheet: GB is 10⁹."""
    size, unit = _unit(count)
    value = count / size
    return f"{value:.{0 if value >= 100 or size == 1 else 1}f} {unit}"


def _unit(count: float) -> tuple[float, str]:
    return next(((size, unit) for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= size),
                (1.0, "B"))


def _height(name: str, filled: Bars, outlined: Bars) -> float:
    return (_BAR if name in filled else 0) + (_OUTLINE if name in outlined else 0)


def _refuse(bars: tuple[Mapping[str, float], ...]) -> None:
    if not bars or not any(sum(parts.values()) for parts in bars):
        raise ValueError("nothing to draw: give bytes by part, measured or by formula")
    for parts in bars:
        if unknown := [part for part in parts if part not in TINTS]:
            raise ValueError(f"unknown part {unknown[0]!r}: choose from {', '.join(TINTS)}")
        if min(parts.values()) < 0:
            raise ValueError(f"bytes below 0: {dict(parts)}")


def _words(filled: Bars, outlined: Bars) -> str:
    """The picture as text: each bar with its total and its largest part."""
    def one(name: str, parts: Mapping[str, float], how: str) -> str:
        largest = max(parts, key=parts.get)  # type: ignore[arg-type]
        return f"{name}{how} {said(sum(parts.values()))}, most of it {largest} with {said(parts[largest])}"
    rows = [one(name, parts, " measured") for name, parts in filled.items()]
    return "Memory by part: " + "; ".join(rows + [one(n, p, " by the formula") for n, p in outlined.items()]) + "."


def _prepare(axes: Axes, until: float, height: float, unit: str, look: Theme) -> None:
    axes.set_xlim(0, until)
    axes.set_ylim(height, 0)
    axes.set_facecolor("none")
    axes.set_yticks([])
    axes.tick_params(axis="x", colors=look.muted, labelsize=8, length=3, width=0.8)
    axes.set_xlabel(f"{unit} on one rank", fontsize=8, color=look.muted, labelpad=2)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(look.grid)


def _draw(axes: Axes, parts: Mapping[str, float], band: tuple[float, float], size: float, outline: bool,
          look: Theme) -> None:
    from course_lib.show.picture import points

    begin, px = 0.0, axes.get_position().width * axes.figure.pixels[0] / axes.get_xlim()[1]
    for part, (fill, ink) in TINTS.items():
        wide = parts.get(part, 0) / size
        inner = (band[0] + 1, band[1] - 3) if outline else band
        axes.broken_barh([(begin, wide)], inner, facecolors="none" if outline else fill,
                         edgecolors=fill if outline else look.paper, linewidth=1.3 if outline else 0.8, zorder=3,
                         clip_on=False, label=f"{'formula ' if outline else ''}{part}")
        text = said(parts.get(part, 0))
        if wide * px > 6.5 * len(text):
            axes.text(begin + wide / 2, band[0] + band[1] / 2, text, color=look.ink if outline else ink, ha="center",
                      va="center_baseline", fontsize=points(9 if outline else 10.5), zorder=5)
        begin += wide


def _limit(axes: Axes, limit_bytes: float, size: float, height: float, look: Theme) -> None:
    from course_lib.show.picture import points

    x = limit_bytes / size
    axes.plot([x, x], [-4, height], color=look.ink, linewidth=1.2, linestyle=(0, (4, 3)), zorder=7, clip_on=False,
              label="limit")
    late = x > 0.6 * axes.get_xlim()[1]
    axes.annotate(f"{said(limit_bytes)} of the device", (x, 0), (-4 if late else 4, 5), textcoords="offset points",
                  ha="right" if late else "left", va="bottom", fontsize=points(10), color=look.ink,
                  annotation_clip=False)


def _legend(picture: Picture, look: Theme, measured: bool, formula: bool, top: float) -> None:
    from matplotlib.patches import Patch

    keys = [Patch(facecolor=tint.fill, edgecolor=look.paper, linewidth=0, label=part) for part, tint in TINTS.items()]
    if formula:
        words = "outline above: by the formula" if measured else "by the formula"
        keys.append(Patch(facecolor="none", edgecolor=look.muted, linewidth=1.3, label=words))
    across, down = picture.pixels
    picture.legend(handles=keys, loc="upper left", bbox_to_anchor=(MARGIN / across, 1 - top / down), ncols=len(keys),
                   frameon=False, fontsize=7.6, labelcolor=look.ink, borderpad=0, borderaxespad=0, handlelength=1.5,
                   handletextpad=0.5, columnspacing=1.3)
