"""The ring: every rank receives from its left neighbour and sends to its right one, all at the same time.

The tensor is cut into n segments. In a reduce-scatter each segment travels once around, gathering a summand at every
rank, and ends at its owner; in an all-gather it travels once around from its owner. Both send (n−1)/n of the tensor
a rank, the least that is possible; an all-reduce is one after the other. (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009.)

The order of the additions is fixed by the ring, and every rank gets the owner's bytes: results are the same to the
bit on all ranks and in every run. Each addition rounds to the tensor's dtype.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from course_lib.collectives.issue import checked, issue

CHUNKS = 2
"""Parts of a segment that follow each other. While one is added to, the next is on the wire; each costs a message's
latency at every hop."""


def segments(flat: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """The parts of a 1-D tensor, as views. They differ by one element at most, the larger ones first, and may be
    empty. Part r belongs to rank r."""
    return list(flat.tensor_split(parts))


def all_reduce_ring(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, op: str = "sum",
                    chunks: int = CHUNKS, async_op: bool = False) -> dist.Work | None:
    """Sum or mean over the ranks of `group`, in place, by a reduce-scatter and an all-gather.

    Sends 2(n−1)/n of the tensor a rank, in 2(n−1) hops. With `async_op` returns a work whose future gives the
    tensor. All ranks issue their collectives in the same order. Raises `ValueError` on a tensor that is not
    contiguous or not on the CPU.
    """
    flat, group = checked(tensor, op, group)
    return issue("all_reduce_ring", tensor, group, lambda: ring_all_reduce(flat, group, chunks, op), async_op)


def reduce_scatter_ring(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, op: str = "sum",
                        chunks: int = CHUNKS, async_op: bool = False) -> dist.Work | None:
    """Sum or mean over ranks, of which rank r gets segment r: `segments(tensor.view(-1), n)[r]` holds it afterwards.
    The other segments hold partial sums then. Otherwise as `all_reduce_ring`, at half of its bytes and hops."""
    flat, group = checked(tensor, op, group)
    return issue("reduce_scatter_ring", tensor, group, lambda: ring_reduce_scatter(flat, group, chunks, op), async_op)


def all_gather_ring(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, chunks: int = CHUNKS,
                    async_op: bool = False) -> dist.Work | None:
    """Every rank's segment to all: rank r gives segment r of its tensor and gets the others, in place."""
    flat, group = checked(tensor, "sum", group)
    return issue("all_gather_ring", tensor, group, lambda: ring_all_gather(flat, group, chunks), async_op)


# the same without the queue: bodies of collectives, this module's and others'


def ring_all_reduce(flat: torch.Tensor, group: dist.ProcessGroup, chunks: int, op: str,
                    divisor: int | None = None) -> None:
    """`divisor` replaces the number of ranks in a mean."""
    n, r = group.size(), group.rank()
    _relay(flat, _around(r - 1, n) + _around(r, n)[1:], n - 1, group, chunks, (divisor or n) if op == "mean" else 1)


def ring_reduce_scatter(flat: torch.Tensor, group: dist.ProcessGroup, chunks: int, op: str) -> None:
    n, r = group.size(), group.rank()
    _relay(flat, _around(r - 1, n), n - 1, group, chunks, n if op == "mean" else 1)


def ring_all_gather(flat: torch.Tensor, group: dist.ProcessGroup, chunks: int) -> None:
    _relay(flat, _around(group.rank(), group.size()), 0, group, chunks, 1)


def _around(first: int, n: int) -> list[int]:
    """The n segments in the order in which they come by, each rank's one behind its right neighbour's."""
    return [(first - k) % n for k in range(n)]


def _relay(flat: torch.Tensor, route: Sequence[int], sums: int, group: dist.ProcessGroup, chunks: int,
           divisor: int) -> None:
    """Send segment `route[0]`, then receive each later one and pass it on; the last stays.

    The first `sums` segments received are summands, the last of these completes its sum and is divided; what comes
    after is final. Two receives are always posted, so that the wire never waits for an addition.
    """
    n, r = group.size(), group.rank()
    if n == 1 and divisor > 1:  # one rank holds the sum of a larger group already
        flat.div_(divisor)
    parts = segments(flat, n)
    pieces = {s: [p for p in parts[s].tensor_split(max(1, chunks)) if p.numel()] for s in route}
    incoming = [(hop, piece) for hop, s in enumerate(route[1:]) for piece in pieces[s]]
    slots = [torch.empty(max((p.numel() for _, p in incoming), default=0) if sums else 0, dtype=flat.dtype)
             for _ in range(2)]
    posted: deque[tuple[torch.Tensor, dist.Work]] = deque()

    def post(i: int) -> None:
        if i < len(incoming):
            hop, piece = incoming[i]
            # A final piece may land in its place at once: it is the answer to the summand that was sent from there.
            buffer = slots[i % 2][:piece.numel()] if hop < sums else piece
            posted.append((buffer, dist.irecv(buffer, group=group, group_src=(r - 1) % n)))

    def send(piece: torch.Tensor) -> dist.Work:
        return dist.isend(piece, group=group, group_dst=(r + 1) % n)

    post(0)
    post(1)
    sent = [send(piece) for piece in pieces[route[0]]] if len(route) > 1 else []
    for i, (hop, piece) in enumerate(incoming):
        buffer, work = posted.popleft()
        work.wait()
        if hop < sums:
            piece.add_(buffer)
            if hop == sums - 1 and divisor > 1:
                piece.div_(divisor)
        post(i + 2)
        if hop < len(route) - 2:
            sent.append(send(piece))
    for work in sent:
        work.wait()
