"""What the wires deliver: rates, latency, bytes, order, and one end for all ranks."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import record
from course_lib.launch import Fabric, control_group, current_wire, run
from course_lib.launch.fabric import shaped_works

needs_shaped = pytest.mark.skipif(not shaped_works(), reason="ip and tc do not work in a user namespace here")
KINDS = ["paced", pytest.param("shaped", marks=needs_shaped)]
MB = 2**20


def best_all_reduce_s(nbytes, repeats):
    buffer = torch.zeros(nbytes // 4)
    dist.all_reduce(buffer)
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        best = min(best, time.perf_counter() - start)
    return best


def best_send_s(nbytes, repeats):
    """Rank 0 sends to rank 1: the wire alone, without the additions of a reduction."""
    buffer, best = torch.zeros(nbytes // 4), float("inf")
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(buffer, 1)
        else:
            dist.recv(buffer, 0)
            best = min(best, time.perf_counter() - start)
    return best


@pytest.mark.timing
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gbit, mb", [(0.2, 4), (1.0, 16), (2.0, 32)])
def test_delivered_rate(kind, gbit, mb):
    fabric = Fabric(gbit=gbit, kind=kind)
    for _ in range(6):  # a busy machine can slow all messages of one run; never those of six
        delivered = 8e-9 * mb * MB / run(best_send_s, mb * MB, 5, ranks=2, fabric=fabric)[1]
        if abs(delivered / gbit - 1) <= 0.10:
            break
    assert delivered == pytest.approx(gbit, rel=0.10)


def best_late_wake_up_s(seconds, repeats):
    """How late this machine wakes a thread from a sleep of that length, at best: the wire can be no more exact."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        time.sleep(seconds)
        best = min(best, time.perf_counter() - start - seconds)
    return best


@pytest.mark.timing
@pytest.mark.parametrize("kind", KINDS)
def test_injected_latency(kind):
    """In a shaped wire it comes on top of what a message costs; in a paced one the message moves meanwhile."""
    best = {}

    def fastest(latency_ms):
        """Of all runs so far: a busy machine can delay all forty messages of one run, and never shortens any."""
        fabric = Fabric(gbit=1, latency_us=1e3 * latency_ms, kind=kind)
        took = 1e3 * max(run(best_all_reduce_s, 4, 40, ranks=2, fabric=fabric))
        best[latency_ms] = min(best.get(latency_ms, took), took)
        return best[latency_ms]

    for latency_ms in (1, 4, 10):
        for _ in range(6):
            took, alone = fastest(latency_ms), fastest(0)
            late = min(0.3, 1e3 * best_late_wake_up_s(1e-3 * latency_ms, 20))
            least = latency_ms + (alone - 0.3 if kind == "shaped" else 0)
            most = latency_ms + alone + 0.3 + late
            if least <= took <= most:
                break
        assert least <= took <= most, f"a message took {alone:.2f} ms; {took:.2f} ms with {latency_ms} ms of latency"


