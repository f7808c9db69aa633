# %% [markdown] id="title"
# # 04 · Gradient buckets
#
# **The question.** Backward produces the gradient piece by piece, last layer first. The wire is idle while it does. How
# much of the gradient's journey can hide behind the backward pass, and what decides it?
#
# You write the reducer that sits inside `DistributedDataParallel`: it fills buckets, launches them while backward is
# still running, and waits at the end. Then you measure which bucket size is best on this wire, compute a plan that
# beats every fixed size, and give the same plan to stock DDP.
#
# About 70 minutes, 25 more for the challenge. Two ranks start on this machine; every byte between them crosses a
# real, rate-limited wire.

# %% id="parameters" tags=["parameters"]
ranks = 2
fabric = "auto"
device = "auto"
seed = 0
quick = False
submission = ""

# %% id="begin"
from course_lib import lab

lab.begin(submission, device)

# %% id="imports"
from course_lib import show
from course_lib.lab.workbench.buckets import ddp_layout, own_run
from course_lib.lab.workbench.real import real_runs
from course_lib.launch import Fabric
from course_lib.simulate.buckets import MB, BucketPlan, ddp_arguments, predict, uniform_plan
from course_lib.tune import compare, sweep

wire = Fabric(gbit=1.0, latency_us=4000, kind=fabric)
repeats = 3 if quick else 7
caps_mb = (1, 4, 16) if quick else (1, 2, 3, 4, 8, 16)

# %% [markdown] id="symbols"
# ## The words
#
# | symbol | meaning |
# |---|---|
# | G | bytes of the whole gradient; here 16 MB (MB is 2²⁰ bytes, as in PyTorch's `bucket_cap_mb`) |
# | S | bytes of one bucket |
# | a | latency of *one collective*: what it costs before the first byte moves; here 4 ms by order |
# | β | time per byte |
# | c(S) = a + β·S | how long one bucket occupies the wire |
# | Tf, Tb | time of the forward and the backward pass |
# | Tc | all compute of the step; Tm: one all-reduce of all G bytes at once; r = Tm/Tc |
# | exposed | time in which a rank communicates and computes nothing |
# | F | the fair score: 0 is no better than one all-reduce after backward, 1 is the physical limit max(Tc, Tm) |
# | A | attained: the same, but 1 is the best that any bucket plan can reach on this wire |
#
# The ranks *emulate* their device: each layer owns real parameters and makes real gradients, but takes a prescribed
# time. Two laptop cores cannot run several ranks of real compute without a fight over the cores. Hooks, buckets, bytes,
# order and the wire are real.

# %% [markdown] id="predict-text"
# ## Predict
#
# The model has 16 layers of 1 MB each. Communication takes as long as compute: r = 1. Answer before you run anything.

# %% id="predict-best"
lab.predict("4.best_bucket", "Which bucket size makes the step shortest on this wire?", unit="MB")

# %% id="predict-exposed"
lab.predict("4.hidden", "With that size, how much of the communication hides behind compute?", unit="%")

# %% [markdown] id="baseline-text"
# ## The baseline
#
# First the work is sized for this wire: `calibrate` measures a and β and chooses layer times so that r = 1. Then one
# update runs the way lab 03 left it: all of backward, then one blocking all-reduce.

# %% id="baseline"
load = lab.calibrate(1.0, wire, ranks=ranks)
print(f"one collective costs a = {load.link.a_s * 1e3:.1f} ms, then {8e-9 / load.link.beta_s_per_byte:.2f} Gbit/s")
print(f"Tf = {load.forward_ms:.0f} ms, Tb = {load.backward_ms:.0f} ms")

baseline = compare(load.model, {"serial": ("no_sync", {})}, ranks=ranks, fabric=wire, repeats=repeats)["serial"]
show.figure(baseline.timeline, title="One all-reduce after backward")

