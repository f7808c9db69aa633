"""What a rank holds and sends in one update: DDP, ZeRO's stages, and PyTorch's own, counted by one tracker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from course_lib.launch import Fabric, run

WIDTH, LAYERS = 256, 8
PARAMETERS = WIDTH * WIDTH * LAYERS
UNIT_BYTES = 4 * WIDTH * WIDTH
WAYS = ("DDP", "ZeroRedundancyOptimizer", "stage 1", "stage 2", "stage 3", "stage 3, no_sync", "FSDP2",
        "FSDP2, no sync", "stage 3, one unit")


@dataclass(frozen=True)
class Held:
    """Bytes of rank 0. `parameters`, `gradients` and `optimizer` are alive when the window has been computed and the
    optimizer has not stepped (gradients with the buckets that they lie in), `peak` is the most at any moment of the
    update, `sent` what the rank sends in it; of stock collectives what a ring would send."""

    parameters: int
    gradients: int
    optimizer: int
    peak: int
    sent: float

    def parts(self) -> dict[str, float]:
        return {"parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer}


def held_runs(micro_steps: Sequence[int] = (1, 8), ways: Sequence[str] = WAYS, *, ranks: int = 2,
              fabric: str | Fabric = "loopback", timeout_s: float = 120.0) -> dict[tuple[str, int], Held]:
    """By way and N. The model is 8 layers of 256 × 256 in fp32 with AdamW, each layer a unit; two rows of activations
    weigh next to nothing."""
    return run(_on_rank, tuple(micro_steps), tuple(ways), ranks=ranks, fabric=fabric, timeout_s=timeout_s)[0]


def _on_rank(micro_steps, ways):
    import torch

    torch.set_num_threads(1)
    found = {}
    for name in ways:
        way = _made(name)
        for _ in range(2):
            way.update(1)  # the optimizer's state comes with the first, DDP's final buckets with the second
        found |= {(name, N): _counted(way, N) for N in micro_steps}
    return found


@dataclass
class _Way:
    """`window(N)` runs and synchronises N micro-steps; `holds()` lists the tensors of parameters."""

    window: Callable[[int], None]
    optimizer: Any
    holds: Callable[[], list]

    def update(self, N: int) -> None:
        self.window(N)
        self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _counted(way: _Way, N: int) -> Held:
    import torch.distributed as dist

    from course_lib.train.live_bytes import LiveBytes

    traffic = dist.group.WORLD.traffic
    traffic.reset()
    with LiveBytes() as counter:
        for tensor in (*way.holds(), *_states(way.optimizer)):
            tensor.detach()  # the tracker knows what an operator has seen
        way.window(N)
        parameters, state = _storages(way.holds()), _storages(_states(way.optimizer))
        rest = sum(size for key, size in counter.alive().items() if key not in parameters | state)
        way.step()
    return Held(sum(parameters.values()), rest, sum(state.values()), counter.peak, traffic.total_bytes)


def _made(name: str) -> _Way:
    import torch
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from course_lib.train import Sharded, StockDDP
    from course_lib.train.fsdp2 import fsdp2

    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    adamw = {"lr": 1e-3, "foreach": False}
    if name.startswith("stage"):
        whole = name.endswith("no_sync")
        model = Sharded(module, stage=int(name[6]), units=() if name.endswith("one unit") else None,
                        whole_gradients=whole)

        def window(N: int) -> None:
            _micro_steps(model, N, every=model.stage > 1 and not whole)
            model.finish_gradient_synchronization()

        return _Way(window, torch.optim.AdamW(model.shards(), **adamw),
                    lambda: [*module.parameters(), *model.shards(), *(unit._flat for unit in model.units)])
    if name.startswith("FSDP2"):
        model = fsdp2(module)

        def window(N: int) -> None:
            for i in range(N):
                model.set_requires_gradient_sync(name == "FSDP2" or i == N - 1)
                _loss(model, N).backward()

        return _Way(window, torch.optim.AdamW(model.parameters(), **adamw),
                    lambda: [p.to_local() for p in model.parameters()])
    model = StockDDP(module)
    if name == "DDP":
        optimizer = torch.optim.AdamW(model.parameters(), **adamw)
    else:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **adamw)
    return _Way(lambda N: _micro_steps(model, N, every=False), optimizer, lambda: list(module.parameters()))


def _micro_steps(model, N: int, every: bool) -> None:
    from contextlib import nullcontext

    for i in range(N):
        with nullcontext() if every or i == N - 1 else model.no_sync():
            _loss(model, N).backward()


def _loss(model, N: int):
    import torch
    return model(torch.ones(2, WIDTH)).square().mean() / N


def _states(optimizer) -> list:
    """This rank's: a ZeroRedundancyOptimizer keeps them in one of its own."""
    import torch

    states = getattr(optimizer, "optim", optimizer).state.values()
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def _storages(tensors) -> dict[int, int]:
    """Bytes of each storage, by its `_cdata`."""
    from torch.distributed.tensor import DTensor

    found = {}
    for tensor in tensors:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return found
