"""The light recorder's view of real compute: forward, and backward up to its last gradient.

What a host does after the last gradient (waiting for buckets, inside `backward()` under DDP) is not
compute. An emulated device records its own spans and needs none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from course_lib import record
from course_lib.record import now


class Phases:
    """Run micro-steps of `module` so that the active recorder sees their compute (lane `compute`)."""

    def __init__(self, module: nn.Module) -> None:
        self._last = 0
        for p in module.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._note)

    def _note(self, _param: Any) -> None:
        self._last = now()

    def micro_step(self, forward: Callable[[], Any]) -> None:
        """`forward()` returns the loss; its backward runs here."""
        begin = now()
        loss = forward()
        middle = self._last = now()
        loss.backward()
        if (recorder := record.active()) is not None:
            recorder.add("compute", "compute", "forward", begin, middle)
            recorder.add("compute", "compute", "backward", middle, self._last)
