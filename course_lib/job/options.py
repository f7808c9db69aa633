"""What the command can be asked for, and what it refuses before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from course_lib.plan.volumes import Impossible, accumulation_steps
from course_lib.train.gpt import GPTConfig

STRATEGIES = {"serial": "serial", "no_sync": "no_sync", "bucketed": "bucketed", "every-step": "every_step",
              "zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "local-sgd": "local_sgd", "diloco": "diloco"}
"""What people write, and what `train.wrap` calls it."""
LOCAL, SHARDED = ("local-sgd", "diloco"), ("zero1", "zero2", "zero3")
SPLIT = ("zero-bubble", "zb-v")
"""Pipelines that run the backward pass in two halves."""
PIPELINES = ("1f1b", "gpipe", "interleaved", *SPLIT)
MOST = 2**43
"""The largest whole number, and size in bytes. Batches are seeded with a million times as much, which has 64 bits."""
RATE = 1e37
"""The largest that optimizers take: AdamW's first step multiplies it by 10, in float32."""
SCHEMES = ("none", "fp16", "bf16", "onebit", "topk", "powersgd")


class Refusal(ValueError):
    """What was asked for cannot be done; the sentence says why and what to do instead."""


def _about(help: str, kind: Any, choices: tuple[str, ...] | None = None) -> dict[str, Any]:
    return {"help": help, "kind": kind, "choices": choices}


def _option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata=_about(help, type(default), choices))


