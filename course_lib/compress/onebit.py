"""One bit an entry: signs, and one scale for each parameter.

Two phases, so that bytes do not grow with the ranks. Every rank owns one part of every parameter. In phase 1 it
receives all ranks' signs of its parts (all-to-all) and averages them; the mean is no longer ±scale, so it is
compressed again, with a residual of its own, and in phase 2 everybody gets every part (all-gather).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from course_lib.compress.compressor import Compressor, NonFiniteGradient, Phases
from course_lib.compress.memory import Memory
from course_lib.train.bucket import Bucket

# As a little-endian number, eight bytes that are 0 or 1 times this have the eight bits in their highest byte.
_GATHER = 0x0102040810204080
_SCALE_BYTES = 4
_thread = threading.local()


def part_of(numel: int, ranks: int) -> int:
    """Entries of a parameter that one rank owns: `numel` over `ranks`, rounded up to 32, which is 4 bytes of signs.
    The last ranks own fewer, or none."""
    return -(-numel // (32 * ranks)) * 32


def signs_of(x: torch.Tensor, numel: int) -> torch.Tensor:
    """The sign bits of the 1-D x as uint8 (numel/8,), the first one lowest, then zeros. `numel` is a multiple of 8."""
    if not x.is_cuda:  # on a CPU numpy takes a quarter of the time of what follows
        packed = torch.from_numpy(np.packbits(np.signbit(x.numpy()), bitorder="little"))
        return pad(packed, (0, numel // 8 - len(packed)))
    words = pad(torch.signbit(x), (0, numel - len(x))).view(torch.int64) * _GATHER
    return words.view(torch.uint8)[7::8].contiguous()


def unpack(packed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 (…, n) to float32 (…, 8·n): +1 for a bit that is 0, −1 for one that is 1."""
    out = torch.empty(8 * packed.numel(), device=packed.device) if out is None else out
    torch.index_select(_table(packed.device), 0, packed.reshape(-1).int(), out=out.view(-1, 8))
    return out.view(*packed.shape[:-1], 8 * packed.shape[-1])


@lru_cache
def _table(device: torch.device) -> torch.Tensor:
    """The eight signs of every byte, (256, 8)."""
    return (1.0 - 2.0 * (torch.arange(256)[:, None] >> torch.arange(8) & 1)).to(device, torch.float32)


