"""`explore(...)`: the best interactive picture that this environment can show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course_lib.simulate.buckets import GradientProfile, LinkCost
    from course_lib.timeline import Timeline


def explore(profile: GradientProfile | None = None, link: LinkCost | None = None,
            measured: Timeline | Mapping[float, Timeline] | None = None, points: Iterable[Sequence[float]] = (), *,
            ranks: int | None = None, bucket_mb: float | None = None, limit_ns: float | None = None,
            fair: float | Mapping[float, float] | None = None, step: int | None = None,
            title: str | None = None) -> Any:
    """A predicted step with sliders above a measured one: `TimelineWidget`, or ipywidgets and an inline
    SVG without anywidget, or a static figure without both.

    `profile` and `link` (from one measured run) give the prediction and the sliders; without them only
    zoom, pan and hover remain. `measured` is a timeline, or one for each of several bucket sizes in MB
    (2**20 bytes), of which the nearest is shown. `points` are measured step times of a sweep,
    (MB, median, low, high) in ms. `ranks` (default: those of `measured`, else 2) turns time per byte into
    Gbit/s on the wire. `bucket_mb` is where that slider starts. `limit_ns` is the physical limit of a
    measured step shown without a prediction, `fair` its score F (or one for each bucket size), `step` the
    step to show (default: the one of median time).

    Raises `ValueError` when there is nothing to show, when only one of profile and link is given, or for
    a bucket size that is not positive.
    """
    from course_lib.show.exploration import Exploration

    options: dict[str, Any] = {"ranks": ranks, "bucket_mb": bucket_mb, "limit_ns": limit_ns, "fair": fair,
                               "step": step, "title": title}
    try:
        from course_lib.show.widget import TimelineWidget
    except ImportError:
        shown = Exploration.of(profile, link, measured, points, **options)
    else:
        return TimelineWidget(profile, link, measured, points, **options)
    try:
        from course_lib.show.fallback import Explorer
    except ImportError:
        return shown.picture(shown.start)
    return Explorer(shown)
