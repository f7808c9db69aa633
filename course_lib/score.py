"""What overlap is worth: step times turned into the fair score F and the attained share A."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Score:
    """A score with what qualifies it. `value` is None when there was `nothing to hide`; that, `calibration` (the
    bound is not one) or nothing is the `label`. `spread` is in units of the score. `impossible`: the step was
    shorter than its compute or its communication alone, and a person decides."""

    name: str
    value: float | None
    spread: float = 0.0
    label: str = ""
    impossible: bool = False

    @property
    def sentence(self) -> str:
        goal = "the physical limit" if self.name == "F" else "the best bucket plan"
        if self.value is None:
            said = f"{self.name}: nothing to hide, {goal} would save under 5 % of the serial step."
        else:
            shown = f"{self.name} = {self.value:.2f}" + (f" ± {self.spread:.2f}" if self.spread else "")
            said = f"{shown}: slower than serial." if self.value < 0 else (
                f"{shown}: {self.value:.0%} of the time that {goal} saves over serial.")
            if self.label == "calibration":
                said = f"{shown}: above 1.03 the bound is wrong, not the run good. Fit a and β again in the same run."
        if self.impossible:
            said += " Impossible: the step is shorter than its compute or its communication alone, so work is missing."
        return said


def _score(name: str, T_serial: float, T: float, limit: float, spread: float) -> Score:
    if not all(0 < t < float("inf") for t in (T_serial, T, limit)) or spread < 0:
        raise ValueError(f"step times {T_serial}, {T}, {limit} (spread {spread}) cannot be scored; "
                         "give positive times of one run, all in one unit")
    gain = T_serial - limit
    if gain < 0.05 * T_serial:
        return Score(name, None, label="nothing to hide")
    return Score(name, (T_serial - T) / gain, spread / gain)


def fair_score(T_serial: float, T: float, Tc: float, Tm: float, *, spread: float = 0.0) -> Score:
    """F = (T_serial − T) / (T_serial − max(Tc, Tm)): 1 is the physical limit, 0 no better than serial.

    All times in one unit, medians of one run in alternation; `spread` is the spread of T in that unit. Shown
    first everywhere, because an overlap ratio alone rewards waiting. Raises `ValueError` on times that
    are not positive."""
    limit = max(Tc, Tm)
    score = _score("F", T_serial, T, limit, spread)
    return replace(score, impossible=limit - spread > T)


def attained(T_serial: float, T: float, T_bound: float, *, spread: float = 0.0) -> Score:
    """A = (T_serial − T) / (T_serial − T_bound), T_bound being the step of the best contiguous bucket plan with
    costs fitted in the same run (`simulate.buckets.step_bound`). Units and errors as `fair_score`."""
    score = _score("A", T_serial, T, T_bound, spread)
    if score.value is not None and score.value > 1.03:
        return replace(score, label="calibration")
    return score
