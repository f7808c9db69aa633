"""The joint schedule: a pipeline (PP) of stages cut over tensor-parallel ranks (TP), with ZeRO over its replicas.

One list a pipeline rank says all of it. Tensor-parallel ranks and replicas do the same list at the same time; the
collectives of TP are inside F, I and W, those of ZeRO are `reduce` (reduce-scatter) and `gather` (all-gather).

    from course_lib.schedule import zero_bubble
    from course_lib.schedule.joint import naive, reductions_at_last_use
    from course_lib.schedule.measured import measure_joint          # needs torch
    from course_lib.simulate.bound import bound
    from course_lib.simulate.place import joint
    from course_lib.simulate.pipeline import Costs, period, predict, updates
    from course_lib.simulate.search import search

    bare = zero_bubble(2, 3, 4)                 # compute only: 2 ranks, 3 micro-batches, 4 stages a rank
    given = naive(bare, buckets=2)              # reduce, step and gather when the rank has computed everything;
                                                # naive(add_gathers(bare, 1), 2): gathered for every use (ZeRO-3)
    dp = reductions_at_last_use(given)          # what data parallelism alone overlaps
    costs = Costs(F=0.04, I=0.04, W=0.04, reduce=0.05, gather=0.1, step=0.001)  # a bucket, a stage, a stage
    ours = joint(bare, costs, buckets=2)        # the passes below, placed by cost

    check(ours)                                 # it can run; ScheduleError says why one cannot
    predict(ours, costs, passes=3).timeline     # `Timeline` of three updates, pass k as step k
    period(ours, costs)                         # seconds of an update in a long run
    bound(ours, costs)                          # (seconds, path): no valid schedule is faster, and why
    found = search(given, costs, moves=200, seed=0, memory=12)   # .schedule .period_s .bound .gap
    got = measure_joint({"naive": given, "ours": found.schedule})  # 8 emulated ranks, 2 × 2 × 2, two nodes
    got.timelines["ours"][0], got.costs         # `Timeline` of all ranks; costs of the same run for predict and bound
    updates(got.timelines["ours"][0])           # seconds of each update but the first, measured or predicted
    got.degrees.one_pipeline(got.timelines["ours"][0])   # ranks as in the schedule, to draw beside a prediction

Passes, each `Schedule` to `Schedule`; `check` proves what they return:

    reductions_at_last_use   each stage's buckets leave as soon as its last W (or B) is done
    first_needed_first       in the cool-down the W of the stage that the next pass needs first come first
    delay_weights            more W behind all else, to reduce that stage under them
    steps_by_bucket          the optimizer steps, and parameters are gathered, one bucket after the other
    under_the_next_pass      stages that the next pass needs later are stepped and gathered under its first forwards
    just_in_time             (simulate.place) steps and gathers where their reduction is predicted to have arrived
    move_earlier             (passes) with Op.GATHER, by=1: gathers between the uses of a stage, one computation ahead
"""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.schedule.action import COMPUTE, LAST_USE, SENDS, Action, Op, Schedule, ScheduleError
from course_lib.schedule.cycle import uses


def naive(compute: Schedule, buckets: int | Sequence[int] = 1) -> Schedule:
    """Nothing overlaps: when a rank has computed everything it reduces all gradients, steps, and gathers all
    parameters. The stage that the next pass needs first is gathered last, so that, as in an optimizer that gathers in
    its own step(), nothing computes before everything is there. What a schedule gathers and frees between the uses of a
    stage (ZeRO-3, `add_gathers`) stays. Raises `ScheduleError` for one that has reductions or steps already."""
    if any(a.op in (Op.REDUCE, Op.STEP) for actions in compute.ranks for a in actions):
        raise ScheduleError("the schedule has reductions or steps already; start from one without")
    each = [buckets] * compute.stages if isinstance(buckets, int) else list(buckets)
    numbered = compute.with_ranks(compute.ranks, each)

    def tail(rank: int) -> list[Action]:
        stages = by_last_use(compute, rank)
        return [*(Action(Op.FREE, s) for s in stages),
                *(Action(Op.REDUCE, s, b) for s in stages for b in range(each[s])),
                *(Action(Op.STEP, s) for s in stages),
                *(Action(Op.GATHER, s) for s in reversed(by_first_use(compute, rank)))]

    def inside(actions: Sequence[Action]) -> list[Action]:
        use = _uses(actions)
        return [a for k, a in enumerate(actions)
                if a.op not in (Op.GATHER, Op.FREE) or use[a.stage][0] < k < use[a.stage][1]]

    return numbered.with_ranks((*inside(actions), *tail(rank)) for rank, actions in enumerate(compute.ranks))


def reductions_at_last_use(schedule: Schedule) -> Schedule:
    """Reduce the buckets of each stage, and free its parameters, as soon as its last W (or B) is done."""

    def moved(actions: Sequence[Action]) -> list[Action]:
        last = {a.stage: k for k, a in enumerate(actions) if a.op in LAST_USE}
        moving = [a for a in actions if a.op is Op.REDUCE]
        freed = {a.stage: k for k, a in enumerate(actions) if a.op is Op.FREE}
        out: list[Action] = []
        due: list[Action] = []
        for k, a in enumerate(actions):
            if a.op is Op.REDUCE or (a.op is Op.FREE and freed[a.stage] == k):
                continue
            if a.op not in SENDS:  # another rank waits for those
                out, due = [*out, *due], []
            out.append(a)
            if last.get(a.stage) == k:
                due += [Action(Op.FREE, a.stage)] if a.stage in freed else []
                due += [r for r in moving if r.stage == a.stage]
        return [*out, *due]

    return schedule.with_ranks(moved(actions) for actions in schedule.ranks)


