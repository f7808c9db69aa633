"""Do pipelines take what the simulator says, and are they as fast as `torch.distributed.pipelining`?

The cost of a message is measured in the same run; torch's pipelines run on the same ranks, in alternation.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from course_lib.lab.workbench.pipeline import pipeline_runs
from course_lib.launch import Fabric, run
from course_lib.launch.fabric import shaped_works
from course_lib.link_cost import LinkCost
from course_lib.schedule import interleaved, one_f_one_b, zb_v, zero_bubble
from course_lib.simulate.pipeline import Costs, bubble, predict
from course_lib.spread import half_iqr
from course_lib.timeline import Timeline
from tests.benchmarks.harness import Figure, benchmark

WIRE = Fabric(gbit=1.0, latency_us=500, kind="shaped" if shaped_works() else "paced")
P, M, ROUNDS, MS, MESSAGE = 4, 8, 9, 20.0, 2**16
SCHEDULES = {"1F1B": one_f_one_b(P, M), "zero bubble": zero_bubble(P, M), "interleaved": interleaved(P, M, 2),
             "ZB-V": zb_v(P, M)}


@benchmark
def pipeline_against_simulator() -> Iterator[Figure]:
    """Step and bubble of four ranks with emulated stages, F = I = W = 20 ms, messages of 64 KB."""
    rows = run(_measured, ranks=P, fabric=WIRE, timeout_s=400)
    links = rows[0][0]
    link = LinkCost(*(statistics.median(getattr(one, field) for one in links) for field in ("a_s", "beta_s_per_byte")))
    costs = Costs(*[MS / 1e3] * 3, link=link, message_bytes=MESSAGE)
    for name, schedule in SCHEDULES.items():
        expected = predict(schedule, costs)
        steps, bubbles = [], []
        for k in range(ROUNDS):
            timeline = Timeline.merge(own[name][k] for _, own in rows)
            compute = timeline.select(kind="compute")
            took = max(s.stop for s in compute) - min(s.start for s in compute)
            steps.append(took / 1e9 / expected.step_s - 1)
            bubbles.append(bubble(timeline) - expected.bubble)
        hop = costs.link.cost(MESSAGE) * 1e3
        note = f"{ROUNDS} passes; predicted {expected.step_s * 1e3:.0f} ms, a message {hop:.2g} ms"
        yield Figure(f"step of {name} against the simulator", abs(statistics.median(steps)), "of the step",
                     half_iqr(steps), 0.03, "<=", note=note)
        yield Figure(f"bubble of {name} against the simulator", abs(statistics.median(bubbles)), "of the step",
                     half_iqr(bubbles), 0.02, "<=", note=f"predicted {expected.bubble:.3f}")


@benchmark
def pipeline_against_torch() -> Iterator[Figure]:
    """Steps of 1F1B and interleaved 1F1B over torch's, with the same emulated stages; the bubbles that are left where
    the backward is split (zero bubble is ZB-H1) over 1F1B's."""
    twins = {"torch 1F1B": ("1F1B", M, 1), "torch interleaved": ("interleaved", M, 2)}
    found = pipeline_runs(SCHEDULES, twins, stage_ms=(MS, MS, MS), message_kb=MESSAGE / 1024, fabric=WIRE,
                          repeats=ROUNDS, timeout_s=400).runs
    for name in ("1F1B", "interleaved"):
        mine, theirs = found[name], found[f"torch {name}"]
        ratios = [a / b for a, b in zip(mine.seconds, theirs.seconds)]
        note = (f"{ROUNDS} passes, {WIRE.kind}; {mine.median_s * 1e3:.0f} against {theirs.median_s * 1e3:.0f} ms, "
                f"gradients differ by {max(mine.from_reference, theirs.from_reference):.0e}")
        yield Figure(f"step of {name} over torch.distributed.pipelining", statistics.median(ratios), "of torch's",
                     half_iqr(ratios), 1.0, "<=", note=note)
    plain = found["1F1B"]
    for name in ("zero bubble", "ZB-V"):
        ratios = [a / b for a, b in zip(found[name].bubbles, plain.bubbles)]
        yield Figure(f"bubble of {name} over 1F1B's", statistics.median(ratios), "of 1F1B's", half_iqr(ratios), 0.5,
                     "<=", note=f"{found[name].bubble:.3f} against {plain.bubble:.3f} of the step")


def _measured() -> tuple[list[LinkCost], dict[str, list[Timeline]]]:
    import torch
    import torch.distributed as dist

    from course_lib.record import recording
    from course_lib.schedule.emulated import EmulatedStage
    from course_lib.schedule.execute import Pipeline
    from course_lib.schedule.measure import measure_message

    rank = dist.get_rank()
    pipelines = {name: Pipeline(s, {k: EmulatedStage(MS, MS, MS) for k in s.stages_of(rank)}, lambda out, _: out.sum())
                 for name, s in SCHEDULES.items()}
    window, out = [(torch.ones(MESSAGE // 4),)] * M, {name: [] for name in SCHEDULES}
    for pipeline in pipelines.values():
        pipeline.run(window, 1)
    links = []
    for _ in range(ROUNDS):
        links.append(measure_message((2**12, MESSAGE), turns=4, repeats=1))
        for name, pipeline in pipelines.items():
            dist.barrier()
            with recording(rank, "measured (real wires, emulated device)") as recorder, recorder.measure_step(0):
                pipeline.run(window, 1)
            out[name].append(recorder.timeline())
    return links, out
