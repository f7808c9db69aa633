"""The whole model over 1, 2 and 4 ranks against the plain one in one process, and against DTensor on the same ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from course_lib.launch import RankFailed, run
from course_lib.tensor import (
    finish_replicated_gradients,
    full_state,
    global_norm,
    parallel_gpt,
    parallel_next_byte_loss,
)
from course_lib.tensor.twin import dtensor_gpt, dtensor_gradients
from course_lib.train.ddp import wrap
from course_lib.train.gpt import GPT, next_byte_loss
from tests.tensor.given import apart, batch, every_degree, gpt, plain, rough

HOW = {"tensor": {}, "sequence": {"sequence_parallel": True}, "chunked": {"sequence_parallel": True, "chunks": 3}}
MODELS = {"tied": {}, "untied": {"tied": False}, "recomputed": {"checkpoint": True}}


def frozen_in_part(**config) -> GPT:
    model = gpt(**config)
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[1].norm1.bias.requires_grad_(False)
    return model


def of_ours(group: dist.ProcessGroup) -> dict:
    """What differs from the plain model: nothing, hopefully."""
    wrong = {}
    for kind, config in MODELS.items():
        model = frozen_in_part(**config)
        loss, want = plain(model)
        norm = nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
        for name, how in HOW.items():
            ours = parallel_gpt(model, group, **how)
            summed, count = parallel_next_byte_loss(ours, batch())
            summed.backward()
            finish_replicated_gradients(ours)
            got = {"loss": summed, "norm": global_norm(ours), **full_state(ours, gradients=True)}
            wrong[kind, name] = apart(got, {"loss": loss, "norm": norm, **want})
            wrong[kind, name] |= apart(full_state(ours), model.state_dict())
            if count != int((batch()[1] != -100).sum()):
                wrong[kind, name]["count"] = count
    return wrong


def test_loss_and_every_gradient_are_those_of_the_plain_model() -> None:
    for found in run(every_degree, of_ours, ranks=4, fabric="loopback"):
        for wrong in found.values():
            assert len(found) == 3 and len(wrong) == 9 and not any(wrong.values()), found


def of_theirs() -> dict:
    """What differs between DTensor's model and the plain one."""
    torch.set_num_threads(1)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    wrong = {}
    for tied in (True, False):
        model = frozen_in_part(tied=tied)
        loss, want = plain(model)
        for sequence in (False, True):
            theirs = dtensor_gpt(model, mesh, sequence)
            summed, _ = next_byte_loss(theirs, batch())
            summed.backward()
            wrong[tied, sequence] = apart({"loss": summed, **dtensor_gradients(theirs, mesh)}, {"loss": loss, **want})
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_twin_of_pytorch_gives_the_same(ranks: int) -> None:
    for wrong in run(of_theirs, ranks=ranks, fabric="loopback"):
        assert len(wrong) == 4 and not any(wrong.values()), wrong


def under_autocast() -> dict[str, tuple[float, float]]:
    """How far the loss and the gradient lie from the plain model's under the same autocast, as shares of it."""
    torch.set_num_threads(1)
    out, model = {}, gpt().float()
    with torch.autocast("cpu", torch.bfloat16):
        loss, want = plain(model)
        for name, how in HOW.items():
            ours = parallel_gpt(model, **how)
            summed, _ = parallel_next_byte_loss(ours, batch())
            summed.backward()
            finish_replicated_gradients(ours)
            got = full_state(ours, gradients=True)
            whole, other = (torch.cat([grads[key].flatten() for key in want]) for grads in (want, got))
            out[name] = abs(summed - loss).item() / loss.item(), ((other - whole).norm() / whole.norm()).item()
    return out


def test_autocast_changes_what_it_changes_in_the_plain_model() -> None:
    for found in run(under_autocast, ranks=2, fabric="loopback"):
        assert list(found) == list(HOW)
        for loss, gradient in found.values():
            assert loss < 0.01 and gradient < 0.02, found


def traffic_of_a_step() -> dict:
    """Calls and bytes of one forward and backward."""
    torch.set_num_threads(1)
    out, traffic = {}, dist.group.WORLD.traffic
    for name, how in HOW.items():
        model = parallel_gpt(gpt(), **how)
        traffic.reset()
        parallel_next_byte_loss(model, batch())[0].backward()
        out[name] = dict(traffic.calls), traffic.total_bytes
        traffic.reset()
        finish_replicated_gradients(model)
        out[name] += (dict(traffic.calls),)
    return out


def test_the_collectives_of_a_step_and_their_bytes() -> None:
    found = run(traffic_of_a_step, ranks=2, fabric="loopback")[0]
    layers, chunks = 2, 3
    loss = 2
    # A layer has two pairs, each with a collective forward and one backward; so have the embedding (forward alone) and
    # the head (backward alone).
    assert found["tensor"][0] == {"all_reduce": 4 * layers + 2 + loss} and found["tensor"][2] == {}
    calls, whole, finish = found["sequence"]
    assert calls == {"all_gather": 4 * layers + 2, "reduce_scatter": 4 * layers + 2, "all_reduce": loss}
    assert finish == {"all_reduce": 1}
    assert whole == pytest.approx(found["tensor"][1]), "an all-reduce is a reduce-scatter and an all-gather"
    calls, in_chunks, _ = found["chunked"]
    pieces = (4 * layers + 1) * chunks + 1
    assert calls == {"all_gather": pieces, "reduce_scatter": pieces, "all_reduce": loss}
    assert in_chunks == pytest.approx(whole)


def started_apart() -> tuple[dict, dict]:
    torch.set_num_threads(1)
    model = rough(gpt(), seed=dist.get_rank())
    return full_state(parallel_gpt(model)), {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_first_rank_s_parameters_count() -> None:
    found = run(started_apart, ranks=2, fabric="loopback")
    assert not apart(found[0][1], found[0][0]) and not apart(found[1][0], found[0][1]) and apart(*found[1])


def two_by_two() -> dict:
    """Two data-parallel replicas of two tensor-parallel ranks, two micro-steps."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    tensor, data = ([dist.new_group(ranks) for ranks in grid] for grid in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    model = parallel_gpt(gpt(), tensor[rank // 2], sequence_parallel=True, chunks=2)
    model = wrap("bucketed", model, process_group=data[rank % 2], bucket_mb=0.004)
    with model.no_sync():
        parallel_next_byte_loss(model, batch(rank // 2))[0].backward()
    parallel_next_byte_loss(model, batch(2 + rank // 2))[0].backward()
    model.finish_gradient_synchronization()
    finish_replicated_gradients(model)
    return full_state(model.module, gradients=True)


def test_with_data_parallel_and_accumulation() -> None:
    model, want = gpt(), {}
    for seed in range(4):
        for name, grad in plain(model, seed)[1].items():
            want[name] = want.get(name, 0) + grad / 2
    for got in run(two_by_two, ranks=4, fabric="loopback"):
        assert not apart(got, want)


@pytest.mark.parametrize(("config", "said"), [({"heads": 2, "width": 18}, "number of heads = 2"),
                                               ({"heads": 4}, "length of the sequence|dimension 1")])
@pytest.mark.parametrize("ranks", [4])
def test_what_does_not_divide_is_refused(config: dict, said: str, ranks: int) -> None:
    def body() -> None:
        model = parallel_gpt(gpt(**config), sequence_parallel=True)
        model(batch(time=7)[0])

    with pytest.raises(RankFailed, match=said):
        run(body, ranks=ranks, fabric="loopback")
