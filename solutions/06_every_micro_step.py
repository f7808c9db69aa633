# %% [markdown] id="title"
# # 06 · Every micro-step, asynchronously
#
# **The question.** While micro-step i+1 computes, the wire is idle. Why not send the gradient of micro-step i then,
# piece by piece, and have nearly nothing left to send at the end?
#
# You write the double buffer that makes it possible, run it on the wire beside the window of lab 04, and put the result
# into a formula. The same idea then feeds the device with data, where it does pay.
#
# About 30 minutes. Two ranks start on this machine; every byte between them crosses a real, rate-limited wire.

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
from statistics import median

from course_lib import overlap, show
from course_lib.lab.pictures.phase import phase
from course_lib.lab.pictures.side_by_side import side_by_side
from course_lib.lab.pictures.sliders import sliders
from course_lib.lab.workbench.every import every_runs
from course_lib.lab.workbench.input_pipeline import input_runs, readers
from course_lib.launch import Fabric
from course_lib.link_cost import LinkCost
from course_lib.plan.volumes import data_parallel_bytes
from course_lib.score import fair_score
from course_lib.simulate.buckets import MB, GradientProfile, predict, uniform_plan
from course_lib.simulate.every_step import predict_every_step
from course_lib.tune import compare
from course_lib.tune.choice import gain

wire = Fabric(gbit=1.0, latency_us=1000, kind=fabric)
repeats = 3 if quick else 7
layers, gradient_mb, bucket_mb, N = 6, 3.0, 1.0, 4

# %% [markdown] id="symbols"
# ## The words
#
# | symbol | meaning |
# |---|---|
# | N | micro-steps of one update |
# | Tf, Tb | time of the forward and of the backward pass of one micro-step |
# | G | bytes of the whole gradient; here 3 MB (MB is 2²⁰ bytes), in buckets of 1 MB |
# | C | how long the wire is busy with the buckets of *one* micro-step |
# | r = C/(Tf + Tb) | communication of one micro-step against its compute |
# | exposed | time in which a rank communicates and computes nothing |
# | overlap | the part of all communication that hides behind compute |
# | F | the fair score: 0 is no better than one all-reduce after backward, 1 is the physical limit max(Tc, Tm) |
#
# Two ways to do the same update are compared. **Once**: N − 1 micro-steps under `no_sync`, the buckets of lab 04 in the
# last. **Every micro-step**: buckets leave in each backward, nobody waits for them between micro-steps, and the update
# ends when all have arrived. Both give the same gradient.

# %% [markdown] id="predict-text"
# ## Predict
#
# N = 4, and the work will be sized so that the wire keeps up: the buckets of one micro-step need about two thirds of
# the time that it computes.

# %% id="predict-step"
lab.predict("6.step", "Sending every micro-step's gradient under the next micro-step makes the update",
            choices=["shorter", "equally long", "longer"])

# %% id="predict-overlap"
lab.predict("6.overlap", "Sending every micro-step: how much of all its communication hides behind compute?", unit="%")

# %% [markdown] id="calibrate-text"
# The work is sized for this wire. The device is emulated, the wire is real.

# %% id="calibrate"
load = lab.calibrate(0.6, wire, ranks=ranks, layers=layers, gradient_mb=gradient_mb)
Tf, Tb = load.forward_ms / 1e3, load.backward_ms / 1e3


def profile_of(N):
    """What the emulated device prescribes: equal layers, the last one's gradient first."""
    return GradientProfile([f"layer {layers - 1 - j}" for j in range(layers)], [gradient_mb * MB / layers] * layers,
                           [Tb * (j + 1) / layers for j in range(layers)], Tf, Tb, N=N)


plan = uniform_plan(profile_of(1), bucket_mb * MB)
C = sum(load.link.cost(size) for size in plan.bytes)
print(f"one micro-step computes for Tf + Tb = {(Tf + Tb) * 1e3:.1f} ms; its {len(plan)} buckets keep the wire busy for "
      f"C = {C * 1e3:.1f} ms; r = {C / (Tf + Tb):.2f}")

