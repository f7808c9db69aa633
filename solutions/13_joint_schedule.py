# %% [markdown] id="title"
# # 13 · The joint schedule
#
# **The question.** A pipeline whose stages are cut over tensor-parallel ranks, and whose parameters are sharded over
# replicas: PP × TP × ZeRO. Each has a schedule of its own, and each of these leaves the device or the wire idle
# somewhere. What is gained when one schedule places everything?
#
# You move the reductions to where they can hide, beat the schedule that you were given, and plan a run on 64 GPUs and
# defend the plan. At the end stands the whole way of this course on one page, measured on your machine: all-reduce
# after every micro-step, once, in buckets, and the joint schedule.
#
# About 60 minutes. Eight ranks start on this machine, on two nodes; every byte between them crosses a real,
# rate-limited wire. (With `quick=True`, or fewer than eight `ranks`, there are four, without tensor parallelism.)

# %% id="parameters" tags=["parameters"]
ranks = 8
fabric = "auto"
device = "auto"
seed = 0
quick = False
submission = ""

# %% id="begin"
from course_lib import lab

lab.begin(submission, device)

# %% id="imports"
from dataclasses import replace

from course_lib import show
from course_lib.lab.pictures.schedules_widget import explore_schedules
from course_lib.lab.pictures.side_by_side import side_by_side
from course_lib.lab.pictures.sliders import sliders
from course_lib.lab.recall import recall
from course_lib.lab.workbench.joint import joint_runs
from course_lib.lab.workbench.pipeline_words import with_words, words_of
from course_lib.lab.workbench.way import way_runs
from course_lib.launch import Fabric
from course_lib.plan.hardware import cluster
from course_lib.plan.search import search as plan_search
from course_lib.plan.search import slower_because
from course_lib.plan.shape import model
from course_lib.plan.validate import compare as against_published
from course_lib.plan.validate import summaries
from course_lib.schedule import Op, ScheduleError, breadth_first, check, interleaved, zero_bubble
from course_lib.schedule.degrees import Degrees
from course_lib.schedule.joint import (
    delay_weights,
    first_needed_first,
    naive,
    reductions_at_last_use,
    steps_by_bucket,
    under_the_next_pass,
)
from course_lib.show.memory import memory
from course_lib.simulate.greedy import greedy
from course_lib.simulate.pipeline import Costs, period, predict
from course_lib.simulate.search import search

degrees = Degrees(2, 2, 2) if ranks >= 8 and not quick else Degrees(2, 1, 2)
m, v, buckets = 4, 3, 2
action_ms = 6.0 if quick else 32.0  # eight ranks on few cores are late by more
passes, rounds = (3, 2) if quick else (4, 2)


