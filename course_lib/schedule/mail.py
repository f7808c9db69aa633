"""Messages between neighbouring stages: sends that go on at once, receives that are posted early.

A receive needs to know what comes. The shape of what a stage puts out is told through the store, once; from then
on it must stay, and a micro-batch of another shape is refused by name.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from datetime import timedelta

import torch
import torch.distributed as dist

from course_lib.schedule.action import SENDS, Action, Op, Schedule, ScheduleError
from course_lib.tensor.collective import in_memory


class Shapes:
    """Shape and dtype of what each stage puts out, and so of the gradient that comes back."""

    def __init__(self, name: str, limit_s: float) -> None:
        self._store, self._name, self._limit_s = dist.distributed_c10d._get_default_store(), name, limit_s
        self._known: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}

    def tell(self, stage: int, micro: int, output: torch.Tensor) -> None:
        """Note what a stage put out. Raises `ScheduleError` where it is not what it was before."""
        now = tuple(output.shape), output.dtype
        before = self._known.get(stage)
        if before is None:
            self._known[stage] = now
            self._store.set(f"{self._name}/{stage}", json.dumps([now[0], str(now[1]).removeprefix("torch.")]))
        elif now != before:
            raise ScheduleError(f"stage {stage} put out {describe(*now)} for micro-batch {micro}, but "
                                f"{describe(*before)} before; pad micro-batches to one shape and leave the padding out "
                                "of the loss")

    def known(self, stage: int) -> bool:
        return stage in self._known

    def ask(self, stage: int, rank: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Wait until another rank has told. Raises `TimeoutError` naming it."""
        if stage not in self._known:
            key = f"{self._name}/{stage}"
            try:
                self._store.wait([key], timedelta(seconds=self._limit_s))
            except (RuntimeError, dist.DistStoreError) as error:
                raise TimeoutError(f"rank {rank} did not say within {self._limit_s:g} s what stage {stage} puts out: "
                                   "it has ended or waits itself") from error
            shape, dtype = json.loads(self._store.get(key))
            self._known[stage] = tuple(shape), getattr(torch, dtype)
        return self._known[stage]


def describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


class Mail:
    """Sends and receives of one rank. `ranks[r]` is the global rank of rank r of the pipeline."""

    def __init__(self, schedule: Schedule, rank: int, group: dist.ProcessGroup, device: torch.device,
                 shapes: Shapes) -> None:
        self._schedule, self._shapes = schedule, shapes
        self._global = dist.get_process_group_ranks(group)
        nccl = device.type == "cuda" and "nccl" in dist.get_backend_config(group)
        self._device = device if nccl else torch.device("cpu")  # gloo sends and receives from the host's memory only
        self._ways = _ways(schedule, rank, group, self._global, device if nccl else None)
        self._unposted: dict[int, deque[Action]] = defaultdict(deque)
        self._posted: dict[Action, tuple[torch.Tensor, dist.Work]] = {}
        self._sent: list[tuple[torch.Tensor, dist.Work]] = []
        self._rank = rank

    def _peer(self, action: Action) -> int:
        return self._schedule.rank_of[action.partner().stage]

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Hand a tensor over; it is kept until it has gone."""
        self._sent = [(kept, work) for kept, work in self._sent if not (work.is_completed() and work.wait())]
        tensor, peer = in_memory(tensor.detach().to(self._device)), self._peer(action)
        work = dist.isend(tensor, self._global[peer], group=self._ways[self._rank, peer])
        self._sent.append((tensor, work))

    def post(self, action: Action) -> None:
        """Post a receive now, or, while the shape is not known, when it is needed. One way keeps its order."""
        peer = self._peer(action)
        self._unposted[peer].append(action)
        self._flush(peer, None)

    def take(self, action: Action) -> tuple[torch.Tensor, dist.Work]:
        """The buffer of a receive and its work, not waited for."""
        if action not in self._posted:
            self._flush(self._peer(action), action)
        return self._posted.pop(action)

    def finish(self) -> None:
        """Wait until everything sent has gone."""
        for _, work in self._sent:
            work.wait()
        self._sent.clear()

    def _flush(self, peer: int, until: Action | None) -> None:
        waiting = self._unposted[peer]
        while waiting and (until is not None or self._shapes.known(_source(waiting[0]))):
            action = waiting.popleft()
            shape, dtype = self._shapes.ask(_source(action), peer)
            buffer = torch.empty(shape, dtype=dtype, device=self._device)
            work = dist.irecv(buffer, self._global[peer], group=self._ways[peer, self._rank])
            self._posted[action] = buffer, work
            until = None if action == until else until


def _source(receive: Action) -> int:
    """The stage whose output has the shape of what is received."""
    return receive.stage - 1 if receive.op is Op.RECV_F else receive.stage


def _ways(schedule: Schedule, rank: int, group: dist.ProcessGroup, ranks: list[int],
          nccl: torch.device | None) -> dict[tuple[int, int], dist.ProcessGroup]:
    """The group for messages from one rank to another. NCCL keeps each two ranks apart, but runs what they tell each
    other in order, so that a receive that waits would hold up the send that its peer waits for: each direction has a
    group there, which all ranks of the pipeline make. A Wire and gloo keep directions apart by themselves."""
    pairs = sorted({(r, schedule.rank_of[a.partner().stage])
                    for r, actions in enumerate(schedule.ranks) for a in actions if a.op in SENDS})
    mine = [pair for pair in pairs if rank in pair]
    if nccl is None:
        return dict.fromkeys(mine, group)
    up, down = (dist.new_group(ranks, use_local_synchronization=True) for _ in range(2))
    ways = {(a, b): up if a < b else down for a, b in mine}
    for (a, b), way in ways.items():
        # The first message waits for both ends to make the communicator; a receive that is posted early must not.
        first = torch.zeros(1, device=nccl)
        dist.send(first, ranks[b], way) if rank == a else dist.recv(first, ranks[a], way)
    return ways
