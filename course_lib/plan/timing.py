"""Seconds of one update by part: compute, pipeline bubble, and what of each kind of communication is exposed.

The step of a pipeline is N times its slowest stage plus p−1 times one part of a stage: (p−1)/(v·N) of the ideal
time is bubble (arXiv 2104.04473). What tensor parallelism sends in forward sits on the critical path and is all
exposed; in backward most of it runs under the products for the gradients. What data parallelism sends hides under
backward as far as backward is long.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from course_lib.plan.compute import VALUE, Amount, head, layer, optimizer
from course_lib.plan.hardware import Cluster
from course_lib.plan.layout import Layout, split
from course_lib.plan.shape import ModelShape
from course_lib.plan.volumes import all_reduce_bytes, shuffle_bytes

INTERFERENCE = 0.1
"""Share of hidden communication by which compute is slowed: collectives take SMs and memory bandwidth. Assumed, not
fitted."""


@dataclass(frozen=True)
class Stage:
    """One micro-batch on one pipeline stage, in seconds: compute and tensor-parallel traffic, and one hop to the next
    stage."""

    forward: float
    backward: float
    tensor_forward: float
    tensor_backward: float
    hop: float

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def tensor(self) -> float:
        return self.tensor_forward + self.tensor_backward


@dataclass(frozen=True)
class Step:
    """One update, in seconds by part. `bubble` is what the slowest stage waits for others; the rest adds up to `total`.
    """

    D: int
    N: int
    tokens: int
    compute: float
    optimizer: float
    bubble: float
    tensor: float
    pipeline: float
    data: float

    PARTS = ("compute", "optimizer", "bubble", "tensor", "pipeline", "data")

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        return {part: getattr(self, part) for part in self.PARTS}

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total

    def mfu(self, shape: ModelShape, cluster: Cluster) -> float:
        """The model's FLOPs, without those of recomputation, over what the GPUs could do in the time."""
        return shape.flops_per_token * self.tokens_per_s / (cluster.gpus * cluster.gpu.flops)


def stage_of(shape: ModelShape, cluster: Cluster, layout: Layout, *, last: bool) -> Stage:
    """Seconds of one micro-batch on a stage; the last one also has the output matrix and the loss."""
    return _stage_of(shape, cluster, layout.tensor, layout.pipeline, layout.micro_batch, layout.recompute,
                     layout.sequence, layout.fused, layout.dropout, layout.overlap, last)


@lru_cache(maxsize=4096)
def _stage_of(shape: ModelShape, cluster: Cluster, tensor: int, pipeline: int, micro_batch: int, recompute: str,
              sequence: bool, fused: bool, dropout: bool, overlap: bool, last: bool) -> Stage:
    """Kept by what it depends on: a search asks for the same stage under every ZeRO stage and interleaving."""
    layout = Layout(tensor, pipeline, micro_batch, recompute=recompute, sequence=sequence, fused=fused, dropout=dropout,
                    overlap=overlap)
    gpu, t, layers = cluster.gpu, layout.tensor, shape.layers // layout.pipeline
    forward, backward = (part.times(layers) for part in layer(shape, layout))
    hidden = forward.matmul / (gpu.efficiency.matmul * gpu.flops) if layout.overlap else 0.0
    if last:
        more = head(shape, layout)
        forward, backward = forward + more[0], backward + more[1]
    A = VALUE * layout.micro_batch * shape.length * shape.width
    inside = min(t, cluster.node)
    # Two all-reduces a layer and direction; sequence parallelism makes each a gather and a scatter of the same bytes.
    reduce = cluster.collective_s(all_reduce_bytes(A, t), t, inside, passes=2) * layers * 2
    if layout.sequence:
        # Gathering a layer's gradient is waited for. Gathering its input again and scattering the gradient of the input
        # run under the products for the gradients of input and weight.
        back = reduce / 2 + max(reduce - hidden, INTERFERENCE * reduce)
    else:
        # The all-reduce of the gradient of the input runs under the product for the weight's gradient.
        back = max(reduce - hidden, INTERFERENCE * reduce)
    again = reduce if layout.recompute == "full" else 0.0
    hop = 0.0
    if layout.pipeline > 1:
        between = cluster.gpus > cluster.node  # stages lie side by side, so that some neighbours are in two nodes
        hop = cluster.send_s(A / t, between) + cluster.collective_s(shuffle_bytes(A, t), t, inside) * (
            not layout.sequence)
    return Stage(forward.seconds(gpu), backward.seconds(gpu), reduce, back + again, hop)


