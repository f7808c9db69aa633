"""Matmuls and collectives in chunks: equal results, nothing dropped, and an order in which one hides the other."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.launch import Fabric, run
from course_lib.tensor import chunked, gather_linear, linear_scatter
from tests.tensor.given import apart, every_degree, numbers

SHAPES = ((5,), (2, 5), (2, 3, 1))  # leading dimensions and this rank's rows
CHUNKS = (1, 2, 3, 5, 9)
INPUTS, OUTPUTS = 6, 7


def results(group: dist.ProcessGroup) -> list[tuple]:
    """What differs from the product of whole tensors, for every shape and number of chunks."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    wrong = []
    for shape in SHAPES:
        for chunks in CHUNKS:
            xs = [numbers(*shape, INPUTS, seed=r) for r in range(ranks)]
            weights = [numbers(OUTPUTS, INPUTS, seed=10 + r) for r in range(ranks)]
            upstream = [numbers(*shape[:-1], ranks * shape[-1], OUTPUTS, seed=20 + r) for r in range(ranks)]
            whole = torch.cat(xs, dim=-2)

            x, w = xs[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
            y = gather_linear(x, w, group, chunks)
            (y * upstream[rank]).sum().backward()
            grad_x = sum(u @ v for u, v in zip(upstream, weights)).chunk(ranks, -2)[rank]
            grad_w = torch.einsum("...o,...i->oi", upstream[rank], whole)
            wrong.append((shape, chunks, "gather", apart({"y": y, "x": x.grad, "w": w.grad}, {
                "y": whole @ weights[rank].t(), "x": grad_x, "w": grad_w})))

            xs = [numbers(*shape[:-1], ranks * shape[-1], INPUTS, seed=30 + r) for r in range(ranks)]
            x, w = xs[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
            y = linear_scatter(x, w, group, chunks)
            mine = [u.chunk(ranks, -2)[r] for r, u in enumerate(upstream)]
            (y * mine[rank]).sum().backward()
            back = torch.cat(mine, dim=-2)
            wrong.append((shape, chunks, "scatter", apart({"y": y, "x": x.grad, "w": w.grad}, {
                "y": sum(a @ b.t() for a, b in zip(xs, weights)).chunk(ranks, -2)[rank],
                "x": back @ weights[rank], "w": torch.einsum("...o,...i->oi", back, xs[rank])})))
    return [row for row in wrong if row[-1]] if len(wrong) == 2 * len(SHAPES) * len(CHUNKS) else wrong


def test_equal_to_whole_products_however_many_chunks() -> None:
    assert run(every_degree, results, ranks=4, fabric="loopback") == [{1: [], 2: [], 4: []}] * 4


class Watched(TorchDispatchMode):
    """Writes down what happens in order: G, S a gather or scatter starts; A one has arrived; M a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.events = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.events += "M"
        return func(*args, **(kwargs or {}))

    def note(self, letter: str, function):
        def noted(*args):
            self.events += letter
            return function(*args)
        return noted


def orders() -> dict[str, str]:
    torch.set_num_threads(1)
    before = {name: getattr(chunked, name) for name in ("start_gather", "start_scatter", "arrived")}
    out = {}
    try:
        for name, operator, rows in (("gather", gather_linear, 3), ("scatter", linear_scatter, 6)):
            with Watched() as watched:
                for letter, function in zip("GSA", before):
                    setattr(chunked, function, watched.note(letter, before[function]))
                x, w = numbers(rows, INPUTS).requires_grad_(), numbers(OUTPUTS, INPUTS).requires_grad_()
                y = operator(x, w, None, 3)
                out[name], watched.events = watched.events, ""
                y.sum().backward()
                out[f"{name}, back"], watched.events = watched.events, ""
                operator(x, w.detach(), None, 3).sum().backward()
                out[f"{name}, frozen weight"] = watched.events
    finally:
        for name, function in before.items():
            setattr(chunked, name, function)
    return out


def test_collectives_start_before_the_matmuls_that_hide_them_and_in_one_order() -> None:
    found = run(orders, ranks=2, fabric="loopback")
    assert found[0] == found[1]
    assert found[0] == {
        "gather": "GGAM" "GAM" "AM",
        "gather, back": "MS" "MS" "MS" "M" "AAA",
        "gather, frozen weight": "GGAM" "GAM" "AM" "MS" "MS" "MS" "AAA",
        "scatter": "MS" "MS" "MS" "AAA",
        "scatter, back": "GGAMM" "GAMM" "AMM",
        "scatter, frozen weight": "MS" "MS" "MS" "AAA" "GGAM" "GAM" "AM",
    }


MATMUL_S, WIRE_S = 0.08, 0.08
WIDE, LONG = 256, 1024  # LONG rows a rank of WIDE float32 columns


class Slow(TorchDispatchMode):
    """A matmul of all rows takes MATMUL_S, most of it asleep: a busy machine delays both ways alike."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            time.sleep(MATMUL_S * args[0].shape[0] / (2 * LONG))
        return func(*args, **(kwargs or {}))


def seconds() -> dict[str, float]:
    """The time of each operator with 4 chunks over that with 1, as the median of pairs taken in alternation."""
    torch.set_num_threads(1)
    out = {}
    cases = {"gather": (gather_linear, torch.randn(LONG, WIDE), torch.randn(8, WIDE)),
             "scatter": (linear_scatter, torch.randn(2 * LONG, 8), torch.randn(WIDE, 8))}
    for name, (operator, x, weight) in cases.items():
        ratios = []
        for _ in range(6):
            took = {}
            for chunks in (1, 4):
                dist.barrier()
                start = time.perf_counter()
                with Slow():
                    operator(x, weight, None, chunks)
                took[chunks] = time.perf_counter() - start
            ratios.append(took[4] / took[1])
        out[name] = statistics.median(ratios[1:])
    return out


@pytest.mark.timing
@pytest.mark.slow
def test_four_chunks_hide_a_good_part_of_the_wire() -> None:
    """One after the other takes 160 ms; in four chunks, 80 ms and what stands out of the first or last one: 100 ms."""
    bytes_sent = 4 * LONG * WIDE
    wire = Fabric(gbit=8e-9 * bytes_sent / WIRE_S, latency_us=500, kind="paced")
    for found in run(seconds, ranks=2, fabric=wire):
        assert found["gather"] < 0.8 and found["scatter"] < 0.8, found
