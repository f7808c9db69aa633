"""Sliders for a picture that is computed: `sliders(draw, N=(4, [1, 2, 4, 8]))`."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.lab.errors import LabError
from course_lib.lab.present import in_notebook

if TYPE_CHECKING:
    from course_lib.show.picture import Picture


def sliders(draw: Callable[..., Picture], labels: Mapping[str, str] | None = None,
            **positions: tuple[Any, Sequence[Any]]) -> Any:
    """Show `draw(name=value, …)` with a slider for each name: `(where it starts, all its positions)`.

    `labels` are what stands beside a slider. The picture is drawn anew in the kernel. Whoever opens the stored
    notebook without a kernel sees it where the sliders start; outside a notebook that picture is returned.
    Raises `LabError` for a start that is none of the positions.
    """
    for name, (start, stops) in positions.items():
        if start not in stops:
            raise LabError(f"sliders: {name} starts at {start!r}, which is none of its positions {list(stops)}")
    picture = draw(**{name: start for name, (start, _) in positions.items()})
    if not in_notebook():
        return picture
    bundle, metadata = picture._repr_mimebundle_()
    try:
        box = _box(draw, picture, labels or {}, positions)
        bundle = dict(box._repr_mimebundle_()) | bundle
    except ImportError:
        pass
    from IPython.display import display

    display(bundle, metadata=metadata, raw=True)
    return None


def _box(draw: Callable[..., Picture], first: Picture, labels: Mapping[str, str],
         positions: Mapping[str, tuple[Any, Sequence[Any]]]) -> Any:
    import ipywidgets

    shown = ipywidgets.HTML(_inline(first))
    controls = {name: ipywidgets.SelectionSlider(
        options=[(f"{stop:g}" if isinstance(stop, int | float) else str(stop), stop) for stop in stops], value=start,
        description=labels.get(name, name), style={"description_width": "12em"}, layout={"width": "36em"})
        for name, (start, stops) in positions.items()}

    def again(_: object) -> None:
        shown.value = _inline(draw(**{name: control.value for name, control in controls.items()}))

    for control in controls.values():
        control.observe(again, "value")
    return ipywidgets.VBox([*controls.values(), shown])


def _inline(picture: Picture) -> str:
    out = io.StringIO()
    picture.savefig(out, format="svg", facecolor=picture.theme.paper)
    code = base64.b64encode(out.getvalue().encode()).decode()
    words = html.escape(picture.words, quote=True)
    return f'<img style="max-width: 100%" alt="{words}" src="data:image/svg+xml;base64,{code}">'
