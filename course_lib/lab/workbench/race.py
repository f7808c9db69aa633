"""Loss after equal seconds: one small GPT trained on real text by several schemes in turn, on the same ranks and wire.

Every scheme has a model, an optimizer and a clock of its own. They take turns update by update, so that a busy moment
of the machine hits all of them alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from course_lib.lab.errors import LabError
from course_lib.launch import Fabric, run

FLOAT32 = "float32"
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    FLOAT32: ("", {}), "fp16": ("fp16", {}), "1-bit": ("onebit", {}), "top 1 %": ("topk", {"k": 0.01}),
    "PowerSGD": ("powersgd", {"rank": 2})}
"""By the name in a table: the scheme of `course_lib.compress`, and its options."""

SHAPE = {"length": 32, "layers": 2, "heads": 4, "width": 128}
ROWS, LOOK_ROWS = 8, 32
MAX_NORM = 0.5
PLAIN = (0.5, 0.0)
"""Learning rate and momentum. Without momentum all schemes train alike here. With it float32 is faster, and 1-bit and
top-k are not made for it: what they send late is multiplied by it."""


@dataclass(frozen=True)
class Lap:
    """How one scheme fared: `seconds` of its own clock after each update, and the held-out loss (nats a byte) that
    was looked at after `looked[i]` updates. `bytes` are what one rank sends for one update."""

    seconds: tuple[float, ...]
    looked: tuple[int, ...]
    losses: tuple[float, ...]
    bytes: float

    @property
    def step_s(self) -> float:
        """Median seconds of an update."""
        import statistics
        return statistics.median(b - a for a, b in zip((0.0, *self.seconds), self.seconds))

    def reaches(self, loss: float) -> float:
        """Seconds until the loss was first seen at or below `loss`; infinite if it never was."""
        return next((s for s, seen in self.points() if seen <= loss), math.inf)

    def points(self) -> list[tuple[float, float]]:
        """(seconds, loss), from the untrained model on."""
        clock = (0.0, *self.seconds)
        return [(clock[n], loss) for n, loss in zip(self.looked, self.losses)]


def race(schemes: Mapping[str, tuple[str, Mapping[str, Any]]] | None = None, *, fabric: str | Fabric = "auto",
         ranks: int = 2, seconds: float = math.inf, until_loss: float = -math.inf, max_updates: int = 1000,
         look_every: int = 10, bucket_mb: float = 0.25, sgd: tuple[float, float] = PLAIN,
         shape: Mapping[str, int] = SHAPE, rows: int = ROWS, seed: int = 0,
         timeout_s: float = 300.0) -> dict[str, Lap]:
    """Train with every scheme until its own clock shows `seconds`, its loss is at `until_loss`, or `max_updates`.

    The model is a `GPT` of `shape`; a rank sees `rows` rows of text an update. All start from the same weights, see the
    same data, and step by SGD with `sgd` = (learning rate, momentum).
    Gradients travel in buckets of `bucket_mb` MB under backward. The options of an entry may say otherwise
    (`{"bucket_mb": 1, "sgd": (0.1, 0.9)}`). Raises `LabError` for numbers below 1.
    """
    if min(max_updates, look_every, rows) < 1:
        raise LabError(f"race: max_updates={max_updates}, look_every={look_every}, rows={rows}; give numbers of 1 or "
                       "more.")
    entries = {name: (scheme, dict(options)) for name, (scheme, options) in (schemes or SCHEMES).items()}
    return run(_on_rank, entries, seconds, until_loss, max_updates, look_every, bucket_mb, sgd, dict(shape), rows, seed,
               ranks=ranks, fabric=fabric, timeout_s=timeout_s)[0]


class Runner:
    """One scheme on one rank."""

    def __init__(self, scheme: str, options: dict[str, Any], bucket_mb: float, sgd: tuple[float, float],
                 shape: Mapping[str, int], seed: int) -> None:
        import torch

        from course_lib.compress import SCHEMES as KNOWN
        from course_lib.compress import hook
        from course_lib.train import wrap
        from course_lib.train.gpt import GPT, GPTConfig

        torch.manual_seed(seed)
        self.model = GPT(GPTConfig(**shape))
        layout = {"bucket_mb": options.pop("bucket_mb", bucket_mb), "first_bucket_mb": None}
        lr, momentum = options.pop("sgd", sgd)
        hooked = {"comm_hook": hook, "hook_state": KNOWN[scheme](self.model, **options)} if scheme else {}
        self.wrapped = wrap("bucketed", self.model, **layout, **hooked)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        self.state = hooked.get("hook_state")
        self.seconds: list[float] = []
        self.looked, self.losses = [], []

    def sent(self) -> float:
        from course_lib.launch import current_wire
        return self.state.wire_bytes() if self.state else current_wire().traffic.total_bytes

    def gradient(self, batch: Any) -> None:
        from course_lib.train import accumulate
        from course_lib.train.gpt import next_byte_loss

        self.optimizer.zero_grad(set_to_none=False)
        accumulate(self.wrapped, [batch], next_byte_loss, normalise="micro")

    def update(self, batch: Any) -> None:
        from course_lib.train.clip import clip_grad_norm

        self.gradient(batch)
        clip_grad_norm(self.model.parameters(), MAX_NORM)
        self.optimizer.step()

    def warm_up(self, batch: Any) -> float:
        """Rebuild the buckets and make the connections, as if it never was. Returns the bytes sent for one gradient."""
        kept = self.state.state_dict() if self.state else None
        for _ in range(2):
            before = self.sent()
            self.gradient(batch)
        if self.state:
            self.state.load_state_dict(kept)
        return self.sent() - before

    def look(self, held_out: Any) -> None:
        import torch

        from course_lib.train.gpt import next_byte_loss

        with torch.no_grad():
            summed, count = next_byte_loss(self.model, held_out)
        self.looked.append(len(self.seconds))
        self.losses.append(float(summed) / count)


def _on_rank(entries, seconds, until_loss, max_updates, look_every, bucket_mb, sgd, shape, rows,
             seed) -> dict[str, Lap]:
    import torch
    import torch.distributed as dist

    from course_lib.launch import control_group
    from course_lib.record import now
    from course_lib.train import data

    text, control, rank = data.text(1.0), control_group(), dist.get_rank()
    cut = len(text) * 9 // 10
    (held_out,) = data.batches(text[cut:], LOOK_ROWS, shape["length"], 1, seed=seed)
    batches = list(data.batches(text[:cut], rows, shape["length"], max_updates, seed=seed, rank=rank))
    runners = {name: Runner(*entry, bucket_mb, sgd, shape, seed) for name, entry in entries.items()}
    sent = {name: runner.warm_up(batches[0]) for name, runner in runners.items()}
    for runner in runners.values():
        runner.look(held_out)
    running = dict(runners)
    for turn in range(max_updates):
        names = list(running)
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            runner = running[name]
            dist.barrier(control)
            begin = now()
            runner.update(batches[turn])
            took = torch.tensor([(now() - begin) * 1e-9], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX, group=control)
            runner.seconds.append(float(took) + (runner.seconds[-1] if runner.seconds else 0.0))
            over = runner.seconds[-1] >= seconds
            if over or len(runner.seconds) % look_every == 0:
                runner.look(held_out)
            if over or runner.losses[-1] <= until_loss:
                del running[name]
        if not running:
            break
    return {name: Lap(tuple(r.seconds), tuple(r.looked), tuple(r.losses), sent[name]) for name, r in runners.items()}