@dataclass(frozen=True)
class Options:
    """One run. The field `global_batch` is the option `--global-batch`, and so on."""

    strategy: str = _option("bucketed", "How gradients travel.", choices=tuple(STRATEGIES))
    compress: str = _option("none", "What the buckets are compressed by.", choices=SCHEMES)
    topk: float = _option(0.01, "The share of entries that --compress topk sends.")
    powersgd_rank: int = _option(2, "Columns of the factors of --compress powersgd.")
    bucket_mb: float = _option(1.0, "Bucket size in MB (2**20 bytes).")
    local_steps: int = _option(8, "Updates in a round of local-sgd and diloco.")
    outer_lr: float = _option(0.7, "Learning rate of diloco's outer step.")
    outer_momentum: float = _option(0.9, "Momentum of diloco's outer step.")
    pp: int = _option(1, "Ranks in a pipeline.")
    tp: int = _option(1, "Ranks that share every layer.")
    dp: int = _option(0, "Replicas. 0: as many as the ranks give.")
    pipeline: str = _option("1f1b", "The schedule of a pipeline.", choices=PIPELINES)
    sequence_parallel: bool = _option(False, "With --tp: norms and residuals are cut along the rows too.")

    steps: int = _option(100, "Updates in all; a run that is resumed counts on.")
    batch: int = _option(4, "b: rows of a micro-batch.")
    micro_steps: int = _option(4, "N: micro-batches of a replica in one update.")
    global_batch: int = _option(0, "B: rows of one update over all replicas; N is then B / (b·D). 0: b·D·N.")
    optimizer: str = _option("adamw", "The optimizer.", choices=("adamw", "sgd"))
    lr: float = _option(2e-3, "Learning rate.")
    warmup: int = _option(0, "Updates in which the learning rate rises to --lr.")
    decay: str = _option("constant", "What the learning rate does after that.", choices=("constant", "cosine"))
    weight_decay: float = _option(0.0, "Weight decay.")
    momentum: float = _option(0.9, "Momentum of --optimizer sgd.")
    max_norm: float = _option(0.0, "Clip the gradient to this global norm. 0: never.")
    bf16: bool = _option(False, "Compute in bfloat16 by autocast; parameters and gradients stay float32.")
    seed: int = _option(0, "Of the parameters and the order of the data.")

    layers: int = _option(4, "Blocks of the GPT.")
    heads: int = _option(4, "Attention heads.")
    width: int = _option(128, "Width of the residual stream.")
    length: int = _option(128, "Bytes of a row.")
    untied: bool = _option(False, "Give the output matrix its own parameters.")
    recompute: bool = _option(False, "Recompute activations in backward.")
    data: Path | None = field(default=None, metadata=_about("A file to learn, as bytes. Without: the standard "
                                                            "library's sources.", Path))
    data_mb: float = _option(4.0, "How much of the data is used, in MB (2**20 bytes).")

    out: Path = field(default=Path("run"), metadata=_about("Folder of metrics.jsonl, checkpoints/, trace/, model.pt; "
                                                           "all nodes see it.", Path))
    checkpoint_every: int = _option(50, "Updates from one checkpoint to the next; the last update has one too.")
    keep: int = _option(2, "How many checkpoints stay.")
    trace_steps: str = _option("", "Profile these updates, for `course trace`: 5, or 5-7.")

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch", 1), ("micro_steps", 1), ("layers", 1), ("heads", 1), ("width", 1),
                            ("length", 1), ("pp", 1), ("tp", 1), ("dp", 0), ("global_batch", 0), ("warmup", 0),
                            ("local_steps", 1), ("powersgd_rank", 1), ("checkpoint_every", 1), ("keep", 1)):
            if getattr(self, name) < least:
                raise Refusal(f"{flag(name)} {getattr(self, name)}: give a whole number of {least} or more")
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, int) and abs(value) > MOST:
                near = f"{MOST} or less" if value > 0 else f"{-MOST} or more"
                raise Refusal(f"{flag(one.name)} {str(value)[:30]}: give a whole number of {near}")
        for name in ("lr", "weight_decay", "outer_lr"):
            if getattr(self, name) > RATE:
                raise Refusal(f"{flag(name)} {getattr(self, name)}: give a number of {RATE} or less")
        if not 1 <= self.data_mb * 2**20 <= MOST:
            raise Refusal(f"--data-mb {self.data_mb}: give a size of a byte or more, in MB (2**20 bytes), and at most "
                          f"{MOST // 2**20}")
        for name in ("bucket_mb", "lr"):
            if not getattr(self, name) > 0:
                raise Refusal(f"{flag(name)} {getattr(self, name)}: give a number above 0")
        for name in ("max_norm", "weight_decay", "outer_lr"):
            if not getattr(self, name) >= 0:
                raise Refusal(f"{flag(name)} {getattr(self, name)}: give a number of 0 or more")
        for name in ("momentum", "outer_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise Refusal(f"{flag(name)} {getattr(self, name)}: give a number from 0 up to, not including, 1")
        if not 0 < self.topk <= 1:
            raise Refusal(f"--topk {self.topk}: give the share of entries to send, above 0 and at most 1")
        for one in fields(self):
            if (choices := one.metadata["choices"]) and getattr(self, one.name) not in choices:
                raise Refusal(f"{flag(one.name)} {getattr(self, one.name)}: choose one of {', '.join(choices)}")
        if self.data is not None and not self.data.is_file():
            raise Refusal(f"--data {self.data}: there is no such file")
        self._refuse_combinations()
        self.traced  # noqa: B018  (refuses what cannot be read)

    def _refuse_combinations(self) -> None:
        if self.width % self.heads:
            raise Refusal(f"--heads {self.heads} do not divide --width {self.width}; choose a divisor")
        if self.compress != "none" and self.strategy != "bucketed":
            raise Refusal(f"--compress {self.compress} compresses buckets, and --strategy {self.strategy} sends its "
                          "gradients another way; use --strategy bucketed")
        if self.compress != "none" and (self.pp > 1 or self.tp > 1):
            raise Refusal(f"--compress {self.compress} works on replicas of a whole model; leave --pp and --tp out")
        if self.pp > 1 and self.strategy != "bucketed":
            raise Refusal(f"--pp {self.pp} reduces the gradients of a stage over its replicas in buckets, as soon as "
                          f"they are whole, and --strategy {self.strategy} would do it another way; use bucketed")
        if self.tp > 1 and self.strategy in (*LOCAL, *SHARDED):
            raise Refusal(f"--tp {self.tp} cuts every layer, and --strategy {self.strategy} would have to spread or "
                          "average what is cut; use serial, no_sync, bucketed or every-step, or leave --tp out")
        if self.heads % self.tp or self.width % self.tp:
            raise Refusal(f"--tp {self.tp} does not divide --heads {self.heads}; choose a divisor of it")
        if self.sequence_parallel and (self.tp == 1 or self.length % self.tp):
            raise Refusal(f"--sequence-parallel cuts --length {self.length} over --tp {self.tp} ranks; give a --tp "
                          "above 1 that divides it")
        if self.tp > 1 and self.pp > 1 and self.pipeline in SPLIT:
            raise Refusal(f"--pipeline {self.pipeline} runs backward in two halves, and --tp {self.tp} would "
                          "communicate in both; use 1f1b, gpipe or interleaved")
        if self.pp > 1 and self.layers < self.stages:
            raise Refusal(f"--layers {self.layers} do not fill the {self.stages} stages of --pp {self.pp} --pipeline "
                          f"{self.pipeline}; give each stage a layer or more")

    def laid_out(self, ranks: int) -> Options:
        """These options with `dp`, `micro_steps` and `global_batch` filled in for a number of ranks. Raises `Refusal`
        where they do not fit."""
        if ranks < 1:
            raise Refusal(f"--ranks {ranks}: give a whole number of 1 or more")
        each = self.pp * self.tp
        dp = self.dp or ranks // each
        if self.dp and dp * each != ranks:
            raise Refusal(f"--dp {self.dp} times --pp {self.pp} times --tp {self.tp} is {dp * each}, and there are "
                          f"{ranks} ranks; start {dp * each}")
        if not dp or dp * each != ranks:
            raise Refusal(f"--pp {self.pp} times --tp {self.tp} is {each}, which does not divide the {ranks} ranks; "
                          f"start a multiple of {each}")
        micro_steps = self._accumulated(dp) if self.global_batch else self.micro_steps
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return Options(**values | {"dp": dp, "micro_steps": micro_steps, "global_batch": micro_steps * self.batch * dp})

    def _accumulated(self, dp: int) -> int:
        """N of the batches, by the library's one formula. Raises `Refusal`."""
        try:
            return accumulation_steps(self.global_batch, self.batch, dp)
        except Impossible as reason:
            raise Refusal(f"--global-batch {self.global_batch} with --batch {self.batch} on {dp} replicas: "
                          f"{reason}") from None

    @property
    def stages(self) -> int:
        return self.pp * (2 if self.pipeline in ("interleaved", "zb-v") else 1)

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(length=self.length, layers=self.layers, heads=self.heads, width=self.width,
                         tied=not self.untied, checkpoint=self.recompute)

    @property
    def traced(self) -> range:
        """The updates to profile, counted from 1."""
        if not self.trace_steps:
            return range(0)
        found = re.fullmatch(r"([0-9]{1,12})(?:-([0-9]{1,12}))?", self.trace_steps)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise Refusal(f"--trace-steps {self.trace_steps}: give an update, counted from 1, or a range of them, as 5 "
                          "or 5-7")
        if first > self.steps:
            raise Refusal(f"--trace-steps {self.trace_steps}: --steps {self.steps} is the last update")
        return range(first, last + 1)

    def identity(self) -> dict[str, Any]:
        """What a run keeps from its first update to its last, by option. A checkpoint of another is not its own."""
        names = ("layers", "heads", "width", "length", "untied", "seed", "batch", "global_batch", "optimizer", "pp",
                 "tp")
        return {**{flag(name): getattr(self, name) for name in names},
                "--pipeline": self.pipeline if self.pp > 1 else None, "--strategy": self.family}

    @property
    def family(self) -> str:
        """Strategies of one family read each other's checkpoints: all that keep one state for all replicas do."""
        if self.strategy in LOCAL:
            return self.strategy
        return "one with the same state everywhere" if self.compress == "none" else f"bucketed, {self.compress}"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