# %% [markdown] id="double-text"
# ## Exercise 6.1 · double buffers (8 min)
#
# While a bucket travels its memory belongs to the wire: what you add to it now may be sent or not, and differs between
# ranks. So the next micro-step needs a second buffer, and the one after that the first again. Write the three methods
# for one bucket:
#
# - `wire.buffers[0]` and `wire.buffers[1]` are 1-D tensors. `wire.launch(b)` starts their sum over all `wire.ranks`
#   ranks, in place, and returns a handle at once. `handle.wait()` blocks until the sum is there.
# - `collect(b)`: if buffer b is in flight, wait for it and add what arrived to `self.total`.
# - `micro_step(i, gradient)` is called inside backward when the bucket is full. `gradient` is that of micro-step i
#   *alone*. Send it in this call, through buffer `i % 2`. Nothing is waited for before its buffer is needed again.
# - `finish()` returns the mean over the ranks of the window's gradient, and makes ready for the next window.

# %% id="double" exercise="6.1"
import torch


class DoubleBuffer:
    def __init__(self, wire):
        self.wire = wire
        self.handles = [None, None]
        self.total = torch.zeros_like(wire.buffers[0])

    def collect(self, b):
        ### BEGIN SOLUTION
        if self.handles[b] is not None:
            self.handles[b].wait()
            self.total += self.wire.buffers[b]
            self.handles[b] = None
        ### END SOLUTION

    def micro_step(self, i, gradient):
        ### BEGIN SOLUTION
        b = i % 2
        self.collect(b)
        self.wire.buffers[b].copy_(gradient)
        self.handles[b] = self.wire.launch(b)
        ### END SOLUTION

    def finish(self):
        ### BEGIN SOLUTION
        self.collect(0)
        self.collect(1)
        mean = self.total / self.wire.ranks
        self.total = torch.zeros_like(self.total)
        return mean
        ### END SOLUTION

# %% id="double-check"
lab.check("6.1", DoubleBuffer)

# %% [markdown] id="double-hint"
# Stuck? `lab.hint("6.1")` gives a first step, and a further one each time you run it.
#
# ## On the wire
#
# Your class runs with one object for each bucket. Beside it, in alternation on the same ranks and with the same
# buckets: sending once, `train.EveryStep` of the library, stock DDP without `no_sync`, and one all-reduce after the
# last backward (serial), which F is measured against.

# %% id="own"
runs = every_runs(load, DoubleBuffer, N, bucket_mb=bucket_mb, ranks=ranks, fabric=wire, repeats=repeats)
Tc, Tm = N * (Tf + Tb), load.link.cost(gradient_mb * MB)
for name, one in runs.items():
    F = fair_score(runs["serial"].median_s, one.median_s, Tc, Tm).value
    print(f"{name:>9}: step {one.median_s * 1e3:6.1f} ± {one.spread_s * 1e3:4.1f} ms, exposed "
          f"{one.exposed_s * 1e3:5.1f} ms, overlap {one.overlap:4.0%}, F {F:5.2f}, sent {one.bytes / MB:2.0f} MB in "
          f"{one.collectives:2d}")
worst = max(one.from_reference for one in runs.values())
print(f"gradients differ from the mean over ranks by at most {worst:.0e} of the largest element")

# %% id="own-compare"
yours, once = runs["yours"], runs["once"]
longer, spread = gain(yours, once)
print(f"round by round, every micro-step takes {longer:+.1%} ± {spread:.1%} of a step longer than once")
noise = max(2 * spread, 0.02)
if noise > 0.1:
    print("this machine is too busy to tell more than that: close what runs beside it, and run the cell above again")
lab.compare("6.step", "longer" if longer > noise else "shorter" if longer < -noise else "equally long")
lab.compare("6.overlap", round(100 * yours.overlap))

