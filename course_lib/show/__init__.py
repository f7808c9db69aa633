"""Static figures and the timeline widget, in one picture language (`style`).

Nothing heavy is imported before something is drawn: no torch ever, matplotlib and anywidget on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from course_lib.show.curve import Point, curve
from course_lib.show.explore import explore
from course_lib.show.figure import figure
from course_lib.show.review import review

if TYPE_CHECKING:
    from course_lib.show.widget import TimelineWidget

__all__ = ["Point", "TimelineWidget", "curve", "explore", "figure", "review"]


def __getattr__(name: str) -> Any:
    if name == "TimelineWidget":
        from course_lib.show.widget import TimelineWidget
        return TimelineWidget
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
