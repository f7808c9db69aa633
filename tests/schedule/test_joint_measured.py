"""A joint run on emulated devices beside its prediction. How fast it is on a quiet machine is for `make bench`."""

from __future__ import annotations

from course_lib.launch import Fabric
from course_lib.schedule import Op, zero_bubble
from course_lib.schedule.action import COMPUTE
from course_lib.schedule.cycle import carried
from course_lib.schedule.degrees import Degrees
from course_lib.schedule.joint import naive
from course_lib.schedule.measured import Work, measure_joint
from course_lib.show import figure
from course_lib.simulate.bound import bound
from course_lib.simulate.greedy import greedy
from course_lib.simulate.pipeline import Costs, period, predict, updates

MS, UPDATES = 8.0, 3
GIVEN = Costs(F=MS / 1e3, I=MS / 1e3, W=MS / 1e3, reduce=0.008, gather=0.016, step=0.001)


def test_a_measured_and_a_predicted_joint_schedule_tell_one_story() -> None:
    bare, degrees = zero_bubble(2, 2, 3), Degrees(2, 1, 2)
    schedules = {"naive": naive(bare, 2), "joint": greedy(bare, GIVEN, 2)}
    wire = Fabric(gbit=1.0, nodes=2, inter_gbit=0.05, kind="paced")
    got = measure_joint(schedules, degrees, Work(MS, MS, MS, parameters=2**16), wire, updates=UPDATES)
    costs = got.costs
    assert min(costs.F, costs.I, costs.W) >= 0.9 * MS / 1e3
    # 256 KB of a stage in two buckets, of which half crosses a wire of 50 Mbit/s each way
    assert costs.gather >= 0.9 * 2**17 * 8 / 50e6 and costs.reduce >= 0.45 * 2**17 * 8 / 50e6
    for name, schedule in schedules.items():
        (timeline,) = got.timelines[name]
        assert timeline.ranks == [0, 1, 2, 3] and timeline.steps == list(range(UPDATES))
        assert len(updates(timeline)) == UPDATES - 1
        assert min(updates(timeline)) > 0.95 * bound(schedule, costs).seconds
        predicted = predict(schedule, costs, passes=UPDATES).timeline
        for stage in range(2):
            actions = schedule.ranks[stage]
            names = [schedule.name(a) for a in actions if a.op in COMPUTE]
            reductions = sum(a.op is Op.REDUCE for a in actions)
            for rank in (stage, stage + 2):
                mine = timeline.select(rank=rank, step=1)
                compute = [s.name for s in mine.select(kind="compute") if not s.name.startswith("step")]
                assert list(dict.fromkeys(compute)) == names
                moved = [s.name for s in timeline.select(rank=rank, kind="comm") if s.step >= 0]
                assert moved.count("reduce_scatter") == UPDATES * reductions
                assert sorted(s.name for s in mine if s.name.startswith("step") and s.kind == "compute") == sorted(
                    schedule.name(a) for a in actions if a.op is Op.STEP)
        assert figure(degrees.one_pipeline(timeline), predicted=predicted, step=1) is not None
    assert carried(schedules["joint"], 0) and period(schedules["joint"], costs) < period(schedules["naive"], costs)