# %% id="figure" tags=["picture"]
side_by_side({"once": runs["once"].timeline, "every micro-step": runs["yours"].timeline})

# %% [markdown] id="own-why"
# **Far more of the communication is hidden, and nothing is gained.** The overlap of the second way is higher because it
# sends N times the bytes, and hides all those that nobody had to send. What ends the update is the same in both: the
# last micro-step's buckets. They hold a full gradient, they cannot leave before they are ready, and the last of them is
# ready when backward ends.
#
# So **the ratio is not the score**. F compares step times, and counts what the update needs, not what was sent.
#
# ## Exercise 6.2 · the argument as a formula (8 min)
#
# Could it ever be shorter? Write the step time of both, then look at all wires at once.
#
# Write `step_time(N, Tf_s, Tb_s, ready_s, cost_s, every)`:
#
# - Micro-steps of `Tf_s` forward and `Tb_s` backward follow each other directly. Compute never waits for the wire.
# - Bucket j of a micro-step is ready `ready_s[j]` after *its backward* began, and keeps the wire busy for `cost_s[j]`.
# - The wire carries one bucket at a time, in order. With `every`, each micro-step sends its buckets, otherwise only the
#   last does.
# - Return the seconds until both compute and the wire have ended.
#
# For N = 2, Tf = 1, Tb = 2, two buckets that are ready at 1 and 2 and cost 2 each, the answers are 9 for sending once
# and 10 for every micro-step.

# %% id="formula" exercise="6.2"
def step_time(N, Tf_s, Tb_s, ready_s, cost_s, every):
    ### BEGIN SOLUTION
    free = 0.0
    for k in range(N):
        if every or k == N - 1:
            begin = k * (Tf_s + Tb_s) + Tf_s
            for ready, cost in zip(ready_s, cost_s):
                free = max(free, begin + ready) + cost
    return max(N * (Tf_s + Tb_s), free)
    ### END SOLUTION

# %% id="formula-check"
lab.check("6.2", step_time)

# %% [markdown] id="argument-text"
# Your loop over the last micro-step does the same in both ways. It differs in one number: when the wire is free. An
# idle wire is the best that the last backward can find, and sending earlier can only leave it busy:
#
# > last bucket arrives = max(f, w + C)
#
# where f is its arrival on a free wire and w is what earlier micro-steps left in the queue, both counted from the start
# of the last backward. **Never shorter.** Equal when the queue has drained before the last micro-step's first bucket is
# ready. With C below Tf + Tb, r < 1, the wire keeps up and that is nearly always so. With r > 1 every micro-step
# leaves a little more, and the step grows towards N·C.
#
# One formula for all wires and all N; four points are measured. What a bucket costs is read off the runs that send
# once: a bucket on the slow wire and one on the fast wire give a and β.

# %% id="phase-runs"
found = {}
ways = {"once": ("bucketed", {"bucket_mb": bucket_mb, "first_bucket_mb": None}),
        "every": ("every_step", {"bucket_mb": bucket_mb, "first_bucket_mb": None})}
for gbit in (0.3, 1.6):
    other = Fabric(gbit=gbit, latency_us=1000, kind=fabric)
    for steps in (2, 4):
        found[gbit, steps] = compare(load.model, ways, every=["every"], ranks=ranks, fabric=other, micro_steps=steps,
                                     repeats=repeats)


def bucket_s(gbit):
    """What one bucket costs on this wire, median over the runs that send once."""
    return 1e-9 * median(row.transfer for steps in (2, 4)
                         for row in overlap.report(found[gbit, steps]["once"].timeline).collectives)


