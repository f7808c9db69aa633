"""What tuning found: predicted and measured side by side, the layout to take, and whether it is worth taking."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from course_lib.link_cost import LinkCost
from course_lib.simulate.buckets import GradientProfile, Prediction, ddp_arguments, step_floor, step_serial
from course_lib.spread import half_iqr
from course_lib.tune.calibrate import VERDICT_RANGE
from course_lib.tune.sweep import Measured

DEFAULT, PLAN, BASELINES = "ddp default", "plan", ("compute", "comm", "serial")
BUSY = 0.1
"""Times whose spread is more than this share of their median say more of the machine than of the layouts."""
WORTH = 0.01
"""Less than this share of a step is no reason to set anything."""


def gain(slow: Measured, fast: Measured) -> tuple[float, float]:
    """Median and half the distance between the quartiles of the differences, round by round of one alternation, as
    shares of `slow`'s median. What the machine did to a whole round cancels."""
    shares = [(a - b) / slow.median_s for a, b in zip(slow.seconds, fast.seconds)]
    return statistics.median(shares), half_iqr(shares)


def beats(fast: Measured, slow: Measured) -> bool:
    """Is the difference larger than its own spread, and large enough to act on?"""
    share, spread = gain(slow, fast)
    return share > max(spread, WORTH)


@dataclass(frozen=True)
class Choice:
    """The outcome of `choose`.

    `predicted` has an entry for every cap (`"4 MB"`), `plan` and `ddp default`, made from `profile` and `link` before
    any of them ran. `measured` has the baselines `compute`, `comm` (one flat all-reduce) and `serial`, and the
    candidates, all of them stock DDP. `best` names the recommended one of these, `ddp_arguments` is what to pass to
    `DistributedDataParallel` for it (nothing for the default), `verdict` says in words how much it is worth.
    """

    profile: GradientProfile
    link: LinkCost
    predicted: Mapping[str, Prediction]
    measured: Mapping[str, Measured]
    best: str = field(init=False)
    verdict: str = field(init=False)

    def __post_init__(self) -> None:
        best, verdict = _judge(self)
        object.__setattr__(self, "best", best)
        object.__setattr__(self, "verdict", verdict + _doubt(self))

    @property
    def Tc(self) -> float:
        """All compute of one update, seconds."""
        return self.measured["compute"].median_s

    @property
    def Tm(self) -> float:
        """One flat all-reduce of the gradient, seconds."""
        return self.measured["comm"].median_s

    @property
    def r(self) -> float:
        return self.Tm / self.Tc

    @property
    def floor_s(self) -> float:
        """T_floor: no plan of any shape is faster than this under the profile and the fitted wire, seconds."""
        return step_floor(self.profile, self.link)

    @property
    def candidates(self) -> list[str]:
        """The layouts that were measured, the simplest to set first."""
        names = (n for n in self.measured if n not in BASELINES)
        return sorted(names, key=lambda n: (n != DEFAULT, n == PLAN, len(self.predicted[n].plan)))

    @property
    def ddp_arguments(self) -> dict[str, Any]:
        return _arguments(self, self.best)

    @property
    def settled(self) -> bool:
        """Whether r lies where overlap can be judged; outside, nothing is recommended."""
        return VERDICT_RANGE[0] <= self.r <= VERDICT_RANGE[1]

    def predicted_s(self, name: str) -> float:
        """The predicted step of a layout or a baseline, seconds."""
        if name in BASELINES:
            whole = self.link.cost(self.profile.total_bytes)
            return {"compute": self.profile.Tc, "comm": whole, "serial": step_serial(self.profile, self.link)}[name]
        return self.predicted[name].step_s

    def table(self) -> str:
        """Predicted and measured step in ms, one line a layout; `–` where nothing was measured. The last line is
        the least that any layout could take."""
        rows = [("", "buckets", "predicted ms", "measured ms", "spread", "exposed ms")]
        for name in (*BASELINES, *self.predicted):
            count = str(len(self.predicted[name].plan)) if name in self.predicted else ""
            rows.append((name, count, f"{self.predicted_s(name) * 1e3:.1f}", *self._cells(name)))
        rows.append(("T_floor", "", f"{self.floor_s * 1e3:.1f}", "", "", ""))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [_line(row, widths) for row in rows]
        chosen = 1 + len(BASELINES) + list(self.predicted).index(self.best)
        if self.settled:
            lines[chosen] += "  <- take this"
        return "\n".join(lines)

    def _cells(self, name: str) -> tuple[str, str, str]:
        if name not in self.measured:
            return "–", "", ""
        one = self.measured[name]
        exposed = f"{one.exposed_s * 1e3:.1f}" if name not in ("compute", "comm") else ""
        return f"{one.median_s * 1e3:.1f}", f"± {one.spread_s * 1e3:.1f}", exposed


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
    return "  ".join((name, *numbers)).rstrip()


