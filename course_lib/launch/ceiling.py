"""How fast a wire can be here at all: above that an absolute rate is a wish, and refused."""

from __future__ import annotations

import functools

from course_lib.launch.fabric import Fabric

SAFE_GBIT = 2.0
"""Up to this rate nothing is measured: two busy cores carry it."""


@functools.lru_cache
def ceiling_gbit(ranks: int) -> float:
    """Gbit/s a rank sends in an unshaped 16 MiB all-reduce, best of five. Starts a run of its own."""
    from course_lib.launch.client import run
    return min(run(_fastest, ranks=ranks, fabric="loopback", timeout_s=60))


def _fastest() -> float:
    import torch
    import torch.distributed as dist

    from course_lib.record import now
    buffer, best = torch.zeros(4 * 2**20), float("inf")
    ranks = dist.get_world_size()
    for _ in range(6):
        dist.barrier()
        start = now()
        dist.all_reduce(buffer)
        best = min(best, now() - start)
    return 8 * 2 * (ranks - 1) / ranks * 16 * 2**20 / best if ranks > 1 else float("inf")


def refuse_above_ceiling(fabric: Fabric, ranks: int) -> None:
    """Raise `ValueError` if an absolute rate is more than this machine can carry."""
    asked = max((r for r in (fabric.gbit, fabric.inter_gbit) if r), default=0.0)
    if fabric.kind not in ("shaped", "paced") or asked <= SAFE_GBIT:
        return
    ceiling = ceiling_gbit(ranks)
    if asked > ceiling:
        raise ValueError(f"{asked:g} Gbit/s is above what {ranks} ranks can carry on this machine "
                         f"({ceiling:.1f} Gbit/s measured just now): ask for less, or use a preset "
                         "such as Fabric('100GbE'), which is scaled and says so")
