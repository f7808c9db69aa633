"""One update of a model under any strategy, as a step that can be timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.launch import context
from course_lib.train import emulated
from course_lib.train.ddp import wrap
from course_lib.train.phases import Phases
from course_lib.tune.alternate import Step
from course_lib.tune.profile import Observer


class Updates:
    """Makes steps from a model factory on a rank: every strategy gets a model of its own, with equal weights
    (the factory must seed itself or build constants; the wrappers broadcast rank 0's)."""

    def __init__(self, model: Callable[[], nn.Module], micro_step: Callable[[nn.Module], Any],
                 micro_steps: int) -> None:
        self._model, self._micro_step, self._micro_steps = model, micro_step, micro_steps
        self._bare = model()
        self._emulates = isinstance(self._bare, emulated.Emulated)
        self.observer = Observer(self._bare)
        kind = emulated.PROVENANCE if self._emulates else "measured (cpu)"
        self.provenance = f"{kind}, {context().spec.provenance}"

    def of(self, strategy: str, options: Mapping[str, Any], every: bool = False) -> Step:
        """All micro-steps of one update under `strategy`, the gradient synchronised at its end or after `every` one."""
        wrapped = wrap(strategy, self._model(), **options)
        phases = self._phases(wrapped)

        def step() -> None:
            with nullcontext() if every else wrapped.no_sync():
                for _ in range(self._micro_steps - 1):
                    self._backward(wrapped, phases)
            self._backward(wrapped, phases)
            wrapped.finish_gradient_synchronization()

        return Step(step, lambda: wrapped.zero_grad(set_to_none=False))

    def compute(self) -> Step:
        """The same work without any communication; `observer` notes when its gradients are ready."""
        def step() -> None:
            for _ in range(self._micro_steps):
                self.observer.micro_step(lambda: self._micro_step(self._bare) / self._micro_steps)

        return Step(step, lambda: self._bare.zero_grad(set_to_none=False))

    @staticmethod
    def train(nbytes: int, length: int) -> Step:
        """`length` back-to-back all-reduces of `nbytes` bytes: what one bucket costs, as buckets are sent."""
        buffer = torch.zeros(nbytes // 4)

        def step() -> None:
            for work in [dist.all_reduce(buffer, async_op=True) for _ in range(length)]:
                work.wait()

        return Step(step)

    @staticmethod
    def communication(nbytes: int) -> Step:
        """One flat all-reduce of `nbytes` bytes."""
        flat = torch.zeros(nbytes // 4)
        return Step(lambda: dist.all_reduce(flat))

    def _phases(self, module: nn.Module) -> Phases | None:
        return None if self._emulates else Phases(module)  # an emulated device records its own compute

    def _backward(self, module: nn.Module, phases: Phases | None) -> None:
        if phases is None:
            (self._micro_step(module) / self._micro_steps).backward()
        else:
            phases.micro_step(lambda: self._micro_step(module) / self._micro_steps)