def cap_mb(name: str) -> float:
    """The cap that a layout is named after: 4.0 for `"4 MB"`."""
    return float(name.removesuffix(" MB"))


def _arguments(choice: Choice, name: str) -> dict[str, Any]:
    if name == DEFAULT:
        return {}
    if name == PLAN:
        return ddp_arguments(choice.predicted[PLAN].plan)
    return {"bucket_cap_mb": cap_mb(name)}


def _judge(choice: Choice) -> tuple[str, str]:
    low, high = VERDICT_RANGE
    r, measured = choice.r, choice.measured
    if r < low:
        return DEFAULT, (f"Nothing to gain here: r = {r:.2g}, all communication takes {r:.0%} of the compute, and "
                         "hiding all of it would hardly be seen. Keep DDP's default.")
    if r > high:
        N = choice.profile.N
        return DEFAULT, (f"No recommendation: r = {r:.2g}, communication takes {r:.1f} times the compute, and most of "
                         "it can hide behind nothing. Send fewer bytes, or accumulate more micro-steps an update: "
                         f"{math.ceil(N * r)} instead of {N} would bring r to about 1.")
    names = choice.candidates
    fastest = min(names, key=lambda n: measured[n].median_s)
    best = next(n for n in names if n == fastest or not beats(measured[fastest], measured[n]))
    gains = any(beats(measured[n], measured["serial"]) for n in names)
    if not gains and not beats(measured[best], measured[DEFAULT]):
        return DEFAULT, ("Nothing to gain here: no layout is clearly faster than one all-reduce after backward "
                         f"({_ms(measured['serial'])}). Keep DDP's default ({_ms(measured[DEFAULT])}).")
    if best != fastest:
        share, spread = gain(measured[best], measured[fastest])
        tie = (f"A tie: {fastest} is ahead of {best} by {share:.1%} ± {spread:.1%} of a step "
               f"({_ms(measured[fastest])} against {_ms(measured[best])}), which is not enough to tell or to matter. ")
        return best, tie + f"Take the simpler: {best}."
    if best == DEFAULT:
        return best, f"DDP's default is as good as anything that was measured ({_ms(measured[best])}): leave it."
    share, spread = gain(measured[DEFAULT], measured[best])
    return best, (f"Take {_described(choice, best)}: {_ms(measured[best])} against {_ms(measured[DEFAULT])} with DDP's "
                  f"default, {share:.1%} ± {spread:.1%} of a step saved.")


def _doubt(choice: Choice) -> str:
    worst = max(m.spread_s / m.median_s for m in choice.measured.values())
    return "" if worst <= BUSY else (f" Times of one layout varied by ± {worst:.0%}: the machine was busy, so measure "
                                     "again when it is quiet, or with more repeats.")


def _described(choice: Choice, name: str) -> str:
    return f"the planned buckets {choice.predicted[name].plan}" if name == PLAN else f"buckets of {name}"


def _ms(one: Measured) -> str:
    return f"{one.median_s * 1e3:.1f} ms"


