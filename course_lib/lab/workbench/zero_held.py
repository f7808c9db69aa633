"""What a rank holds at the most in each ZeRO stage, by the formula."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from course_lib.simulate.zero import Units


def held_bytes(units: Units, ranks: int, stage: int, ahead: int = 1) -> dict[str, float]:
    """Bytes of one rank by part, in fp32 with Adam: what `plan.memory.states` says, and what is whole for a moment. In
    stage 3 those are the units in use and ahead, in stages 2 and 3 the gradients of two units: one is computed while
    the other travels."""
    from course_lib.plan.memory import FP32, states

    parameters, gradients, optimizer = states(round(units.count * units.bytes / 4), FP32, stage, ranks)
    if stage == 3:
        parameters += min(1 + ahead, units.count) * units.bytes
    if stage > 1:
        gradients += min(2, units.count) * units.bytes
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
