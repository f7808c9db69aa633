"""What a restart does to compressed training: the learner's `Checkpoint` against a run that was never interrupted."""

from __future__ import annotations

import pickle
from typing import Any

from course_lib.lab.errors import LabError

UPDATES, K = 12, 0.01


def resumed(Checkpoint: type, *, ranks: int = 2) -> dict[str, float]:
    """Train a small GPT by top-1 % for `2 * UPDATES` updates, with a restart in the middle. The largest difference of a
    parameter from the run without a restart, by what the checkpoint did with the residuals: `"yours"`, with buckets
    that are rebuilt at the restart, `"rank 0's for all"` and `"dropped"`.

    Raises `OwnRunFailed` with one sentence for what the learner's class does wrong on a rank.
    """
    from course_lib.lab.workbench.buckets import _run

    if not isinstance(Checkpoint, type):
        raise LabError("resumed: pass the class of exercise 7.4 itself.")
    return _run(_on_rank, Checkpoint, ranks=ranks, fabric="loopback", timeout_s=90)[0]


def _on_rank(Checkpoint: type) -> dict[str, float]:
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()

    def gather(value: Any) -> list:
        every = [None] * ranks
        dist.all_gather_object(every, value)
        return every

    first = Training()
    first.train(range(UPDATES))
    sizes = {n: p.numel() for n, p in first.model.named_parameters()}
    weights = {n: p.clone() for n, p in first.model.state_dict().items()}
    mine = first.memory.state_dict()
    ways = {"yours": _through(Checkpoint, mine, sizes, rank, gather), "rank 0's for all": gather(mine)[0],
            "dropped": {}}  # fmt: skip
    first.train(range(UPDATES, 2 * UPDATES))
    found = {}
    for name, residuals in ways.items():
        again = Training()
        again.model.load_state_dict(weights)
        again.memory.load_state_dict(residuals)
        again.train(range(UPDATES, 2 * UPDATES))
        found[name] = max(float((a - b).detach().abs().max())
                          for a, b in zip(again.model.parameters(), first.model.parameters()))
    return found


def _through(Checkpoint: type, mine: dict, sizes: dict[str, int], rank: int, gather: Any) -> dict:
    """The residuals after the learner's save, a file that rank 0 wrote, and load into other buckets."""
    import torch
    import torch.distributed as dist

    from course_lib.lab.guard import Broke, call
    from course_lib.lab.workbench.rank import Fault

    names = list(sizes)
    old, new = ([names[i:i + length] for i in range(0, len(names), length)] for length in (4, 7))
    try:
        flats = [torch.cat([mine[n] for n in bucket]) for bucket in old]
        saved = call(call(Checkpoint, shown="Checkpoint()").save, flats, old, sizes, rank, gather, shown="save(…)")
        file = [pickle.dumps(saved) if rank == 0 else None]
        dist.broadcast_object_list(file, 0)
        flats = call(call(Checkpoint, shown="Checkpoint()").load, pickle.loads(file[0]), new, sizes, rank,
                     shown="load(…)")
        return {n: part for flat, bucket in zip(flats, new) for n, part in
                zip(bucket, flat.split([sizes[n] for n in bucket]))}
    except Broke as broke:
        raise Fault(f"rank {rank}: {broke}") from broke


class Training:
    """A small GPT on one rank, trained by top-k, always on the same rows of the same update."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        from course_lib.compress import TopK, hook
        from course_lib.train import data, wrap
        from course_lib.train.gpt import GPT, GPTConfig

        torch.manual_seed(0)
        self.model = GPT(GPTConfig(length=16, layers=1, heads=2, width=24))
        state = TopK(self.model, K)
        self.memory = state.memories["residual"]
        self.wrapped = wrap("bucketed", self.model, comm_hook=hook, hook_state=state)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)
        self.batches = list(data.batches(data.text(0.1), 4, 16, 2 * UPDATES, rank=dist.get_rank()))

    def train(self, updates: range) -> None:
        from course_lib.train import accumulate
        from course_lib.train.gpt import next_byte_loss

        for update in updates:
            self.optimizer.zero_grad()
            accumulate(self.wrapped, [self.batches[update]], next_byte_loss, normalise="micro")
            self.optimizer.step()
