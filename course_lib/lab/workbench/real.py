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
from course_lib.launch.fabric import gpus

if TYPE_CHECKING:
    from course_lib.trace import Trace

SHAPES = {"cpu": {"length": 64, "layers": 4, "heads": 4, "width": 128},
          "cuda": {"length": 512, "layers": 12, "heads": 12, "width": 768}}
ROWS, LR = 4, 0.1

Ways = Mapping[str, tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Real:
    """Updates of one strategy. `times_s` are those of the slowest rank, `trace` is one more update under
    torch.profiler. `apart` is the largest difference of a parameter from that of the first strategy after the same
    updates, as a share of the largest element of that parameter."""

    name: str
    times_s: tuple[float, ...]
    trace: Trace
    apart: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def sentence(self) -> str:
        seen = overlap.report(self.trace.timeline).pooled
        exposed = "cannot be told" if seen.exposed is None else f"{seen.exposed / 1e6:.1f} ms"
        half = (max(self.times_s) - min(self.times_s)) / 2
        return (f"update {self.median_s * 1e3:.1f} ms (± {half * 1e3:.1f}), exposed {exposed} in the profiled one, "
                f"parameters apart by {self.apart:.0e}")


def real_runs(ways: Ways, *, device: str, ranks: int = 2, fabric: str | Fabric = "auto", micro_steps: int = 4,
              updates: int = 5, shape: Mapping[str, int] | None = None, seed: int = 0,
              timeout_s: float = 300.0) -> dict[str, Real]:
    """Train a GPT on text for `updates` updates of `micro_steps` micro-steps with SGD, in alternation under each of
    `ways`: {name: (strategy of `train.STRATEGIES`, its options)}. ZeRO's stages 2 and 3 and `every_step` send after
    every micro-step, the others once an update. All begin alike and see the same batches.

    `device="cuda"` gives each rank a GPU and takes NCCL for a wire, `"cpu"` shares the cores and takes `fabric`.
    `shape` are fields of `train.gpt.GPTConfig`; the default is larger on GPUs. Raises `LabError` if
    there are fewer GPUs than ranks.
    """
    if device not in SHAPES:
        raise LabError(f"real_runs: device={device!r}; choose 'cpu' or 'cuda'.")
    if device == "cuda":
        if gpus() < ranks:
            raise LabError(f"device='cuda' gives each of {ranks} ranks a GPU of its own, and this machine shows "
                           f"{gpus()}. Choose fewer ranks, or device='cpu'.")
        fabric = "nccl"
    entries = {name: (strategy, dict(options)) for name, (strategy, options) in ways.items()}
    with tempfile.TemporaryDirectory(prefix="course-real-") as folder:
        rows = run(_on_rank, entries, device, micro_steps, updates, dict(shape or SHAPES[device]), seed, folder,
                   ranks=ranks, fabric=fabric, timeout_s=timeout_s)
        return {name: Real(name, tuple(max(times) for times in zip(*(seconds[name] for seconds, _ in rows))),
                           trace.load(Path(folder, str(i))), max(apart[name] for _, apart in rows))
                for i, name in enumerate(entries)}


def _on_rank(entries, device, micro_steps, updates, shape, seed, folder):
    """The rank's side: everything in the same order on every rank."""
    import os

    import torch
    import torch.distributed as dist

    from course_lib.launch import control_group
    from course_lib.record import now
    from course_lib.train.data import batches, text
    from course_lib.train.profiled import profiled, profiled_step

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # below this the profiler writes a line at every start and stop
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

    for trainee in trainees.values():
        timed(trainee, 0)  # buckets are rebuilt and kernels chosen
    seconds = {name: [] for name in trainees}
    for number in range(1, updates + 1):
        for name in list(trainees)[::1 if number % 2 else -1]:
            seconds[name].append(timed(trainees[name], number))
    for i, trainee in enumerate(trainees.values()):
        batch = window(updates + 1)
        settle()
        dist.barrier(control_group())
        with profiled(_made(Path(folder, str(i))) / f"rank-{dist.get_rank()}.json"), profiled_step(0):
            trainee.update(batch)
            settle()
    states = {name: trainee.state() for name, trainee in trainees.items()}
    first = next(iter(states.values()))
    apart = {name: max(float((state[key] - first[key]).abs().max() / first[key].abs().max()) for key in first)
             for name, state in states.items()}
    return seconds, apart


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


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
        self.every = strategy in ("every_step", "zero2", "zero3")

    def update(self, window) -> None:
        from course_lib.train.gpt import next_byte_loss
        from course_lib.train.window import accumulate

        counts = [y.numel() for _, y in window]
        accumulate(self.model, window, next_byte_loss, counts=counts, every=self.every)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict:
        """Whole parameters, on the CPU."""
        whole = self.model.full_state_dict() if self.sharded else self.model.module.state_dict()
        return {name: tensor.detach().float().cpu() for name, tensor in whole.items()}