# %% [markdown] id="baseline-seen"
# Vermilion, hatched: communication that nothing hides. The wire was idle during the whole backward pass, and the device
# is idle during the whole all-reduce. The last layer's gradient was ready at the very start of backward. It waited for
# the first layer's, for no reason but the order in which we wrote things down.

# %% [markdown] id="assign-text"
# ## Exercise 4.1 · assign parameters to buckets (10 min)
#
# One collective per parameter pays the latency a for every parameter. One collective for all of them cannot start
# before backward ends. A *bucket* is the compromise: some parameters that travel together.
#
# Write `assign_buckets(sizes_bytes, cap_bytes)`:
#
# - `sizes_bytes` lists `(id, bytes)` in the order in which the model registers its parameters, first layer first. A
#   tied parameter is listed at each of its places, with the same id.
# - Backward runs the other way: the last parameter's gradient is ready first. A tied parameter's gradient is complete
#   when backward has passed its *first* place.
# - Fill a bucket in ready order and close it as soon as it holds `cap_bytes` or more. The last one holds what is left.
# - Return the buckets in the order in which they become ready, each a list of ids in that order. Each id appears once.
#
# For `[(0, 8), (1, 4), (2, 12), (3, 4)]` and a cap of 12 the answer is `[[3, 2], [1, 0]]`.

# %% id="assign" exercise="4.1"
def assign_buckets(sizes_bytes, cap_bytes):
    ### BEGIN SOLUTION
    first_place = {}
    for place, (index, _) in enumerate(sizes_bytes):
        first_place.setdefault(index, place)
    buckets, held = [[]], 0
    for place, (index, size) in reversed(list(enumerate(sizes_bytes))):
        if first_place[index] != place:
            continue  # a tied parameter comes again, and only then is its gradient complete
        buckets[-1].append(index)
        held += size
        if held >= cap_bytes:
            buckets.append([])
            held = 0
    return [bucket for bucket in buckets if bucket]
    ### END SOLUTION

# %% id="assign-check"
lab.check("4.1", assign_buckets)

# %% [markdown] id="assign-hint"
# Stuck? `lab.hint("4.1")` gives a first step, and a further one each time you run it.

# %% [markdown] id="launch-text"
# ## Exercise 4.2 · launch when full (15 min)
#
# PyTorch calls a hook when a parameter's gradient has been accumulated. Write that hook. It has to be short: backward
# stands still while it runs.
#
# - `on_gradient_ready(index)` is called for parameter `index`. `self.uses_left[index]` says how often it will still be
#   called; the gradient is complete at the last call. For nearly every parameter that is the first. A weight inside
#   re-entrant checkpoints, or one that collects two micro-steps, is called twice.
# - When the last gradient of a bucket is complete, the bucket is full. `self.wire.launch(bucket)` starts it and returns
#   a handle at once. Keep the handle in `self.handles`.
# - Collectives are matched by their order, so every rank has to launch bucket 0 first, then 1, then 2, whichever fills
#   first. `self.next_bucket` is the one whose turn it is.

# %% id="launch" exercise="4.2"
class Reducer:
    def __init__(self, buckets, uses, wire):
        self.buckets = buckets
        self.uses_left = dict(uses)
        self.grads_left = [len(bucket) for bucket in buckets]
        self.bucket_of = {index: b for b, bucket in enumerate(buckets) for index in bucket}
        self.next_bucket = 0
        self.wire = wire
        self.handles = []

    def on_gradient_ready(self, index):
        ### BEGIN SOLUTION
        self.uses_left[index] -= 1
        if self.uses_left[index]:
            return
        self.grads_left[self.bucket_of[index]] -= 1
        while self.next_bucket < len(self.buckets) and self.grads_left[self.next_bucket] == 0:
            self.handles.append(self.wire.launch(self.next_bucket))
            self.next_bucket += 1
        ### END SOLUTION

# %% id="launch-check"
lab.check("4.2", Reducer)

