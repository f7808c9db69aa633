"""Matmuls and their collectives on real ranks and an emulated device: ways of writing one, timed in alternation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_lib.launch import Fabric
from course_lib.link_cost import LinkCost
from course_lib.simulate.chunked import Operator
from course_lib.timeline import Timeline
from course_lib.tune.sweep import Measured

if TYPE_CHECKING:
    from torch import Tensor

MB = 2**20
LIMIT_S = 30.0
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Way(Measured):
    """One way of writing an operator. `from_reference` is the largest difference of an element from the same in one
    process, as a fraction of the largest element, over all ranks."""

    from_reference: float


@dataclass(frozen=True)
class Ways:
    """What one run measured: the costs of the collectives that it fitted by name, the seconds of one matmul of all
    rows, the bytes of all rows, and every way by name."""

    links: dict[str, LinkCost]
    matmul_s: float
    bytes: int
    measured: dict[str, Way]

    def __getitem__(self, name: str) -> Way:
        return self.measured[name]

    def operator(self) -> Operator:
        """A gather and the matmul after it, for the simulator."""
        return Operator("gather", self.matmul_s, self.bytes, self.links["all_gather"])

    def pair(self) -> list[Operator]:
        """A pair's forward and backward: gather and up, down and scatter; gather and both gradients of down, the
        gradient of up's input and scatter, then the gradient of up, for which nobody waits."""
        gather, scatter, one = self.links["all_gather"], self.links["reduce_scatter"], self.matmul_s
        return [Operator("gather", one, self.bytes, gather), Operator("scatter", one, self.bytes, scatter),
                Operator("gather", 2 * one, self.bytes, gather),
                Operator("scatter", one, self.bytes, scatter, spare_s=one)]  # fmt: skip


def layer_runs(ways: Mapping[str, Callable], *, shards: bool = False, r: float = 1.0, mb: float = 1.0, ranks: int = 2,
               fabric: str | Fabric = "auto", repeats: int = 5, timeout_s: float = 120.0) -> Ways:
    """Time `way(x, multiply, wire)` for each way. x has `mb` MB of rows, or with `shards` the rank's part of them;
    `multiply` keeps a row's width and takes emulated time: all rows together as long as a gather of them, over r.

    Raises `OwnRunFailed` with one sentence for whatever a way does wrong on a rank, a hang included."""
    from course_lib.lab.workbench.buckets import _run

    return _ways(_run(_layers_on_rank, dict(ways), shards, r, round(mb * MB), repeats, ranks=ranks, fabric=fabric,
                      timeout_s=timeout_s))  # fmt: skip


def pair_runs(chunks: Sequence[int], *, r: float = 1.0, mb: float = 1.0, ranks: int = 2,
              fabric: str | Fabric = "auto", repeats: int = 5, timeout_s: float = 300.0) -> Ways:
    """Time the library's sequence-parallel pair, forward and backward: `"waiting"` for each of its four collectives,
    and in each number of `chunks`, `"4 chunks"`. A matmul takes as long as a gather of `mb` MB, over r."""
    from course_lib.launch import run

    return _ways(run(_pair_on_rank, tuple(chunks), r, round(mb * MB), repeats, ranks=ranks, fabric=fabric,
                     timeout_s=timeout_s))  # fmt: skip


class LayerWire:
    """What a way sees of the wire: `rank`, `ranks`, `all_reduce(tensor)`, which blocks, and `start_all_reduce(tensor)`
    and `start_gather(part)`, which return a handle at once."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place."""
        self.start_all_reduce(tensor).wait()

    def start_all_reduce(self, tensor: Tensor) -> Flying:
        """Start a sum over the ranks, in place; it is there after the handle's `wait()`."""
        import torch.distributed as dist

        return Flying((tensor, tensor, dist.all_reduce(tensor, async_op=True)))

    def start_gather(self, part: Tensor) -> Flying:
        """Start an all-gather; the handle's `wait()` returns the parts of all ranks, (ranks, …)."""
        from course_lib.tensor.collective import start_gather

        return Flying(start_gather(part, None))


class Flying:
    """The handle of a collective on its way."""

    def __init__(self, flight: tuple[Tensor, Tensor, Any]) -> None:
        self._flight = flight

    def wait(self, timeout: object = None) -> Tensor:
        """Block until the result is there, and return it."""
        from datetime import timedelta

        self._flight[2].wait(timedelta(seconds=LIMIT_S))
        return self._flight[0]


def _ways(rows: list) -> Ways:
    links, matmul_s, nbytes, worst, seconds, _ = rows[0]
    return Ways(links, matmul_s, nbytes, {
        name: Way(name, tuple(seconds[name]), Timeline.merge(row[-1][name] for row in rows), worst[name])
        for name in seconds})  # fmt: skip


