"""A matplotlib figure that shows itself in a notebook without pyplot, with a text line beside the image."""

from __future__ import annotations

import base64
import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from course_lib.show.style import Theme

PIXELS_PER_INCH = 100


class Picture(Figure):
    """A `Figure` of a given size in CSS pixels. Nothing global is touched: no pyplot, no rcParams.

    `words` says in one sentence what is drawn; it is the text alternative of the image.
    """

    def __init__(self, width_px: int, height_px: int, theme: Theme, words: str = "") -> None:
        super().__init__(figsize=(width_px / PIXELS_PER_INCH, height_px / PIXELS_PER_INCH), dpi=PIXELS_PER_INCH,
                         facecolor=theme.paper, edgecolor=theme.paper)
        FigureCanvasAgg(self)
        self.theme, self.words = theme, words

    @property
    def pixels(self) -> tuple[int, int]:
        """Width and height in CSS pixels."""
        width, height = self.get_size_inches() * PIXELS_PER_INCH
        return round(width), round(height)

    def axes_px(self, left: float, top: float, width: float, height: float, **options):
        """Axes placed in CSS pixels from the top left corner."""
        across, down = self.pixels
        return self.add_axes((left / across, 1 - (top + height) / down, width / across, height / down), **options)

    def text_px(self, left: float, top: float, words: str, px: float, **options):
        """Text of a height in CSS pixels, its upper left corner `left`, `top` pixels from the figure's."""
        across, down = self.pixels
        options = {"ha": "left", "va": "top", "color": self.theme.ink} | options
        return self.text(left / across, 1 - top / down, words, fontsize=points(px), **options)

    def png(self, scale: int = 2) -> bytes:
        """The image, `scale` device pixels a CSS pixel."""
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=PIXELS_PER_INCH * scale, facecolor=self.theme.paper,
                     metadata={"Description": self.words, "Software": None})
        return out.getvalue()

    def _repr_mimebundle_(self, include=None, exclude=None):
        width, height = self.pixels
        data = {"image/png": base64.b64encode(self.png()).decode(), "text/plain": self.words}
        return data, {"image/png": {"width": width, "height": height}}


def points(px: float) -> float:
    """Font points of a size in CSS pixels."""
    return px * 72 / PIXELS_PER_INCH
