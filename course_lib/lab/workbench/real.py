"""Whole updates of a GPT whose compute is real: on the CPU over emulated wires, or on GPUs over NCCL."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib import overlap, trace
from course_lib.lab.errors import LabError
from course_lib.launch import Fabric, run
from course_lib.launch.fabric import as_fabric, gpus
from course_lib.spread import half_iqr

if TYPE_CHECKING:
    from course_lib.trace import Trace

STRATEGIES = {"serial": False, "no_sync": False, "bucketed": False, "ddp": False, "every_step": True, "zero1": False,
              "zero2": True, "zero3": True}
"""Those that step with a plain optimizer at the end of a window; whether they send after every micro-step."""
SHAPES = {"cpu": {"length": 64, "layers": 4, "heads": 4, "width": 128},
          "cuda": {"length": 512, "layers": 12, "heads": 12, "width": 768}}
ROWS, LR = 4, 0.1

Ways = Mapping[str, tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Real:
    """Updates of one strategy. `times_s` are those of the slowest rank, `trace` is one more update under
    torch.profiler. `apart` is the largest difference of a parameter, on any rank, from that of the first strategy on
    rank 0 after the same updates, as a share of the largest element of that parameter."""

    name: str
    times_s: tuple[float, ...]
    trace: Trace
    apart: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def spread_s(self) -> float:
        """Half the distance between the quartiles."""
        return half_iqr(self.times_s)

    @property
    def exposed_ms(self) -> float | None:
        """Of the rank that has most, in the profiled update; None where it cannot be told."""
        seen = [rank.exposed for rank in overlap.report(self.trace.timeline).ranks]
        return None if None in seen else max(seen) / 1e6

    @property
    def sentence(self) -> str:
        if overlap.report(self.trace.timeline).pooled.comm == 0:
            exposed = "nothing was sent"
        elif self.exposed_ms is None:
            exposed = "exposed time cannot be told"
        else:
            exposed = f"{self.exposed_ms:.1f} ms exposed in the profiled one"
        return (f"update {self.median_s * 1e3:.1f} ± {self.spread_s * 1e3:.1f} ms, {exposed}, parameters apart by "
                f"{self.apart:.0e}")


def real_runs(ways: Ways, *, device: str, ranks: int = 2, fabric: str | Fabric = "loopback", micro_steps: int = 4,
              updates: int = 5, shape: Mapping[str, int] | None = None, seed: int = 0,
              timeout_s: float = 300.0) -> dict[str, Real]:
    """Train a GPT on text for `updates` updates of `micro_steps` micro-steps with SGD, in alternation under each of
    `ways`: {name: (one of `STRATEGIES`, its options)}. ZeRO's stages 2 and 3 and `every_step` send after every
    micro-step, the others once an update. All begin alike and see the same batches.

    `device="cuda"` gives each rank a GPU and takes NCCL for a wire, `"cpu"` shares the cores and takes `fabric`.
    `shape` are fields of `train.gpt.GPTConfig`; the default is larger on GPUs. Raises `LabError` if
    there are fewer GPUs than ranks.
    """
    if device not in SHAPES:
        raise LabError(f"real_runs: device={device!r}; choose 'cpu' or 'cuda'.")
    if other := [strategy for strategy, _ in ways.values() if strategy not in STRATEGIES]:
        raise LabError(f"real_runs: {other[0]!r}; choose among {', '.join(STRATEGIES)}.")
    if updates < 2:
        raise LabError(f"real_runs: updates={updates}; a spread needs 2 or more.")
    if device == "cuda":
        if gpus() < ranks:
            raise LabError(f"device='cuda' gives each of {ranks} ranks a GPU of its own, and this machine shows "
                           f"{gpus()}. Choose ranks={gpus()}, or device='cpu'." if gpus() else
                           "device='cuda': this machine shows no CUDA device. Choose device='cpu'.")
        import torch

        if not torch.backends.cuda.is_built():
            raise LabError("device='cuda': the torch that is installed was built without CUDA.")
        fabric = "nccl"
    elif as_fabric(fabric).kind == "nccl":
        raise LabError("real_runs: device='cpu' needs a wire that carries what lies on the CPU, and NCCL does not. "
                       "Leave fabric out, or give a rate.")
    entries = {name: (strategy, dict(options)) for name, (strategy, options) in ways.items()}
    with tempfile.TemporaryDirectory(prefix="course-real-") as folder:
        for i in range(len(entries)):
            Path(folder, str(i)).mkdir()
        rows = run(_on_rank, entries, device, micro_steps, updates, dict(shape or SHAPES[device]), seed, folder,
                   ranks=ranks, fabric=fabric, timeout_s=timeout_s)
        return {name: Real(name, tuple(max(times) for times in zip(*(seconds[name] for seconds, _ in rows))),
                           trace.load(Path(folder, str(i))), max(apart[name] for _, apart in rows))
                for i, name in enumerate(entries)}


def _on_rank(entries, device, micro_steps, updates, shape, seed, folder):
    """The rank's side: everything in the same order on every rank."""
    import torch
    import torch.distributed as dist

    from course_lib.launch import control_group
    from course_lib.record import now
    from course_lib.train.data import batches, text
    from course_lib.train.profiled import profiled, profiled_step

    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    trainees = {name: _Trainee(strategy, options, shape, place) for name, (strategy, options) in entries.items()}
    data = text(1.0)

    def window(number: int) -> list:
        made = batches(data, ROWS, shape["length"], micro_steps, seed=seed + number, rank=dist.get_rank())
        return [(x.to(place), y.to(place)) for x, y in made]

    def settle() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def timed(trainee: _Trainee, number: int) -> float:
        batch = window(number)
        settle()
        dist.barrier(control_group())
        begin = now()
        trainee.update(batch)
        settle()
        return (now() - begin) / 1e9

    for number in range(2):  # kernels are chosen, and buckets rebuilt in the second
        for trainee in trainees.values():
            timed(trainee, number)
    seconds = {name: [] for name in trainees}
    for number in range(2, updates + 2):
        for name in list(trainees)[::1 if number % 2 else -1]:
            seconds[name].append(timed(trainees[name], number))
    with profiled():  # its first start takes long on a GPU, and not equally long on all ranks
        settle()
    for i, trainee in enumerate(trainees.values()):
        batch = window(updates + 2)
        with profiled(Path(folder, str(i), f"rank-{dist.get_rank()}.json")):
            settle()
            dist.barrier(control_group())
            with profiled_step(0):
                trainee.update(batch)
                settle()
    right = {key: tensor.clone() for key, tensor in next(iter(trainees.values())).state().items()}
    for tensor in right.values():
        dist.broadcast(tensor, 0, group=control_group())
    apart = {}
    for name, trainee in trainees.items():
        state = trainee.state()
        apart[name] = max(float((state[key] - right[key]).abs().max() / right[key].abs().max()) for key in right)
    return seconds, apart


class _Trainee:
    """A GPT under one strategy, with its optimizer."""

    def __init__(self, strategy, options, shape, place) -> None:
        import torch

        from course_lib.train import wrap
        from course_lib.train.gpt import GPT, GPTConfig

        torch.manual_seed(0)
        self.model = wrap(strategy, GPT(GPTConfig(**shape)).to(place), **options)
        self.sharded = hasattr(self.model, "shards")
        held = self.model.shards() if self.sharded else self.model.parameters()
        self.optimizer = torch.optim.SGD(held, lr=LR)
        self.every = STRATEGIES[strategy]

    def update(self, window) -> None:
        from torch.nn.functional import cross_entropy

        from course_lib.train.window import accumulate

        def loss_of(model, batch):  # every byte counts, so nothing has to be asked of the device in between
            x, y = batch
            return cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"), y.numel()

        counts = [y.numel() for _, y in window]
        accumulate(self.model, window, loss_of, counts=counts, every=self.every)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict:
        """Whole parameters, on the CPU."""
        whole = self.model.full_state_dict() if self.sharded else self.model.module.state_dict()
        return {name: tensor.detach().float().cpu() for name, tensor in whole.items()}
