"""The orders that `torch.distributed.pipelining` makes, as lists of our actions. No ranks are started."""

from __future__ import annotations

from types import SimpleNamespace

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from course_lib.schedule import Action, Op

_OPS = {"F": Op.F, "B": Op.B, "I": Op.I, "W": Op.W, "SEND_F": Op.SEND_F, "RECV_F": Op.RECV_F, "SEND_B": Op.SEND_B,
        "RECV_B": Op.RECV_B, "UNSHARD": Op.GATHER, "RESHARD": Op.FREE, "REDUCE_GRAD": Op.REDUCE}
COMPUTE = ("F", "B", "I", "W")


def ours(actions) -> list[Action]:
    return [Action(_OPS[a.computation_type.value], a.stage_index, *([] if a.microbatch_index is None else
                                                                     [a.microbatch_index]))
            for a in actions if a is not None]


def single(cls: str, p: int, m: int) -> dict:
    """One stage a rank: torch derives the order from these two numbers alone."""
    maker = getattr(schedules, cls)
    return maker._get_pipeline_order(SimpleNamespace(_num_stages=p, _n_microbatches=m, pp_group_size=p))


def _stage(p: int, v: int, index: int) -> SimpleNamespace:
    return SimpleNamespace(stage_index=index, group_rank=0, group_size=p, num_stages=p * v, is_first=index == 0,
                           is_last=index == p * v - 1, group=None, device="cpu", submod=None, has_backward=True,
                           stage_index_to_group_rank=None)


def multi(cls: str, p: int, m: int, v: int):
    """Several stages a rank. Returns torch's schedule object. Raises `ValueError` where torch refuses."""
    return getattr(schedules, cls)([_stage(p, v, p * c) for c in range(v)], m)


def compute(order: dict) -> list[list[Action]]:
    return [ours(a for a in order[rank] if a is not None and a.computation_type.value in COMPUTE)
            for rank in sorted(order)]


def lowered(order: dict, rank_of, max_active: int | None = None, messages: bool = True, micro: int = 0):
    """Through torch's own passes: gathers (`max_active`), reductions (`micro`), then sends and receives."""
    plain = {r: [a for a in order[r] if a is not None and a.computation_type.value in COMPUTE] for r in sorted(order)}
    if max_active:
        plain = {r: schedules._add_unshard_reshard(a, max_active) for r, a in plain.items()}
    if micro:
        plain = {r: schedules._add_reduce_grad(a, micro) for r, a in plain.items()}
    if messages:
        plain = schedules._add_send_recv(plain, lambda s: rank_of[s], len(rank_of))
    return [ours(plain[r]) for r in sorted(plain)]


__all__ = ["compute", "generate_stage_to_rank_mapping", "lowered", "multi", "ours", "single"]