def step(shape: ModelShape, cluster: Cluster, layout: Layout, B: int) -> Step:
    """One update of `B` rows. Raises `Impossible` for degrees that do not divide what they must."""
    D, N = split(layout, shape, cluster.gpus, B)
    p, v = layout.pipeline, layout.interleaved
    slow = stage_of(shape, cluster, layout, last=True)
    usual = stage_of(shape, cluster, layout, last=p == 1)
    held = -(-shape.stage_parameters(p) // layout.tensor)
    updated = held / (D if layout.stage else 1)
    copies = copying(shape, cluster, layout, D)
    return Step(
        D, N, B * shape.length, compute=N * (slow.compute + copies), optimizer=optimizer(updated).seconds(cluster.gpu),
        bubble=(p - 1) * ((usual.compute + usual.tensor + copies) / v + 2 * slow.hop), tensor=N * slow.tensor,
        # A micro-batch comes in and its gradient too, in each part of the stage.
        pipeline=N * 2 * v * slow.hop, data=data_exposed(shape, cluster, layout, held, D, N, slow),
    )  # fmt: skip


def copying(shape: ModelShape, cluster: Cluster, layout: Layout, D: int) -> float:
    """Seconds in which sharding copies within a GPU, a micro-step: a gathered weight is written by the wire and copied
    out (6 bytes), a gradient is read, written flat in the type it is reduced in, and read by the wire. Without sharding
    a gradient is added to the last one by the product that makes it."""
    if D == 1 or layout.stage < 2:
        return 0.0
    reduced = 2 + 2 * (2 * VALUE if layout.fp32_gradients else VALUE)
    gathered = 2 * 6 if layout.stage == 3 else 0
    held = shape.stage_parameters(layout.pipeline) / layout.tensor
    return Amount(bytes=(gathered + reduced) * held).seconds(cluster.gpu)


def data_exposed(shape: ModelShape, cluster: Cluster, layout: Layout, held: int, D: int, N: int, stage: Stage) -> float:
    """Exposed seconds of what data parallelism sends in an update: gradients once (ZeRO 0 and 1), in every micro-step
    (2), and parameters for forward and backward of every micro-step as well (3). See `volumes.data_parallel_bytes`.

    Sent layer by layer. Without overlap all is exposed. With it, what is longer than its window, the piece that has
    nothing left to hide behind, and `INTERFERENCE` of the rest.
    """
    if D == 1:
        return 0.0
    inside = max(1, min(D, cluster.node // layout.tensor))
    pieces = shape.layers // layout.pipeline + 1
    weight, gradient = VALUE * held, (2 * VALUE if layout.fp32_gradients else VALUE) * held

    def shuffles(size: float, count: int) -> float:
        return count * (cluster.collective_s(shuffle_bytes(size, D), D, inside)
                        + (pieces - 1) * cluster.collective_s(0.0, D, inside))

    def exposed(sent: float, window: float) -> float:
        if not layout.overlap:
            return sent
        tail = sent / pieces
        return max(sent - window, tail) + INTERFERENCE * min(sent - tail, window)

    forward, backward = stage.forward + stage.tensor_forward, stage.backward + stage.tensor_backward
    if layout.stage == 3:
        gathers, scatter = shuffles(weight, 1), shuffles(gradient, 1)
        return N * (exposed(gathers, forward) + exposed(gathers + scatter, backward))
    if layout.stage == 2:
        return N * exposed(shuffles(gradient, 1), backward) + exposed(shuffles(weight, 1), forward)
    if layout.stage == 1:
        return exposed(shuffles(gradient, 1), backward) + exposed(shuffles(weight, 1), forward)
    return exposed(shuffles(gradient, 2), backward)
