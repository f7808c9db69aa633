"""A pipelined step replayed action by action, for clusters of any size.

Tensor-parallel ranks of a stage do the same at the same time, and so do the D copies of the model until gradients are
reduced. GPUs therefore fall into p classes, one a stage, and one member of each is replayed: 16,384 GPUs with 16 stages
are 16 ranks of a schedule, not 16,384.
"""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.plan.hardware import Cluster
from course_lib.plan.layout import Layout
from course_lib.plan.shape import ModelShape
from course_lib.plan.timing import Step, copying, stage_of, step
from course_lib.schedule.generators import interleaved
from course_lib.simulate.pipeline import Costs, Prediction, predict


@dataclass(frozen=True)
class Replay:
    """`pipeline` has a rank for each class of GPUs, and each class has `members`. After the last backward comes what
    `step` says of the exposed reduction of gradients and of the optimizer, the same for all."""

    pipeline: Prediction
    members: int
    step: Step

    @property
    def total(self) -> float:
        """Seconds of the update."""
        return self.pipeline.step_s + self.step.data + self.step.optimizer


def replay(shape: ModelShape, cluster: Cluster, layout: Layout, B: int) -> Replay:
    """One update of `B` rows under 1F1B, interleaved if the layout is. What a stage sends to its neighbours counts to
    the action that sends it, as in `step`. Raises `Impossible` for degrees that do not divide what they must."""
    found = step(shape, cluster, layout, B)
    p, v = layout.pipeline, layout.interleaved
    of = [stage_of(shape, cluster, layout, last=rank == p - 1) for rank in range(p)]
    forward = [(one.forward + one.tensor_forward) / v + one.hop for one in of]
    copies = copying(shape, cluster, layout, found.D)
    backward = [(one.backward + one.tensor_backward + copies) / v + one.hop for one in of]
    # Stage s of the schedule is on rank s % p: a rank's parts take equally long.
    costs = Costs(F=forward * v, B=backward * v)
    return Replay(predict(interleaved(p, found.N, v), costs), layout.tensor * found.D, found)
