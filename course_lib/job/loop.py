"""The training loop: the same for every strategy and every layout, on each rank."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from course_lib import launch, record
from course_lib.job import checkpoint
from course_lib.job.batches import Batches
from course_lib.job.lock import take
from course_lib.job.mesh import mesh
from course_lib.job.metrics import Metrics
from course_lib.job.model import build, learning_rate
from course_lib.job.options import Options
from course_lib.job.piped import Piped
from course_lib.job.progress import Bar
from course_lib.job.replicas import Replicas, saved_layout
from course_lib.job.resume import Keeper
from course_lib.job.together import Diverged, JobError, together
from course_lib.job.trainee import Made, Trainee
from course_lib.launch.wire import Wire
from course_lib.overlap import report
from course_lib.train.control import Control
from course_lib.train.profiled import profiled, profiled_step

UNKNOWN = -1.0


def train(options: Options) -> dict[str, Any] | None:
    """Train, from the newest checkpoint in `options.out` if there is one; to be called on every rank. Returns the last
    line of the metrics on rank 0, or None if nothing was left to do."""
    options, control = options.laid_out(dist.get_world_size()), Control(dist.group.WORLD)
    with ExitStack() as held:
        def make() -> None:
            options.out.mkdir(parents=True, exist_ok=True)
            if dist.get_rank() == 0:
                held.enter_context(take(options.out))

        together(control, "making --out", make)
        return _train(options, control)


def _train(options: Options, control: Control) -> dict[str, Any] | None:
    nccl = launch.context().fabric.kind == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    grid, rank = mesh(options), dist.get_rank()
    data: list[Batches] = []

    def read() -> str:
        data.append(Batches(options, device))
        return data[0].digest

    digests = together(control, "reading the data", read)
    if other := [r for r, digest in enumerate(digests) if digest != digests[0]]:
        raise JobError(f"rank {other[0]} reads other data than rank 0: give --data a file that is the same on all "
                       "nodes")
    keeper = Keeper(options, grid, control, digests[0])
    saved = keeper.saved()
    model = build(options, grid, device)
    trainee = Piped(options, grid, model) if options.pp > 1 else Replicas(options, grid, model,
                                                                         saved_layout(options, saved.cell))
    together(control, "taking the checkpoint over", lambda: saved.load(trainee))
    if rank == 0:
        print(f"{dist.get_world_size()} ranks = {options.dp} replicas × {options.pp} stages × {options.tp} shards, "
              f"B = b·D·N = {options.batch}·{options.dp}·{options.micro_steps} = {options.global_batch} rows" +
              (f"; goes on after update {saved.step}" if saved.step else ""), flush=True)
    logs: list[Log] = []
    together(control, "opening metrics.jsonl", lambda: logs.append(Log(options, saved.step)) if rank == 0 else None)
    log = logs[0] if logs else None
    try:
        last = _updates(options, trainee, data[0], keeper, control, log, range(saved.step, options.steps))
    finally:
        if log is not None:
            log.close()
    trainee.settle()
    weights = trainee.weights()
    together(control, "writing the model", lambda: checkpoint.write_file(
        options.out / "model.pt", {"config": asdict(options.config), "model": weights}) if rank == 0 else None)
    return last


class Log:
    """What rank 0 writes and shows."""

    def __init__(self, options: Options, step: int) -> None:
        self._metrics = Metrics(options.out / "metrics.jsonl", step)
        self._bar = Bar(step, options.steps)

    def add(self, row: dict[str, Any]) -> None:
        self._metrics.add(row)
        self._bar.show(row)

    def sync(self) -> None:
        self._metrics.sync()

    def close(self) -> None:
        self._bar.close()
        self._metrics.close()


def _updates(options: Options, trainee: Trainee, data: Batches, keeper: Keeper, control: Control, log: Log | None,
             updates: range) -> dict[str, Any] | None:
    row = None
    with ExitStack() as traces:
        for update in updates:
            step = update + 1
            for group in trainee.optimizer.param_groups:
                group["lr"] = learning_rate(options, update)
            window = data.window(update, trainee.mesh.replica)
            if step in options.traced and step in (updates[0] + 1, options.traced[0]):
                traces.enter_context(profiled(_trace(options)))
            before = _sent()
            with profiled_step(step) if step in options.traced else nullcontext(), _measured(trainee, step) as seen:
                seen.made = trainee.update(window)
            saves = step % options.checkpoint_every == 0 or step == options.steps
            row, fault = _row(options, control, step, seen, before, not saves or trainee.finite())
            if options.traced and step == options.traced[-1]:
                traces.close()
            if log is not None:
                log.add(row)
            if fault:
                raise Diverged(f"update {step}: {fault} is not finite, and would never be again, so the run ends here; "
                               f"{_from_here(options)} a smaller --lr, a longer --warmup or a --max-norm")
            if saves:
                if log is not None:
                    log.sync()
                keeper.save(trainee, step)
    return row


def _trace(options: Options):
    folder = options.out / "trace"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"rank-{dist.get_rank()}.json"


class _Seen:
    """What one rank knows about one update."""

    made: Made
    seconds: float
    exposed_ms: float = UNKNOWN


@contextmanager
def _measured(trainee: Trainee, step: int) -> Iterator[_Seen]:
    seen = _Seen()
    records = trainee.knows_compute and isinstance(dist.group.WORLD, Wire)
    with record.recording(dist.get_rank()) if records else nullcontext() as recorder:
        begin = time.perf_counter()
        with recorder.measure_step(step) if records else nullcontext():
            yield seen
        if not isinstance(dist.group.WORLD, Wire):  # NCCL: the host has run ahead of the device
            torch.cuda.synchronize()
        seen.seconds = time.perf_counter() - begin
    if records:
        row = report(recorder.timeline()).rows[0]
        seen.exposed_ms = (row.exposed or 0) / 1e6


def _row(options: Options, control: Control, step: int, seen: _Seen, before: float,
         sound: bool) -> tuple[dict[str, Any], str | None]:
    """The line of one update, from what all ranks saw, and what of it is not finite: the same on every rank. Times are
    those of the slowest rank, bytes of the one that sent most; null is what cannot be known here. `sound`: this rank
    has found nothing wrong with the parameters."""
    mine = struct.pack("<5d?", seen.made.share, seen.made.norm, seen.seconds, seen.exposed_ms, _sent() - before, sound)
    notes = [struct.unpack("<5d?", note) for note in control.exchange(mine, f"the end of update {step}")]
    shares, norms, seconds, exposed, sent, sounds = zip(*notes)
    tokens, loss = options.global_batch * options.length, sum(shares) / options.tp
    finite = {"the loss": math.isfinite(loss), "the norm of the gradient": all(map(math.isfinite, norms)),
              "a parameter": all(sounds)}
    row = {"step": step, "loss": loss, "grad_norm": norms[0], "lr": learning_rate(options, step - 1), "tokens": tokens,
           "tokens_per_s": tokens / max(seconds), "step_ms": 1e3 * max(seconds),
           "exposed_ms": None if UNKNOWN in exposed else max(exposed),
           "sent_bytes": max(sent) if isinstance(dist.group.WORLD, Wire) else None}
    return row, next((what for what, ok in finite.items() if not ok), None)


def _from_here(options: Options) -> str:
    if not (saved := checkpoint.steps(options.out)):
        return "there is no checkpoint yet, start again with"
    folder = checkpoint.folder_of(options.out, saved[-1])
    return f"{folder} is kept, go on from it (or delete it, and go on from the one before) with"


def _sent() -> float:
    """Bytes that this rank has sent on all of its wires."""
    return float(sum(group.traffic.total_bytes for group in dist.distributed_c10d._world.pg_map
                     if isinstance(group, Wire)))
