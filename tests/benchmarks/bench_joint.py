"""PP × TP × ZeRO on eight emulated ranks: what placing reductions and gathers by the whole schedule is worth."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from course_lib.launch import Fabric
from course_lib.link_cost import LinkCost
from course_lib.schedule import zero_bubble
from course_lib.schedule.joint import naive, reductions_at_last_use
from course_lib.simulate.bound import bound
from course_lib.simulate.pipeline import Costs, period, predict, updates
from course_lib.simulate.search import search
from course_lib.spread import half_iqr
from tests.benchmarks.harness import Figure, benchmark

BARE, BUCKETS, ROUNDS, UPDATES, MS = zero_bubble(2, 3, 4), 2, 2, 4, 80.0
WIRE = Fabric(gbit=1.0, latency_us=100, nodes=2, inter_gbit=0.04, inter_latency_us=500, kind="paced")
"""Two nodes. Between them the 1.5 MB of a stage are gathered in 0.16 s."""
PARAMETERS = 400_000
PLANNED = Costs(F=0.085, I=0.085, W=0.08, link=LinkCost(0.003, 0.0), gather=0.16, reduce=0.08, step=0.001)
"""What the search is given, before anything is measured."""


@benchmark
def joint_schedule() -> Iterator[Figure]:
    """2 × 2 × 2 ranks on two nodes, four stages a rank, three micro-batches, F = I = W = 80 ms: updates of three
    schedules in alternation, against the bound with the costs of the same run."""
    from course_lib.schedule.degrees import Degrees
    from course_lib.schedule.measured import Work, measure_joint

    given = naive(BARE, BUCKETS)
    found = search(given, PLANNED, moves=40, memory=12)
    schedules = {"naive": given, "overlap in DP": reductions_at_last_use(given), "joint": found.schedule}
    got = measure_joint(schedules, Degrees(2, 2, 2), Work(MS, MS, MS, parameters=PARAMETERS), WIRE, updates=UPDATES,
                        rounds=ROUNDS, timeout_s=600)
    took = {name: [statistics.median(updates(t)[1:]) for t in rounds] for name, rounds in got.timelines.items()}
    least = bound(found.schedule, got.costs)
    pipeline = predict(BARE, got.costs).step_s
    sent = BARE.stages // 2 * (got.costs.gather + BUCKETS * got.costs.reduce)
    note = (f"Tm(DP)/T(pipeline) = {sent:.3f}/{pipeline:.3f} s = {sent / pipeline:.2f}; bound {least.seconds:.3f} s "
            f"({least.path}); " + ", ".join(f"{name} {statistics.median(t):.3f} s, predicted "
                                            f"{period(schedules[name], got.costs):.3f}" for name, t in took.items()))
    attained = [(a - b) / (a - least.seconds) for a, b in zip(took["naive"], took["joint"])]
    yield Figure("attained of the joint schedule", statistics.median(attained), "of what the bound leaves",
                 half_iqr(attained), 0.90, ">=", note=note)
    for name, goal in (("naive", 1.25), ("overlap in DP", 1.0)):
        ratios = [a / b for a, b in zip(took[name], took["joint"])]
        yield Figure(f"update, {name} / joint", statistics.median(ratios), "ratio", half_iqr(ratios), goal, ">=",
                     note=f"{ROUNDS} rounds of {UPDATES - 2} updates each, after two to settle")
    apart = [abs(statistics.median(t) / period(schedules[name], got.costs) - 1) for name, t in took.items()]
    yield Figure("update against the simulator", max(apart), "of the update", 0.0, 0.05, "<=",
                 note="the largest of the three schedules")
