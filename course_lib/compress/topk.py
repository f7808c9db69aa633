"""Top-k: send the largest entries of a gradient with their places, and keep the rest for later."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from course_lib.compress.compressor import Compressor, NonFiniteGradient, Phases
from course_lib.compress.memory import Memory
from course_lib.train.bucket import Bucket
from course_lib.train.control import ranks_text


def count_of(numel: int, k: float) -> int:
    """How many of `numel` entries the share `k` is: at least one, unless there are none."""
    return min(numel, max(1, round(k * numel)))


def compress(x: torch.Tensor, k: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices) of the `count_of(len(x), k)` entries of the 1-D x with the largest magnitude, unsorted.
    NaN counts as largest, so that it cannot hide."""
    count, size = count_of(x.numel(), k), x.abs()
    if x.is_cuda:
        indices = torch.topk(size, count, sorted=False).indices
    else:  # on a CPU numpy's selection takes a fifth of the time of torch's
        indices = torch.from_numpy(np.argpartition(size.numpy(), x.numel() - count)[x.numel() - count:])
    return x[indices], indices


def decompress(values: torch.Tensor, indices: torch.Tensor, numel: int) -> torch.Tensor:
    """1-D of length `numel`, zero where nothing was sent."""
    return torch.zeros(numel, dtype=values.dtype, device=values.device).index_put_((indices,), values)


def share_at(update: int, k: float, warm_up: int) -> float:
    """The share sent in update 0, 1, …: from near 1 down to `k` in equal factors over `warm_up` updates."""
    return k if update >= warm_up else k ** ((update + 1) / (warm_up + 1))


class TopK(Compressor):
    """The share `k` of every parameter's entries travels as float32 values with 32-bit indices, by one all-gather.

    Every rank chooses other entries, so nothing can be added up on the way: a rank sends 8·(W−1) bytes an entry,
    and above k = 1/W that is more than a float32 ring all-reduce of everything.

    `error_feedback` adds what was not sent to the next gradient (Stich 2018, arXiv 1809.07599). `momentum` is
    momentum correction and factor masking (Lin 2018, Deep Gradient Compression, arXiv 1712.01887, section 3): the
    velocity is accumulated before the choice, so use an optimizer without momentum. `warm_up` is the number of
    updates over which the share falls to k. Raises `ValueError` for k outside (0, 1], momentum outside [0, 1), a
    negative warm-up, and momentum without error feedback.
    """

    scheme = "topk"

    def __init__(self, module: nn.Module, k: float, *, error_feedback: bool = True, momentum: float = 0.0,
                 warm_up: int = 0, on_nonfinite: str = "raise", process_group: dist.ProcessGroup | None = None) -> None:
        if not isinstance(k, (int, float)) or not 0 < k <= 1:
            raise ValueError(f"k={k!r}: give the share of entries to send, above 0 and at most 1 (0.01 is 1 %)")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: give a number from 0 up to, not including, 1")
        if momentum and not error_feedback:
            raise ValueError("momentum correction builds on error feedback: leave error_feedback=True")
        if not isinstance(warm_up, int) or warm_up < 0:
            raise ValueError(f"warm_up={warm_up!r}: give a number of updates, 0 or more")
        super().__init__(module, process_group, on_nonfinite, k=k, error_feedback=error_feedback, momentum=momentum,
                         warm_up=warm_up)
        self.k, self.momentum, self.warm_up = k, momentum, warm_up
        if error_feedback:
            self.keep_residual()
        if momentum:
            self.memories["velocity"] = Memory(self.memories["residual"].sizes)

    def phases(self, bucket: Bucket) -> Phases:
        flat, velocity = bucket.buffer(), self._velocity(bucket)
        left = self.compensated(bucket, velocity)
        places = self._choose(bucket, left)
        values = left[places].float()
        left[places] -= values.to(left.dtype)
        if velocity is not None:
            velocity[places] = 0

        count = len(places)
        sent = torch.cat((places.int(), values.view(torch.int32)))
        gathered = sent.new_empty(self.size, 2 * count)
        yield dist.all_gather(list(gathered), sent, group=self.group, async_op=True)

        shares = gathered[:, count:].view(torch.float32)
        self.demand_finite(bucket, shares, partial(self._not_finite, bucket, shares))
        flat.zero_()
        # One rank's places are all different, so adding rank by rank gives the same bits everywhere.
        for rank in range(self.size):
            flat.index_add_(0, gathered[rank, :count], shares[rank].div_(self.size).to(flat.dtype))

    def _not_finite(self, bucket: Bucket, shares: torch.Tensor) -> NonFiniteGradient:
        bad = [r for r, share in zip(self.ranks, shares) if not torch.isfinite(share).all()]
        return NonFiniteGradient(f"the gradient of {ranks_text(bad)} in bucket {bucket.index()} is not finite; the "
                                 "residuals are as they were")

    def _velocity(self, bucket: Bucket) -> torch.Tensor | None:
        """momentum·velocity + gradient, the velocity's next value; None without momentum correction."""
        if not self.momentum:
            return None
        flat, names, memory = bucket.buffer(), self.names(bucket), self.memories["velocity"]
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        return torch.add(wide, memory.read(names, wide), alpha=self.momentum, out=memory.write(names, wide))

    def _choose(self, bucket: Bucket, flat: torch.Tensor) -> torch.Tensor:
        """Places in the bucket of the largest entries of each of its parameters, int64."""
        if flat.numel() > 2**31:
            raise ValueError(f"bucket {bucket.index()} has {flat.numel()} entries, more than 32-bit indices can name; "
                             "make buckets smaller")
        share, start, places = share_at(self._window.updates, self.k, self.warm_up), 0, []
        for param in bucket.parameters():
            _, indices = compress(flat[start:start + param.numel()], share)
            places.append(indices.add_(start))
            start += param.numel()
        return torch.cat(places)
