"""Numbers as people read them: the header strip, bytes and times."""

from __future__ import annotations

from typing import NamedTuple

from course_lib.show.scene import Scene


class Stat(NamedTuple):
    """One number of the header strip, measured, and the same number predicted ("" when there is none)."""

    label: str
    value: str
    predicted: str = ""


def ms(ns: float) -> str:
    """Nanoseconds in milliseconds with three or four significant digits."""
    value = ns / 1e6
    return f"{value:.{3 if abs(value) < 1 else 2 if abs(value) < 10 else 1}f} ms"


def percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.0f} %"


def exposed(scene: Scene) -> str:
    """Exposed time, or which of the other two answers it is."""
    if scene.exposed_ns is None:
        return "nothing sent" if scene.silent else "unknown"
    return ms(scene.exposed_ns)


def size(count: int) -> str:
    """Bytes in KiB or MB of 2**20 bytes, as `bucket_cap_mb` counts them."""
    if count < 0:
        return "unknown size"
    return f"{count / 2**20:.2f} MB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def stats(measured: Scene, predicted: Scene | None = None, fair: float | None = None) -> list[Stat]:
    """The header strip: step time, exposed milliseconds, communication share and, if known, F."""
    def said(value: str) -> str:
        return value if predicted else ""
    other = predicted or measured
    strip = [
        Stat("step", ms(measured.step_ns), said(ms(other.step_ns))),
        Stat("exposed", exposed(measured), said(exposed(other))),
        Stat("communication", percent(measured.share), said(percent(other.share))),
    ]
    if fair is not None:
        strip.append(Stat("fair score F", f"{fair:.2f}"))
    return strip


def sentence(measured: Scene, predicted: Scene | None = None, fair: float | None = None) -> str:
    """The picture as one line of text, for screen readers and hosts without images."""
    def one(s: Stat) -> str:
        return f"{s.label} {s.value}" + (f" (predicted {s.predicted})" if s.predicted else "")
    ranks = len({row.rank for row in measured.rows})
    return (f"Timeline of {ranks} rank{'' if ranks == 1 else 's'}: "
            + ", ".join(map(one, stats(measured, predicted, fair))) + f". Provenance: {measured.provenance}.")
