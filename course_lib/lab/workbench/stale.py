"""The learner's `Delayed` and `Rounds` on real ranks, compared with the library and with PyTorch's own."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.lab.workbench.updates import Flight, told
from course_lib.launch import Fabric

WINDOWS, SIZE, ROWS, LR = 12, 16, 8, 0.05


@dataclass(frozen=True)
class Compared:
    """Two ways of doing the same updates. `apart` is the largest difference of a parameter element on any rank after
    them, as a fraction of the largest; `moved` is how far the parameters are from plain updates, likewise."""

    yours: str
    theirs: str
    apart: float
    moved: float

    def __str__(self) -> str:
        apart, moved = (f"{far:.0e}" if far else "nothing" for far in (self.apart, self.moved))
        return f"{self.yours} and {self.theirs}\n      differ by {apart}; theirs and plain updates by {moved}"


def stale_runs(Delayed: type, Rounds: type, *, H: int = 4, outer: tuple[float, float] = (0.7, 0.9), ranks: int = 2,
               fabric: str | Fabric = "loopback", timeout_s: float = 60.0) -> list[Compared]:
    """Twelve updates of a small network with the classes of 8.2 and 8.3, the library's and PyTorch's, on the same
    ranks with the same data. Raises `OwnRunFailed` with one sentence for what a class does wrong on a rank."""
    from course_lib.lab.workbench.buckets import _run
    return _run(_on_rank, Delayed, Rounds, H, outer, ranks=ranks, fabric=fabric, timeout_s=timeout_s)[0]


def _on_rank(Delayed, Rounds, H, outer):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    lr, momentum = outer
    plain, found = _library("bucketed", {}), []

    def compare(yours, theirs, mine, right):
        numbers = torch.stack([(mine - right).abs().max(), (right - plain).abs().max()]) / right.abs().max()
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        found.append(Compared(yours, theirs, *numbers.tolist()))

    for delay in (0, 1, 2):
        compare(f"your Delayed, delay {delay}", "the library's", _delayed(Delayed, delay),
                _library("delayed", {"delay": delay}))
    local = _rounds(Rounds, H, 1.0, 0.0)
    name = f"your Rounds, H = {H}, outer_lr = {{:g}}, outer_momentum = {{:g}}".format
    compare(name(1, 0), "the library's LocalSGD", local, _library("local_sgd", {"every": H}))
    compare(name(1, 0), "PyTorch's PostLocalSGDOptimizer", local, _post_local(H))
    compare(name(lr, momentum), "the library's DiLoCo", _rounds(Rounds, H, lr, momentum),
            _library("diloco", {"every": H, "outer_lr": lr, "outer_momentum": momentum}))
    return found


def _network():
    """Two layers whose weights are one flat parameter, so that a gradient is one tensor."""
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, SIZE * SIZE + SIZE).sin())

        def forward(self, x):
            first, second = self.weight.split([SIZE * SIZE, SIZE])
            return torch.tanh(x @ first.view(SIZE, SIZE) / 4) @ second

    return Network()


def _batches():
    import torch.distributed as dist

    from course_lib.train.data import synthetic
    return synthetic(ROWS, SIZE, WINDOWS, rank=dist.get_rank())


def _loss(model, batch):
    x, y = batch
    return (model(x) - y.squeeze(1)).square().sum(), len(x)


def _sgd(params):
    import torch
    return torch.optim.SGD(params, lr=LR, momentum=0.9)


def _library(strategy, options):
    from course_lib.train import accumulate, wrap
    from course_lib.train.delayed import Delayed

    model = wrap(strategy, _network(), **options)
    optimizer = _sgd(model.parameters())
    if hasattr(model, "take_optimizer"):
        model.take_optimizer(optimizer)
    for batch in _batches():
        accumulate(model, [batch], _loss, normalise="micro")
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(model, Delayed):
        for _ in model.flush():
            optimizer.step()
            optimizer.zero_grad()
    return model.module.weight.detach().clone()


def _own_gradient(model, batch):
    model.weight.grad = None
    summed, count = _loss(model, batch)
    (summed / count).backward()


def _delayed(Delayed, delay):
    model = _network()
    mine = told(Delayed, Wire(), model.weight, _sgd([model.weight]), delay,
                 shown="Delayed(wire, param, optimizer, delay)")
    for batch in _batches():
        _own_gradient(model, batch)
        told(mine.end_of_window, model.weight.grad.clone(), shown="end_of_window(gradient)")
    told(mine.flush, shown="flush()")
    return model.weight.detach().clone()


def _rounds(Rounds, H, lr, momentum):
    import torch.distributed as dist

    model = _network()

    def mean(tensor):
        total = tensor.detach().clone() / dist.get_world_size()
        dist.all_reduce(total)
        return total

    mine = told(Rounds, [model.weight], _sgd([model.weight]), mean, H, lr, momentum,
                 shown="Rounds(params, optimizer, mean, H, outer_lr, outer_momentum)")
    for batch in _batches():
        _own_gradient(model, batch)
        told(mine.step, shown="step()")
    return model.weight.detach().clone()


def _post_local(H):
    """PyTorch's twin: it averages after steps 0, H, 2H, … that follow its warm-up."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = _network()
    optimizer = PostLocalSGDOptimizer(_sgd([model.weight]), PeriodicModelAverager(period=H, warmup_steps=H - 1))
    for batch in _batches():
        _own_gradient(model, batch)
        optimizer.step()
    return model.weight.detach().clone()


class Wire:
    """`launch(gradient)` starts the mean over ranks in place and returns a handle at once."""

    def launch(self, gradient):
        import torch.distributed as dist

        return Flight(dist.all_reduce(gradient.div_(dist.get_world_size()), async_op=True))
