"""The memory picture: what is drawn, what is said about it, what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from course_lib.show.memory import TINTS, memory, said

SMALL = {"parameters": 3e6, "gradients": 3e6, "optimizer": 6e6, "activations": 36e6}


def bars(picture, label: str) -> list:
    return [c for c in picture.axes[0].collections if c.get_label() == label]


def test_measured_is_filled_and_the_formula_is_an_outline() -> None:
    picture = memory({"b = 8": SMALL}, {"b = 8": SMALL}, title="A GPT", provenance="measured (cpu)")
    for part in TINTS:
        (filled,), (outline,) = bars(picture, part), bars(picture, f"formula {part}")
        assert len(filled.get_facecolor()) and not len(outline.get_facecolor())
        assert filled.get_paths()[0].get_extents().width == pytest.approx(SMALL[part] / 1e6)
        assert outline.get_paths()[0].get_extents().y0 < filled.get_paths()[0].get_extents().y0
    assert "measured (cpu)" in [text.get_text() for text in picture.texts]
    assert picture.words == ("Memory by part: b = 8 measured 48.0 MB, most of it activations with 36.0 MB; "
                             "b = 8 by the formula 48.0 MB, most of it activations with 36.0 MB.")


def test_parts_lie_side_by_side_in_their_order() -> None:
    picture = memory({"one": SMALL})
    edges = [bars(picture, part)[0].get_paths()[0].get_extents() for part in TINTS]
    assert [e.x0 for e in edges] == pytest.approx([0, 3, 6, 12]) and edges[-1].x1 == pytest.approx(48)


def test_the_limit_is_a_line_within_the_picture() -> None:
    picture = memory(formula={"one": SMALL}, limit_bytes=80e6)
    (line,) = [line for line in picture.axes[0].lines if line.get_label() == "limit"]
    assert line.get_xdata()[0] == 80 and picture.axes[0].get_xlim()[1] > 80
    assert "80.0 MB of the device" in [text.get_text() for text in picture.axes[0].texts]


def test_notes_make_room_for_themselves() -> None:
    plain, noted = memory({"one": SMALL}, title="x"), memory({"one": SMALL}, title="x", notes=["D = 8", "N = 32"])
    assert noted.pixels[1] == plain.pixels[1] + 38
    assert {"D = 8", "N = 32"} <= {text.get_text() for text in noted.texts}


def test_it_can_be_dark_and_becomes_a_png() -> None:
    assert memory({"one": SMALL}, dark=True).png(1)[:4] == b"\x89PNG"


@pytest.mark.parametrize(("count", "words"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (3.37e6, "3.4 MB"),
                                              (80e9, "80.0 GB"), (142.4e9, "142 GB"), (2.5e12, "2.5 TB")])  # fmt: skip
def test_sizes_as_people_read_them(count: float, words: str) -> None:
    assert said(count) == words


@pytest.mark.parametrize(("measured", "message"), [
    ({}, "nothing to draw"), ({"one": dict.fromkeys(SMALL, 0)}, "nothing to draw"),
    ({"one": {"weights": 3}}, "unknown part 'weights'"), ({"one": {"parameters": -1, "gradients": 3}}, "below 0"),
])  # fmt: skip
def test_refusals(measured: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory(measured)


def test_no_torch() -> None:
    code = ("import sys; from course_lib.show.memory import memory; memory({'a': {'gradients': 1}}); "
            "print('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
