"""Size the work so that a lesson shows: communication r times as long as compute, on any fabric."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.launch import Fabric, run
from course_lib.launch.measure import measure
from course_lib.link_cost import LinkCost

MB = 2**20
VERDICT_RANGE = (0.2, 2.0)
"""Outside this range of r, overlap is either not worth much or mostly impossible: no timing verdict is given."""
PROFILES = ("equal", "gpt")


@dataclass(frozen=True)
class Load:
    """An emulated model sized for one fabric. `r` = Tm/Tc was asked for and follows from the fitted `link`."""

    profile: str
    layers: int
    gradient_mb: float
    forward_ms: float
    backward_ms: float
    r: float
    link: LinkCost

    def model(self):
        """Build it on a rank: an `nn.Module` that takes and returns a small tensor."""
        from course_lib.train import emulated
        if self.profile == "equal":
            return emulated.equal(self.layers, self.gradient_mb / self.layers, self.forward_ms / self.layers,
                                  self.backward_ms / self.layers)
        plain = emulated.gpt_like()
        return emulated.gpt_like(scale=(self.forward_ms + self.backward_ms) / (plain.forward_ms + plain.backward_ms))


def calibrate(target_r: float = 0.65, fabric: str | Fabric = "auto", ranks: int = 2, profile: str = "equal",
              layers: int = 16, gradient_mb: float = 16.0, micro_steps: int = 1,
              link: LinkCost | None = None) -> Load:
    """Measure the wire (unless `link` is given) and size an emulated model so that Tm/Tc = `target_r`.

    Tm is one flat all-reduce of the gradient, Tc all compute of an update of `micro_steps` micro-steps,
    forward to backward as 1 to 2. `profile="gpt"` has a GPT's sizes, with a large embedding ready last,
    and its own gradient bytes. Raises `ValueError` for what cannot be calibrated.
    """
    if not VERDICT_RANGE[0] <= target_r <= VERDICT_RANGE[1]:
        raise ValueError(f"target_r={target_r}: choose communication between {VERDICT_RANGE[0]} and "
                         f"{VERDICT_RANGE[1]} times the compute; outside, overlap cannot be judged")
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}: choose one of {', '.join(PROFILES)}")
    if ranks == 1:
        raise ValueError("ranks=1: a rank alone sends nothing, so there is nothing to hide; take 2 or more")
    if link is None:
        link = run(measure, ranks=ranks, fabric=fabric)[0]
    if profile == "gpt":
        gradient_mb, layers = _gpt_mb()
    compute_ms = link.cost(gradient_mb * MB) / target_r / micro_steps * 1e3
    return Load(profile, layers, gradient_mb, compute_ms / 3, compute_ms * 2 / 3, target_r, link)


def _gpt_mb() -> tuple[float, int]:
    from course_lib.train import emulated
    model = emulated.gpt_like()
    return sum(p.numel() * p.element_size() for p in model.parameters()) / MB, len(model)
