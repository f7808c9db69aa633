"""Wait with sending: accumulate a whole window, then one blocking all-reduce."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from course_lib.train.serial import SerialAllReduce


class NoSync(SerialAllReduce):
    """One flat blocking all-reduce a window (and dtype), in `finish_gradient_synchronization()`."""

    def __init__(self, module: nn.Module, op: str = "mean", process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, flat=True, op=op, process_group=process_group)

    def _after_synchronised_backward(self) -> None:
        """Nothing yet: later micro-steps may still add to the window."""

    def _finish(self) -> None:
        self._reduce()
