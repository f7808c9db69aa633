"""`TimelineWidget`: a predicted step above a measured one, with sliders that need no kernel."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import anywidget
import traitlets

from course_lib.show import export
from course_lib.show.exploration import Exploration
from course_lib.show.payload import PLANS, Setting
from course_lib.simulate.buckets import GradientProfile, LinkCost
from course_lib.timeline import Timeline


class TimelineWidget(anywidget.AnyWidget):
    """Lanes per rank with zoom, pan and hover; sliders for bucket size, link speed, latency and N.

    The sliders live in the browser. Where a kernel runs, `bucket_mb`, `gbit`, `latency_ms`,
    `micro_steps` and `plan` (`equal`, `first` or `best`, see `payload.Setting`) follow them when they
    come to rest; they can be observed and set. Arguments and errors are those of `explore`.
    """

    _esm = export.ESM

    data = traitlets.Dict().tag(sync=True)
    bucket_mb = traitlets.Float(1.0).tag(sync=True)
    gbit = traitlets.Float(1.0).tag(sync=True)
    latency_ms = traitlets.Float(0.0).tag(sync=True)
    micro_steps = traitlets.Int(1).tag(sync=True)
    plan = traitlets.Enum(PLANS, "equal").tag(sync=True)

    def __init__(self, profile: GradientProfile | None = None, link: LinkCost | None = None,
                 measured: Timeline | Mapping[float, Timeline] | None = None, points: Iterable[Sequence[float]] = (),
                 **options) -> None:
        self.exploration = Exploration.of(profile, link, measured, points, **options)
        at = self.exploration.start
        super().__init__(data=self.exploration.payload(), **(vars(at) if at else {}))

    @property
    def setting(self) -> Setting | None:
        """Where the sliders are, or None when there are none."""
        if self.exploration.start is None:
            return None
        return Setting(self.bucket_mb, self.gbit, self.latency_ms, self.micro_steps, self.plan)

    def picture(self, dark: bool = False):
        """The matplotlib twin of what is shown now."""
        return self.exploration.picture(self.setting, dark)

    def export_html(self, path: str | Path) -> Path:
        """Write one HTML file that works offline, sliders included. Returns its path."""
        twin = self.picture()
        state = {name: getattr(self, name) for name in ("data", *Setting.__dataclass_fields__)}
        path = Path(path)
        path.write_text(export.page(state, title=self.data["title"] or "Timeline", words=twin.words, png=twin.png()),
                        encoding="utf-8")
        return path

    def _repr_mimebundle_(self, **kwargs):
        """The widget, and beside it what a host without widgets or without a kernel can show."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        twin = self.picture()
        width, height = twin.pixels
        data |= {"image/png": base64.b64encode(twin.png()).decode(), "text/plain": twin.words}
        return data, metadata | {"image/png": {"width": width, "height": height}}