def split(x: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, units) of the 1-D x: mean|x| with no dimensions, and ±1 by the sign bits of x.

    Of all ±s, s = mean|x| has the smallest squared error (Seide 2014; Karimireddy 2019, arXiv 1901.09847). A sum and
    no dot product: BLAS adds in an order that depends on where in memory x begins, and so on the bucket it lies in.
    """
    units = torch.abs(x, out=out)
    scale = units.sum(dtype=torch.promote_types(x.dtype, torch.float32)) / max(1, len(x))
    return scale, torch.copysign(x.new_ones(()), x, out=units)


def compress(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, signs) of the 1-D x: mean|x|, and its sign bits in uint8."""
    return split(x)[0], signs_of(x, -(-len(x) // 8) * 8)


def decompress(scale: torch.Tensor, signs: torch.Tensor, numel: int) -> torch.Tensor:
    """1-D float32 of length `numel`, every entry ±scale."""
    return unpack(signs)[:numel] * scale


class OneBit(Compressor):
    """Scaled signs in two phases, both with error feedback: 2(W−1)/W·(1/8 byte an entry), 1/32 of float32.

    Tang 2021 (1-bit Adam, arXiv 2102.02888, section 4) has the same exchange with one scale a bucket. Without
    `error_feedback` the scheme is biased and training stalls. The second residual is that of the parts a rank owns, so
    it too stays on the rank.
    """

    scheme = "onebit"
    has_second_phase = True

    def __init__(self, module: nn.Module, *, error_feedback: bool = True, on_nonfinite: str = "raise",
                 process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, process_group, on_nonfinite, error_feedback=error_feedback)
        if error_feedback:
            self.keep_residual()
            self.memories["second residual"] = Memory({n: self._owned(size) for n, size in
                                                       self.memories["residual"].sizes.items()})

    def _owned(self, numel: int) -> int:
        part = part_of(numel, self.size)
        return max(0, min(part, numel - self.rank * part))

    def phases(self, bucket: Bucket) -> Phases:
        sizes = self.sizes(bucket)
        parts = [part_of(size, self.size) for size in sizes]
        left = self.compensated(bucket)

        rows = _rows(left.split(sizes), parts, self.size)
        received = torch.empty_like(rows)
        yield dist.all_to_all_single(received, rows, group=self.group, async_op=True)

        scales, signs = _columns(received, parts)
        self.demand_finite(bucket, scales, partial(self._not_finite, bucket, scales))
        owned = [self._owned(size) for size in sizes]
        mean = self._mean(bucket, owned, scales.T / self.size, signs)
        row = self._second_row(bucket, parts, mean.split(owned), scales.T).view(-1)
        gathered = row.new_empty(self.size, len(row))
        yield dist.all_gather(list(gathered), row, group=self.second_group(bucket), async_op=True)

        scales, signs = _columns(gathered, parts)
        for scale, sign, out in zip(scales.T, signs, bucket.buffer().split(sizes)):
            units = unpack(sign, _room(scale, 8 * sign.numel()))
            if units.numel() == len(out):
                torch.mul(units, scale[:, None], out=out.view_as(units))
            else:
                out.copy_(units.mul_(scale[:, None]).view(-1)[:len(out)])

    def _mean(self, bucket: Bucket, owned: Sequence[int], scales: torch.Tensor,
              signs: Iterator[torch.Tensor]) -> torch.Tensor:
        """Mean over ranks of what they sent for the parts this rank owns: 1-D, where the next value of those parts'
        residual is to be left. `scales` is (parameters, ranks), already divided by the ranks."""
        if memory := self.memories.get("second residual"):
            mean = memory.write(self.names(bucket), scales)
        else:
            mean = scales.new_empty(sum(owned))
        for i, (out, sign) in enumerate(zip(mean.split(owned), signs)):
            units = unpack(sign, _room(mean, 8 * sign.numel()))[:, :len(out)]
            torch.mul(units[0], scales[i, 0], out=out)
            for rank in range(1, self.size):  # one after the other: see `split`
                out.addcmul_(units[rank], scales[i, rank])
        return mean

    def _second_row(self, bucket: Bucket, parts: Sequence[int], means: Sequence[torch.Tensor],
                    scales: torch.Tensor) -> torch.Tensor:
        """What travels of `means`, with their residual; leaves its next value there. Where no rank has sent anything of
        a parameter (see `compensated`) it stays."""
        if "second residual" not in self.memories:
            return _rows(means, parts, 1)
        before = self.memories["second residual"].read(self.names(bucket), scales).split([len(m) for m in means])
        came = scales.any(1).to(scales.dtype)
        for mean, left, yes in zip(means, before, came):
            mean.addcmul_(left, yes)
        row = _rows(means, parts, 1)
        for mean, left, no in zip(means, before, 1 - came):
            mean.addcmul_(left, no)
        return row

    def _not_finite(self, bucket: Bucket, scales: torch.Tensor) -> NonFiniteGradient:
        rank, index = (~torch.isfinite(scales)).nonzero()[0].tolist()
        return NonFiniteGradient(f"rank {self.ranks[rank]}: the gradient of {self.names(bucket)[index]!r} is not "
                                 "finite; the residuals are as they were")


def _room(like: torch.Tensor, numel: int) -> torch.Tensor:
    """Room for one parameter, on a CPU this thread's own: fresh memory costs there as much as the arithmetic in it.
    On a GPU the allocator keeps memory, and knows which stream still uses it."""
    if like.is_cuda:
        return like.new_empty(numel)
    key = like.dtype, like.device
    if key not in (rooms := _thread.__dict__) or len(rooms[key]) < numel:
        rooms[key] = like.new_empty(numel)
    return rooms[key][:numel]


def _rows(values: Sequence[torch.Tensor], parts: Sequence[int], ranks: int) -> torch.Tensor:
    """What travels, uint8, a row for each of `ranks`: the float32 scales of all parameters, then the signs of the
    rank's part of each. Leaves in every one of `values` what was not sent of it."""
    scales, signs = [], []
    for x, part in zip(values, parts):
        scale, units = split(x, _room(x, len(x)))
        scales.append(scale.float())
        signs.append(signs_of(x, ranks * part).view(ranks, part // 8))
        x.addcmul_(units, scales[-1].to(x.dtype), value=-1)
    head = torch.stack(scales).view(torch.uint8)
    return torch.cat([head.expand(ranks, -1), *signs], dim=1)


def _columns(rows: torch.Tensor, parts: Sequence[int]) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
    """Scales (ranks, parameters), and the signs of each parameter, uint8 (ranks, part/8)."""
    head = _SCALE_BYTES * len(parts)
    return rows[:, :head].view(torch.float32), iter(rows[:, head:].split([part // 8 for part in parts], dim=1))
