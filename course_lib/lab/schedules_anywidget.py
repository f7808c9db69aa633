"""The widget of `explore_schedules`."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING

import anywidget
import traitlets

from course_lib.lab.schedules_widget import ESM

if TYPE_CHECKING:
    from course_lib.show.picture import Picture


class SchedulesWidget(anywidget.AnyWidget):
    """`data` is what `predicted` gives, `at` where the sliders are: they live in the browser, and where a kernel runs
    `at` follows them. `draw(**at)` is the static picture."""

    _esm = ESM

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
