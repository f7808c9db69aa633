"""Which rows an update sees: the same for every number of replicas, and without any state to save."""

from __future__ import annotations

import hashlib

import torch

from course_lib.job.options import Options, Refusal
from course_lib.train import data


class Batches:
    """`window(update, replica)` are the micro-batches of a replica in an update (both counted from 0).

    Micro-batch g of all those of an update depends on the seed, the update and g alone, so that a run that is resumed,
    on however many replicas, sees what it would have seen. `digest` tells one text from another.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        self._options, self._device = options, device
        self._text = _text(options)
        if len(self._text) <= options.length:
            raise Refusal(f"the data has {len(self._text)} bytes, too few for rows of {options.length} + 1; shorten "
                          "--length, or give more by --data and --data-mb")
        self.digest = hashlib.sha256(self._text.numpy()).hexdigest()

    def window(self, update: int, replica: int) -> list[data.Batch]:
        o = self._options
        return [self._micro_batch((update * o.dp + replica) * o.micro_steps + i) for i in range(o.micro_steps)]

    def _micro_batch(self, number: int) -> data.Batch:
        o = self._options
        x, y = next(data.batches(self._text, o.batch, o.length, 1, seed=o.seed, rank=number))
        return x.to(self._device), y.to(self._device)


def _text(options: Options) -> torch.Tensor:
    if options.data is None:
        return data.text(options.data_mb)
    with options.data.open("rb") as file:
        raw = bytearray(file.read(min(int(options.data_mb * data.MB), options.data.stat().st_size)))
    return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
