"""Training through the collectives: both reducers, every all-reduce, and callbacks that issue the next one."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib.collectives import all_reduce_doubling, all_reduce_hierarchical, all_reduce_ring, hook, node_groups
from course_lib.launch import RunTimeout, run
from course_lib.record import recording
from course_lib.train import wrap
from tests.train.on_ranks import backward, grads, model_of

SMALL = 0.0004


class Given(torch.nn.Module):
    """Odd sizes, a tied layer, a frozen parameter and one that the loss never sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied, self.last = torch.nn.Linear(6, 11), torch.nn.Linear(11, 11), torch.nn.Linear(11, 3)
        self.frozen = torch.nn.Parameter(torch.ones(11), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(7))

    def forward(self, x):
        return self.last(torch.tanh(self.tied(torch.tanh(self.tied(self.first(x)) * self.frozen))))


def gradients():
    """For both reducers and every all-reduce: gradients of two windows of two micro-steps, and of plain DDP."""
    torch.set_num_threads(1)
    inner, inter = node_groups([r // 2 for r in range(dist.get_world_size())])
    ways = {"ring": all_reduce_ring, "doubling": all_reduce_doubling,
            "hierarchical": functools.partial(all_reduce_hierarchical, inner=inner, inter=inter)}
    out = {"stock": two_windows(DistributedDataParallel(model_of(Given), bucket_cap_mb=SMALL,
                                                        find_unused_parameters=True))}
    for name, way in ways.items():
        ours = wrap("bucketed", model_of(Given), bucket_mb=SMALL, find_unused=True, comm_hook=hook, hook_state=way)
        out[name, "bucketed"] = two_windows(ours)
        ours.close()
        theirs = DistributedDataParallel(model_of(Given), bucket_cap_mb=SMALL, find_unused_parameters=True)
        theirs.register_comm_hook(way, hook)
        out[name, "ddp"] = two_windows(theirs)
    return out


def two_windows(model):
    out = []
    for window in range(2):
        model.zero_grad()
        with model.no_sync():
            backward(model, 2 * window)
        backward(model, 2 * window + 1)
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        out.append(grads(model))
    return out


def test_gradients_are_those_of_plain_ddp_and_the_same_on_every_rank() -> None:
    results = run(gradients, ranks=4, fabric="loopback")
    for rank, out in enumerate(results):
        stock = out.pop("stock")
        for name, windows in out.items():
            for got, want, first in zip(windows, stock, results[0][name]):
                for g, w, f in zip(got, want, first):
                    assert (g is None) == (f is None), (rank, name)
                    if g is not None:
                        assert torch.equal(g, f), (rank, name)
                        assert torch.allclose(g, torch.zeros_like(g) if w is None else w, atol=1e-5), (rank, name)


def in_callbacks():
    """Each collective is issued by the callback of the one before; a callback also waits for one."""
    tensors = [torch.ones(1000) for _ in range(4)]
    last: torch.futures.Future = torch.futures.Future()

    def after(k: int):
        def then(_done) -> None:
            if k == len(tensors):
                last.set_result(None)
            elif k == 2:
                all_reduce_ring(tensors[k])
                after(k + 1)(None)
            else:
                all_reduce_ring(tensors[k], async_op=True).get_future().then(after(k + 1))
        return then

    after(0)(None)
    last.wait()
    return [t[0].item() for t in tensors]


def test_callbacks_may_issue_collectives_and_wait_for_them() -> None:
    assert run(in_callbacks, ranks=3, fabric="loopback") == [[3.0] * 4] * 3


def tagged_spans():
    model = wrap("bucketed", model_of(Given), bucket_mb=SMALL, find_unused=True, comm_hook=hook,
                 hook_state=all_reduce_ring)
    with recording(dist.get_rank()) as recorder, recorder.measure_step(0):
        backward(model)
        model.finish_gradient_synchronization()
    sends = [s for s in recorder.timeline().select(kind="comm") if s.name == "send"]
    return [s.bucket for s in sorted(sends, key=lambda s: s.start)], {s.step for s in sends}, len(model.buckets)


def test_messages_carry_their_bucket_and_go_in_bucket_order() -> None:
    for buckets, steps, count in run(tagged_spans, ranks=2, fabric="loopback"):
        assert buckets == sorted(buckets) and set(buckets) == set(range(count)) and count > 1
        assert steps == {0}


def one_never_comes():
    if dist.get_rank() != 1:
        all_reduce_ring(torch.ones(10))


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(RunTimeout, match="rank 1 has not entered any collective"):
        run(one_never_comes, ranks=2, fabric="loopback", timeout_s=4)
