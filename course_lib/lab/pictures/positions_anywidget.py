"""Widgets whose every position was computed beforehand, and which the browser draws alone."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING

import anywidget
import traitlets

from course_lib.lab.pictures import pipeline_widget, schedules_widget

if TYPE_CHECKING:
    from course_lib.show.picture import Picture


class PositionsWidget(anywidget.AnyWidget):
    """`data` is what the browser draws from, `at` where the controls are: they live in the browser, and where a kernel
    runs `at` follows them. `draw(**at)` is the static picture. A subclass names the script."""

    data = traitlets.Dict().tag(sync=True)
    at = traitlets.Dict().tag(sync=True)

    def __init__(self, data: dict, at: dict, draw: Callable[..., Picture]) -> None:
        self._draw = draw
        super().__init__(data=data, at=at)

    def picture(self) -> Picture:
        """What is shown now, for a host without widgets."""
        return self._draw(**self.at)

    def _repr_mimebundle_(self, **kwargs):
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        twin = self.picture()
        width, height = twin.pixels
        data |= {"image/png": base64.b64encode(twin.png()).decode(), "text/plain": twin.words}
        return data, metadata | {"image/png": {"width": width, "height": height}}


class PipelineWidget(PositionsWidget):
    """Of `explore_pipelines`; `data` is what `positions` gives."""

    _esm = pipeline_widget.ESM


class SchedulesWidget(PositionsWidget):
    """Of `explore_schedules`; `data` is what `predicted` gives."""

    _esm = schedules_widget.ESM
