"""Saving a run and taking it up again: which files there are, who writes them, and whether they are this run's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from course_lib.job import checkpoint
from course_lib.job.mesh import Mesh
from course_lib.job.options import LOCAL, Options
from course_lib.job.state import load_random_state, random_state
from course_lib.job.together import JobError, together
from course_lib.job.trainee import Trainee
from course_lib.train.control import Control


@dataclass(frozen=True)
class Saved:
    """Where a run goes on: after `step` updates, with what this rank's cell and the rank itself had then. Without a
    checkpoint, at the beginning."""

    step: int = 0
    cell: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)

    def load(self, trainee: Trainee) -> None:
        """Hyper-parameters stay those that were asked for now."""
        if not self.step:
            return
        asked = [{key: value for key, value in group.items() if key != "params"} for group in trainee.groups]
        trainee.load(self.cell, self.own)
        for group, values in zip(trainee.groups, asked):
            group.update(values)
        if self.own:
            load_random_state(self.own["random"])


class Keeper:
    """Writes and reads the checkpoints of one run. Every call is collective.

    A cell (the replicas of one stage and shard) writes one file; every rank writes one of its own, with its random
    generators and what else belongs to it alone. `data` is the digest of what is learnt.
    """

    def __init__(self, options: Options, mesh: Mesh, control: Control, data: str) -> None:
        self._options, self._mesh, self._control = options, mesh, control
        self._identity = {**options.identity(), "--data": data}
        self._rank = dist.get_rank()

    def saved(self) -> Saved:
        """The newest checkpoint in --out. Raises `JobError`, on all ranks, where it is damaged or of another run."""
        found = together(self._control, "the choice of a checkpoint", lambda: checkpoint.steps(self._options.out)[-1:])
        if not found[0]:
            return Saved()
        step = found[0][0]
        box: list[Saved] = []
        together(self._control, f"reading the checkpoint of update {step}", lambda: box.append(self._read(step)))
        return box[0]

    def _read(self, step: int) -> Saved:
        folder = checkpoint.folder_of(self._options.out, step)
        manifest = checkpoint.manifest_of(folder)
        theirs = manifest["identity"]
        if other := [key for key, value in self._identity.items() if theirs.get(key) != value]:
            raise JobError(f"{folder} belongs to another run: {other[0]} was {theirs.get(other[0])!r} and is "
                           f"{self._identity[other[0]]!r}; give what that run had, or another --out")
        same_ranks = manifest["ranks"] == dist.get_world_size()
        if not same_ranks and (self._options.strategy in LOCAL or self._options.compress != "none"):
            raise JobError(f"{folder} was written by {manifest['ranks']} ranks and there are {dist.get_world_size()}: "
                           "local updates and compression keep something on every rank; start as many, or choose "
                           "another --out")
        cell = checkpoint.read(folder, f"{self._mesh.cell}.pt", manifest)
        own = checkpoint.read(folder, f"rank-{self._rank}.pt", manifest) if same_ranks else {}
        return Saved(step, cell, own)

    def save(self, trainee: Trainee, step: int) -> None:
        out, control, rank = self._options.out, self._control, self._rank
        states = {f"rank-{rank}.pt": {**trainee.own(), "random": random_state()}}
        cell = trainee.cell()
        if self._mesh.speaks:
            states[f"{self._mesh.cell}.pt"] = cell
        what = f"the checkpoint of update {step}"
        together(control, what, lambda: str(checkpoint.begin(out, step)) if rank == 0 else None)
        written = together(control, what, lambda: {name: checkpoint.write(out, step, name, state)
                                                   for name, state in states.items()})
        files = {name: entry for one in written for name, entry in one.items()}
        manifest = {"identity": self._identity, "strategy": self._options.strategy, "ranks": control.size,
                    "torch": torch.__version__}
        together(control, what, lambda: checkpoint.publish(out, step, manifest, files, self._options.keep)
                 if rank == 0 else None)
