"""What the widget is sent, once: a profile, a link, the stops of the sliders and what was measured.

From it every position of the sliders is drawn in the browser. Plain JSON types only, so the same
payload goes to a notebook, into a stand-alone HTML page and into a notebook's saved widget state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from course_lib.show.curve import Point
from course_lib.show.scene import Bar, Piece, Row, Scene, coarse, scene
from course_lib.show.style import LOOKS, as_dict
from course_lib.simulate.buckets import (
    MB,
    BucketPlan,
    GradientProfile,
    LinkCost,
    Prediction,
    best_plan,
    capped_plan,
    predict,
)
from course_lib.timeline import Timeline

BUCKET_MB = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 25, 32, 50, 64, 100, 128, 256, 512, 1024)
GBIT = (*(k * 10.0**e for e in range(-2, 3) for k in (1, 1.5, 2, 3, 5, 7)), 1000.0)
LATENCY_MS = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 10, 15, 20, 30, 50)
MICRO_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PLANS = ("equal", "first", "best")

PIXELS = 3000
"""Bars shorter than a step divided by this are joined: even zoomed in, a notebook need not carry each kernel."""


@dataclass(frozen=True)
class Setting:
    """Where the sliders are. `bucket_mb` in MB of 2**20 bytes; `gbit` of the wire, of which a ring of n ranks
    needs 2(n−1)/n bytes for each byte of gradient; `latency_ms` of one collective; `plan` one of
    `equal` buckets, `first` (a 1 MB first bucket, as DDP's default has) and `best` (the best plan)."""

    bucket_mb: float
    gbit: float
    latency_ms: float
    micro_steps: int
    plan: str = "equal"


def wire_factor(ranks: int) -> float:
    """Bytes on the wire for each byte of gradient in a ring all-reduce: 2(n−1)/n."""
    if ranks < 2:
        raise ValueError(f"ranks is {ranks}; communication needs at least 2")
    return 2 * (ranks - 1) / ranks


def starting_at(profile: GradientProfile, link: LinkCost, ranks: int, bucket_mb: float) -> Setting:
    """The sliders at the link and the N that the profile was measured with."""
    gbit = wire_factor(ranks) * 8e-9 / max(link.beta_s_per_byte, 1e-15)
    return Setting(float(bucket_mb), gbit, link.a_s * 1e3, profile.N)


def predicted(profile: GradientProfile, ranks: int, at: Setting) -> Prediction:
    """The Python twin of what the browser draws at a setting."""
    link, profile = link_of(ranks, at), replace(profile, N=at.micro_steps)
    return predict(profile, link, _plan(profile, link, at))


def link_of(ranks: int, at: Setting) -> LinkCost:
    return LinkCost(at.latency_ms / 1e3, wire_factor(ranks) * 8e-9 / at.gbit)


def _plan(profile: GradientProfile, link: LinkCost, at: Setting) -> BucketPlan:
    if at.plan == "best":
        return best_plan(profile, link)
    return capped_plan(profile, [MB, at.bucket_mb * MB] if at.plan == "first" else [at.bucket_mb * MB])


def stops(profile: GradientProfile, start: Setting) -> dict[str, list[float]]:
    """The positions of every slider; where the sliders start is always one of them."""
    total = profile.total_bytes / MB
    sizes = [mb for mb in BUCKET_MB if total / 200 <= mb < total] + [round(total, 2)]
    return {
        "bucket_mb": _with(sizes, start.bucket_mb),
        "gbit": _with(GBIT, start.gbit),
        "latency_ms": _with(LATENCY_MS, start.latency_ms),
        "micro_steps": [int(n) for n in _with(MICRO_STEPS, start.micro_steps)],
    }


def _with(values: Sequence[float], one: float) -> list[float]:
    """Sorted values among which is `one`, in place of those so close that they would read the same."""
    return sorted([v for v in values if not math.isclose(v, one, rel_tol=0.02)] + [one])


def payload(profile: GradientProfile | None, start: Setting | None, measured: Mapping[float | None, Timeline],
            points: Iterable[Point], *, ranks: int, limit_ns: float | None, fair: Mapping[float | None, float],
            step: int | None, title: str | None) -> dict:
    """Everything the widget draws from. `measured` and `fair` are keyed by bucket size in MB, or by None."""
    drawn = {mb: scene(timeline, step) for mb, timeline in measured.items()}
    looks = {look for one in drawn.values() for look in one.looks}
    data = {
        "style": as_dict(), "title": title or "", "limit_ns": limit_ns, "profile": None, "points": [],
        "measured": [_measured(mb, one, fair.get(mb)) for mb, one in drawn.items()],
        "looks": [name for name in LOOKS if name in looks or (profile and name in ("compute", "hidden", "exposed"))],
    }
    if profile is not None and start is not None:
        data |= {
            "profile": {"bytes": list(profile.bytes), "ready": list(profile.ready_s), "Tf": profile.Tf,
                        "Tb": profile.Tb, "To": profile.To},
            "wire_factor": wire_factor(ranks), "start": asdict(start), "stops": stops(profile, start),
            "points": [list(p) for p in points],
        }
    return data


def _measured(bucket_mb: float | None, one: Scene, fair: float | None) -> dict:
    pixel = max(1, one.step_ns // PIXELS)
    return {"bucket_mb": bucket_mb, "provenance": one.provenance, "step": one.step, "step_ns": one.step_ns,
            "exposed_ns": one.exposed_ns, "share": one.share, "silent": one.silent, "fair": fair,
            "rows": [row_dict(row, pixel) for row in one.rows]}


def row_dict(row: Row, pixel: int = 0) -> dict:
    """A row as the ESM draws it (its `rows` makes the same of a prediction)."""
    bars = [bar._asdict() | {"pieces": [list(p) for p in _pieces(bar, pixel)]} for bar in few(row.bars, pixel)]
    return {"rank": row.rank, "role": row.role, "tracks": row.tracks, "stop": row.stop, "backward": row.backward,
            "bars": bars}


def _pieces(bar: Bar, pixel: int) -> list[Piece]:
    return coarse((p for p in bar.pieces if p.look != "wait"), pixel) + [p for p in bar.pieces if p.look == "wait"]


def few(bars: Iterable[Bar], pixel: int) -> list[Bar]:
    """Join neighbours too small to be told apart, if they look the same."""
    out: list[Bar] = []
    joined = 1
    for bar in bars:
        last = out[-1] if out else None
        alike = last and (last.track, [p.look for p in last.pieces]) == (bar.track, [p.look for p in bar.pieces][:1])
        if alike and min(bar.stop - bar.start, last.stop - last.start) < pixel and bar.start - last.stop < pixel / 2:
            joined += 1
            stop = max(last.stop, bar.stop)
            piece = Piece(bar.pieces[0].look, last.start, stop)
            out[-1] = last._replace(name=f"{joined} spans", stop=stop, bytes=-1, bucket=-1, pieces=(piece,))
        else:
            out.append(bar)
            joined = 1
    return out
