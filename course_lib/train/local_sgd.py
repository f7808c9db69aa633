"""Local updates: every rank steps by itself, and the ranks' parameters are averaged after every H steps."""

from __future__ import annotations

import struct
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

from course_lib.train.base import Strategy
from course_lib.train.control import SynchronizationError, ranks_text
from course_lib.train.saved import refuse_other, whose
from course_lib.train.status import Progress


class LocalSGD(Strategy):
    """No gradient travels: `.grad` is this rank's own, and after each `every` steps of the optimizer the parameters
    become their mean over ranks. One round moves what one window of gradients would, so bytes fall to 1/`every`.

        model = LocalSGD(module, every=8)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.take_optimizer(optimizer)
        accumulate(model, window, loss_of, counts=counts)
        optimizer.step()                                     # averages when the round is full

    Each rank keeps its own optimizer state, momentum included (Lin et al., arXiv:1808.07217), as PyTorch's
    `PostLocalSGDOptimizer` does, which also leaves the state alone. `average_state=True` averages every state tensor
    of a parameter's shape too (Yu et al., arXiv:1905.03817): two or three times the bytes. Buffers stay each rank's
    own. PyTorch's `PeriodicModelAverager` averages after steps 0, H, 2H, … of those that follow its warm-up, this after
    H, 2H, …; with `warmup_steps=H-1` the two are the same.

    `.grad` is the rank's own mean, so a loss is normalised as under any strategy with `op="mean"`. At the end of a
    round the ranks compare how many steps and windows they made; who differs is named in a `SynchronizationError` on
    all ranks. Inside a round the ranks' parameters differ, so `state_dict()` belongs to its rank; between two rounds
    any rank may load it, and any number of them.
    """

    def __init__(self, module: nn.Module, every: int = 8, average_state: bool = False,
                 process_group: dist.ProcessGroup | None = None, settings: tuple = ()) -> None:
        """`settings` are further ones that all ranks must share, of a subclass."""
        if every < 1:
            raise ValueError(f"every={every}: give the local steps of a round, 1 or more")
        super().__init__(module, process_group=process_group)
        self.every, self.average_state = every, average_state
        self.rounds = self.local_steps = self.local_windows = 0
        self._optimizer: optim.Optimizer | None = None
        self._sync = False  # no backward is ever synchronised
        self._start(every, average_state, settings)

    # the training loop's side

    def take_optimizer(self, optimizer: optim.Optimizer) -> None:
        """Count this optimizer's steps, and end a round after each `every` of them, inside `step()`."""
        me = weakref.ref(self)

        def stepped(*_: Any) -> None:
            if (model := me()) is not None and model._optimizer is optimizer and not model.closed:
                model._stepped_once()

        self._optimizer = optimizer
        optimizer.register_step_post_hook(stepped)

    def finish_gradient_synchronization(self) -> None:
        """End the window. Nothing is sent: `.grad` is final as it is."""
        if self.closed:
            raise RuntimeError(f"this {type(self).__name__} was closed or its module was wrapped again")
        self.window += 1
        self.local_windows += 1
        self.progress = Progress()

    def average(self) -> None:
        """End the round now, full or not: on return all ranks hold the same parameters. Collective call; at the end
        of training, and before an evaluation or a checkpoint that is to be the same on all ranks. Where no step was
        made since the last round, they do already."""
        self._compare()
        if self.local_steps:
            self._combine()
            self.rounds += 1
        self.local_steps = self.local_windows = 0

    # inside

    def before_step(self, optimizer: optim.Optimizer) -> None:
        if optimizer is not self._optimizer:
            raise RuntimeError(f"{type(self).__name__} would not see this step: call take_optimizer(optimizer) first")

    def _stepped_once(self) -> None:
        self.steps += 1
        self.local_steps += 1
        if self.local_steps >= self.every:
            self.average()

    def _combine(self) -> None:
        mean_over_ranks(self._averaged(), self.group)

    def _averaged(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = [slot.param for slot in self.slots]
        if self.average_state and self._optimizer is not None:
            state = self._optimizer.state
            tensors += [value for slot in self.slots for _, value in sorted(state.get(slot.param, {}).items())
                        if torch.is_tensor(value) and value.shape == slot.param.shape and value.is_floating_point()]
        return tensors

    def _compare(self) -> None:
        mine = self.rounds, self.local_steps, self.local_windows, sum(t.numel() for t in self._averaged())
        where = f"the end of round {self.rounds}"
        notes = [struct.unpack("<4q", note) for note in self.control.exchange(struct.pack("<4q", *mine), where)]
        counts = Counter(notes)
        if len(counts) == 1:
            return
        usual = max(notes, key=lambda note: (counts[note], note[1] == note[2]))
        odd = ranks_text([rank for rank, note in zip(self.control.ranks, notes) if note != usual])
        if len({note[:3] for note in notes}) == 1:
            raise SynchronizationError(f"{where}: the optimizer of {odd} has state for other parameters than that of "
                                       "the others, so the state has no mean; use average_state=False")
        made = ", ".join(f"rank {rank}: {steps} steps in {windows} windows since round {rounds} began"
                         for rank, (rounds, steps, windows, _) in zip(self.control.ranks, notes))
        raise SynchronizationError(f"{where}: {odd} did not make the same local steps as the others ({made}); step the "
                                   "optimizer once a window on every rank, and give every rank as many windows")

    # the place in the round, in state_dict()

    def get_extra_state(self) -> dict[str, Any]:
        return {**whose(self, any_rank=not self.local_steps),
                "rounds": self.rounds, "local_steps": self.local_steps, "local_windows": self.local_windows}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Raises `ValueError`, with nothing changed, for the state of another strategy, model, rank or number of ranks.
        """
        self._refuse(state)
        self.rounds, self.local_steps, self.local_windows = (
            state["rounds"], state["local_steps"], state["local_windows"])

    def _refuse(self, state: dict[str, Any]) -> None:
        refuse_other(type(self).__name__, state, whose(self), rounds=int, local_steps=int, local_windows=int)


@torch.no_grad()
def mean_over_ranks(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its mean over the ranks of `group`: one flat all-reduce for each dtype and device.
    Every rank gives tensors of the same shapes in the same order; each is divided before the sum."""
    kinds: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.dtype, tensor.device].append(tensor)
    for same in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        if flat.numel():
            flat.div_(dist.get_world_size(group))
            dist.all_reduce(flat, group=group)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same])):
            tensor.copy_(part.view(tensor.shape))