# %% [markdown] id="finish-text"
# ## Exercise 4.3 · finish (12 min)
#
# Backward is over. Some buckets are still on the wire, and some may never have left: a parameter that this step did not
# use leaves its bucket incomplete on this rank, while the other ranks wait for it. Write `finish`:
#
# - launch what has not left, in order (before each call of your hook, the gradient was copied into the bucket; where
#   none came, the bucket holds zeros);
# - wait for every handle;
# - `self.wire.views[id]` then holds the *sum* over `self.wire.ranks` ranks. Give each `self.params[id].grad` the mean,
#   in memory of its own: the bucket is filled again in the next window;
# - make ready for the next window: zero every `self.wire.flat[b]`, and set the counters as `__init__` does.

# %% id="finish" exercise="4.3"
class CompleteReducer(Reducer):
    def __init__(self, buckets, uses, wire, params):
        super().__init__(buckets, uses, wire)
        self.uses = dict(uses)
        self.params = params

    def finish(self):
        ### BEGIN SOLUTION
        while self.next_bucket < len(self.buckets):
            self.handles.append(self.wire.launch(self.next_bucket))
            self.next_bucket += 1
        for handle in self.handles:
            handle.wait()
        for index, view in self.wire.views.items():
            self.params[index].grad = view / self.wire.ranks
        for flat in self.wire.flat:
            flat.zero_()
        self.uses_left = dict(self.uses)
        self.grads_left = [len(bucket) for bucket in self.buckets]
        self.next_bucket = 0
        self.handles = []
        ### END SOLUTION

# %% id="finish-check"
lab.check("4.3", CompleteReducer)

# %% [markdown] id="own-text"
# ## Your reducer on the wire
#
# Now your three pieces run on real ranks, with real hooks, on the wire of the baseline. The gradients are compared with
# the mean over ranks and with what stock DDP computes on the same ranks.

# %% id="own"
own = own_run(load, assign_buckets, CompleteReducer, 4, fabric=wire, ranks=ranks, steps=repeats)
print(own.sentence)
show.figure(own.timeline, title="Your buckets of 4 MB")

# %% [markdown] id="order-text"
# The early buckets travel under backward: green. The last one cannot: vermilion.
#
# ## Does the order matter?
#
# Buckets of the same sizes, but dealt out from the *first* layer on, as one would read the model. Before you run it:
# how much of their communication will hide?

# %% id="predict-forward"
lab.predict("4.forward_order", "How much of the communication hides with buckets in forward order?", unit="%")

# %% id="forward"
forward = own_run(load, assign_buckets, CompleteReducer, 4, fabric=wire, ranks=ranks, steps=repeats, order="forward")
Tm = load.link.cost(load.gradient_mb * MB)
lab.compare("4.forward_order", round(max(0, 100 * (1 - forward.exposed_s / Tm))))
show.figure(forward.timeline, title="The same buckets in forward order")

# %% [markdown] id="forward-why"
# **Full, but not arrived.** The bucket that is sent first holds the first layers, and their gradients are the last to
# be ready. All others wait behind it, although they have long been full. Nothing about the sizes changed. Order
# matters more than size.
#
# ## Exercise 4.4 · rebuild the order (8 min)
#
# Reverse registration order is only a guess. A model may register its layers in one order and use them in another,
# and then the guess costs what you just saw. PyTorch watches the first backward pass and rebuilds the buckets in the
# order in which gradients really became ready. There is one trap: each rank sees its own order, and the ranks must
# agree.
#
# Write `rebuilt_order(seen, uses, broadcast)`; every rank calls it once after the first window:
#
# - `seen` lists the ids for which this rank's hook was called, in order. A parameter used twice is listed twice; its
#   gradient is complete at the second.
# - `uses` maps each id to the number of calls that complete it.
# - `broadcast(value)` gives every rank the value of rank 0. It is a collective: every rank has to call it.
# - Return the order in which gradients were complete *on rank 0*, or `None` if rank 0's window was not complete.
#
# With `uses = {0: 2, 1: 1, 2: 1, 3: 1}`, rank 0 having seen `[0, 3, 2, 1, 0]` and rank 1 `[3, 0, 2, 0, 1]`, both return
# `[3, 2, 1, 0]`.

