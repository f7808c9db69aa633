"""The Wire: a `ProcessGroup` through which every byte of a run goes.

It stands in front of gloo. Collectives start in the order in which they were issued, each pays the
link's latency, and each is counted and recorded (issued, started, finished). Stock
`DistributedDataParallel`, FSDP2, comm hooks and our own reducers run on it unchanged.
"""

from __future__ import annotations

import atexit
from typing import Any

import torch
import torch.distributed as dist

from course_lib import record
from course_lib.launch.board import Board
from course_lib.launch.gloo import WireSpec, gloo_group
from course_lib.launch.link import Link, Transfer, WireWork
from course_lib.launch.streams import devices_of, in_order
from course_lib.launch.traffic import SHARE, Traffic, payload_bytes


def profile_label(op: str, nbytes: int, bucket: int) -> str:
    """What a transfer is called in a torch.profiler trace: `wire::all_reduce bytes=4194304 bucket=2`."""
    return f"wire::{op} bytes={nbytes}" + (f" bucket={bucket}" if bucket >= 0 else "")


class Wire(dist.ProcessGroup):
    """A process group over one link. `traffic` counts; spans go to the active recorder."""

    def __init__(self, store: dist.Store, rank: int, size: int, name: str, link: Link, spec: WireSpec,
                 board: Board | None, members: tuple[int, ...]) -> None:
        super().__init__(rank, size)
        self.inner = gloo_group(store, rank, size, spec)
        self.link, self.spec, self.traffic = link, spec, Traffic()
        self._name, self._description = name, "wire"
        self._board, self._members = board, members
        self._board_rank = members[rank]
        self._counts: dict[str, list[int]] = {}  # lane: entered, finished
        self.issued = 0
        """Collectives issued so far: the same on every rank, as long as they pair up."""
        self.queue = "collective"
        """The link's queue for this group's collectives. One queue runs in the order of issue, so a group whose
        collectives fall between another group's in an order of its own on each rank needs another queue."""

    # names, as c10d asks for them

    def getBackendName(self) -> str:
        return "wire"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    # the one way in

    def _issue(self, op: str, start, payload: Any, result: Any, lane: str = "collective") -> WireWork:
        """Queue a transfer. `payload` are the tensors whose bytes count; `result` what its future gives."""
        ranks, nbytes = self.size(), payload_bytes(payload)
        moved = SHARE[op](ranks) * nbytes
        recorder, step, bucket = record.active(), getattr(record.active(), "step", -1), record.tagged()
        size_text = f"{nbytes / 2**20:.3g} MB" if nbytes >= 2**18 else f"{nbytes} bytes"
        what = f"{op}, {size_text}" + (f", bucket {bucket}" if bucket >= 0 else "")
        if "-" in lane and not lane.endswith("any"):
            direction, peer = lane.split("-")
            what += f" {'to' if direction == 'send' else 'from'} rank {self._members[int(peer)]}"
        what += "" if self._name == "0" else f", group {self._name}"
        counts = self._counts.setdefault(lane, [0, 0])
        self.issued += lane == "collective"
        self.traffic.calls[op] += 1
        self.traffic.bytes[op] += moved
        issued = record.now()
        work = WireWork(f"rank {self._board_rank}: {what} on group {self._name!r}", self.spec.timeout_s)

        def before() -> None:
            counts[0] += 1
            self._show(lane, what)

        def after(begin: int, end: int) -> None:
            counts[1] += 1
            self._show(lane, what)
            if recorder is not None:
                if begin > issued:
                    recorder.add("queue", "wire", op, issued, begin, nbytes, bucket, step)
                recorder.add("comm", "wire", op, begin, end, nbytes, bucket, step)

        paced = self.spec.kind == "paced" and lane == "collective" and ranks > 1
        # Messages of one group never wait for another group's: what that one waits for may come after them here.
        return self.link.put(self.queue if lane == "collective" else f"{lane} in {self._name}",
                             Transfer(work, in_order(start, payload), result, moved, issued,
                                      profile_label(op, nbytes, bucket), received=op == "recv",
                                      enter=self._last_entry if paced else None, before=before, after=after))

    def _show(self, lane: str, what: str) -> None:
        """Sends and receives are no rank's fault by their number, so the board hears no members for them."""
        if self._board is not None:
            self._board.write(self._board_rank, f"{self._name}/{lane}",
                              self._members if lane == "collective" else None, *self._counts[lane], what)

    def _last_entry(self, begin: int) -> int:
        """When the last rank of the group entered: all ranks of a paced run share one clock."""
        entered = torch.tensor([begin], dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.inner.allreduce([entered], options).wait()
        return int(entered)

    # collectives: the c10d method names of torch 2.11 to 2.13, once

    def allreduce(self, tensors, opts=None):
        tensors, opts = _listed(tensors), opts or dist.AllreduceOptions()
        return self._issue("all_reduce", lambda: self.inner.allreduce(tensors, opts), tensors, tensors)

    def allreduce_coalesced(self, tensors, opts=None):
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._issue("all_reduce", lambda: self.inner.allreduce_coalesced(tensors, opts), tensors, tensors)

    def broadcast(self, tensors, opts):
        tensors = _listed(tensors)
        return self._issue("broadcast", lambda: self.inner.broadcast(tensors, opts), tensors, tensors)

    def reduce(self, tensors, opts):
        tensors = _listed(tensors)
        return self._issue("reduce", lambda: self.inner.reduce(tensors, opts), tensors, tensors)

    def allgather(self, outputs, inputs, opts=None):
        opts = opts or dist.AllgatherOptions()
        return self._issue("all_gather", lambda: self.inner.allgather(outputs, inputs, opts), outputs, outputs)

    def _allgather_base(self, output, input, opts=None):
        opts = opts or dist.AllgatherOptions()
        return self._issue("all_gather", lambda: self.inner._allgather_base(output, input, opts), output, [output])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        opts = opts or dist.AllgatherOptions()
        start = lambda: self.inner.allgather_into_tensor_coalesced(outputs, inputs, opts)  # noqa: E731
        return self._issue("all_gather", start, outputs, outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(self, outputs, inputs, opts=None):
        opts = opts or dist.ReduceScatterOptions()
        return self._issue("reduce_scatter", lambda: self.inner.reduce_scatter(outputs, inputs, opts), inputs, outputs)

    def _reduce_scatter_base(self, output, input, opts=None):
        opts = opts or dist.ReduceScatterOptions()
        start = lambda: self.inner._reduce_scatter_base(output, input, opts)  # noqa: E731
        return self._issue("reduce_scatter", start, input, [output])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        opts = opts or dist.ReduceScatterOptions()
        start = lambda: self.inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts)  # noqa: E731
        return self._issue("reduce_scatter", start, inputs, outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(self, output, input, output_split, input_split, opts=None):
        opts = opts or dist.AllToAllOptions()
        start = lambda: self.inner.alltoall_base(output, input, output_split, input_split, opts)  # noqa: E731
        return self._issue("all_to_all", start, input, [output])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs, inputs, opts=None):
        opts = opts or dist.AllToAllOptions()
        return self._issue("all_to_all", lambda: self.inner.alltoall(outputs, inputs, opts), inputs, outputs)

    def gather(self, outputs, inputs, opts):
        payload = outputs or [inputs] * self.size()
        return self._issue("gather", lambda: self.inner.gather(outputs, inputs, opts), payload, inputs)

    def scatter(self, outputs, inputs, opts):
        payload = inputs or [outputs] * self.size()
        return self._issue("scatter", lambda: self.inner.scatter(outputs, inputs, opts), payload, outputs)

    def barrier(self, opts=None):
        opts = opts or dist.BarrierOptions()
        return self._issue("barrier", lambda: self.inner.barrier(opts), None, [])

    def send(self, tensors, dst, tag=0):
        _in_memory(tensors)
        return self._issue("send", lambda: self.inner.send(tensors, dst, tag), tensors, tensors, f"send-{dst}")

    def recv(self, tensors, src, tag=0):
        _in_memory(tensors)
        # Posted at once, also behind others: gloo sends when it has heard that the receiver is ready, and that word
        # would queue behind whatever this rank sends meanwhile.
        posted = self.inner.recv(tensors, src, tag)
        return self._issue("recv", lambda: posted, tensors, tensors, f"recv-{src}")

    def recv_anysource(self, tensors, tag=0):
        _in_memory(tensors)
        return self._issue("recv", lambda: self.inner.recv_anysource(tensors, tag), tensors, tensors, "recv-any")


def _in_memory(tensors: Any) -> None:
    if device := next(devices_of(tensors), None):
        raise ValueError(f"a tensor on {device} cannot be sent to one rank or received from one: gloo takes CUDA "
                         "tensors in collectives alone; move it to the CPU, or use fabric=\"nccl\"")


def _listed(tensors: Any) -> list:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def register(spec: WireSpec, board: Board | None = None) -> None:
    """Make `backend="wire"` known to torch.distributed in this process. Groups whose ranks share a
    node use the inner link, all others the link between nodes. Where the process ends in the ordinary way, the
    links and the groups are closed before it does."""
    inner, inter = Link("inner", spec.inner), Link("inter", spec.inter)

    def create(options, _backend_options) -> Wire:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        nodes = {spec.node_of[r] for r in ranks}
        link = inner if len(nodes) == 1 else inter
        return Wire(options.store, options.group_rank, options.group_size, options.group_id, link, spec, board,
                    tuple(ranks))

    def close() -> None:
        for link in (inner, inter):
            link.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(close)
    dist.Backend.register_backend("wire", create, extended_api=True, devices=["cpu", "cuda"])
