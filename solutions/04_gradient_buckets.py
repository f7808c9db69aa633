# %% [markdown] id="title"
# # 04 · Gradient buckets
#
# **The question.** Backward produces the gradient piece by piece, last layer first. The wire is idle while it does. How
# much of the gradient's journey can hide behind the backward pass, and what decides it?
#
# You write the reducer that sits inside `DistributedDataParallel`: it fills buckets, launches them while backward is
# still running, and waits at the end. Then you measure which bucket size is best on this wire, compute a plan that beats
# every fixed size, and give the same plan to stock DDP.
#
# About 45 minutes. Two ranks start on this machine; every byte between them crosses a real, rate-limited wire.

# %% id="parameters" tags=["parameters"]
ranks = 2
fabric = "auto"
device = "auto"
seed = 0
quick = False
submission = ""

# %% id="begin"
from course_lib import lab

lab.begin(submission)

# %% id="imports"
from course_lib import show
from course_lib.launch import Fabric
from course_lib.simulate.buckets import MB, ddp_arguments, predict, uniform_plan
from course_lib.tune import calibrate, compare, sweep

wire = Fabric(gbit=1.0, latency_us=4000, kind=fabric)
repeats = 3 if quick else 7
caps_mb = (1, 2, 4, 8, 16) if quick else (1, 2, 3, 4, 8, 16)

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
# | F | the fair score: 0 is no better than waiting for one all-reduce after backward, 1 is the physical limit max(Tc, Tm) |
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
load = calibrate(1.0, wire, ranks=ranks)
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
# One collective per parameter pays the latency a for every parameter. One collective for all of them cannot start before
# backward ends. A *bucket* is the compromise: some parameters that travel together.
#
# Write `assign_buckets(sizes_bytes, cap_bytes)`:
#
# - `sizes_bytes` lists `(id, bytes)` in the order in which the model registers its parameters, first layer first. A tied
#   parameter is listed at each of its places, with the same id.
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
#   called; the gradient is complete at the last call.
# - When the last gradient of a bucket is complete, the bucket is full. `self.wire.launch(bucket)` starts it and returns a
#   handle at once. Keep the handle in `self.handles`.
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

# %% [markdown] id="sweep-text"
# ## Which bucket size?
#
# Every size below runs on the same ranks and the same wire, in alternation, so that a busy moment of your machine hits
# all of them alike. One run without communication gives the times at which the gradients are ready; with a and β that is
# enough to *predict* every size before it is measured:
#
# > bucket i finishes at fᵢ = max(fᵢ₋₁, rᵢ) + a + β·Sᵢ, where rᵢ is when its last gradient is ready.

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
# last of it cannot leave before backward ends. If a were 0, the smallest would be best; if a were very large, one bucket
# would be.
#
# **And no size reaches the limit.** The last bucket contains the first layer's gradient, which is ready when backward
# ends. Its whole c(S) is exposed, whatever came before. So the *last* bucket should be small, and the early ones, which
# have time, should be just large enough not to waste latency. That is a plan, not a size.

# %% id="plan" tags=["picture"]
print("the plan:", found.plan)
print("its predicted step:", f"{found.prediction().step_s * 1e3:.1f} ms")
print("no plan of any shape beats:", f"{found.floor_s * 1e3:.1f} ms")
print(found.fair_score("plan").sentence)
print(found.attained("plan").sentence)
show.figure(found.measured["plan"].timeline, predicted=found.prediction().timeline,
            limit_ns=round(max(found.Tc, found.Tm) * 1e9), fair=found.fair_score("plan").value,
            title="The planned buckets, predicted above measured")

# %% [markdown] id="slider-text"
# ## Move the sliders
#
# The picture below is computed in your browser from the profile you just measured; the bars under it are the run nearest
# to the chosen size. Try: latency to its minimum. Then latency to 20 ms. Then a link ten times faster. Which bucket wins,
# and why?

# %% id="slider"
timelines = {float(cap): found.measured[f"{cap:g} MB"].timeline for cap in caps_mb}
show.explore(found.profile, found.link, timelines, found.points(), ranks=ranks, bucket_mb=float(best_cap))

# %% [markdown] id="twin-text"
# ## What you would use in production
#
# `DistributedDataParallel` does what you just wrote, in C++. These are the arguments that give it your plan.

# %% id="twin"
ddp_arguments(found.plan)
