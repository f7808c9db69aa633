"""Updates of whole models, or of one shard of every layer, under any strategy of `train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from course_lib import tensor
from course_lib.compress import SCHEMES, Compressor, hook
from course_lib.job.mesh import Mesh
from course_lib.job.model import loss_of, make_optimizer, terms
from course_lib.job.options import LOCAL, SHARDED, STRATEGIES, Options
from course_lib.job.trainee import Made, Trainee
from course_lib.train import Bucketed, DiLoCo, LocalSGD, Sharded, accumulate, wrap
from course_lib.train.clip import global_norm
from course_lib.train.data import Batch
from course_lib.train.gpt import GPT
from course_lib.train.phases import Phases


class Replicas(Trainee):
    """`layout` is the order of the buckets in a saved run. Sums depend on it in their last bits on three ranks or more,
    so a run that goes on goes on with it."""

    def __init__(self, options: Options, mesh: Mesh, model: GPT, layout: Sequence[Sequence[str]] | None = None) -> None:
        super().__init__(options, mesh)
        self._device = next(model.parameters()).device
        self._loss_of = loss_of(options, mesh, self._device)
        self._compressor = _compressor(options, model)
        self._phases = Phases(model)
        self.model = wrap(STRATEGIES[options.strategy], model, process_group=mesh.replicas,
                          **_settings(options, self._compressor, layout))
        self._every = options.strategy in ("serial", "every-step", "zero2", "zero3")
        # these wait for the wire inside a forward pass, and the layers of a sharded model everywhere
        self.knows_compute = mesh.shards is None and options.strategy not in (*SHARDED, "every-step")
        self.params = {slot.name: slot.param for slot in self.model.slots}
        sharded = isinstance(self.model, Sharded)
        self.optimizer = make_optimizer(options, self.model.shards() if sharded else self.params.values())
        if isinstance(self.model, LocalSGD):
            self.model.take_optimizer(self.optimizer)

    def update(self, window: Sequence[Batch]) -> Made:
        share = accumulate(self.model, window, self._loss_of, counts=[terms(batch) for batch in window],
                           every=self._every, phases=self._phases if self.knows_compute else None)
        if self.options.sequence_parallel:
            tensor.finish_replicated_gradients(self.model.module)
        norm = self._norm()
        self.clip(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Made(float(share), float(norm))

    def _norm(self) -> torch.Tensor:
        if isinstance(self.model, Sharded):
            return global_norm(self.model.shards(), shards=self.model.group)
        return global_norm(self.params.values()) if self.mesh.shards is None else tensor.global_norm(self.model.module)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return super().groups + (self.model.outer.param_groups if isinstance(self.model, DiLoCo) else [])

    def settle(self) -> None:
        if isinstance(self.model, LocalSGD) and self.model.local_steps:
            self.model.average()

    # what is saved

    def cell(self) -> dict[str, Any]:
        if self.options.strategy in LOCAL:  # between two averages no two ranks are alike
            return {}
        if isinstance(self.model, Sharded):
            return {"model": self.model.full_state_dict(), "optimizer": self.model.full_optimizer_state(self.optimizer)}
        layout = self.model.buckets if isinstance(self.model, Bucketed) else None
        return {**super().cell(), "layout": layout, "bucket_mb": self.options.bucket_mb}

    def own(self) -> dict[str, Any]:
        if self.options.strategy in LOCAL:
            return {**super().cell(), "round": self.model.get_extra_state()}
        return {} if self._compressor is None else {"compressor": self._compressor.state_dict()}

    def load(self, cell: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        if isinstance(self.model, Sharded):
            self.model.load_full_state_dict(cell["model"])
            self.model.load_full_optimizer_state(self.optimizer, cell["optimizer"])
        elif self.options.strategy in LOCAL:
            super().load(own, {})
            self.model.set_extra_state(own["round"])
        else:
            super().load(cell, own)
        if self._compressor is not None:
            self._compressor.load_state_dict(own["compressor"])

    def weights(self) -> dict[str, torch.Tensor]:
        if isinstance(self.model, Sharded):
            return self.model.full_state_dict()
        if self.mesh.shards is not None:
            return tensor.full_state(self.model.module)
        return {name: value.detach() for name, value in self.model.module.state_dict().items()}


def saved_layout(options: Options, cell: Mapping[str, Any]) -> list[list[str]] | None:
    """The buckets of a saved cell, where this run would make buckets of that size."""
    return cell.get("layout") if cell.get("bucket_mb") == options.bucket_mb else None


def _settings(options: Options, compressor: Compressor | None,
              layout: Sequence[Sequence[str]] | None) -> dict[str, Any]:
    if options.strategy in ("bucketed", "every-step"):
        settings: dict[str, Any] = {"bucket_mb": options.bucket_mb, "plan": layout}
        return settings if compressor is None else settings | {"comm_hook": hook, "hook_state": compressor}
    if options.strategy in LOCAL:
        outer = {"outer_lr": options.outer_lr, "outer_momentum": options.outer_momentum}
        return {"every": options.local_steps} | (outer if STRATEGIES[options.strategy] == "diloco" else {})
    return {}


def _compressor(options: Options, model: GPT) -> Compressor | None:
    if options.compress == "none":
        return None
    settings = {"onebit": {}, "topk": {"k": options.topk}, "powersgd": {"rank": options.powersgd_rank}}
    scheme = SCHEMES[options.compress]
    if options.compress not in settings:
        return scheme(model)
    return scheme(model, on_nonfinite="nan", **settings[options.compress])  # the norm says it, as without compression
