"""`torch.distributed.pipelining` on the ranks of a run, with the same stages and the same rule for the device's clock.

An emulated device is idle while its rank waits for a message. Our executor tells it so; torch's waits are told to it
here, by the same rule, or it would be credited with 2 ms at every wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from course_lib import record
from course_lib.schedule.action import ScheduleError
from course_lib.train.emulated import device

CLASSES = {"GPipe": "ScheduleGPipe", "1F1B": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
           "zero bubble": "ScheduleInterleavedZeroBubble", "ZB-V": "ScheduleZBVZeroBubble"}


class TorchPipeline:
    """One rank's part of torch's pipeline. `stages` maps this rank's stage numbers to modules, of `count` in all; each
    keeps the shape of its input. `loss_of(output)` is the summed loss of a micro-batch.

    `scale_grads` is torch's own switch: divide `.grad` by the number of micro-batches at the end of every step.
    Raises `ScheduleError` for a kind that torch does not have, and with torch's words for what it refuses.
    """

    def __init__(self, kind: str, stages: Mapping[int, nn.Module], count: int, micro_batches: int,
                 loss_of: Callable[[torch.Tensor], torch.Tensor], example: torch.Tensor,
                 scale_grads: bool = False) -> None:
        if kind not in CLASSES:
            raise ScheduleError(f"torch has no pipeline {kind!r}; choose one of {', '.join(CLASSES)}")
        self._denominator, self._first, self._last = 1.0, 0 in stages, count - 1 in stages
        between = example.clone().requires_grad_()  # torch sends a gradient back only for what needs one
        parts = [PipelineStage(module, number, count, torch.device("cpu"), input_args=between if number else example,
                               output_args=between) for number, module in sorted(stages.items())]
        one = kind in ("GPipe", "1F1B")
        try:
            self._schedule = getattr(schedules, CLASSES[kind])(
                parts[0] if one else parts, micro_batches, scale_grads=scale_grads,
                loss_fn=lambda output, _: loss_of(output) / self._denominator)
        except ValueError as error:
            raise ScheduleError(f"torch refuses {kind} with {micro_batches} micro-batches: "
                                f"{' '.join(str(error).split())}") from error

    def run(self, window: Sequence[torch.Tensor], denominator: float) -> None:
        """One pass; gradients are added to `.grad`. `window` holds the micro-batches, each of the example's shape."""
        self._denominator = denominator
        whole = (torch.cat(list(window)),) if self._first else ()
        target = {"target": torch.zeros(len(window) * len(window[0]))} if self._last else {}
        device.busy_until = max(device.busy_until, record.now())
        with _device_waits():
            self._schedule.step(*whole, return_outputs=False, **target)


@contextmanager
def _device_waits():
    """While torch waits for a message that is not there, the device is idle."""
    before = schedules._wait_batch_p2p

    def wait(works) -> None:
        late = not all(work.is_completed() for work in works)
        before(works)
        if late:
            device.busy_until = max(device.busy_until, record.now())

    schedules._wait_batch_p2p = wait
    try:
        yield
    finally:
        schedules._wait_batch_p2p = before