b = (bucket_s(0.3) - bucket_s(1.6)) / (1 / 0.3 - 1 / 1.6) / (bucket_mb * MB)  # seconds a byte at 1 Gbit/s
a = max(0, bucket_s(1.6) - b * bucket_mb * MB / 1.6)
print(f"a = {a * 1e3:.1f} ms, and at 1 Gbit/s β = {b * MB * 1e3:.1f} ms for one MB")
ready_s = [Tb * (j + 1) * bucket_mb / gradient_mb for j in range(len(plan))]


def loss(gbit, N):
    """How much longer every micro-step is than once, on a link of this speed, as a part of the step."""
    cost_s = [a + b * size / gbit for size in plan.bytes]
    once, every = (step_time(N, Tf, Tb, ready_s, cost_s, every) for every in (False, True))
    return every / once - 1


measured = {}
for (gbit, steps), one in found.items():
    sent_once, sent_every = one["once"], one["every"]
    measured[gbit, steps] = sent_every.median_s / sent_once.median_s - 1
    print(f"{gbit} Gbit/s, N = {steps}: once {sent_once.median_s * 1e3:5.1f} ± {sent_once.spread_s * 1e3:.1f} ms, "
          f"every {sent_every.median_s * 1e3:5.1f} ± {sent_every.spread_s * 1e3:.1f} ms: "
          f"{measured[gbit, steps]:+.0%}, predicted {loss(gbit, steps):+.0%}")

# %% id="phase" tags=["picture"]
speeds = [0.2 * 2 ** (j / 6) for j in range(25)]
level = b * gradient_mb * MB / (Tf + Tb - len(plan) * a)  # the speed in Gbit/s at which C = Tf + Tb
phase(loss, speeds, [1, 2, 3, 4, 6, 8, 12, 16], measured, mark=level,
      provenance=sent_once.timeline.provenance.rsplit(", ", 2)[0])

# %% [markdown] id="phase-why"
# Left of r = 1 sending every micro-step loses, and loses more the larger N is. Right of it the two are equal, but for
# what the formula does not know: the host's own work for N times the collectives, which a busy machine stretches.
# There is no region in which it wins: **for replicated gradients it cannot**. And where they are equal, every
# micro-step still sends N times the bytes (somebody else may want the wire) and keeps a second buffer:

# %% id="price" tags=["picture"]
every = predict_every_step(profile_of(N), load.link, plan)
print(f"buffers: {gradient_mb:.0f} MB once, {every.buffer_bytes / MB:.0f} MB every micro-step")
print(f"sent in an update: {gradient_mb:.0f} MB once, {every.bytes / MB:.0f} MB every micro-step")
show.figure(yours.timeline, predicted=every.timeline, title="Every micro-step, predicted above measured")

# %% [markdown] id="slider-text"
# ## Move the sliders
#
# - At 0.5 Gbit/s r is a little above 1. Take N from 2 to 16: the steps part.
# - At 10 Gbit/s: where did the difference go? And what hides in the second way that the first never sent?
# - Buckets of 3 MB, a single one: the last bucket is everything. Does sending earlier help now?

# %% id="slider"
def drawn(N, gbit, bucket_mb):
    profile, link = profile_of(N), LinkCost(a, b / gbit)
    layout = uniform_plan(profile, bucket_mb * MB)
    return side_by_side({"once": predict(profile, link, layout).timeline,
                         "every micro-step": predict_every_step(profile, link, layout).timeline})


sliders(drawn, {"N": "micro-steps N", "gbit": "link, Gbit/s", "bucket_mb": "bucket, MB"}, N=(4, [1, 2, 3, 4, 8, 16]),
        gbit=(0.5, [0.25, 0.5, 0.7, 1, 2, 10]), bucket_mb=(1, [0.5, 1, 1.5, 3]))

# %% [markdown] id="sharded-text"
# ## Where it does pay
#
# A rank that keeps the *whole* gradient can wait with sending. A rank that keeps only its part of it, as in ZeRO-2 and
# ZeRO-3, cannot: the other parts have nowhere to stay until the end. It has to reduce in every micro-step, and there
# the double buffer hides a price that must be paid. The bytes are real; what they buy is memory.