def first_needed_first(schedule: Schedule) -> Schedule:
    """Behind the last F and I of a rank only W are left to compute: do those of the stage first that the next pass
    needs first. Its reduction then travels under the W of the others. Reductions follow their stage's last W.

    More W are left behind, and there is more to travel under, the later they were: `delay_weights` delays them."""

    def moved(rank: int, actions: Sequence[Action]) -> list[Action]:
        need = {stage: k for k, stage in enumerate(by_first_use(schedule, rank))}
        cut = 1 + max(k for k, a in enumerate(actions) if a.op in COMPUTE and a.op is not Op.W)
        weights = iter(sorted((a for a in actions[cut:] if a.op is Op.W), key=lambda a: need[a.stage]))
        return [next(weights) if k >= cut and a.op is Op.W else a for k, a in enumerate(actions)]

    there = any(a.op is Op.REDUCE for actions in schedule.ranks for a in actions)
    made = schedule.with_ranks(moved(rank, actions) for rank, actions in enumerate(schedule.ranks))
    return reductions_at_last_use(made) if there else made


def delay_weights(schedule: Schedule, keep: int) -> Schedule:
    """Do `keep` W of each rank behind all else: the last ones of the stage that the next pass needs last, then of the
    one needed before it, but never of the one needed first, which is reduced under them. Each keeps the activations of
    one micro-batch longer."""
    if keep < 0:
        raise ScheduleError(f"keep={keep}: give a number of W, 0 or more")

    def moved(rank: int, actions: Sequence[Action]) -> list[Action]:
        latest = [a for stage in by_first_use(schedule, rank)[:0:-1] for a in reversed(actions)
                  if a.op is Op.W and a.stage == stage]
        late = set(latest[:keep])
        end = 1 + max(k for k, a in enumerate(actions) if a.op in COMPUTE)
        return [*(a for a in actions[:end] if a not in late), *(a for a in actions[:end] if a in late), *actions[end:]]

    there = any(a.op is Op.REDUCE for actions in schedule.ranks for a in actions)
    made = schedule.with_ranks(moved(rank, actions) for rank, actions in enumerate(schedule.ranks))
    return reductions_at_last_use(made) if there else made


def steps_by_bucket(schedule: Schedule) -> Schedule:
    """Step and gather each bucket by itself, in the order in which they are reduced, when the rank has computed
    everything. A step waits for its reduction only, and its parameters travel while the next bucket steps."""

    def moved(actions: Sequence[Action]) -> list[Action]:
        use = _uses(actions)
        stepped = {a.stage for a in actions if a.op is Op.STEP}
        ours = {k: a for k, a in enumerate(actions) if a.op in (Op.STEP, Op.GATHER) and a.stage in stepped
                and not use[a.stage][0] < k < use[a.stage][1]}
        gathered = {a.stage for a in ours.values() if a.op is Op.GATHER}
        tail = [Action(op, a.stage, a.index) for a in actions if a.op is Op.REDUCE and a.stage in stepped
                for op in ((Op.STEP, Op.GATHER) if a.stage in gathered else (Op.STEP,))]
        return [*(a for k, a in enumerate(actions) if k not in ours), *tail]

    return schedule.with_ranks(moved(actions) for actions in schedule.ranks)


def under_the_next_pass(schedule: Schedule, ahead: int = 1) -> Schedule:
    """Step and gather each stage but the one that a rank needs first in the *next* pass, `ahead` computations before
    its first use there: its reduction, and all of this, travels under the first forwards of the others. The one needed
    first is stepped and gathered before those that end after it are reduced: its gather does not queue behind them."""

    def moved(rank: int, actions: Sequence[Action]) -> list[Action]:
        out = list(actions)
        for k, stage in enumerate(by_first_use(schedule, rank)):
            last = max(k for k, a in enumerate(out) if a.stage == stage and a.op in COMPUTE)
            bundle = [a for k, a in enumerate(out) if k > last and a.stage == stage and a.op in (Op.STEP, Op.GATHER)]
            out = [a for k, a in enumerate(out) if k <= last or a not in bundle]
            reduced = max((k for k, a in enumerate(out) if a.stage == stage and a.op is Op.REDUCE), default=last)
            if k == 0:
                place = next((k for k, a in enumerate(out) if k > reduced and a.op is Op.REDUCE), len(out))
            else:
                before = [k for k, a in enumerate(out) if a.op in COMPUTE]
                use = next(k for k, a in enumerate(out) if a.stage == stage and a.op in COMPUTE)
                place = before[max(0, before.index(use) - ahead)]
            out[place:place] = bundle
        return out

    return schedule.with_ranks(moved(rank, actions) for rank, actions in enumerate(schedule.ranks))


def _uses(actions: Sequence[Action]) -> dict[int, tuple[int, int]]:
    """Where in a list each stage computes first and last."""
    places: dict[int, list[int]] = {}
    for k, a in enumerate(actions):
        if a.op in COMPUTE:
            places.setdefault(a.stage, []).append(k)
    return {stage: (at[0], at[-1]) for stage, at in places.items()}


def by_first_use(schedule: Schedule, rank: int) -> list[int]:
    """The stages of a rank in the order in which a pass needs them."""
    return sorted(schedule.stages_of(rank), key=lambda s: uses(schedule, s)[0])


def by_last_use(schedule: Schedule, rank: int) -> list[int]:
    """The stages of a rank in the order in which a pass is done with them."""
    return sorted(schedule.stages_of(rank), key=lambda s: uses(schedule, s)[1])
