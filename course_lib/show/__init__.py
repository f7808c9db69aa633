"""Static figures and the timeline widget, in one picture language (`style`).

Nothing heavy is imported before something is drawn: no torch ever, matplotlib and anywidget on first use.
"""

from __future__ import annotations

from course_lib.show.curve import Point, curve
from course_lib.show.figure import figure

__all__ = ["Point", "curve", "figure"]