# %% id="sharded"
parameters, degree = 7e9 / 8, 8  # a model of 7 billion parameters, tensor parallel over 8, on 64 GPUs: D = 8
G = 2 * parameters  # the gradient travels in bf16
print("per update and rank, GB (10⁹ bytes):")
for steps in (1, 8, 32):
    once, every_step, zero2 = (data_parallel_bytes(G, degree, steps, **how) / 1e9 for how in
                               ({}, {"every_micro_step": True}, {"stage": 2}))
    print(f"  N = {steps:2d}: replicated, once {once:5.1f}; replicated, every micro-step {every_step:6.1f}; ZeRO-2 "
          f"{zero2:5.1f}")
print(f"gradient in fp32 on each rank: {4 * parameters / 1e9:.2f} GB replicated, "
      f"{4 * parameters / degree / 1e9:.2f} GB with ZeRO-2")

# %% [markdown] id="sharded-why"
# ZeRO-2 sends half of "every micro-step", because a reduce-scatter is half an all-reduce, and then gathers the
# parameters once. Lab 12 builds it.
#
# ## Exercise 6.3 · feed the device (6 min)
#
# The same idea on another wire: the next batch travels to the device while the present one is computed. Here nothing
# is sent that would not have to be sent anyway, so hiding it is a gain.
#
# Write `feed(batches, bus, compute)`, which returns the list of all results:
#
# - `bus.pin(batch)` gives the batch in page-locked memory: memory that the operating system does not move.
# - `bus.copy(...)` starts a copy to the device. From page-locked memory it returns at once; from pageable memory it
#   returns when the copy has ended. What it returns has `.data`, the batch's memory on the device, and `.wait()`, which
#   blocks until the copy has ended and `.data` may be read.
# - `compute(data)` runs one step on a batch and returns its result.
# - `batches` may be a list or a generator: take one after the other.
# - While batch i is computed, batch i+1 is on its way. The device has room for two batches.

# %% id="feed" exercise="6.3"
def feed(batches, bus, compute):
    ### BEGIN SOLUTION
    results, before = [], None
    for batch in batches:
        coming = bus.copy(bus.pin(batch))
        if before is not None:
            before.wait()
            results.append(compute(before.data))
        before = coming
    if before is not None:
        before.wait()
        results.append(compute(before.data))
    return results
    ### END SOLUTION

# %% id="feed-check"
lab.check("6.3", feed)

# %% [markdown] id="feed-text"
# ## The two pitfalls, measured
#
# This machine may have no GPU, so the bus is *emulated*: a thread that copies real bytes, part by part, in 14 ms a
# batch; a step computes for 12 ms. Your `feed` runs three times: as it is; with a `pin` that leaves the batch in
# pageable memory; and with a `wait` that does not wait.

# %% id="feed-run"
for name, epoch in input_runs(feed).items():
    print(f"{name:>27}: {epoch.ms / epoch.batches:5.1f} ms a batch, {epoch.wrong} of {epoch.batches} batches computed "
          "on wrong numbers")

# %% [markdown] id="feed-why"
# - **From pageable memory** the copy and the step add up. The call looks the same, and `non_blocking=True` does not
#   complain: CUDA copies into page-locked memory of its own first, and you wait for that. The emulated bus imitates
#   this rule; it does not prove it.
# - **Read before the copy ended** takes no longer, raises nothing, and computes on an earlier batch, in part or
#   whole. On CUDA the host need not wait: the *stream* that computes waits for the event that the copy recorded
#   (`stream.wait_event`).
#
# What does torch say here about page-locked memory, and about `non_blocking` on this device?

# %% id="pageable"
batch = torch.ones(1024)
try:
    print("pin_memory():", "page-locked" if batch.pin_memory().is_pinned() else "pageable")
except RuntimeError as error:
    print("pin_memory():", str(error).splitlines()[0])
