"""What a lab measures with: work sized for the wire, and the three review figures. Heavy imports wait for the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course_lib.show.picture import Picture
    from course_lib.timeline import Timeline
    from course_lib.tune.calibrate import Load


def calibrate(target_r: float = 0.65, fabric: Any = "auto", **options: Any) -> Load:
    """Work whose communication takes `target_r` times as long as its compute on this fabric; see `tune.calibrate`."""
    from course_lib.tune import calibrate as sized
    return sized(target_r, fabric, **options)


def review(timeline: Timeline, title: str | None = None) -> Picture:
    """Communication share, busy curve and step-time variation of a measured run; see `show.review`."""
    from course_lib import show
    return show.review(timeline, title=title)
