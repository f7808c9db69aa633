"""A map over link speed and N: where sending every micro-step ties with sending once, and by how much it loses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from course_lib.lab.errors import LabError

if TYPE_CHECKING:
    from course_lib.show.picture import Picture

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BELOW = 700, 330, 64, 44, 96, 74
TIE = 0.01
"""A loss under this part of the step is called a tie."""


def phase(loss: Callable[[float, int], float], speeds: Sequence[float], Ns: Sequence[int],
          measured: Mapping[tuple[float, int], float], *, mark: float, provenance: str = "",
          dark: bool = False) -> Picture:
    """`loss(gbit, N)` over all `speeds` (Gbit/s, rising) and `Ns`: how much longer the step is when every micro-step
    sends, as a part of the step that sends once. `measured` has the same number for runs that were made, by
    (gbit, N). `mark` is the speed at which r = 1. Raises `LabError` without a speed, an N or a measured point."""
    from matplotlib.colors import LinearSegmentedColormap

    from course_lib.show.picture import Picture
    from course_lib.show.style import LOOKS, theme

    if not (len(speeds) and len(Ns) and measured):
        raise LabError("phase: give speeds, Ns and at least one measured point {(gbit, N): loss}")
    look = theme(dark)
    grid = [[max(0.0, loss(speed, N)) for speed in speeds] for N in Ns]
    most = max(*measured.values(), *(value for row in grid for value in row), TIE)
    said = "; ".join(f"{gbit:g} Gbit/s, N = {N}: {_percent(value)}" for (gbit, N), value in sorted(measured.items()))
    picture = Picture(WIDTH, HEIGHT, look, f"Longer step when every micro-step sends. Measured: {said}.")
    axes = picture.axes_px(LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BELOW)
    colours = LinearSegmentedColormap.from_list("loss", [look.paper, LOOKS["exposed"].fill])
    columns = range(len(speeds))
    filled = axes.pcolormesh(columns, range(len(Ns)), grid, cmap=colours, vmin=0, vmax=most, shading="nearest")
    if any(value <= TIE for row in grid for value in row) and any(value > TIE for row in grid for value in row):
        axes.contour(columns, range(len(Ns)), grid, levels=[TIE], colors=[look.ink], linewidths=1.3)

    def place(gbit: float) -> float:
        """Where a speed stands between the columns."""
        below = max(j for j in columns if speeds[j] <= gbit * (1 + 1e-9))
        above = min(below + 1, len(speeds) - 1)
        return below if above == below else below + (gbit - speeds[below]) / (speeds[above] - speeds[below])

    axes.axvline(place(mark), color=look.muted, linewidth=1, linestyle="--")
    axes.text(place(mark), len(Ns) - 0.42, " r = 1", fontsize=8, color=look.muted, va="bottom")
    for (gbit, N), value in measured.items():
        x, y = place(gbit), list(Ns).index(N)
        axes.plot([x], [y], "o", color=LOOKS["compute"].fill, markeredgecolor="#FFFFFF", markersize=8)
        axes.annotate(_percent(value), (x, y), (8, -3), textcoords="offset points", fontsize=8, color=look.ink,
                      bbox={"facecolor": look.paper, "edgecolor": "none", "pad": 1, "alpha": 0.85})
    ticks = columns[::max(1, len(speeds) // 4)]
    axes.set_xticks(ticks, [f"{speeds[j]:.2g}" for j in ticks])
    axes.set_yticks(range(len(Ns)), [str(N) for N in Ns])
    axes.set_xlabel("link, Gbit/s", fontsize=8, color=look.muted)
    axes.set_ylabel("micro-steps N", fontsize=8, color=look.muted)
    bar = picture.colorbar(filled, cax=picture.axes_px(WIDTH - RIGHT + 16, TOP, 12, HEIGHT - TOP - BELOW))
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for each in (axes, bar.ax):
        each.tick_params(colors=look.muted, labelsize=8, length=3, width=0.8)
        for spine in each.spines.values():
            spine.set_color(look.grid)
    bar.outline.set_edgecolor(look.grid)
    picture.text_px(14, 12, "How much longer the step is when every micro-step sends", 13, weight="bold")
    picture.text_px(14, HEIGHT - 22, f"colour: predicted, the line is {TIE:.0%}  ·  points: {provenance or 'measured'}",
                    10, color=look.muted)
    return picture


def _percent(value: float) -> str:
    return f"{round(100 * value):+d}%" if round(100 * value) else "0%"
