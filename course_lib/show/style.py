"""The picture language, in one place: matplotlib, the widget and the HTML report all read it from here.

Colours are Okabe–Ito (told apart with every common colour blindness; Okabe & Ito, "Color Universal
Design", 2008). Colour never carries a meaning alone: exposed communication is hatched too, waiting is
an outline, a prediction has no fill.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple


class Look(NamedTuple):
    """How one kind of bar is drawn: its fill, the ink that is readable on it, its hatch, its legend."""

    fill: str
    ink: str
    hatch: str
    words: str


LOOKS: dict[str, Look] = {
    "compute": Look("#0072B2", "#FFFFFF", "", "compute"),
    "hidden": Look("#009E73", "#0B0B0B", "", "hidden communication"),
    "exposed": Look("#D55E00", "#0B0B0B", "////", "exposed communication"),
    "wait": Look("#F0E442", "#0B0B0B", "", "waiting, late rank"),
    "copy": Look("#56B4E9", "#0B0B0B", "", "copy"),
    "memset": Look("#999999", "#0B0B0B", "", "memset"),
}

BEST = "#E69F00"
"""The best plan, wherever it is marked."""


@dataclass(frozen=True)
class Theme:
    """Colours of everything that is not a bar. `lane` is the empty track: idle time shows as this."""

    name: str
    paper: str
    ink: str
    muted: str
    lane: str
    grid: str


LIGHT = Theme("light", paper="#FFFFFF", ink="#1B1B1B", muted="#5A5F66", lane="#F0F2F4", grid="#D5D9DE")
DARK = Theme("dark", paper="#111418", ink="#ECEEF0", muted="#A3ABB4", lane="#1E2329", grid="#3A424B")


@dataclass(frozen=True)
class Lanes:
    """Heights in CSS pixels (1/100 inch in a figure) of what is stacked in a timeline picture."""

    compute: int = 22
    wire: int = 22
    predicted: int = 16
    between: int = 3
    ranks: int = 12


LANES = Lanes()
THEMES = {"light": LIGHT, "dark": DARK}


def theme(dark: bool) -> Theme:
    return DARK if dark else LIGHT


def as_dict() -> dict:
    """The same language for the widget, as plain JSON types."""
    return {
        "looks": {name: look._asdict() for name, look in LOOKS.items()},
        "themes": {name: asdict(t) for name, t in THEMES.items()},
        "lanes": asdict(LANES),
        "best": BEST,
    }
