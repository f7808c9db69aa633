"""What is explored: one model on one wire, and what was measured of it. Widget and fallback both show this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log

from course_lib.show import payload
from course_lib.show.curve import Point, point
from course_lib.show.figure import figure
from course_lib.show.payload import Setting
from course_lib.simulate.buckets import GradientProfile, LinkCost
from course_lib.timeline import Timeline


@dataclass(frozen=True)
class Exploration:
    """Arguments of `explore`, checked. `measured` and `fair` are keyed by bucket size in MB, or by None."""

    profile: GradientProfile | None
    start: Setting | None
    measured: Mapping[float | None, Timeline]
    points: tuple[Point, ...]
    ranks: int
    limit_ns: float | None
    fair: Mapping[float | None, float]
    step: int | None
    title: str | None

    @classmethod
    def of(cls, profile: GradientProfile | None, link: LinkCost | None,
           measured: Timeline | Mapping[float, Timeline] | None, points: Iterable[Sequence[float]], *,
           ranks: int | None = None, bucket_mb: float | None = None, limit_ns: float | None = None,
           fair: float | Mapping[float, float] | None = None, step: int | None = None,
           title: str | None = None) -> Exploration:
        if (profile is None) != (link is None):
            raise ValueError("a prediction needs both a profile and a link; give both or neither")
        if bucket_mb is not None and not bucket_mb > 0:
            raise ValueError(f"bucket_mb is {bucket_mb}; give a size above 0")
        timelines = {None: measured} if isinstance(measured, Timeline) else dict(measured or {})
        if profile is None and not timelines:
            raise ValueError("nothing to show: give a profile with its link, a measured timeline, or both")
        scores = dict(fair) if isinstance(fair, Mapping) else {mb: fair for mb in timelines if fair is not None}
        if ranks is None:
            ranks = max([2, *(len(t.ranks) for t in timelines.values())])
        if bucket_mb is None:
            bucket_mb = min((mb for mb in timelines if mb), default=4.0, key=lambda mb: abs(log(mb / 4)))
        start = None if profile is None else payload.starting_at(profile, link, ranks, bucket_mb)
        return cls(profile, start, timelines, tuple(point(p) for p in points), ranks, limit_ns, scores, step, title)

    def payload(self) -> dict:
        return payload.payload(self.profile, self.start, self.measured, self.points, ranks=self.ranks, step=self.step,
                               limit_ns=self.limit_ns, fair=self.fair, title=self.title)

    def picture(self, at: Setting | None, dark: bool = False):
        """The static twin: `figure` of what the widget shows at a setting."""
        prediction = payload.predicted(self.profile, self.ranks, at) if at is not None else None
        limit = self.limit_ns
        if prediction is not None:
            link = payload.link_of(self.ranks, at)
            compute = at.micro_steps * (self.profile.Tf + self.profile.Tb) + self.profile.To
            limit = 1e9 * max(compute, link.cost(self.profile.total_bytes))
        if not self.measured:
            return figure(prediction.timeline, limit_ns=limit, title=self.title, dark=dark)
        size = self.nearest(at.bucket_mb if at else None)
        return figure(self.measured[size], predicted=prediction and prediction.timeline, step=self.step, limit_ns=limit,
                      title=self.title, dark=dark, fair=self.fair.get(size))

    def nearest(self, bucket_mb: float | None) -> float | None:
        """The measured bucket size nearest to one, in ratio."""
        if bucket_mb is None or None in self.measured:
            return next(iter(self.measured))
        return min(self.measured, key=lambda mb: abs(log(mb / bucket_mb)))
