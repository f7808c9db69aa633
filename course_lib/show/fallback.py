"""The same sliders where anywidget is missing: ipywidgets, and a picture drawn anew in the kernel."""

from __future__ import annotations

import base64
import html
import io

import ipywidgets

from course_lib.show.exploration import Exploration
from course_lib.show.payload import PLANS, Setting, stops

_SLIDERS = {"bucket_mb": ("bucket size", "{:g} MB"), "gbit": ("link speed", "{:.3g} Gbit/s"),
            "latency_ms": ("latency", "{:.3g} ms"), "micro_steps": ("micro-steps N", "{}")}


class Explorer(ipywidgets.VBox):
    """Sliders above an inline SVG. `controls` maps the fields of a `Setting` to their widgets."""

    def __init__(self, exploration: Exploration) -> None:
        self.exploration = exploration
        self.controls: dict[str, ipywidgets.Widget] = {}
        self.picture = ipywidgets.HTML()
        if exploration.start is not None:
            self.controls = _controls(exploration)
            for control in self.controls.values():
                control.observe(self._draw, "value")
        super().__init__([*self.controls.values(), self.picture])
        self._draw()

    def _draw(self, _change: object = None) -> None:
        at = Setting(**{name: c.value for name, c in self.controls.items()}) if self.controls else None
        twin = self.exploration.picture(at)
        out = io.StringIO()
        twin.savefig(out, format="svg", facecolor=twin.theme.paper)
        code = base64.b64encode(out.getvalue().encode()).decode()
        self.picture.value = (f'<img style="max-width: 100%" alt="{html.escape(twin.words, quote=True)}" '
                              f'src="data:image/svg+xml;base64,{code}">')


def _controls(exploration: Exploration) -> dict[str, ipywidgets.Widget]:
    positions, wide = stops(exploration.profile, exploration.start), {"description_width": "8em"}
    controls = {}
    for name, (label, words) in _SLIDERS.items():
        controls[name] = ipywidgets.SelectionSlider(
            options=[(words.format(v), v) for v in positions[name]], value=getattr(exploration.start, name),
            description=label, style=wide, layout={"width": "32em"})
    controls["plan"] = ipywidgets.Dropdown(options=PLANS, description="bucket plan", style=wide)
    return controls
