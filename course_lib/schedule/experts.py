"""Expert parallelism: an all-to-all where one stage of a rank hands over to the next, under the compute of others.

A block with experts is several stages of one rank: what routes, what the experts do, what follows. Between them the
tokens travel to the ranks that hold their experts, and back. Where a rank takes all micro-batches through a stage
before it goes on (`breadth_first`), they travel under the compute of other micro-batches; where it takes one through
all stages (`interleaved` for one rank), it waits for each.

    schedule = breadth_first(1, m=4, v=3)
    swap = exchange_over(group)
    Pipeline(schedule, stages, loss_of, group=alone, exchange={0: swap, 1: swap})
    predict(schedule, Costs(F=0.01, B=0.02, exchange=0.005))
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from course_lib.tensor.collective import InFlight, in_memory, same_everywhere

Exchange = Callable[[torch.Tensor], InFlight]
"""Sends off what a stage gives; its result is what the next stage takes. It must be its own transpose, because
gradients go back by the same."""


def exchange_over(group: dist.ProcessGroup | None) -> Exchange:
    """Equal shares: of a tensor whose first dimension the ranks divide, part k goes to rank k. Raises `ValueError`
    where they do not divide it, or the ranks' tensors differ."""

    def exchange(x: torch.Tensor) -> InFlight:
        same_everywhere(x, group)
        ranks = dist.get_world_size(group)
        if x.shape[0] % ranks:
            raise ValueError(f"{x.shape[0]} rows cannot go to {ranks} ranks in equal shares; choose a multiple of "
                             f"{ranks}")
        x = in_memory(x)
        y = torch.empty_like(x)
        return y, x, dist.all_to_all_single(y, x, group=group, async_op=True)

    return exchange