@pytest.mark.timing
@pytest.mark.parametrize("kind", KINDS)
def test_two_nodes_with_a_fast_inner_and_a_slow_outer_wire(kind):
    def both():
        inner = dist.new_group([0, 1]), dist.new_group([2, 3])
        mine = inner[dist.get_rank() // 2]
        out = []
        for group in (mine, None):
            buffer, best = torch.zeros(MB), float("inf")
            dist.all_reduce(buffer, group=group)
            for _ in range(12):  # four ranks share the cores, and a busy moment only slows
                dist.barrier()
                start = time.perf_counter()
                dist.all_reduce(buffer, group=group)
                best = min(best, time.perf_counter() - start)
            out.append(best)
        return out

    fabric = Fabric(gbit=1.0, nodes=2, inter_gbit=0.2, kind=kind)
    inside, across = (max(column) for column in zip(*run(both, ranks=4, fabric=fabric)))
    assert 8e-9 * 4 * MB / inside == pytest.approx(1.0, rel=0.15)
    assert 8e-9 * 1.5 * 4 * MB / across == pytest.approx(0.2, rel=0.15)


@needs_shaped
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_kernel_counters_agree_with_the_ring(ranks):
    def sent():
        from course_lib.launch.netns import kernel_bytes
        buffer = torch.zeros(MB)
        dist.all_reduce(buffer)
        dist.barrier()
        before = kernel_bytes()[1]
        current_wire().traffic.reset()
        for _ in range(4):
            dist.all_reduce(buffer)
        dist.barrier()
        time.sleep(0.1)
        return (kernel_bytes()[1] - before) / 4, current_wire().traffic.total_bytes / 4

    ring = 2 * (ranks - 1) / ranks * 4 * MB
    for kernel, counted in run(sent, ranks=ranks, fabric=Fabric(gbit=1, kind="shaped")):
        assert kernel == pytest.approx(ring, rel=0.05)
        assert counted == pytest.approx(ring)


@pytest.mark.parametrize("kind", ["loopback", *KINDS])
def test_buckets_issued_together_end_one_after_the_other(kind):
    def two():
        buffers = [torch.zeros(MB), torch.zeros(MB)]
        dist.all_reduce(buffers[0])
        with record.recording(dist.get_rank()) as rec:
            for work in [dist.all_reduce(b, async_op=True) for b in buffers]:
                work.wait()
        return [(s.start, s.stop) for s in rec.timeline() if s.kind == "comm"]

    for first, second in run(two, ranks=2, fabric=Fabric(gbit=1, kind=kind) if kind != "loopback" else kind):
        assert first[1] <= second[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_rank_gives_both_ranks_the_same_end(kind):
    def late():
        buffer = torch.zeros(4 * MB)
        dist.all_reduce(buffer)
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.1)
        with record.recording(dist.get_rank()) as rec:
            dist.all_reduce(buffer)
        (span,) = (s for s in rec.timeline() if s.kind == "comm")
        return span.start, span.stop

    a, b = run(late, ranks=2, fabric=Fabric(gbit=1, kind=kind))
    transfer = 0.134e9
    assert abs(a[1] - b[1]) < 0.05 * transfer
    assert min(a[1], b[1]) - b[0] > 0.9 * transfer  # nothing moved before the late rank came
    assert a[1] - a[0] > transfer + 0.08e9


@needs_shaped
def test_a_rank_cannot_change_its_own_shaper():
    def try_it():
        attempts = ["tc qdisc del dev eth0 root", "ip link set eth0 down", "ip link add x type dummy",
                    "unshare --user --map-root-user tc qdisc del dev eth0 root"]
        env = {**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
        return [subprocess.run(a.split(), capture_output=True, env=env).returncode for a in attempts]

    for codes in run(try_it, ranks=2, fabric=Fabric(gbit=1, kind="shaped")):
        assert all(codes), codes


def test_a_failed_collective_raises_and_is_not_taken_for_a_result():
    def broken():
        unsupported = torch.zeros(3).to(torch.float8_e4m3fn)
        work = dist.all_reduce(unsupported, async_op=True)
        messages = []
        for wait in (work.wait, work.get_future().wait):
            try:
                wait()
            except RuntimeError as error:
                messages.append(str(error))
        return messages

    for rank, messages in enumerate(run(broken, ranks=2, fabric="loopback", timeout_s=8)):
        assert len(messages) == 2 and f"rank {rank}: all_reduce, 3 bytes" in messages[0]


def sends_what_is_not_in_memory():
    elsewhere = torch.zeros(3, device="meta")
    for call in (dist.all_reduce, lambda t: dist.all_gather([t, t.clone()], t), lambda t: dist.broadcast(t, 0)):
        try:
            call(elsewhere)
        except ValueError as error:
            assert "CPU and CUDA tensors" in str(error) and "on meta" in str(error)
        else:
            raise AssertionError("the tensor was taken")
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def test_a_tensor_that_gloo_cannot_reach_is_refused_and_the_wire_goes_on():
    assert run(sends_what_is_not_in_memory, ranks=2, fabric="loopback") == [2.0, 2.0]


def test_a_callback_that_waits_for_a_collective_does_not_hang_the_wire():
    def chain():
        first = dist.all_reduce(torch.ones(1), async_op=True)
        second = torch.full((1,), 2.0)
        done = first.get_future().then(lambda _: dist.all_reduce(second, async_op=True).wait())
        third = dist.all_reduce(torch.ones(1), async_op=True)
        third.wait()
        done.wait()
        return second.item()

    assert run(chain, ranks=2, fabric="loopback", timeout_s=10) == [4.0, 4.0]


def every_collective():
    rank, n = dist.get_rank(), dist.get_world_size()
    out = {}
    t = torch.arange(4.0) + rank
    dist.all_reduce(t)
    out["all_reduce"] = t.tolist()
    t = torch.full((2,), float(rank))
    dist.broadcast(t, src=1)
    out["broadcast"] = t.tolist()
    parts = [torch.zeros(2) for _ in range(n)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    out["all_gather"] = [p.tolist() for p in parts]
    whole = torch.zeros(2 * n)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
    out["all_gather_into_tensor"] = whole.tolist()
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * n))
    out["reduce_scatter_tensor"] = part.tolist()
    dist.reduce_scatter(part, [torch.full((2,), float(i + rank)) for i in range(n)])
    out["reduce_scatter"] = part.tolist()
    swapped = torch.zeros(n)
    dist.all_to_all_single(swapped, torch.arange(float(n)) + 10 * rank)
    out["all_to_all_single"] = swapped.tolist()
    t = torch.full((1,), float(rank))
    dist.reduce(t, dst=0)
    gathered = [torch.zeros(1) for _ in range(n)] if rank == 0 else None
    dist.gather(torch.full((1,), float(rank)), gathered, dst=0)
    out["gather"] = [g.item() for g in gathered] if gathered else None
    t = torch.zeros(1)
    dist.scatter(t, [torch.full((1,), 5.0 + i) for i in range(n)] if rank == 0 else None, src=0)
    out["scatter"] = t.item()
    t = torch.zeros(3)
    ops = [dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank + 1) % n),
           dist.P2POp(dist.irecv, t, (rank - 1) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    out["ring"] = t.tolist()
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    out["objects"] = objects
    sub = dist.new_group([0, 1])
    t = torch.ones(1)
    if rank < 2:
        dist.all_reduce(t, group=sub)
    out["sub"] = t.item()
    dist.barrier()
    return out


@pytest.mark.parametrize("fabric", ["paced", pytest.param("shaped", marks=needs_shaped)])
def test_every_collective_equals_plain_gloo(fabric):
    ours = run(every_collective, ranks=3, fabric=fabric)
    for rank, got in enumerate(ours):
        assert got["all_reduce"] == [3.0, 6.0, 9.0, 12.0]
        assert got["broadcast"] == [1.0, 1.0]
        assert got["all_gather"] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
        assert got["all_gather_into_tensor"] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        assert got["reduce_scatter_tensor"] == [6.0 * rank, 6.0 * rank + 3]
        assert got["reduce_scatter"] == [3.0 * rank + 3] * 2
        assert got["all_to_all_single"] == [float(rank + 10 * i) for i in range(3)]
        assert got["scatter"] == 5.0 + rank
        assert got["ring"] == [float((rank - 1) % 3)] * 3
        assert got["objects"] == [{"rank": r} for r in range(3)]
        assert got["sub"] == (2.0 if rank < 2 else 1.0)
    assert ours[0]["gather"] == [0.0, 1.0, 2.0]


def train_with(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    torch.manual_seed(dist.get_rank())
    x = torch.randn(6, 8)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0002)
    elif kind == "hook":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        model = nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(None, fp16_compress_hook)
    elif kind == "fsdp":
        from torch.distributed.fsdp import fully_shard
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    full = [p.full_tensor() if kind == "fsdp" else p.detach() for p in model.parameters()]
    return torch.cat([p.flatten() for p in full])


def train_alone(ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    xs = []
    for rank in range(ranks):
        torch.manual_seed(rank)
        xs.append(torch.randn(6, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.cat(xs)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("fabric", KINDS)
@pytest.mark.parametrize("kind, tolerance", [("ddp", 1e-6), ("hook", 2e-3), ("fsdp", 1e-6)])
def test_stock_torch_runs_on_the_wire_unchanged(kind, tolerance, fabric):
    for got in run(train_with, kind, ranks=2, fabric=fabric, timeout_s=60):
        torch.testing.assert_close(got, train_alone(2), atol=tolerance, rtol=tolerance)


def test_control_messages_do_not_pay_the_latency_and_are_not_counted():
    def control():
        group = control_group()
        dist.all_reduce(torch.ones(1), group=group)
        current_wire().traffic.reset()
        best = float("inf")
        for _ in range(10):
            start = time.perf_counter()
            dist.all_reduce(torch.ones(1), group=group)
            best = min(best, time.perf_counter() - start)
        return best, current_wire().traffic.calls.total()

    for best, calls in run(control, ranks=2, fabric=Fabric(gbit=1, latency_us=20000, kind="paced")):
        assert best < 0.01 and calls == 0


def test_spans_carry_step_and_bucket():
    def tagged():
        with record.recording(dist.get_rank()) as rec, rec.measure_step(7), record.tag(3):
            work = dist.all_reduce(torch.ones(5), async_op=True)
            work.wait()
        return [(s.kind, s.bucket, s.step, s.bytes) for s in rec.timeline() if s.kind == "comm"]

    assert run(tagged, ranks=2, fabric="loopback") == [[("comm", 3, 7, 20)]] * 2
