"""Gradients of stages, reduced over the replicas of a pipeline: one all-reduce a bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from course_lib import record
from course_lib.schedule.action import WHOLE, ScheduleError


class Replicas:
    """Sums gradients over `group`. The loss was divided by what the whole window of all replicas holds, so that the
    sum is the gradient of the mean.

    `stages` are those of this rank in the order in which their last backward is done: a parameter that several of
    them share is reduced with the last, when its gradient is complete. `buckets[s]` parts of about equal size a
    stage, from the last parameter to the first. A parameter without a gradient on one rank counts as zeros there,
    and stays without where no rank has one.
    """

    def __init__(self, stages: Mapping[int, nn.Module], buckets: Mapping[int, int], group: dist.ProcessGroup) -> None:
        self.group, self._stages = group, stages
        self._parts = {key: one_dtype(key, params) for key, params in parts_of(stages, buckets).items()}
        self._travelling: list[tuple[tuple[int, int], torch.Tensor, dist.Work]] = []

    def parameters(self, stage: int, bucket: int = WHOLE) -> list[nn.Parameter]:
        """What an optimizer of the stage, or of one bucket of it, holds."""
        if bucket != WHOLE:
            return list(self._parts[stage, bucket])
        return [p for p in self._stages[stage].parameters() if p.requires_grad]

    def start(self, stage: int, bucket: int) -> None:
        """Send the gradient of a bucket on its way."""
        params = self._parts[stage, bucket]
        if not params:
            return
        # Filled on the device: for a copy from its own memory the host would wait until backward is done.
        has = [p.new_full((1,), p.grad is not None) for p in params]
        flat = torch.cat([*(p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in params), *has])
        with record.tag(bucket):
            work = dist.all_reduce(flat, group=self.group, async_op=True)
        self._travelling.append(((stage, bucket), flat, work))

    def finish(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Wait for these (stage, bucket) and put the sums into `.grad`."""
        rest, wanted = [], set(wanted)
        for key, flat, work in self._travelling:
            if key not in wanted:
                rest.append((key, flat, work))
                continue
            work.wait()
            params = self._parts[key]
            *sums, has = flat.split([*(p.numel() for p in params), len(params)])
            # Only a rank that has none need ask whether another has one: to ask, the host waits for the device.
            someone = has.tolist() if any(p.grad is None for p in params) else [1.0] * len(params)
            for p, total, there in zip(params, sums, someone):
                if there:
                    p.grad = total.view_as(p)
        self._travelling = rest


def parts_of(stages: Mapping[int, nn.Module], buckets: Mapping[int, int]) -> dict[tuple[int, int], list[nn.Parameter]]:
    """The trainable parameters of each (stage, bucket), each in one: in the last of the stages that share it."""
    taken: set[int] = set()
    parts = {}
    for stage in reversed(stages):
        params = [p for p in stages[stage].parameters() if p.requires_grad and id(p) not in taken]
        taken |= {id(p) for p in params}
        parts |= {(stage, bucket): part for bucket, part in enumerate(_even(params[::-1], buckets[stage]))}
    return parts


def one_dtype(key: tuple[int, int], params: list[nn.Parameter]) -> list[nn.Parameter]:
    """The same list. Raises `ScheduleError` where it cannot travel as one tensor."""
    dtypes = sorted({str(p.dtype) for p in params})
    if len(dtypes) > 1:
        raise ScheduleError(f"bucket {key[1]} of stage {key[0]} holds parameters of {' and '.join(dtypes)}; give a "
                            "stage parameters of one dtype")
    return params


def _even(params: Sequence[nn.Parameter], parts: int) -> list[list[nn.Parameter]]:
    """Cut a list into `parts` runs of about equal size; some are empty where there are fewer parameters."""
    whole, before = sum(p.numel() for p in params), 0
    out: list[list[nn.Parameter]] = [[] for _ in range(parts)]
    for p in params:
        out[min(parts - 1, (before + p.numel() // 2) * parts // max(1, whole))].append(p)
        before += p.numel()
    return out