def _links(nbytes: int, kinds: Sequence[str] = KINDS) -> dict[str, LinkCost]:
    from course_lib.launch.measure import measure

    return {kind: measure(kind, sizes=(nbytes // 8, nbytes // 2)) for kind in kinds}


def _layers_on_rank(ways, shards, r, nbytes, repeats):
    import torch
    import torch.distributed as dist

    from course_lib.lab.workbench.gradients import difference
    from course_lib.train.emulated import device
    from course_lib.tune.alternate import Step, alternate

    torch.set_num_threads(1)
    width, ranks, wire = 256, dist.get_world_size(), LayerWire()
    rows = nbytes // (4 * width) // ranks * ranks
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(rows, width, generator=generator)
    weight = torch.randn(width, generator=generator)
    x = whole.chunk(ranks)[wire.rank].clone() if shards else whole
    links = _links(nbytes, KINDS if shards else ("all_gather",))
    matmul_s = links["all_gather"].cost(nbytes) / r

    def multiply(part):
        """By a diagonal matrix: next to no arithmetic for what is to travel, and the device's time for all of it."""
        out = part * weight
        device.spend("matmul", round(matmul_s * 1e9 * part.numel() / (rows * width)))
        return out

    def step(name, way) -> Step:
        def run():
            out[name] = _tensor(name, _call(way, x, multiply, wire, shown=f"{name}(x, multiply, wire)"), whole)

        return Step(run)

    out: dict[str, Any] = {}
    steps = {name: step(name, way) for name, way in ways.items()}
    seconds, lines = alternate(steps, repeats, 1, _provenance())
    right = multiply(whole) if shards else out[next(iter(ways))]
    worst = {name: difference(got, right) for name, got in out.items()}
    return links, matmul_s, nbytes, worst, seconds, lines


def _pair_on_rank(chunks, r, nbytes, repeats):
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from course_lib.lab.workbench.gradients import difference
    from course_lib.tensor import all_gather, gather_linear, linear_scatter, reduce_scatter
    from course_lib.tensor.emulated import EmulatedMatmuls
    from course_lib.tune.alternate import Step, alternate

    torch.set_num_threads(1)
    width, hidden, ranks = 256, 16, dist.get_world_size()
    rows = nbytes // (4 * width) // ranks * ranks
    torch.manual_seed(dist.get_rank())
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((rows // ranks, width), (hidden, width),
                                                                    (width, hidden))]
    links = _links(nbytes)
    matmul_s = links["all_gather"].cost(nbytes) / r
    found: dict[str, Tensor] = {}

    def waiting(x, up, down):
        return reduce_scatter(F.linear(F.linear(all_gather(x, -2, None), up), down), -2, None)

    def step(name, forward) -> Step:
        def run() -> None:
            with EmulatedMatmuls(matmul_s * 1e9 / (rows * width * hidden)):
                y = forward(*leaves)
                y.backward(y.detach())
            found[name] = torch.cat([y.detach().flatten(), *(leaf.grad.flatten() for leaf in leaves)])

        def prepare() -> None:
            for leaf in leaves:
                leaf.grad = None

        return Step(run, prepare)

    steps = {"waiting": step("waiting", waiting)}
    for k in chunks:
        steps[f"{k} chunk{'s' * (k > 1)}"] = step(f"{k} chunk{'s' * (k > 1)}", lambda x, up, down, k=k: linear_scatter(
            gather_linear(x, up, None, k), down, None, k))
    seconds, lines = alternate(steps, repeats, 2, _provenance())
    worst = {name: difference(one, found["waiting"]) for name, one in found.items()}
    return links, matmul_s, nbytes, worst, seconds, lines


def _provenance() -> str:
    from course_lib.launch import context
    from course_lib.train import emulated

    return f"{emulated.PROVENANCE}, {context().spec.provenance}"


def _tensor(name: str, got: Any, like: Tensor) -> Tensor:
    """What a way returned, refused unless it has the shape that is asked for."""
    import torch
    import torch.distributed as dist

    from course_lib.lab.workbench.rank import Fault

    if not isinstance(got, torch.Tensor) or got.shape != like.shape:
        seen = f"a tensor of {tuple(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)
        raise Fault(f"rank {dist.get_rank()}: {name} returned {seen}, not a tensor of {tuple(like.shape)}")
    return got


def _call(function: Callable, *arguments: Any, shown: str) -> Any:
    """Call what the learner wrote. Whatever it raises, and an endless loop, becomes a `Fault`."""
    import torch.distributed as dist

    from course_lib.lab.guard import Broke, TookTooLong, call, time_limit
    from course_lib.lab.workbench.rank import Fault

    rank = dist.get_rank()
    try:
        with time_limit(LIMIT_S):
            return call(function, *arguments, shown=shown)
    except Broke as broke:
        raise Fault(f"rank {rank}: {broke}") from broke
    except NotImplementedError as stub:
        raise Fault(f"rank {rank}: {shown} is not written yet ({stub or 'NotImplementedError'})") from None
    except TookTooLong:
        raise Fault(f"rank {rank}: {shown} was still running after {LIMIT_S:.0f} s") from None
