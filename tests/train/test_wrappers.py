"""Comm hooks, records, wrapping again, and what is refused."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from course_lib import record
from course_lib.train.bucketed import Bucketed
from course_lib.train.ddp import StockDDP, wrap
from course_lib.train.nosync import NoSync
from tests.train.cases import mlp, tiny_emulated
from tests.train.on_ranks import RANKS, SMALL, backward, grads, inputs, model_of, same, sent, together

on_ranks, got = together()


@on_ranks
def comm_hooks():
    out = {}
    seen = []

    def spy(state, bucket):
        seen.append((state, bucket.index(), bucket.is_last(), len(bucket.gradients()), len(bucket.parameters()),
                     bucket.buffer().numel()))
        return default_hooks.allreduce_hook(None, bucket)

    makers = {"mean": lambda c: c(model_of()),
              "all-reduce": lambda c: c(model_of(), comm_hook=default_hooks.allreduce_hook),
              "fp16": lambda c: c(model_of(), comm_hook=default_hooks.fp16_compress_hook)}
    for name, make in makers.items():
        pair = []
        for model_class in (Bucketed, StockDDP):
            model = make(model_class)
            for i in range(3):
                backward(model, i)
                model.finish_gradient_synchronization()
            pair.append(grads(model))
        out[name] = same(*pair, 1e-3 if name == "fp16" else 1e-5)
    model = Bucketed(model_of(), bucket_mb=SMALL, first_bucket_mb=None, comm_hook=spy, hook_state="state")
    backward(model)
    model.finish_gradient_synchronization()
    out["spy"] = seen
    return out


def test_comm_hooks_of_ddp_run_unchanged(got) -> None:
    for rank in got(comm_hooks):
        seen = rank.pop("spy")
        assert all(rank.values()), rank
        assert [s[:3] for s in seen] == [("state", 0, False), ("state", 1, True)]
        assert sum(s[3] for s in seen) == sum(s[4] for s in seen) == 6
        assert sum(s[5] for s in seen) == sum(p.numel() for p in mlp().parameters())


@on_ranks
def sums():
    """Every strategy's sum against its mean."""
    out = {}
    for name in ("serial", "no_sync", "bucketed", "ddp"):
        pair = []
        for op in ("mean", "sum"):
            model = wrap(name, model_of(), op=op)
            backward(model, 0)
            model.finish_gradient_synchronization()
            pair.append(grads(model))
        out[name] = same(pair[1], [g * RANKS for g in pair[0]])
    return out


def test_a_sum_is_the_mean_times_the_ranks(got) -> None:
    assert all(all(rank.values()) for rank in got(sums)), got(sums)


@on_ranks
def recorded():
    model = Bucketed(tiny_emulated(), bucket_mb=0.001, first_bucket_mb=None)
    sizes = model.bucket_bytes
    with record.recording(dist.get_rank()) as recorder, recorder.measure_step(0):
        model(inputs()[:, 0]).sum().backward()
        model.finish_gradient_synchronization()
    return recorder.timeline(), sizes


def test_fills_and_transfers_carry_their_bucket(got) -> None:
    for timeline, sizes in got(recorded):
        fills, comms = timeline.select(kind="fill"), timeline.select(kind="comm")
        assert [s.bucket for s in fills] == [s.bucket for s in comms] == list(range(len(sizes)))
        assert [s.bytes for s in fills] == [s.bytes for s in comms] == sizes
        assert all(f.stop <= c.start for f, c in zip(fills, comms))
        assert {s.step for s in timeline} == {0}


@on_ranks
def wrapped_again():
    module = model_of()
    old = Bucketed(module)
    new = NoSync(module)
    try:
        old(inputs())
        said = ""
    except RuntimeError as error:
        said = str(error)
    sent()
    backward(new)
    new.finish_gradient_synchronization()
    calls = sent()[0]
    new.close()
    del old, new
    backward(module)
    return said, calls, [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()]


def test_wrapping_again_takes_over(got) -> None:
    for said, calls, hooks in got(wrapped_again):
        assert "wrapped again" in said and calls == 1 and set(hooks) == {0}


@on_ranks
def refusals():
    out = {}

    def refused(name, make) -> None:
        try:
            make()
            out[name] = ""
        except (ValueError, RuntimeError) as error:
            out[name] = str(error)

    refused("size", lambda: Bucketed(mlp(), bucket_mb=0))
    refused("op", lambda: NoSync(mlp(), op="max"))
    refused("sum with hook", lambda: Bucketed(mlp(), op="sum", comm_hook=default_hooks.allreduce_hook))
    refused("nothing to train", lambda: Bucketed(mlp().requires_grad_(False)))
    refused("sparse", lambda: Bucketed(nn.Embedding(3, 2, sparse=True)))
    refused("lazy", lambda: Bucketed(nn.LazyLinear(2)))
    refused("strategy", lambda: wrap("bucket", mlp()))
    refused("plan", lambda: Bucketed(mlp(), plan=[["0.weight"]]))
    module = mlp()
    module[0].requires_grad_(False)
    model = Bucketed(module)
    module[0].requires_grad_(True)
    refused("thawed", lambda: model(inputs()))
    return out


def test_what_cannot_be_is_refused_with_the_remedy(got) -> None:
    for said in got(refusals):
        for name, words in {"size": "above 0", "op": "'mean' or 'sum'", "sum with hook": "drop one",
                            "nothing to train": "nothing to reduce", "sparse": "sparse=False",
                            "lazy": "before wrapping", "strategy": "choose one of serial, no_sync, bucketed, ddp",
                            "plan": "leaves out", "thawed": "'0.weight' was frozen"}.items():
            assert words in said[name], (name, said[name])


def test_outside_a_run_it_says_where_to_be() -> None:
    with pytest.raises(RuntimeError, match=r"construct it inside the function given to launch\.run"):
        Bucketed(mlp())
