"""Blocking baselines on real ranks and a real wire: the learner's, the library's and stock DDP, in alternation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course_lib.lab.errors import LabError
from course_lib.launch import Fabric
from course_lib.link_cost import LinkCost
from course_lib.timeline import Timeline
from course_lib.tune.sweep import Measured

if TYPE_CHECKING:
    from torch import nn

LIBRARY = {"one a parameter": ("serial", {}), "flat": ("serial", {"flat": True}), "DDP": ("ddp", {})}


@dataclass(frozen=True)
class Baseline(Measured):
    """Updates in which every micro-step ends with its all-reduces. `from_reference` is the largest difference of a
    gradient element from the mean over ranks, as a fraction of the largest element."""

    from_reference: float

    @property
    def collectives(self) -> int:
        """Collectives of one update, as rank 0's wire recorded them."""
        return len(self._first_step())

    @property
    def bytes(self) -> int:
        """Bytes handed to the collectives of one update."""
        return sum(span.bytes for span in self._first_step())

    def _first_step(self) -> Timeline:
        return self.timeline.select(rank=0, kind="comm", step=0)


@dataclass(frozen=True)
class Baselines:
    """What one run measured: the `link`, fitted on its own wire from collectives that are waited for, and each way of
    sending by name: `yours`, `one a parameter`, `flat` and `DDP`."""

    link: LinkCost
    measured: dict[str, Baseline]

    def __getitem__(self, name: str) -> Baseline:
        return self.measured[name]


def baselines(model: Callable[[], nn.Module], average_gradients: Callable, *, ranks: int = 2,
              fabric: str | Fabric = "auto", micro_steps: int = 4, repeats: int = 3,
              timeout_s: float = 120.0) -> Baselines:
    """Time updates of `micro_steps` micro-steps that send after every backward, by the learner's function and by the
    library, in alternation on the same ranks.

    `model()` builds an emulated model on every rank. Raises `OwnRunFailed` with one sentence for whatever the
    function does wrong on a rank, a hang included.
    """
    from course_lib.lab.workbench.buckets import _run

    if not callable(average_gradients):
        raise LabError("baselines: pass the function of exercise 2.1 itself, without calling it.")
    rows = _run(_on_rank, model, average_gradients, micro_steps, repeats, ranks=ranks, fabric=fabric,
                timeout_s=timeout_s)  # fmt: skip
    link, worst, seconds, _ = rows[0]
    return Baselines(link, {name: Baseline(name, tuple(seconds[name]), Timeline.merge(row[3][name] for row in rows),
                                           worst[name]) for name in seconds})  # fmt: skip


def _on_rank(build, average, micro_steps, repeats):
    """The rank's side: one update of each kind is compared, then all are timed, collectives of three sizes too."""
    import statistics

    from course_lib.lab.workbench import gradients
    from course_lib.launch import context
    from course_lib.launch.measure import fit
    from course_lib.train import emulated, wrap
    from course_lib.tune.alternate import Step, alternate

    plain = build()
    size = max(p.numel() * p.element_size() for p in plain.parameters())
    whole = sum(p.numel() * p.element_size() for p in plain.parameters())
    sizes = sorted({size, whole // 4, whole})
    trains = [max(2, whole // nbytes) for nbytes in sizes]
    with gradients.instant(plain):
        mean = gradients.mean_gradient(plain, micro_steps)
    steps, worst = {f"{nbytes} bytes": _blocking(nbytes, times) for nbytes, times in zip(sizes, trains)}, {}
    for name, (module, forward, after) in {
            "yours": _learners(build(), average),
            **{name: _strategy(wrap(kind, build(), **options)) for name, (kind, options) in LIBRARY.items()}}.items():
        step = Step(_window(forward, after, micro_steps), module.zero_grad)
        step.prepare()
        with gradients.instant(module):
            step.run()
        worst[name] = gradients.difference(gradients.flat_gradient(module), mean)
        steps[name] = step
    provenance = f"{emulated.PROVENANCE}, {context().spec.provenance}"
    seconds, lines = alternate(steps, repeats, 1, provenance)
    costs = [statistics.median(seconds.pop(f"{nbytes} bytes")) / times for nbytes, times in zip(sizes, trains)]
    return LinkCost(*fit(sizes, costs)), worst, seconds, lines


def _blocking(nbytes, times):
    """A step that sends `times` times and waits each time, as these ways do. In a train of collectives in flight
    (`launch.measure`) the next is issued while one runs, which hides the host's share of each. A long train matters
    for small ones: the scheduler treats a rank that wakes up a hundred times otherwise than one that does so twice."""
    import torch
    import torch.distributed as dist

    from course_lib.tune.alternate import Step

    buffer = torch.zeros(nbytes // 4)

    def run():
        for _ in range(times):
            dist.all_reduce(buffer)

    return Step(run)


def _learners(module, average):
    """The bare module, and the learner's function after each of its backward passes."""
    import torch.distributed as dist

    from course_lib.lab.guard import Broke, call
    from course_lib.lab.workbench.rank import Fault

    params = [param for param in module.parameters() if param.requires_grad]

    def all_reduce(tensor):
        dist.all_reduce(tensor)

    def after(last):
        try:
            call(average, params, dist.get_world_size(), all_reduce,
                 shown="average_gradients(params, ranks, all_reduce)")  # fmt: skip
        except Broke as broke:
            raise Fault(f"rank {dist.get_rank()}: {broke}") from broke

    return module, module, after


def _strategy(wrapped):
    """A strategy sends inside backward; its window is finished once."""
    return wrapped.module, wrapped, lambda last: last and wrapped.finish_gradient_synchronization()


def _window(forward, after, micro_steps):
    import torch.distributed as dist

    from course_lib.lab.workbench.gradients import loss_of

    def window():
        for micro_step in range(micro_steps):
            loss_of(forward, dist.get_rank(), micro_step, micro_steps).backward()
            after(micro_step == micro_steps - 1)

    return window