def two_nodes(gbit, ranks):
    """Fast wires inside a node, and `gbit` between two for each rank, whether the ranks of a node share it or not."""
    wires = Fabric(gbit=1.0, latency_us=100, nodes=2, inter_gbit=gbit, inter_latency_us=500, kind=fabric)
    shared = wires.resolved(ranks).kind == "shaped"
    return Fabric(gbit=1.0, latency_us=100, nodes=2, inter_gbit=gbit * (ranks // 2 if shared else 1),
                  inter_latency_us=500, kind=fabric)


wire = two_nodes(0.12, degrees.ranks)
setting = {"degrees": degrees, "action_ms": action_ms, "stage_kb": 32 * action_ms, "fabric": wire, "passes": passes,
           "rounds": rounds}

# %% [markdown] id="symbols"
# ## The words
#
# | symbol | meaning |
# |---|---|
# | p, t, D | ranks of the pipeline, tensor-parallel ranks of each stage, replicas: p·t·D ranks. Here 2·2·2 |
# | m, v | micro-batches of a pass; stages a rank holds. Here 4 and 3, so the model is cut into 6 |
# | F, I, W | forward; the half of backward that gives the input's gradient; the half that gives the weights' |
# | `reduce0@2` | a reduce-scatter over the replicas: bucket 0 of the gradient of stage 2 |
# | `step@2`, `gather@2` | the optimizer on this rank's shard of stage 2; an all-gather of its parameters |
# | `free@2` | drop the gathered parameters of stage 2, which are out of date after the step and gathered again |
# | update | a pass and everything until the next can begin: in a long run, from the end of one to the end of the next |
# | turn | of a stage: from its last use in one pass to its first use in the next |
# | A | attained: of the time that the bound leaves to gain over the given schedule, the part that was gained |
#
# Each rank does its list in order. Reductions and gathers are only *started* there, and share one wire, which takes
# them in that order; a step waits for its reductions, and compute for the gather of its stage. Tensor-parallel ranks
# do the same list at the same time, and their all-reduces are inside F and I (lab 11: nothing hides those).
#
# The ranks emulate their device, as before. Parameters, gradients, messages, collectives and the wire are real.

# %% [markdown] id="predict-text"
# ## Predict
#
# A rank holds three stages, and is done with one after the other. Their gradients travel between the nodes, over a
# wire on which the gather of a stage takes about as long as one F, and its reduction as long as one or two.

# %% id="predict-reduce"
lab.predict("13.reduce", "Each stage is reduced as soon as its last W is done. How much of the reductions' time does "
            "an update save over reducing at the end?", unit="%")

# %% id="predict-all"
lab.predict("13.all", "Now W, steps and gathers may be placed freely too. How much of all data-parallel traffic can "
            "hide?", unit="%")

# %% id="predict-plan"
lab.predict("13.replicas", "64 A100, 7B parameters, B = 1024: which number of replicas D is the fastest?",
            choices=["1", "2", "4", "8", "16", "32", "64"])

# %% [markdown] id="baseline-text"
# ## The baseline
#
# Zero bubble (lab 10) over two ranks with three stages each. When a rank has computed everything it reduces all
# gradients, steps, and gathers all parameters. That is what you get from a pipeline library and a sharded optimizer
# that know nothing of each other.

# %% id="baseline"
bare = zero_bubble(2, m, v)
given = naive(bare, buckets)
print(given)
first = joint_runs({"given": given}, **setting | {"rounds": 1})
base, costs = first["given"], first.costs
print(f"F {costs.F * 1e3:.1f}, I {costs.I * 1e3:.1f}, W {costs.W * 1e3:.1f} ms; of a stage: both buckets reduced "
      f"{buckets * costs.reduce * 1e3:.1f} ms, gathered {costs.gather * 1e3:.1f} ms, stepped {costs.step * 1e3:.1f} ms")
print(f"an update takes {base.median_s * 1e3:.0f} ± {base.spread_s * 1e3:.0f} ms, predicted "
      f"{first.predicted_s('given') * 1e3:.0f}; without data parallelism it would take {period(bare, costs) * 1e3:.0f}")

# %% id="baseline-figure" tags=["picture"]
expected, seen = first.pair("given")
show.figure(seen, predicted=expected, step=1, title="Given: everything at the end")

# %% [markdown] id="reduce-text"
# At the end the wire works and the device waits. But each rank has three stages, and the first to be done with
# could have been reduced long ago.
#
# *How to read these pictures.* On the measured wire a receive counts from when it is posted until its message is there:
# most of that share is waiting for the other rank, where the prediction has only bytes that travel. The block in front
# is such a wait, too: a measured pass begins with its list, while the gathers of the pass before still travel, a
# predicted one with its first F. The head is that of pass 1 alone, until the last byte that it started is there; the
# prints are the median of all updates, each from the last compute of one pass to that of the next.
#
# ## Exercise 13.1 · move the reductions (12 min)
#
# Write a *pass*: a function from a schedule to a schedule. `reduce_early(words)` gets what one rank does, and returns
# it with the reductions of each stage right behind that stage's last W.
#
# - Each word names its stage behind an @: `"W3@2"`, `"reduce1@2"`, `"step@2"`.
# - A stage may have several buckets, and a rank one stage or several. In which order W come is not given.
# - Where the backward is not split there is no W: the stage's last B completes its gradient.
# - All else stays in its order, and the list that was passed stays as it is.
#
# `["F0@0", "F0@2", "I0@2", "W0@2", "I0@0", "W0@0", "reduce0@2", "reduce0@0", "step@2", "step@0"]` becomes
# `["F0@0", "F0@2", "I0@2", "W0@2", "reduce0@2", "I0@0", "W0@0", "reduce0@0", "step@2", "step@0"]`.

# %% id="reduce" exercise="13.1"
def reduce_early(words):
    ### BEGIN SOLUTION
    def stage(word):
        return word.split("@")[1]

    last = {stage(word): k for k, word in enumerate(words) if word[0] in "WB"}
    moving = [word for word in words if word.startswith("reduce")]
    out = []
    for k, word in enumerate(words):
        if word not in moving:
            out.append(word)
        if last.get(stage(word)) == k:
            out += [reduce for reduce in moving if stage(reduce) == stage(word)]
    return out
    ### END SOLUTION

# %% id="reduce-check"
lab.check("13.1", reduce_early)

# %% [markdown] id="reduce-hint"
# Stuck? `lab.hint("13.1")` gives a first step, and a further one each time you run it.
#
# ## Your pass on ranks

# %% id="reduce-run"
early = with_words(given, [reduce_early(words) for words in words_of(given)])
check(early)
second = joint_runs({"given": given, "reduced early": early}, **setting)


def told(found, name):
    """One run in three lines. Parameters are compared with those of one process after three updates."""
    one = found[name]
    kept = max(check(one.schedule).peak_activations)
    return (f"{name:>14}: update {one.median_s * 1e3:4.0f} ± {one.spread_s * 1e3:.0f} ms, predicted "
            f"{found.predicted_s(name) * 1e3:.0f}\n{'':16}{one.hidden:.0%} of its data-parallel traffic hides, "
            f"predicted {found.predicted_hidden(name):.0%}\n{'':16}keeps {kept} activations; parameters off by "
            f"{one.from_reference:.0e}")


for name in second.runs:
    print(told(second, name))
saved = second["given"].median_s - second["reduced early"].median_s
reducing = second.traffic_s("given", (Op.REDUCE,))
expected_s = second.predicted_s("given") - second.predicted_s("reduced early")
print(f"the reductions of an update take {reducing * 1e3:.0f} ms of a rank's wire; {saved * 1e3:.0f} ms are saved, "
      f"predicted {expected_s * 1e3:.0f}")
lab.compare("13.reduce", round(100 * saved / reducing))

# %% id="reduce-figure" tags=["picture"]
expected, seen = second.pair("reduced early")
show.figure(seen, predicted=expected, step=1, title="Each stage reduced at its last W")

# %% [markdown] id="reduce-why"
# **All but one stage hides.** With v stages a rank that is (v−1)/v of the reductions, two thirds in the prediction: the
# last stage has nothing left to hide under. It is lab 04 again, where the last *bucket* could never hide. Measured it
# is often more. Where everything is reduced at the end, every rank waits there for the one that is late; what is
# reduced under compute has time to wait.
#
# PyTorch's pipelining has the same pass inside. It writes its schedules as such lists too, and puts `REDUCE_GRAD`
# behind the last backward of each stage. Beside yours, on the same compute:

# %% id="reduce-twin"
def torchs_places(actions):
    """Behind how many computations torch reduces each stage. The function is not public and may move."""
    from torch.distributed.pipelining import schedules

    compute = [a for a in actions if a.op in (Op.F, Op.I, Op.W)]
    theirs = [schedules._Action.from_str(f"{a.stage}{a.op.value}{a.index}") for a in compute]
    done, out = 0, {}
    for action in schedules._add_reduce_grad(theirs, m):
        if action.computation_type == schedules.REDUCE_GRAD:
            out[action.stage_index] = done
        else:
            done += 1
    return out


for rank, actions in enumerate(early.ranks):
    compute = [k for k, a in enumerate(actions) if a.op in (Op.F, Op.I, Op.W)]
    mine = {a.stage: sum(k < at for k in compute) for at, a in enumerate(actions) if a.op is Op.REDUCE}
    try:
        theirs = torchs_places(actions)
    except (ImportError, AttributeError) as missing:
        theirs = f"cannot say in this version of torch ({missing})"
    print(f"rank {rank}: computations before the reduction of each stage: yours {mine}, torch's {theirs}")

# %% [markdown] id="beat-text"
# ## Exercise 13.2 · beat the given schedule (20 min, as long as you like)
#
# What is left at the end: the last stage's reduction, all steps, all gathers. In a long run the end of one pass meets
# the beginning of the next: **a rank's list is a circle.** A `step` at the front of a list, before the first F of its
# stage, belongs to the gradient of the pass before, and so does the `gather` behind it. From a stage's last W to its
# next F lies its *turn*; whatever happens there may happen anywhere in it, in this order: the last W, the reductions,
# the step, the gather, the first F. A `free` may stand anywhere between the last W and the gather. Behind the gather it
# would drop what has just come, and an F would find nothing.
#
# Write `beat(lists, seconds)`:
#
# - `lists[r]` are the words of rank r, with the reductions where 13.1 put them. Return other lists of the same words.
# - `seconds(lists)` predicts an update in a long run, with the measured costs. It is infinite for lists that cannot
#   run, so you may try anything; at most 400 times.
# - Leave the lists that were passed as they are.
#
# The check asks for three quarters of what steps and gathers gain in the next pass. The library's search goes
# further. It is your opponent; there is a bound for both of you.

# %% id="beat" exercise="13.2"
def beat(lists, seconds):
    ### BEGIN SOLUTION
    def stage(word):
        return word.split("@")[1]

    def arranged(words, late, behind, ahead):
        """Hold back `late` W of the stages needed later; step what is needed first when only `behind` of those are
        left, and the others in the next pass, `ahead` words before they are needed."""
        order = list(dict.fromkeys(stage(w) for w in words if w[0] == "F"))
        compute = [w for w in words if w[0] in "FIW"]
        held = [w for w in compute if w[0] == "W" and stage(w) != order[0]]
        held = sorted(held[len(held) - late:], key=lambda w: order.index(stage(w)))
        out = [w for w in compute if w not in held] + held

        def put(at, s, *kinds):
            out[at:at] = [w for w in words if w.startswith(kinds) and stage(w) == s]

        def uses(*wanted):
            return [k for k, w in enumerate(out) if w[0] in "FIW" and stage(w) in wanted]

        for s in order:
            put(uses(s)[-1] + 1, s, "free", "reduce")
        put(uses(*order)[-behind] if behind else len(out), order[0], "step", "gather")
        for s in order[1:]:
            put(max(0, uses(s)[0] - ahead), s, "step", "gather")
        return out

    best, least = lists, seconds(lists)
    for late in range(0, sum(w[0] == "W" for w in lists[0]) // 2 + 1, 2):
        for behind in range(0, late + 1, 2):
            for ahead in (0, 1, 2):
                other = [arranged(words, late, behind, ahead) for words in lists]
                if (took := seconds(other)) < least:
                    best, least = other, took
    return best
    ### END SOLUTION

# %% id="beat-check"
lab.check("13.2", beat)

# %% [markdown] id="beat-run-text"
# ## Against the library
#
# Now with the costs that were measured on your wire. The library builds one schedule from nothing, *greedily*: at every
# moment each rank and each wire does the most urgent thing it can. Without `quick` it then tries random moves and keeps
# what is not worse. All run in alternation.

# %% id="beat-run"
costs = second.costs


def seconds(lists):
    try:
        return period(with_words(early, lists), costs)
    except ScheduleError:
        return float("inf")


yours = with_words(early, beat(words_of(early), seconds))
theirs = greedy(bare, costs, buckets, memory=m * v)
if not quick:
    theirs = search(theirs, costs, moves=100, seed=seed, memory=m * v).schedule
between = {} if quick else {"reduced early": early}
third = joint_runs({"given": given, **between, "yours": yours, "library": theirs}, **setting)
least = third.bound("given")
for name, one in third.runs.items():
    print(told(third, name))
    if name != "given":
        gained = third["given"].median_s - one.median_s
        print(f"{'':16}A = {gained / (third['given'].median_s - least.seconds):.2f}, "
              f"{one.median_s / least.seconds - 1:.1%} above the bound")
print(f"no schedule of these stages is faster than {least.seconds * 1e3:.0f} ms ({least.path})")
lab.compare("13.all", round(100 * max(one.hidden for one in third.runs.values())))

# %% id="beat-figure" tags=["picture"]
expected, seen = third.pair("yours")
show.figure(seen, predicted=expected, step=1, title="Your schedule")

# %% id="beat-library" tags=["picture"]
expected, seen = third.pair("library")
show.figure(seen, predicted=expected, step=1, title="The library's schedule")

# %% [markdown] id="beat-why"
# **Nearly all data-parallel traffic fits under compute, if the whole list decides.** (Look at the predicted share. What
# is measured is less: ranks that are late by a little make others wait, the more the busier your machine is.) Three
# moves do it:
#
# - *Into the next pass.* A stage that the next pass needs late is stepped and gathered under the forwards of those that
#   it needs early.
# - *First needed, first done.* The stage that the next pass begins with has no such forwards. Nobody waits for a W, so
#   those of the other stages are held back, and it is reduced, stepped and gathered under them.
# - *Breadth first.* The library's schedule also sends all micro-batches through a stage before the next stage begins.
#   Each stage is then needed later and done with earlier: its turn becomes longer.
#
# The last two cost memory: a W held back keeps its activations, and breadth first keeps all of them. That is the bill
# behind the word "keeps". Pipeline, optimizer and memory compete for the same moments; that is why one schedule has
# to place them all.
#
# What stands between you and the bound may be out of reach. The bound adds up one device's work, or follows one
# micro-batch there and back; it asks for no order.
#
# ## Move the sliders
#
# Rank 0 of four schedules, one pass of a long run, simulated; F, I and W take 10 ms.
#
# - Reductions and gathers that take nothing: what do the schedules still differ in?
# - Traffic of twice an F for each: what does the last schedule still hide, and what not?
# - One stage a rank (v = 1): what is left of reducing early, and why?

# %% id="slider"
def drawn(traffic, stages):
    each = Costs(F=0.01, I=0.01, W=0.01, reduce=0.01 * traffic / buckets, gather=0.01 * traffic, step=0.0005)
    plain = naive(zero_bubble(2, m, stages), buckets)
    moved = reductions_at_last_use(plain)
    held = first_needed_first(delay_weights(moved, m * (stages - 1)))
    shown = {"given": plain, "reduced early": moved, "into the next": under_the_next_pass(moved),
             "W held back": min((under_the_next_pass(steps_by_bucket(held), ahead) for ahead in range(3)),
                                key=lambda one: period(one, each))}
    return {f"{name}, {period(one, each) * 1e3:.0f} ms": predict(one, each, passes=3).timeline.select(step=1)
            for name, one in shown.items()}


explore_schedules(drawn, {"traffic": "reduction, and gather, in F", "stages": "stages a rank v"},
                  traffic=(1, [0, 1, 2]), stages=(3, [1, 2, 3]))

# %% [markdown] id="experts-text"
# ## Extra: experts
#
# A mixture-of-experts layer sends each token to its experts and back: two all-to-alls a layer, in forward and again in
# backward. Like tensor parallelism's all-reduces they sit *inside* F and I, and no list can move them elsewhere. How
# large are they beside the rest? The 7B model with a layer of experts in each of its layers, over the 8 GPUs of a node:

# %% id="experts"
from course_lib.plan import volumes

shape, where = model("7B"), cluster("a100-80", 64)
N = 1024 // (4 * 8)
activations = 2 * 4 * shape.length * shape.width  # bytes of a micro-batch between two layers, in bf16
sent = {"data parallel, once": volumes.data_parallel_bytes(2 * shape.parameters / 8, 8, N),
        "tensor parallel": volumes.tensor_parallel_bytes(activations, 8, shape.layers, N),
        "experts, two a token": volumes.expert_parallel_bytes(activations, 8, shape.layers, N, experts_per_token=2)}
for name, size in sent.items():
    print(f"{name:>21}: {size / 1e9:7.1f} GB sent by a GPU in an update, {size / where.gpu.nvlink:6.2f} s of NVLink, "
          f"{size / where.gpu.network:7.2f} s of the network")

# %% [markdown] id="experts-why"
# Experts and tensor parallelism send the same here: an all-to-all sends half the bytes of an all-reduce, and each token
# has two experts.
#
# What hides an all-to-all is *another micro-batch*: while the tokens of one travel, the other computes (arXiv
# 2412.19437 pairs the forward of one with the backward of another). It is chunking (lab 11) with micro-batches for
# chunks. As a schedule: a layer becomes three stages of one rank, what routes, the experts, what follows, with an
# all-to-all between them. *Depth first* takes a micro-batch through all of them; *breadth first* takes all
# micro-batches through one before the next begins. One rank, simulated:

# %% id="experts-order"
for part in (0.25, 0.5, 1.0, 2.0):
    each = Costs(F=0.01, B=0.02, exchange=0.01 * part)
    deep, wide = (predict(one, each).step_s / (3 * m * 0.03) for one in (interleaved(1, m, 3), breadth_first(1, m, 3)))
    print(f"an all-to-all of {part:4.0%} of F: {deep:.2f} times the compute depth first, {wide:.2f} breadth first")

# %% [markdown] id="plan-text"
# ## A plan for 64 GPUs
#
# An article that this course grew out of proposes: 64 A100, 7B parameters, B = 1024, b = 4, **D = 8, N = 32**. Eight
# replicas leave eight-way model parallelism, as tensor or pipeline ranks. Is that a good choice? Now you have what it
# takes to say.
#
# ## Exercise 13.3 · plan the run (10 min)
#
# Write `best_layout(gpus, B, b, micro_s, data_s, memory, limit)`, which returns `(t, p, D, N)` of the fastest layout
# that fits, or `None`:
#
# - t is 1, 2, 4 or 8: tensor parallelism stays inside a node of eight. p may be any number. t·p·D is `gpus`, exactly.
# - Each replica does N micro-batches of b: B = b·D·N, exactly.
# - `micro_s(t, p)` are the seconds of one micro-batch on *one stage*; `data_s(t, p, D)` those of what data
#   parallelism exposes and of the optimizer, once an update. The pipeline is 1F1B; you know its bubble.
# - `memory(t, p, D)` are bytes of the fullest GPU; it must not be above `limit`. A layout that cannot be, because
#   layers or heads do not divide, takes infinitely many.

# %% id="layout" exercise="13.3"
def best_layout(gpus, B, b, micro_s, data_s, memory, limit):
    ### BEGIN SOLUTION
    best = None
    for t in (1, 2, 4, 8):
        for p in range(1, gpus // t + 1):
            D = gpus // (t * p)
            if gpus % (t * p) or B % (b * D) or memory(t, p, D) > limit:
                continue
            N = B // (b * D)
            took = (N + p - 1) * micro_s(t, p) + data_s(t, p, D)
            if best is None or took < best[0]:
                best = took, (t, p, D, N)
    return best and best[1]
    ### END SOLUTION

# %% id="layout-check"
lab.check("13.3", best_layout)

# %% [markdown] id="layout-run-text"
# Now with the figures of this course's planner (`course plan`): ZeRO-1, bf16 weights and gradients, nothing recomputed.

# %% id="layout-run"
def choices(cluster, b=4, B=1024):
    """The planner's figures by (t, p), and your choice."""
    found = plan_search(shape, cluster, B, micro_batch=b, stage=1)
    plans = {(plan.layout.tensor, plan.layout.pipeline): plan for plan in (*found.fitting, *found.too_large)
             if plan.layout.interleaved == 1 and plan.layout.recompute == "none"}

    def micro_s(t, p):
        step = plans[t, p].step
        return (step.compute + step.tensor + step.pipeline) / step.N

    def data_s(t, p, D):
        return plans[t, p].step.data + plans[t, p].step.optimizer

    def memory(t, p, D):
        return plans[t, p].memory.total if (t, p) in plans else float("inf")

    return plans, best_layout(cluster.gpus, B, b, micro_s, data_s, memory, cluster.gpu.memory - 2 * 2**30)


plans, chosen = choices(where)
best = plans[chosen[:2]]
print("your choice: t = {}, p = {}, D = {}, N = {}".format(*chosen))
for D in (1, 2, 4, 8, 16, 32, 64):
    fitting = [plan for plan in plans.values() if plan.step.D == D and plan.fits]
    if fitting:
        plan = min(fitting, key=lambda one: one.step.total)
        layout = replace(plan.layout, stage=plan.layout.stage if D > 1 else 0)  # one replica has nobody to share with
        print(f"D = {D:2d}: {layout}, N = {plan.step.N}, {plan.memory.total / 2**30:.0f} GiB, "
              f"{plan.step.total:.2f} s\n{'':8}{slower_because(plan, best)}")
lab.compare("13.replicas", str(chosen[2]), how="computed")

# %% [markdown] id="defend-text"
# **D = 8 is not the fast choice here.** Eight-way model parallelism sends activations in every layer of every
# micro-batch, on the critical path, and cuts matrices into pieces that a GPU computes less well. More replicas send
# each gradient once an update, under the last backward. The 7B model does not need to be cut: sharding the optimizer
# (ZeRO-1) is enough to make it fit.
#
# ## Defend it
#
# A plan is a prediction. Three questions that somebody will ask. *Is the planner right at all?* Against published
# runs:

# %% id="defend-published"
for one in summaries(against_published()):
    if one.unit == "s" and one.source in ("korthikanti", "narayanan", "torchtitan-a100", "touvron"):
        print(f"{one.source:>16}: {one.rows} runs on A100, off by {one.mean:.0%} on average, {one.worst:.0%} at worst")

# %% [markdown] id="defend-other-text"
# *Does it depend on your network?* And *what if the GPUs are smaller?* The same search on other clusters:

# %% id="defend-other"
for label, other in (("a quarter of the network", cluster("a100-80", 64, network_gb=6.25)),
                     ("0.5 GB/s a GPU", cluster("a100-80", 64, network_gb=0.5)),
                     ("0.25 GB/s a GPU", cluster("a100-80", 64, network_gb=0.25)),
                     ("0.1 GB/s a GPU", cluster("a100-80", 64, network_gb=0.1)),
                     ("GPUs of 40 GB", cluster("a100-40", 64)), ("8 GPUs of 40 GB", cluster("a100-40", 8))):
    plans_there, there = choices(other)
    if there is None:
        print(f"{label:>25}: nothing fits with b = 4 and nothing recomputed")
        continue
    ours, eight = plans_there[there[:2]], [one for one in plans_there.values() if one.step.D == 8 and one.fits]
    said = f"; the best with D = 8 {min(one.step.total for one in eight):.2f} s" if eight and there[2] != 8 else ""
    print(f"{label:>25}: t = {there[0]}, p = {there[1]}, D = {there[2]}, N = {there[3]}, {ours.step.total:.2f} s{said}")

# %% [markdown] id="defend-why"
# So the defence has its limits in it: **the smallest model parallelism that fits**. It holds down to a network fifty
# times slower than the one assumed. Below that it pays to send less between the nodes: a GPU that holds an eighth of
# the model has an eighth of the gradient to send. At a hundredth of the network D = 8 is the answer at last, and an
# update takes three times as long; at less it is D = 4. With GPUs so small that the model has to be cut, it is
# cut as little as memory allows. N = B/(b·D) follows from D; it is not chosen first.
#
# ## Move the sliders of the plan
#
# All layouts now, with every ZeRO stage, recomputation and interleaving: for each D the fastest that fits.
#
# - Which D is the fastest with GPUs of 40 GB, and what does b have to do with it?
# - A network that is a hundred times slower: which part of D = 64 is it that grows?
# - What does a small B do to pipelines, and to large D?

# %% id="plan-slider"
def by_degree(gpu, network, B, b):
    there = cluster(gpu, 64, network_gb=network)
    plans = plan_search(shape, there, B, micro_batch=b)
    bars, notes = {}, []
    for D, plan in plans.best_by_degree().items():
        parts = plan.memory.parts()
        parts["activations"] += parts.pop("working")
        bars[f"D = {D}, {plan.step.total:.2f} s"] = parts
        most = slower_because(plan, plans.best).partition(",")[0]  # the first part of the difference
        notes.append(f"D = {D}: {plan.layout}, N = {plan.step.N}, {most}")
    return memory(formula=bars, limit_bytes=there.gpu.memory, notes=notes, title=f"7B on 64 {gpu}, B = {B}, b = {b}",
                  provenance="computed; activations include what comes and goes within a step")


sliders(by_degree, {"gpu": "GPU", "network": "network, GB/s a GPU", "B": "global batch B", "b": "micro-batch b"},
        gpu=("a100-80", ["a100-40", "a100-80", "h100"]), network=(25, [0.25, 0.5, 2.5, 25, 50]),
        B=(1024, [64, 256, 1024, 4096]), b=(4, [1, 2, 4, 8, 16]))

# %% [markdown] id="production"
# ## What you would use in production
#
# Megatron-LM has the moves of this lab behind flags: `--use-distributed-optimizer` (ZeRO-1) with
# `--overlap-grad-reduce` and `--overlap-param-gather`, `--num-layers-per-virtual-pipeline-stage` (v), and
# `--overlap-param-gather-with-optimizer-step`. With FSDP2 under `torch.distributed.pipelining`, the pipeline's runtime
# gathers and reduces where its lists say `UNSHARD` and `REDUCE_GRAD`; you have seen the pass that puts them there.
#
# Is it still the same training? Each schedule above did three updates of small stages that was then compared with one
# process on all the data, element by element:

# %% id="twin"
for name, one in third.runs.items():
    print(f"{name:>14}: parameters differ from one process's by {one.from_reference:.0e} of the largest")

# %% [markdown] id="pitfall-early-text"
# ## Pitfalls
#
# **A reduction before the last W.** Hooks on parameters count backward calls, and a split backward makes two of them.
# `check` refuses the list; DDP under a pipeline would not:

# %% id="pitfall-early"
words = words_of(early)
k = next(k for k, word in enumerate(words[0]) if word.startswith("reduce"))
words[0][k - 2:k + 1] = [words[0][k], *words[0][k - 2:k]]
try:
    check(with_words(early, words))
except ScheduleError as refused:
    print(refused)

# %% [markdown] id="pitfall-step-text"
# **A step that waits.** A step blocks its rank until its reductions have arrived. Put right behind them it turns
# asynchronous traffic into waiting, and no gradient is wrong. Predicted with your costs:

# %% id="pitfall-step"
def at_once(words):
    """Each stage stepped right behind its last reduction."""
    out = []
    for word in words:
        if not word.startswith("step"):
            out.append(word)
        if word.startswith(f"reduce{buckets - 1}"):
            out.append(f"step@{word.partition('@')[2]}")
    return out


costs = third.costs
waiting = with_words(early, [at_once(words) for words in words_of(early)])
print(f"steps at the end: {period(early, costs) * 1e3:.0f} ms; each right behind its reductions: "
      f"{period(waiting, costs) * 1e3:.0f} ms")

# %% [markdown] id="pitfall-wire-text"
# **First come, first served.** A wire takes collectives in the order in which they are started. A gather that the next
# pass waits for stands behind whatever was started before it. At the end of the given schedule the stage that is
# needed first is gathered last; turned around, with your costs:

# %% id="pitfall-wire"
turned = early.with_ranks([*(a for a in actions if a.op is not Op.GATHER),
                           *[a for a in actions if a.op is Op.GATHER][::-1]] for actions in early.ranks)
print(f"needed first, gathered last: {period(early, costs) * 1e3:.0f} ms; gathered first: "
      f"{period(turned, costs) * 1e3:.0f} ms")

# %% [markdown] id="pitfall-noise-text"
# **A margin inside the noise.** All schedules above ran in alternation, and each figure has its spread. A gain smaller
# than that is none, whatever the simulator says.
#
# ## The whole way
#
# The article that this course grew out of describes four steps: all-reduce after every micro-step, only once, in
# buckets under backward, and everything in one schedule. Here they are on one set of ranks: four, on two nodes. Same
# stages, same micro-batches, the same compute for each rank. The first three keep the whole model on every rank; the
# joint schedule cuts it over the two ranks of a node and shards it over the nodes.

# %% id="way"
slower = two_nodes(0.048, 4)  # so slow that it matters for all four
joint = greedy(bare, replace(costs, reduce=2.5 * costs.reduce, gather=2.5 * costs.gather), buckets)
way_ms = min(action_ms, 12.0)
way = way_runs(joint, action_ms=way_ms, stage_kb=32 * way_ms, fabric=slower, passes=passes, rounds=1 if quick else 3)
print(f"compute of an update Tc = {way.Tc * 1e3:.0f} ms; one all-reduce of the whole gradient Tm = "
      f"{way.Tm * 1e3:.0f} ms; the joint schedule's reductions and gathers {way.joint_Tm * 1e3:.0f} ms")
for name, one in way.runs.items():
    score = way.fair_score(name)
    print(f"{name:>8}: update {one.median_s * 1e3:4.0f} ± {one.spread_s * 1e3:.0f} ms, compute for "
          f"{way.Tc / one.median_s:.0%} of it; {score.sentence}")

# %% id="way-figure" tags=["picture"]
side_by_side({f"{name}, F = {way.fair_score(name).value or 0:.2f}": one.one_update
              for name, one in way.runs.items()})

# %% [markdown] id="way-why"
# Each row shows rank 0 from the begin of one pass to that of the next. In the last row that begins with what the pass
# before has left over.
#
# F is 0 for the first row and would be 1 at the physical limit, the longer of compute and traffic. The share of the
# update in which a rank computes is what the article calls utilisation and wants to bring from 40 to over 80 %. It is
# the same thing seen from the device, and it says nothing about *useful* compute: recomputation raises it too.
#
# Two things change in the last row, not one. The schedule hides more, and the layout sends less: a rank reduces and
# gathers half the model, with one partner instead of three. That is 2·½·G/2 bytes instead of 2·¾·G. (Less is saved
# here: gloo's reduce-scatter moves twice what it has to. And the pipeline sends activations instead, inside a node.)
# **Send less first, then hide what is left.**
#
# ## What you predicted
#
# All your answers of all labs in this folder, beside what was found:

# %% id="recall"
recall()

# %% [markdown] id="review-text"
# ## Review
#
# Three figures to look at after every change: how much of the step is exposed communication, what the device does
# meanwhile, and whether the steps are alike. Under a joint schedule a step has no clear end: what the last one left
# over is done in this one. Read them for a whole run, not for a single step.

# %% id="review"
lab.review(third["yours"].timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - **Overlap is a resource-allocation problem.** Devices, wires and memory are the resources; a schedule says who gets
#   what when. Now you can state it, check it, and measure it.
# - Reduce each stage when *its* last W is done. What remains is the last stage's, as the last bucket's in lab 04.
# - A pass has no end. What a stage needs between two passes, its turn, can be placed anywhere in it, also under the
#   next forwards.
# - Compare with a bound, and say how far you are above it. Without one, nobody knows whether to go on.
# - Cut the model only as far as it has to be cut. D is what is left over, and N follows.
#
# **For your notes.** Your team trains with 16 pipeline stages, v = 1, and a sharded optimizer. Reductions are "fully
# overlapped", says the dashboard, and yet an update is 12 % longer than without data parallelism. Where would you
# look, and what would you propose?
#
# <details><summary>A model answer</summary>
#
# With one stage a rank, all its W end when the rank's pass ends, so its reduction, its step and its gather are exposed:
# none of them lies *under* compute of its own rank. "Overlapped" may mean that they run while *other* ranks compute, or
# that they fill the rank's bubble, which the dashboard does not call waiting. I would draw one rank over two passes,
# compute lane above wire lane, and add up what lies between its last W and its next F. Then: two or three stages a rank
# (v), so that all but one can be reduced under compute, at the price of v times the messages; W of the stage that is
# needed later held back, so that the one needed first turns around under them, for some activations; smaller buckets at
# the end, so that the step of one runs while the next travels. And I would compute the bound first: if the wire needs
# longer than the turn that is left, only fewer bytes help.
#
# </details>
