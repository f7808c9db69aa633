"""The collectives from sends and receives against gloo's and against the α-β model; the published case rebuilt."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

from torch import nn

from course_lib.launch import Fabric, run
from course_lib.launch.fabric import shaped_works
from course_lib.link_cost import LinkCost
from course_lib.simulate.buckets import MB, GradientProfile
from course_lib.simulate.collectives import best_equal_bucket, flat_ring, hierarchical
from course_lib.simulate.reconstruct import even_profile, reconstruct
from course_lib.spread import half_iqr
from course_lib.train.emulated import equal
from course_lib.tune import sweep
from tests.benchmarks.harness import Figure, benchmark

KIND = "shaped" if shaped_works() else "paced"


def alternate(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank for each way in each of `rounds` rounds, after one that is not counted."""
    import torch
    import torch.distributed as dist

    from course_lib.record import now
    seconds = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            start = now()
            way()
            took = torch.tensor([(now() - start) / 1e9], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[name].append(float(took))
    return {name: values[1:] for name, values in seconds.items()}


@benchmark
def ring_against_gloo() -> Iterator[Figure]:
    """Our ring over gloo's own all-reduce, 16 MB at 1 Gbit/s, pair by pair on the same wires."""
    for ranks in (2, 4):
        seconds = run(_ring_and_gloo, ranks=ranks, fabric=Fabric(gbit=1.0, kind=KIND), timeout_s=200)[0]
        ratios = [ours / theirs for ours, theirs in zip(seconds["ring"], seconds["gloo"])]
        yield Figure(f"ring / gloo all-reduce, 16 MB, {ranks} ranks", statistics.median(ratios), "ratio",
                     half_iqr(ratios), 1.15, "<=",
                     note=f"{len(ratios)} pairs; gloo {statistics.median(seconds['gloo']) * 1e3:.0f} ms")


def _ring_and_gloo() -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    from course_lib.collectives import all_reduce_ring
    tensor = torch.zeros(16 * MB // 4)
    return alternate({"ring": partial(all_reduce_ring, tensor), "gloo": partial(dist.all_reduce, tensor)}, 15)


@benchmark
def hierarchical_against_flat() -> Iterator[Figure]:
    """Two nodes, 1 Gbit/s inside and 0.1 between: how much faster, over what the model says of the wires as measured
    in the same run."""
    for ranks in (4, 6):
        fabric = Fabric(gbit=1.0, latency_us=200, nodes=2, inter_gbit=0.1, inter_latency_us=1000, kind=KIND)
        nodes, seconds = run(_two_levels, KIND == "shaped", ranks=ranks, fabric=fabric, timeout_s=200)[0]
        expected = flat_ring(nodes).cost(4 * MB) / hierarchical(nodes).cost(4 * MB)
        ratios = [flat / two / expected for flat, two in zip(seconds["flat"], seconds["hierarchical"])]
        yield Figure(f"gain of hierarchical over that of the model, 4 MB, 2 nodes of {ranks // 2}",
                     abs(statistics.median(ratios) - 1), "of the gain", half_iqr(ratios), 0.15, "<=",
                     note=f"{len(ratios)} pairs; model {expected:.2f}, measured "
                          f"{statistics.median(ratios) * expected:.2f}")


def _two_levels(shared: bool):
    import torch

    from course_lib.collectives import all_reduce_hierarchical, all_reduce_ring, node_groups
    from course_lib.collectives.measure import measure_nodes
    inner, inter = node_groups()
    nodes, tensor = measure_nodes(inner, inter, shared), torch.zeros(4 * MB // 4)
    return nodes, alternate({"flat": partial(all_reduce_ring, tensor, chunks=1), "hierarchical":
                             partial(all_reduce_hierarchical, tensor, inner, inter, chunks=1)}, 9)


@benchmark
def buckets_and_topology() -> Iterator[Figure]:
    """The best of equal buckets on three wires that differ in rate or in latency alone: step with the bucket that the
    model chooses, over the best step that was measured."""
    caps = (0.25, 0.5, 1.0, 2.0, 4.0)
    for name, gbit, latency_us in (("1 Gbit/s, 1 ms", 1.0, 1000), ("0.6 Gbit/s, 1 ms", 0.6, 1000),
                                   ("1 Gbit/s, 16 ms", 1.0, 16000)):
        found = sweep(partial(equal, layers=32, mb=0.25, forward_ms=1.0, backward_ms=2.0), caps,
                      fabric=Fabric(gbit=gbit, latency_us=latency_us, kind=KIND), repeats=7)
        chosen = best_equal_bucket(found.profile.total_bytes, found.profile.Tb, found.link) / MB
        nearest = min(caps, key=lambda cap: abs(cap / chosen - 1))
        steps = {cap: found.measured[f"{cap:g} MB"] for cap in caps}
        best = min(caps, key=lambda cap: steps[cap].median_s)
        fastest = steps[best].median_s
        yield Figure(f"step with the model's bucket over the best, {name}", steps[nearest].median_s / fastest, "ratio",
                     steps[best].spread_s / fastest, 1.05, "<=",
                     note=f"model {chosen:.2f} MB, nearest {nearest:g}, best measured {best:g}; steps "
                          + ", ".join(f"{cap:g} MB {one.median_s * 1e3:.0f} ms" for cap, one in steps.items()))


@benchmark
def published_case() -> Iterator[Figure]:
    """Buckets from 25 to 60 MB, exposed communication from 37 to 12 %: the link that gives it, brought to these wires
    (same proportions to a and β as measured here), and measured."""
    case = reconstruct(even_profile(1400, layers=56, Tb=0.3, parameters=5))
    fabric = Fabric(gbit=1.0, latency_us=8000, kind=KIND)
    wire = sweep(_model_of(case.on(LinkCost(8e-3, 8e-9))), caps_mb=(), fabric=fabric, repeats=5).link
    here = case.on(wire)
    scale = 0.999 * here.bytes[0] / case.profile.bytes[0]  # a little below the bucket, whose bytes were rounded
    found = sweep(_model_of(here), [cap * scale for cap in (25, 60)], fabric=fabric, repeats=9)
    for cap, share in zip((25, 60), case.shares):
        one, foretold = found.measured[f"{cap * scale:g} MB"], found.prediction(cap * scale)
        note = (f"measured {one.exposed_s / one.median_s:.3f}, step {one.median_s * 1e3:.0f} ms; with a and β of the "
                f"same run {foretold.exposed_s / foretold.step_s:.3f}, {foretold.step_s * 1e3:.0f} ms")
        yield Figure(f"exposed share with {cap} MB, from {share:.0%}", abs(one.exposed_s / one.median_s - share),
                     "of the step", one.spread_s / one.median_s, 0.03, "<=", note=note)
        yield Figure(f"step with {cap} MB against the simulator", abs(one.median_s / foretold.step_s - 1),
                     "of the step", one.spread_s / one.median_s, 0.03, "<=")
    ratios = [a / b for a, b in zip(*(found.measured[f"{cap * scale:g} MB"].seconds for cap in (25, 60)))]
    hop = case.message(64)
    yield Figure("speed-up over the predicted", abs(statistics.median(ratios) / case.speedup - 1), "of the speed-up",
                 half_iqr(ratios), 0.03, "<=",
                 note=f"predicted {case.speedup:.3f}, measured {statistics.median(ratios):.3f}; r = {case.r:.2f}, "
                      f"measured {found.r:.2f}; for 64 ranks {hop.a_s * 1e6:.0f} µs a hop and "
                      f"{8e-9 / hop.beta_s_per_byte:.0f} Gbit/s a rank")


def _model_of(profile: GradientProfile) -> Callable[[], nn.Module]:
    """An emulated model with the sizes and times of the case."""
    return partial(equal, layers=56, mb=profile.total_bytes / 56 / MB, parameters=5, forward_ms=1e3 * profile.Tf / 56,
                   backward_ms=1e3 * profile.Tb / 56)