# %% id="rebuild" exercise="4.4"
def rebuilt_order(seen, uses, broadcast):
    ### BEGIN SOLUTION
    calls, order = {}, []
    for index in seen:
        calls[index] = calls.get(index, 0) + 1
        if calls[index] == uses[index]:
            order.append(index)
    return broadcast(order if len(order) == len(uses) else None)
    ### END SOLUTION

# %% id="rebuild-check"
lab.check("4.4", rebuilt_order)

# %% [markdown] id="sweep-text"
# ## Which bucket size?
#
# Every size below runs on the same ranks and the same wire, in alternation, so that a busy moment of your machine hits
# all of them alike. One run without communication gives the times at which the gradients are ready; with a and β that
# is enough to *predict* every size before it is measured:
#
# > bucket i finishes at fᵢ = max(fᵢ₋₁, readyᵢ) + a + β·Sᵢ, where readyᵢ is when its last gradient is complete.

# %% id="sweep"
found = sweep(load.model, caps_mb=caps_mb, ranks=ranks, fabric=wire, repeats=repeats, ddp=("default",))

predicted = [(cap / 4, predict(found.profile, found.link, uniform_plan(found.profile, cap / 4 * MB)).step_s * 1e3)
             for cap in range(4, 65)]
show.curve(predicted, found.points(), best_ms=found.measured["plan"].median_s * 1e3,
           serial_ms=found.measured["serial"].median_s * 1e3, limit_ms=max(found.Tc, found.Tm) * 1e3,
           title="Step time over bucket size", provenance=found.measured["plan"].timeline.provenance)

# %% id="sweep-compare"
best_cap = min(caps_mb, key=lambda cap: found.measured[f"{cap:g} MB"].median_s)
best = found.measured[f"{best_cap:g} MB"]
lab.compare("4.best_bucket", best_cap)
lab.compare("4.hidden", round(100 * (1 - best.exposed_s / found.Tm)))
for name in [f"{cap:g} MB" for cap in caps_mb] + ["plan"]:
    one = found.measured[name]
    print(f"{name:>6}: step {one.median_s * 1e3:6.1f} ± {one.spread_s * 1e3:.1f} ms, "
          f"exposed {one.exposed_s * 1e3:6.1f} ms, {found.fair_score(name).sentence}")

# %% [markdown] id="sweep-why"
# **Neither small nor large wins.** A small bucket leaves early, but each one pays a. A large one pays a once, but the
# last of it cannot leave before backward ends. If a were 0, the smallest would be best; if a were very large, one
# bucket would be.
#
# **And no size reaches the limit.** Two losses remain, and one size cannot cure both:
#
# - The wire stands idle until the first bucket is full. A *small first* bucket starts it early.
# - The last bucket holds the first layer's gradient, which is ready when backward ends. Its whole c(S) is exposed,
#   whatever came before. A *small last* bucket shortens that tail.
#
# Which of them counts depends on r. Here the wire is slower than backward: once started, it hardly pauses until the
# end. So start it early and then pay a as rarely as possible: the best buckets *grow*. On a fast wire (r = 0.3, say)
# it is the wire that waits for gradients, and only the last bucket is exposed: there the best buckets *shrink*.
# Either way it is a plan, not a size.
#
# ## Exercise 4.5 · the best plan (challenge, 25 min)
#
# Write `best_plan(sizes_bytes, ready_s, a_s, beta_s_per_byte)`. The gradients are given in ready order: their bytes,
# and when each is ready in seconds from the start of backward. A plan cuts the list into buckets. Bucket i occupies
# the wire for `a_s + beta_s_per_byte * bytes` and starts when its last gradient is ready *and* the wire is free.
# Return the number of gradients in each bucket, for the plan whose last bucket finishes first.
#
# `best_plan([1, 1, 2], [1.0, 2.0, 3.0], 1.0, 1.0)` is `[1, 2]`: the first gradient alone is there at 3 s, the other two
# at 7 s.
#
# There are 2ⁿ⁻¹ ways to cut n gradients, so do not try them all. What is the earliest time at which the first j
# gradients can have arrived, if you know it for every shorter beginning?

