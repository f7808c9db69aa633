"""What stands around the lanes of a figure: the header strip, the legend and the provenance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.show.scene import Scene
from course_lib.show.style import LOOKS
from course_lib.show.words import Stat

if TYPE_CHECKING:
    from course_lib.show.picture import Picture

MARGIN = 14


def header(picture: Picture, title: str | None, strip: list[Stat]) -> None:
    """The numbers first: large what was measured, small below it what was predicted."""
    top = MARGIN
    if title:
        picture.text_px(MARGIN, top, title, 15, weight="bold")
        top += 24
    column = (picture.pixels[0] - 2 * MARGIN) / 4
    for i, stat in enumerate(strip):
        left = MARGIN + i * column
        picture.text_px(left, top, stat.label, 11, color=picture.theme.muted)
        picture.text_px(left, top + 13, stat.value, 18, weight="bold")
        if stat.predicted:
            picture.text_px(left, top + 37, f"predicted {stat.predicted}", 11, color=picture.theme.muted)


def legend(picture: Picture, measured: Scene, outline: Scene | None, top: float) -> None:
    """Only what is really drawn."""
    from matplotlib.patches import Patch

    look, drawn = picture.theme, measured.looks | (outline.looks if outline else set())
    keys = []
    for name, (fill, _, hatch, label) in LOOKS.items():
        if name not in drawn:
            continue
        if name == "wait":
            keys.append(Patch(facecolor="none", edgecolor=fill, linewidth=1.7, label=label))
        else:
            keys.append(Patch(facecolor=fill, edgecolor=look.paper, hatch=hatch * 2 or None, linewidth=0, label=label))
    across, down = picture.pixels
    picture.legend(handles=keys, loc="upper left", bbox_to_anchor=(MARGIN / across, 1 - top / down), ncols=len(keys),
                   frameon=False, fontsize=7.6, labelcolor=look.ink, borderpad=0, borderaxespad=0, handlelength=1.5,
                   handletextpad=0.5, columnspacing=1.3)


def caption(picture: Picture, measured: Scene, outline: Scene | None, top: float) -> None:
    """How the times were obtained: under every picture."""
    said = measured.provenance if measured.step is None else f"{measured.provenance}, step {measured.step}"
    if outline:
        said += f"  ·  outline: {outline.provenance}"
    picture.text_px(MARGIN, top, said, 10, color=picture.theme.muted, label="provenance")
