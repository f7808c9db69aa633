"""`utilisation(traces)`: what a utilisation counter shows over time, above what was useful meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_lib.show.style import LOOKS, theme

if TYPE_CHECKING:
    from course_lib.show.picture import Picture

LEFT, MARGIN, HEAD, PANEL, BETWEEN, FOOT = 60, 14, 48, 88, 30, 62


class Sampled(NamedTuple):
    """A counter read over time, and what was useful meanwhile.

    `edges_s` are the ends of the sampling windows in seconds from the start, one more than there are windows;
    `busy` is the counter in each window, 0 to 1; `useful` lists (start, stop) in seconds of useful work.
    """

    edges_s: Sequence[float]
    busy: Sequence[float]
    useful: Sequence[tuple[float, float]]

    @property
    def busy_share(self) -> float:
        """The counter over the whole time, 0 to 1."""
        widths = [b - a for a, b in zip(self.edges_s, self.edges_s[1:])]
        return sum(w * busy for w, busy in zip(widths, self.busy)) / (self.edges_s[-1] - self.edges_s[0])

    @property
    def useful_share(self) -> float:
        """The part of the whole time that was useful work."""
        begin, end = self.edges_s[0], self.edges_s[-1]
        return sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in self.useful) / (end - begin)


def utilisation(sampled: Mapping[str, Sampled], *, title: str = "", provenance: str = "", dark: bool = False,
                width_px: int = 700) -> Picture:
    """A panel for each: the counter as a line, useful work as filled areas below it. Raises `ValueError` when empty."""
    from course_lib.show.picture import Picture

    if not sampled:
        raise ValueError("nothing to draw: give at least one sampled counter")
    look = theme(dark)
    said = "; ".join(f"{name}: the counter says {one.busy_share:.0%}, useful {one.useful_share:.0%}"
                     for name, one in sampled.items())
    height = HEAD + len(sampled) * (PANEL + BETWEEN) + FOOT - BETWEEN
    picture = Picture(width_px, height, look, f"Utilisation over time. {said}.")
    picture.text_px(MARGIN, MARGIN, title, 15, weight="bold")
    longest = max(one.edges_s[-1] for one in sampled.values())
    for k, (name, one) in enumerate(sampled.items()):
        top = HEAD + k * (PANEL + BETWEEN) + 16
        axes = picture.axes_px(LEFT, top, width_px - LEFT - MARGIN, PANEL - 16)
        for start, stop in one.useful:
            axes.axvspan(start * 1e3, stop * 1e3, color=LOOKS["compute"].fill, linewidth=0)
        axes.stairs(one.busy, [edge * 1e3 for edge in one.edges_s], color=look.ink, linewidth=1.6, baseline=None)
        axes.set_xlim(0, longest * 1e3)
        axes.set_ylim(0, 1.12)
        axes.set_yticks([0, 1], ["0", "100 %"])
        axes.set_facecolor(look.lane)
        axes.tick_params(colors=look.muted, labelsize=8, length=3, width=0.8, labelbottom=k == len(sampled) - 1)
        for side in axes.spines.values():
            side.set_visible(False)
        picture.text_px(LEFT, top - 15, f"{name}: counter {one.busy_share:.0%}, useful {one.useful_share:.0%}", 11)
    axes.set_xlabel("milliseconds", fontsize=8, color=look.muted, labelpad=2)
    picture.text_px(MARGIN, height - MARGIN - 10, f"line: the counter  ·  blue: useful work  ·  {provenance}", 10,
                    color=look.muted, label="provenance")
    return picture
