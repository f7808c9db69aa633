"""Half precision on the wire: half the bytes of float32, and nothing to remember."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course_lib.compress.compressor import Compressor, Phases
from course_lib.train.bucket import Bucket


class Cast(Compressor):
    """All-reduce in `dtype`. Divides before it casts: a sum, or even one gradient, may be out of float16's range
    (65504) where the mean is not. An overflow arrives as an infinity on every rank, as with plain DDP; a gradient
    scaler then skips the update."""

    dtype: torch.dtype

    def __init__(self, module: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, process_group, "nan")
        self._sent: dict[int, torch.Tensor] = {}

    def phases(self, bucket: Bucket) -> Phases:
        flat = bucket.buffer()
        sent = self._sent.get(bucket.index())
        if sent is None or sent.shape != flat.shape or sent.device != flat.device:
            sent = self._sent[bucket.index()] = torch.empty_like(flat, dtype=self.dtype)
        sent.copy_(flat.mul_(1 / self.size))
        yield dist.all_reduce(sent, group=self.group, async_op=True)
        flat.copy_(sent)


class FP16(Cast):
    """11 bits of mantissa, range 6e-8 to 65504."""

    scheme, dtype = "fp16", torch.float16


class BF16(Cast):
    """8 bits of mantissa, the range of float32."""

    scheme, dtype = "bf16", torch.bfloat16