# %% id="best" exercise="4.5"
def best_plan(sizes_bytes, ready_s, a_s, beta_s_per_byte):
    ### BEGIN SOLUTION
    n = len(sizes_bytes)
    before = [0]
    for size in sizes_bytes:
        before.append(before[-1] + size)
    earliest, last_cut = [0.0] + [float("inf")] * n, [0] * (n + 1)
    for j in range(1, n + 1):
        for i in range(j):
            start = max(earliest[i], ready_s[j - 1])
            end = start + a_s + beta_s_per_byte * (before[j] - before[i])
            if end < earliest[j]:
                earliest[j], last_cut[j] = end, i
    lengths, j = [], n
    while j:
        lengths.append(j - last_cut[j])
        j = last_cut[j]
    return lengths[::-1]
    ### END SOLUTION

# %% id="best-check"
lab.check("4.5", best_plan)

# %% [markdown] id="plan-text"
# The sweep above has already run the best plan for this wire, found in the same way. Here is yours beside it.

# %% id="plan" tags=["picture"]
profile = found.profile
lengths = best_plan(list(profile.bytes), list(profile.ready_s), found.link.a_s, found.link.beta_s_per_byte)
names = iter(profile.names)
yours = BucketPlan.of(profile, [[next(names) for _ in range(length)] for length in lengths])
print("your plan:        ", yours, f"predicted step {predict(profile, found.link, yours).step_s * 1e3:.1f} ms")
print("the plan that ran:", found.plan, f"predicted step {found.prediction().step_s * 1e3:.1f} ms")
print("no plan of any shape beats:", f"{found.floor_s * 1e3:.1f} ms")
print(found.fair_score("plan").sentence)
print(found.attained("plan").sentence)
show.figure(found.measured["plan"].timeline, predicted=found.prediction().timeline,
            limit_ns=round(max(found.Tc, found.Tm) * 1e9), fair=found.fair_score("plan").value,
            title="The planned buckets, predicted above measured")

# %% [markdown] id="slider-text"
# ## Move the sliders
#
# The picture below is computed in your browser from the profile you just measured; the bars under it are the run
# nearest to the chosen size. Latency to its minimum: which size wins now? Latency to 20 ms? A link ten times
# faster? Then choose "best plan" and do it again.

# %% id="slider"
timelines = {float(cap): found.measured[f"{cap:g} MB"].timeline for cap in caps_mb}
show.explore(found.profile, found.link, timelines, found.points(), ranks=ranks, bucket_mb=float(best_cap))

# %% [markdown] id="twin-text"
# ## What you would use in production
#
# `DistributedDataParallel` does what you wrote, in C++. These arguments give it your plan; the list needs torch 2.13,
# the single cap is the nearest that older versions can do. The sweep above ran DDP with its defaults on the same
# ranks.

# %% id="twin"
arguments = ddp_arguments(found.plan)
print("DistributedDataParallel(model,", ", ".join(f"{k}={v}" for k, v in arguments.items()) + ")")
for name in ("ddp default", "plan"):
    print(f"{name:>12}: step {found.measured[name].median_s * 1e3:.1f} ms, {found.fair_score(name).sentence}")
print(f"largest difference between your gradients and DDP's: {own.from_ddp:.1g} of the largest element")

# %% [markdown] id="layout-text"
# **What does DDP really do with its arguments?** A comm hook that writes down the size of each bucket can tell. The
# model has 60 layers of 1 MB. Compare the default with the same 25 MB written out.