same = batch.to("cuda" if torch.cuda.is_available() else "cpu", non_blocking=True)
print("the same memory, nothing was copied" if same is batch else "a copy on the device")

# %% [markdown] id="twin-text"
# ## What you would use in production
#
# **Reading.** `DataLoader(num_workers=…, prefetch_factor=…, pin_memory=True)` reads and decodes in processes, and its
# batches arrive page-locked. `course_lib.train.prefetch.Prefetch` reads in a thread, and on CUDA copies on a stream of
# its own (that part was written without a GPU, and has not run on one). A reader that takes 10 ms a batch, and the
# 12 ms step:

# %% id="twin"
for name, epoch in readers().items():
    print(f"{name:>21}: {epoch.ms / epoch.batches:5.1f} ms a batch")

# %% [markdown] id="twin-why"
# A thread does when reading waits for a disk or a network. Decoding that keeps a core busy holds Python's lock, and
# needs workers. `torch.utils.data.distributed` has no prefetch: it deals out indices to ranks.
#
# **Sending.** Leaving `no_sync` out of a DDP loop *is* sending every micro-step, and it is worse than what you built:
# DDP waits for its buckets at the end of every backward, so each micro-step has an exposed tail. It ran above:

# %% id="twin-ddp"
for name in ("once", "yours", "EveryStep", "DDP every"):
    print(f"{name:>9}: step {runs[name].median_s * 1e3:6.1f} ms, exposed {runs[name].exposed_s * 1e3:5.1f} ms")

# %% [markdown] id="pitfalls"
# With sharded gradients use FSDP2 (`fully_shard`), which reduces in every micro-step. Its
# `set_requires_gradient_sync(False)` keeps the whole gradient after all, and with it the memory that sharding had
# saved. DeepSpeed's ZeRO-2 reduces in every micro-step too, with two buffers when `overlap_comm` is on.
#
# ## Pitfalls
#
# - **A buffer in flight is not yours.** Adding to it raises nothing, and the result differs between ranks and runs. If
#   a loss depends on whether overlap is on, look for this first.
# - **A mean hides a double count.** Reducing what was already reduced gives the same mean once more, and a *sum* that
#   is too large. Test synchronisation with a sum.
# - **More overlap is not less time.** A report that shows the ratio alone rewards sending what nobody needs.
# - **A third buffer buys nothing.** When the second is still in flight, the wire is what everybody waits for.
# - **Time the whole loop.** A step that waits for its batch looks like slow compute in every picture that begins after
#   the batch is there.
#
# ## Review
#
# Three figures to look at after every change: how much of the step is exposed communication, what the device does
# meanwhile, and whether the steps are alike. Here the wire is busy for most of the step, and that is not a virtue.

# %% id="review"
lab.review(runs["yours"].timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - Sending every micro-step **ties** while the wire keeps up (r below about 1) and **loses** above. It never wins with
#   replicated gradients: the last micro-step's buckets end the update either way.
# - It costs N times the bytes and a second buffer. With **sharded** gradients there is no choice, and the double buffer
#   hides what must be sent.
# - A buffer in flight belongs to the wire until its `wait()`.
# - Copies overlap only from **page-locked** memory, and a batch may be read when its copy has **ended**.
# - **A plausible overlap is a hypothesis.** Write the formula, then measure.
#
# **For your notes.** A report says: "We took `no_sync` out. Communication overlap rose from 55 % to 88 %." What
# happened to the step, most likely, and which three numbers would you ask for?
#
# <details><summary>A model answer</summary>
#
# The step is equally long at best. With stock DDP it is longer, by one exposed tail for each micro-step. The ratio rose
# because N times the bytes are sent, nearly all of them under compute. Ask for the step time of both in alternation,
# for exposed milliseconds of an update, and for the bytes sent in one. And ask whether the gradients are sharded: then
# it is the price of the memory, and the right comparison is with the memory that `no_sync` would need.
#
# </details>
