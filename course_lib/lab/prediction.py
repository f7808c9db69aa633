"""Predicting before measuring: a question, a field, and later the two numbers side by side.

`predict()` never waits for an answer: a notebook that papermill runs goes on without one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html import escape

from course_lib.lab import store
from course_lib.lab.errors import LabError
from course_lib.lab.present import in_notebook, note, show

NAME = "predictions"
KEY = re.compile(r"\d{1,2}\.[a-z0-9_]+")

Answer = float | str
_asked: dict[str, dict] = {}


def predict(
    key: str,
    question: str,
    *,
    unit: str | None = None,
    choices: Sequence[str] | None = None,
    answer: Answer | None = None,
) -> None:
    """Ask `question` and keep the answer under `key` ("4.best_bucket": the lab's number, then a name).

    Give either the `unit` of a number ("" for a bare one) or the `choices`. A notebook shows a field with
    a Save button, filled with what was saved before; `answer=` saves without a field. Raises `LabError`
    for a key without its lab, for both or neither of unit and choices, and for an answer that is no number
    or none of the choices.
    """
    if not KEY.fullmatch(key):
        raise LabError(f'predict: the key {key!r} should be the lab\'s number and a name, as in "4.best_bucket"')
    if (unit is None) == (choices is None):
        raise LabError(f"predict {key}: give unit= for a number, or choices= for a choice, and not both")
    asked = {"question": question, "unit": unit or "", "choices": list(choices) if choices else None}
    _asked[key] = asked
    if answer is not None:
        _save(key, asked, answer)
    if in_notebook():
        _show_field(key, asked)
    else:
        note(_as_text(key, asked))


def predictions() -> dict[str, Answer]:
    """All saved answers by key, of every lab in this folder."""
    return {key: record["answer"] for key, record in store.read(NAME).items() if "answer" in record}


def compare(key: str, answer: Answer, unit: str | None = None, how: str = "measured") -> None:
    """Show what was predicted under `key` beside the answer, and `how` that was come by ("measured", "computed").
    `unit` defaults to the question's.

    Raises `LabError` when nothing was ever asked under `key`.
    """
    record = store.read(NAME).get(key) or _asked.get(key)
    if record is None:
        raise LabError(f"compare: nothing was asked under {key!r}. Asked so far: {', '.join(_asked) or 'nothing'}.")
    unit = record.get("unit", "") if unit is None else unit
    predicted = record.get("answer")
    if predicted is not None:
        with store.update(NAME) as records:
            records[key] |= {"found": answer, "how": how}
    rows = [("you predicted", "nothing" if predicted is None else with_unit(predicted, unit)),
            (how, with_unit(answer, unit))]  # fmt: skip
    if said := _ratio(predicted, answer, how):
        rows.append(("your prediction is", said))
    text = "\n".join([record["question"], *(f"  {name}: {value}" for name, value in rows)])
    cell = "text-align:left;background:transparent;color:inherit;padding:.1em .8em .1em 0"
    body = "".join(
        f'<tr><th scope="row" style="{cell};font-weight:normal">{name}</th><td style="{cell}">{escape(value)}</td></tr>'
        for name, value in rows
    )
    question = escape(record["question"])  # above the table: a caption would be as narrow as the two numbers
    show(f'<div style="color:inherit">{question}</div><table aria-label="{question}">{body}</table>', text)


def _save(key: str, asked: dict, answer: Answer) -> None:
    answer = _checked(key, asked, answer)
    with store.update(NAME) as records:
        records[key] = asked | {"answer": answer}


def _checked(key: str, asked: dict, answer: Answer) -> Answer:
    """The answer as it is kept. Numbers may be typed with their unit."""
    if asked["choices"] is not None:
        if answer in asked["choices"]:
            return answer
        raise LabError(f"predict {key}: {answer!r} is none of the choices: {', '.join(asked['choices'])}.")
    try:
        text = str(answer).strip().removesuffix(asked["unit"])
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        of = f" of {asked['unit']}" if asked["unit"] else ""
        raise LabError(f"predict {key}: {answer!r} is not a number{of}.")
    return number


def _show_field(key: str, asked: dict) -> None:
    """The widget, with text beside it for whoever opens the stored notebook without a kernel."""
    try:
        box = _field(key, asked)
        bundle = dict(box._repr_mimebundle_())
    except ImportError:
        note(_as_text(key, asked))
        return
    from IPython.display import display

    text = _as_text(key, asked)
    html = "".join(f"<p>{escape(line)}</p>" for line in text.splitlines())
    display(bundle | {"text/plain": text, "text/html": html}, raw=True)


def _field(key: str, asked: dict):
    import ipywidgets as widgets

    saved = predictions().get(key)
    question = widgets.HTML(f"<p>{escape(asked['question'])}</p>")
    if asked["choices"] is None:
        shown = "" if saved is None else _number(saved)
        field = widgets.Text(value=shown, placeholder="a number", description="prediction", layout={"width": "16em"})
        row = [field, widgets.Label(asked["unit"])]
    else:
        known = saved if saved in asked["choices"] else None
        field = widgets.RadioButtons(options=asked["choices"], value=known, description="prediction",
                                     layout={"width": "max-content"})
        row = [field]
    said = widgets.HTML(_saved_sentence(saved, asked))
    said.add_class("course-prediction-state")
    button = widgets.Button(description="Save", tooltip="Keep this prediction")
    button.on_click(_saver(key, asked, field, said))
    return widgets.VBox([question, widgets.HBox([*row, button]), said])


def _saver(key: str, asked: dict, field, said) -> Callable[[object], None]:
    """What the Save button does. A bad number is told beside it, not raised into the kernel's log."""

    def save(_: object) -> None:
        try:
            if field.value in (None, ""):
                raise LabError("Answer first, then save.")
            _save(key, asked, field.value)
            said.value = _saved_sentence(predictions()[key], asked)
        except LabError as error:
            said.value = f"<p>{escape(str(error))}</p>"

    return save


def _saved_sentence(saved: Answer | None, asked: dict) -> str:
    return "" if saved is None else f"<p>Saved: {escape(with_unit(saved, asked['unit']))}</p>"


def _as_text(key: str, asked: dict) -> str:
    saved = predictions().get(key)
    options = f" ({' / '.join(asked['choices'])})" if asked["choices"] else ""
    state = "no prediction yet" if saved is None else f"your prediction: {with_unit(saved, asked['unit'])}"
    return f"{asked['question']}{options}\n{state}"


def _ratio(predicted: Answer | None, answer: Answer, how: str) -> str:
    """How far the prediction was off, in words; empty where there is nothing to divide."""
    if predicted is None:
        return ""
    if isinstance(predicted, str) or isinstance(answer, str):
        return "the same" if str(predicted) == str(answer) else "another"
    if predicted <= 0 or answer <= 0:
        return ""
    return f"{_number(predicted / answer)} times what was {how}"


def with_unit(value: Answer, unit: str) -> str:
    return f"{_number(value)} {unit}".strip()


def _number(value: Answer) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