# %% id="layout"
def sixty_layers():
    from torch import nn
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(60)])

for arguments in ({}, {"bucket_cap_mb": 25}):
    for iteration, sizes in enumerate(ddp_layout(sixty_layers, ranks=ranks, iterations=2, **arguments)):
        print(f"{arguments!s:>22}, iteration {iteration}: {[round(size, 1) for size in sizes]} MB")

# %% [markdown] id="layout-why"
# Two things that are easily missed in the documentation:
#
# - The small first bucket, 1 MB, exists only if you do *not* pass `bucket_cap_mb`. Writing out the default value of 25
#   changes the layout.
# - In the first iteration everything is one bucket: DDP does not know the ready order yet. Never time the first steps.

# %% [markdown] id="real-text"
# ## On devices of your own
#
# All ranks above emulate their devices. Set `device = "cuda"` in the first cell, and this part trains a small GPT on
# your GPUs, a rank on each and NCCL between them. `device = "cpu"` trains a smaller one on this machine's cores and
# over the wire of this lab, where ranks and wires take the cores from each other.

# %% id="real"
if device == "auto":
    print('left out, because device = "auto"')
else:
    ways = {"one all-reduce": ("no_sync", {}), "buckets of 1 MB": ("bucketed", {"bucket_mb": 1}), "DDP": ("ddp", {})}
    for name, one in real_runs(ways, device=device, ranks=ranks, fabric=wire, seed=seed).items():
        print(f"{name:>15}: {one.sentence}")

# %% [markdown] id="pitfalls"
# ## Pitfalls
#
# - **A bucket that is full has not arrived.** If the step does not get faster with smaller buckets, look at the order
#   before you look at the size.
# - **Waiting inside the hook** turns asynchronous into serial, one bucket at a time. It still gives right gradients, so
#   no test of numbers finds it. A timeline does.
# - **Small buckets for a wire of high latency** is popular advice, and backwards: each bucket pays a, so high latency
#   wants *larger* ones. Try it on the sliders.
# - **`gradient_as_bucket_view=True`** saves one copy of the gradient, as long as `.grad` keeps pointing into the
#   bucket. `zero_grad(set_to_none=True)`, the default, breaks that, and a copy is made in every step.
# - **A parameter that some rank does not use** leaves its bucket incomplete. DDP needs `find_unused_parameters=True`
#   then, and pays for it: the buckets are never rebuilt.
# - **Order that differs between ranks** does not always hang. Two buckets of the same size are added to each other, and
#   training goes on with wrong gradients.
#
# ## Review
#
# Three figures to look at after every change: how much of the step is exposed communication (above 30 % there is
# something to gain), what the device does meanwhile, and whether the steps are alike. In the middle figure, grey is a
# device that waits for the wire: a utilisation counter calls it busy, and it computes nothing.

# %% id="review"
lab.review(found.measured["plan"].timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - The **last bucket** can never hide: when it is ready, backward is over, and its a + β·S is exposed.
# - The wire cannot start before the **first bucket** is full. On a slow wire that is what costs most.
# - **Order** matters more than size: a bucket leaves when its last gradient is ready *and* all before it have left.
# - The best size balances latency against both; the best **plan** is not uniform, and grows or shrinks with r.
# - Report exposed time and F. A high overlap ratio alone also rewards waiting.
#
# **For your notes.** Your cluster's link gets four times the bandwidth, at the same latency. Should the buckets grow or
# shrink, and why?
#
# <details><summary>A model answer</summary>
#
# Here they shrink. While the wire was slower than backward, every bucket's a counted. Now the wire is faster than
# backward and waits for gradients, so only the last bucket is exposed. The smallest size wins for which the wire still
# keeps up: a + β·S no longer than backward takes to produce S bytes. Below that the latencies queue up again. Set the
# link on the slider to four times its speed and look.
#
# </details>
