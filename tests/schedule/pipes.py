"""What the tests that run pipelines share: models cut into stages, micro-batches, and the single-process truth."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course_lib.schedule import add_reductions, gpipe, interleaved, one_f_one_b, split_backward, zb_v, zero_bubble
from course_lib.schedule.execute import Pipeline
from course_lib.train.gpt import Block, GPTConfig

WIDTH = 6
MAKERS = {"gpipe": gpipe, "1f1b": one_f_one_b, "split": lambda p, m: split_backward(one_f_one_b(p, m)),
          "interleaved": lambda p, m: interleaved(p, m, 2), "zero bubble": zero_bubble,
          "zero bubble 2": lambda p, m: zero_bubble(p, m, 2), "zb-v": zb_v}


class Odd(nn.Module):
    """A stage with a frozen, an unused and a twice used parameter; odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.frozen(x) + self.down(torch.tanh(self.up(x))) + self.down.bias


def mlp_stages(n: int) -> list[nn.Module]:
    torch.manual_seed(n)
    return [Odd() for _ in range(n)]


def plain_stages(n: int) -> list[nn.Module]:
    """No parameter twice: torch 2.13's own split backward fails on those ("a second time")."""
    torch.manual_seed(n)
    return [nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)) for _ in range(n)]


def gpt_stages(n: int) -> list[nn.Module]:
    """Tokens in, scores out."""
    torch.manual_seed(n)
    config = GPTConfig(width=WIDTH, heads=2, length=5)
    first = nn.Sequential(nn.Embedding(11, WIDTH), Block(config))
    last = nn.Sequential(Block(config), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11))
    return [first, *(Block(config) for _ in range(n - 2)), last] if n > 1 else [nn.Sequential(first, last)]


def mlp_batch(i: int):
    g = torch.Generator().manual_seed(i)
    return torch.randn(3, WIDTH, generator=g), torch.randn(3, WIDTH, generator=g)


def gpt_batch(i: int):
    """Ragged: the last i % 3 targets of each row do not count."""
    g = torch.Generator().manual_seed(i)
    x, y = (torch.randint(0, 11, (2, 5), generator=g) for _ in range(2))
    y[:, 5 - i % 3:] = -100
    return x, y


def mlp_loss(output, batch):
    return (output - batch[1]).square().sum()


def gpt_loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), ignore_index=-100, reduction="sum")


KINDS = {"mlp": (mlp_stages, mlp_batch, mlp_loss, lambda b: len(b[0])),
         "gpt": (gpt_stages, gpt_batch, gpt_loss, lambda b: int((b[1] != -100).sum())),
         "plain": (plain_stages, mlp_batch, mlp_loss, lambda b: len(b[0]))}


def truth(kind: str, n: int, batches: list[int]):
    """(loss, gradients of each stage) of one process that sees all micro-batches."""
    make, batch, loss_of, count = KINDS[kind]
    stages, window = make(n), [batch(i) for i in batches]
    total = sum(map(count, window))
    loss = sum(loss_of(nn.Sequential(*stages)(b[0]), b) for b in window) / total
    loss.backward()
    return float(loss.detach()), [gradients(s) for s in stages]


def gradients(stage: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in stage.parameters()]


def gradients_of_a_pipeline(name: str, kind: str, m: int, replicas: int = 1, passes: int = 1, buckets: int = 1):
    """On a rank: (share of the loss, {stage: gradients}) after `passes` passes of m micro-batches a replica."""
    make, batch, loss_of, count = KINDS[kind]
    world = dist.get_world_size()
    p = world // replicas
    mine = dist.get_rank() // p
    group, others = None, None
    if replicas > 1:
        pipes = [dist.new_group(list(range(k * p, k * p + p))) for k in range(replicas)]
        across = [dist.new_group(list(range(r, world, p))) for r in range(p)]
        group, others = pipes[mine], across[dist.get_rank() % p]
    schedule = MAKERS[name](p, m)
    if replicas > 1:
        schedule = add_reductions(schedule, buckets)
    every = make(schedule.stages)
    pipeline = Pipeline(schedule, {s: every[s] for s in schedule.stages_of(dist.get_rank() % p)}, loss_of,
                        group=group, replicas=others)
    windows = [[batch(i) for i in part] for part in split(range(replicas * passes * m), m)]
    total = sum(count(b) for w in windows for b in w)
    own = windows[mine * passes:(mine + 1) * passes]
    share = sum(pipeline.run(w, total, last=k == passes - 1) for k, w in enumerate(own))
    return share, {s: gradients(module) for s, module in pipeline.stages.items()}


def split(items, size: int):
    return [list(items[i:i + size]) for i in range(0, len(items), size)]
