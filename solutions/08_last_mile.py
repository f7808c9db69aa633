# %% [markdown] id="title"
# # 08 · The last mile
#
# **The question.** Gradients travel under backward. What is left is the tail: the last buckets, and after them the
# optimizer's step. Can that hide too, and at what price for what is learnt?
#
# Some ways only reorder the work. Others let a rank go on with parameters that are not up to date. You build both kinds
# and measure what each changes: the step, the loss after as many updates, and the loss after as many seconds.
#
# About 40 minutes. Two ranks start on this machine; every byte between them crosses a real, rate-limited wire.

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
from functools import partial
from textwrap import fill

from course_lib import show
from course_lib.lab.pictures.lines import lines
from course_lib.lab.pictures.side_by_side import side_by_side
from course_lib.lab.pictures.sliders import sliders
from course_lib.lab.workbench.loss_curves import loss_at, loss_curves, update_s
from course_lib.lab.workbench.stale import stale_runs
from course_lib.lab.workbench.updates import update_runs
from course_lib.launch import Fabric, run
from course_lib.launch.measure import measure

wire = Fabric(gbit=0.5, latency_us=500, kind=fabric)
slow_gbit = 0.02 if quick else 0.01
slow = Fabric(gbit=slow_gbit, kind=fabric)
repeats = 2 if quick else 7
MB = 2**20
buckets = {"bucket_mb": 0.5, "first_bucket_mb": None}

# %% [markdown] id="symbols"
# ## The words
#
# | symbol | meaning |
# |---|---|
# | θ | the parameters; θₜ after t updates |
# | Tc | all compute of an update; here two micro-steps and the optimizer's step |
# | C | how long the wire needs for the gradient of an update |
# | exposed | time in which a rank communicates and computes nothing |
# | delay d | the gradient of window t is applied after window t + d; 0 is the plain update |
# | H | local steps between two averages of the parameters |
# | stale | computed with parameters that other updates have changed since |

# %% [markdown] id="predict-text"
# ## Predict
#
# A well-known piece of advice says: leave about 10 % of the communication un-overlapped, for the sake of convergence.
# First reordering: each bucket's parameters are updated as soon as its gradient is there, while the rest still travels.

# %% id="predict-bits"
lab.predict("8.bits", "After some updates, compared with one all-reduce and one step at the end, the parameters are",
            choices=["the same to the bit", "the same but for rounding", "a little worse", "clearly other ones"])

# %% [markdown] id="predict-late-text"
# Then staleness: the gradient of a window travels under the whole next window, and is applied one update late.

# %% id="predict-delay"
lab.predict("8.delay", "After the same number of updates, the loss with a delay of 1 is",
            choices=["lower", "the same", "higher"])

# %% id="predict-seconds"
lab.predict("8.seconds", "On a slow wire, after the same number of seconds: who has the lowest loss?",
            choices=["every update", "delay 1", "delay 2", "H = 8", "H = 32", "DiLoCo"])

# %% [markdown] id="baseline-text"
# ## The baseline
#
# The work is sized so that communication takes as long as compute. The device is emulated, the wire is real, and so is
# the optimizer: AdamW on the parameters of 8 layers. Buckets of 0.5 MB leave under backward, and then, when all have
# arrived, comes `optimizer.step()`.

# %% id="baseline"
shorter = {"sizes": (MB // 4, MB, 2 * MB)} if quick else {}
link = run(partial(measure, **shorter), ranks=ranks, fabric=wire)[0]
load = lab.calibrate(1.0, wire, ranks=ranks, layers=8, gradient_mb=4.0, micro_steps=2, link=link)
baseline = update_runs(load, {"all, then step": ("bucketed", buckets)}, ranks=ranks, fabric=wire,
                       repeats=repeats)["all, then step"]
print(f"update {baseline.median_s * 1e3:.0f} ± {baseline.spread_s * 1e3:.0f} ms, exposed "
      f"{baseline.exposed_s * 1e3:.0f} ms")
show.figure(baseline.timeline, title="Wait for all buckets, then step")

# %% [markdown] id="baseline-seen"
# After backward the device waits for the last buckets, then the wire waits for the optimizer. Neither needs the other:
# when bucket 0 has arrived, nothing that is still to come can change its gradient.
#
# ## Exercise 8.1 · step each bucket when it is there (10 min)
#
# Write two methods:
#
# - `bucket_full(b, last)` is called inside backward, in **every** micro-step, when bucket b's gradients of that
#   micro-step are there; they add up in the bucket. `last` is true in the update's last micro-step.
#   `self.wire.launch(b)` starts the mean over ranks and returns a handle at once. Backward stands still while you are
#   here.
# - `finish()` is called once an update, after the last backward. `handle.wait()` blocks until the bucket has arrived;
#   `self.optimizers[b].step()` updates the parameters of bucket b. Each bucket is to be updated before you wait for the
#   next. `self.scheduler.step()` moves the learning rate on, once an update.
#
# Gradients are zeroed for you before the next update.

# %% id="step" exercise="8.1"
class StepPerBucket:
    def __init__(self, wire, optimizers, scheduler):
        self.wire = wire
        self.optimizers = optimizers
        self.scheduler = scheduler
        self.handles = []

    def bucket_full(self, b, last):
        ### BEGIN SOLUTION
        if last:
            self.handles.append((b, self.wire.launch(b)))
        ### END SOLUTION

    def finish(self):
        ### BEGIN SOLUTION
        for b, handle in self.handles:
            handle.wait()
            self.optimizers[b].step()
        self.scheduler.step()
        self.handles = []
        ### END SOLUTION

# %% id="step-check"
lab.check("8.1", StepPerBucket)

# %% [markdown] id="step-hint"
# Stuck? `lab.hint("8.1")` gives a first step, and a further one each time you run it.
#
# ## On the wire
#
# Your class runs in alternation with four other ways on the same ranks: one all-reduce at the end (serial), the
# baseline, the library's `StepPerBucket`, and stock DDP followed by `optimizer.step()`. After the last update the
# parameters of all are compared with the serial ones; "from serial" is the largest difference.

# %% id="own"
runs = update_runs(load, {"all, then step": ("bucketed", buckets), "StepPerBucket": ("step_per_bucket", buckets),
                          "DDP, then step": ("ddp", buckets)}, StepPerBucket, ranks=ranks, fabric=wire,
                   repeats=repeats)
for name, one in runs.items():
    print(f"{name:>14}: update {one.median_s * 1e3:3.0f} ± {one.spread_s * 1e3:2.0f} ms, exposed "
          f"{one.exposed_s * 1e3:3.0f} ms, overlap {one.overlap:3.0%}; from serial {one.from_serial:g}")
worst = max(one.from_serial for one in runs.values())
lab.compare("8.bits", "the same to the bit" if worst == 0 else
            "the same but for rounding" if worst < 1e-6 else "clearly other ones")

# %% id="own-figure" tags=["picture"]
side_by_side({name: runs[name].timeline for name in ("all, then step", "yours")})

# %% [markdown] id="own-why"
# **The overlap differs from way to way, and the parameters are the same, to the last bit.** "Leave 10 % un-overlapped
# for convergence" has nothing to act on: each element sees the same operations in the same order, only the waiting
# between them has moved. If a loss changes when overlap is switched on, that is a bug, and you look for a buffer that
# is read or written while it travels.
#
# To the bit needs two things: the same optimizer implementation, and the same order of adding. With two ranks there is
# only one order. With three or more, other bucket borders can change it, and the last digit with it.
#
# What hides here is small: the step of all buckets but the last. It is worth its trouble where the step is long, an
# optimizer that lives in host memory, say.
#
# ## What excludes it
#
# Stepping early means that the first parameter changes before the last gradient is known. Anything that needs *all*
# gradients first comes too late. The library refuses it:

# %% id="refuse"
def clip_then_step():
    import torch

    from course_lib.train import wrap
    from course_lib.train.clip import clip_grad_norm

    model = wrap("step_per_bucket", torch.nn.Linear(8, 8), bucket_mb=0.001)
    model.take_optimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 8)).sum().backward()
    model.finish_gradient_synchronization()
    try:
        clip_grad_norm(model.parameters(), 1.0)
    except RuntimeError as error:
        return str(error)


print(fill(run(clip_then_step, ranks=ranks, fabric="loopback")[0], 86))

# %% [markdown] id="refuse-why"
# And a parameter that is used twice may be updated only when the gradients of *both* uses are complete.
#
# ## Staleness
#
# Reordering is used up now. Whoever wants to hide more has to let the device go on *before* the gradient has arrived:
#
# > plain: θₜ₊₁ = θₜ − η·g(θₜ)   delay 1: θₜ₊₁ = θₜ − η·g(θₜ₋₁)
#
# The gradient of window t travels under the whole window t + 1. It is the right gradient, for parameters that are no
# longer there.
#
# ## Exercise 8.2 · delay the update (8 min)
#
# Write three methods. `self.under_way` is a list of your own, oldest first.
#
# - `end_of_window(gradient)` gets this rank's gradient of the window that has just run, a tensor of its own.
#   `self.wire.launch(gradient)` starts the mean over ranks in place and returns a handle. In the first `delay` windows
#   nothing is applied; after that, each window applies the gradient of `delay` windows ago.
# - `apply_oldest()` waits for the oldest gradient under way, makes it `self.param.grad`, and steps.
# - `flush()` is called after the last window and applies what is left, one step each.

# %% id="delayed" exercise="8.2"
class Delayed:
    def __init__(self, wire, param, optimizer, delay):
        self.wire = wire
        self.param = param
        self.optimizer = optimizer
        self.delay = delay
        self.under_way = []

    def apply_oldest(self):
        ### BEGIN SOLUTION
        gradient, handle = self.under_way.pop(0)
        handle.wait()
        self.param.grad = gradient
        self.optimizer.step()
        ### END SOLUTION

    def end_of_window(self, gradient):
        ### BEGIN SOLUTION
        self.under_way.append((gradient, self.wire.launch(gradient)))
        if len(self.under_way) > self.delay:
            self.apply_oldest()
        ### END SOLUTION

    def flush(self):
        ### BEGIN SOLUTION
        while self.under_way:
            self.apply_oldest()
        ### END SOLUTION

# %% id="delayed-check"
lab.check("8.2", Delayed)

# %% [markdown] id="rounds-text"
# ## Exercise 8.3 · local steps and an outer step (8 min)
#
# The other way: send less often. Every rank steps by itself, with its own gradient, H times. Then the parameters
# become their mean over ranks: *Local SGD*. The bytes fall to 1/H.
#
# DiLoCo goes one step further. It looks at how far the round has come, Δ = θ_old − mean(θ), takes it for a gradient,
# and lets an *outer* optimizer step on it. With momentum µ = `outer_momentum` and Nesterov's form:
#
# > v ← µ·v + Δ,   θ ← θ_old − outer_lr·(Δ + µ·v)
#
# Write `step()`, which is called in place of `optimizer.step()`. `self.mean(tensor)` returns the mean over ranks as a
# new tensor; it is a collective. After each H-th step every parameter, and `old`, become the new θ (change a parameter
# under `torch.no_grad()`). Inside a round nothing is sent, and at its end each parameter once. The optimizer's own
# state stays each rank's.

# %% id="rounds" exercise="8.3"
import torch


class Rounds:
    def __init__(self, params, optimizer, mean, H, outer_lr, outer_momentum):
        self.params = list(params)
        self.optimizer = optimizer
        self.mean = mean
        self.H = H
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.old = [p.detach().clone() for p in self.params]
        self.velocity = [torch.zeros_like(p) for p in self.old]
        self.steps = 0

    def step(self):
        ### BEGIN SOLUTION
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.H:
            return
        with torch.no_grad():
            for p, old, v in zip(self.params, self.old, self.velocity):
                delta = old - self.mean(p)
                v.mul_(self.outer_momentum).add_(delta)
                old.sub_(self.outer_lr * (delta + self.outer_momentum * v))
                p.copy_(old)
        ### END SOLUTION

# %% id="rounds-check"
lab.check("8.3", Rounds)

# %% [markdown] id="twin-text"
# ## What you would use in production
#
# Both of your classes train a small network on real ranks, twelve updates each, beside the library's strategies and
# PyTorch's `PostLocalSGDOptimizer`. Differences are those of the parameters, as a part of the largest one. Rounds
# with an outer learning rate of 1 and no outer momentum are Local SGD.

# %% id="twin"
for one in stale_runs(Delayed, Rounds, ranks=ranks):
    print(one)

# %% [markdown] id="twin-why"
# Yours do what theirs do. And all of them, but delay 0, end somewhere else than plain updates: **this** is where
# results change.
#
# - **A step per bucket** is `course_lib.train.stepping.StepPerBucket`. DDP has only a private method for it
#   (`_register_fused_optim`); DDP and `optimizer.step()` gave the same parameters above.
# - **Delay** has no switch in PyTorch. ZeRO-Offload describes a delayed update by one step (arXiv:2101.06840); here it
#   is `course_lib.train.delayed.Delayed`.
# - **Local SGD** is `PostLocalSGDOptimizer` with a `PeriodicModelAverager`. It averages after steps 0, H, 2H, … of
#   those that follow its warm-up; `warmup_steps=H-1` makes that H, 2H, ….
# - **DiLoCo** (arXiv:2311.08105) is in torchft, and here `course_lib.train.diloco.DiLoCo`.
#
# ## What the wire sees
#
# Four updates in a row, on the wire of the baseline: plain, with a delay of 1, and in a round of H = 4. At the end of
# the four nothing is under way.

# %% id="four"
four = update_runs(load, {"every update": ("bucketed", buckets), "delay 1": ("delayed", {"delay": 1, **buckets}),
                          "H = 4": ("local_sgd", {"every": 4})}, updates=4, ranks=ranks,
                   fabric=wire, repeats=2 if quick else 5)
for name in ("every update", "delay 1", "H = 4"):
    one = four[name]
    print(f"{name:>12}: four updates {one.median_s * 1e3:4.0f} ± {one.spread_s * 1e3:3.0f} ms, exposed "
          f"{one.exposed_s * 1e3:4.0f} ms, {one.bytes / MB:2.0f} MB")

# %% id="four-figure" tags=["picture"]
side_by_side({name: four[name].timeline for name in ("every update", "delay 1", "H = 4")})

# %% [markdown] id="race-text"
# A delay hides what an update has to send under the whole next window. It hides at most Tc: the wire still carries
# every byte. A second window of delay only helps when the wire's time varies. Local steps do not hide, they leave out.
#
# ## What is learnt
#
# A very small GPT learns real text (the standard library of your Python) in each of these ways: same weights to begin
# with, same batches in the same order, same AdamW. The wire is slow now, 0.01 Gbit/s (0.02 with `quick=True`). Each has
# a clock of its own and stops when it shows the same number of seconds.

# %% id="race"
ways = {"every update": ("bucketed", {}), "delay 1": ("delayed", {"delay": 1}), "delay 2": ("delayed", {"delay": 2}),
        "H = 8": ("local_sgd", {"every": 8}), "H = 32": ("local_sgd", {"every": 32}),
        "DiLoCo": ("diloco", {"every": 32})}
budget = 1.2 if quick else 8.0
curves = loss_curves(ways, seconds=budget, ranks=ranks, fabric=slow, measure_every=4 if quick else 16, seed=seed)
equal = min(points[-1].update for points in curves.values())
print(f"loss after {equal} updates, and after {budget:g} s:")
for name, points in curves.items():
    last, by_update, by_time = points[-1], loss_at(points, "update", equal), loss_at(points, "seconds", budget)
    print(f"{name:>12}: {last.update:4d} updates of {update_s(points) * 1e3:3.0f} ms and "
          f"{last.bytes / last.update / 1e3:4.1f} kB; loss {by_update:.2f}, and {by_time:.2f}")
difference = loss_at(curves["delay 1"], "update", equal) - loss_at(curves["every update"], "update", equal)
lab.compare("8.delay", "the same" if abs(difference) < 0.02 else "higher" if difference > 0 else "lower")
lab.compare("8.seconds", min(curves, key=lambda name: loss_at(curves[name], "seconds", budget)))

# %% id="race-updates" tags=["picture"]
provenance = "measured (cpu), real ranks and wire, real text"
lines({name: [(p.update, p.loss) for p in points if 0 < p.update <= equal] for name, points in curves.items()},
      x="updates", y="held-out loss, nats a byte", title="Equal updates", provenance=provenance)

# %% id="race-seconds"
lines({name: [(p.seconds, p.loss) for p in points if p.update] for name, points in curves.items()},
      x="seconds of its own clock", y="held-out loss, nats a byte", title=f"Equal seconds, {slow_gbit:g} Gbit/s",
      provenance=provenance)

# %% [markdown] id="race-why"
# Read the two pictures together. (Inside a round each rank is judged by the parameters that it has then.)
#
# - **Update for update, staleness costs here**, a delay of 2 most. That is no law: local steps also add noise, and
#   where training sits on a plateau, noise can help.
# - **Second for second, it depends on the wire.** A delay saves at most one Tc an update, which is little when C is
#   much longer. Local steps save nearly all of C, and on this wire that buys many more updates.
#
# So staleness is a trade, and the wire sets its price. What you see here is one small model, one optimizer and one
# learning rate. Larger models, other rates and more ranks move the borders: measure yours, at equal seconds.
#
# ## Move the sliders
#
# The losses by update that you measured, with the time of an update from a formula: Tc + C for every update, the larger
# of Tc and C with a delay, Tc + C/H in rounds.
#
# - Find the speed above which nothing beats every update. (A line ends where its measured updates end.)
# - Where is delay 1 worth it, and how close are Tc and C there?

# %% id="slider"
kB = curves["every update"][-1].bytes / curves["every update"][-1].update / 1e3
period = {"H = 8": 8, "H = 32": 32, "DiLoCo": 32}
Tc = min(update_s(curves[name]) - kB * 8e-6 / slow_gbit / 32 for name in ("H = 32", "DiLoCo"))  # little of it is wire


def predicted_s(name, gbit):
    C = kB * 1e3 * 8 / (gbit * 1e9)
    return max(Tc, C) if "delay" in name else Tc + C / period.get(name, 1)


print(f"Tc = {Tc * 1e3:.0f} ms; C = {kB * 8e-3 / slow_gbit:.0f} ms at {slow_gbit:g} Gbit/s")
for name, points in curves.items():
    print(f"{name:>14}: update {update_s(points) * 1e3:4.0f} ms measured, "
          f"{predicted_s(name, slow_gbit) * 1e3:4.0f} predicted")


def drawn(gbit, seconds):
    seen = {name: [(p.update * predicted_s(name, gbit), p.loss) for p in points if p.update]
            for name, points in curves.items()}
    shown = {name: row[:1] + [pair for pair in row[1:] if pair[0] <= seconds] for name, row in seen.items()}
    return lines(shown, x="seconds", y="held-out loss, nats a byte", title=f"{gbit:g} Gbit/s",
                 provenance="seconds from the formula, losses measured by update")


sliders(drawn, {"gbit": "link, Gbit/s", "seconds": "seconds"}, gbit=(slow_gbit, [0.005, 0.01, 0.02, 0.05, 0.1, 1]),
        seconds=(4, [1, 2, 4, 8, 16]))

# %% [markdown] id="pitfalls"
# ## Pitfalls
#
# - **A step in every micro-step.** A hook that steps when a gradient is accumulated does so N times an update under
#   accumulation. It trains, with another batch size than you think.
# - **Clipping beside a step per bucket.** Its norm is computed after the first parameters have changed. The same holds
#   for a scaler's overflow check and for skipping a step on NaN.
# - **A zero gradient is not "no step".** Momentum and weight decay move the parameters, and Adam counts. In the first
#   windows of a delay no step may be made.
# - **A checkpoint inside a delay or a round.** The gradients under way, or θ_old and the outer momentum, are training
#   state. And inside a round each rank has other parameters: rank 0's file is not the model.
# - **Steps counted by rank.** If one rank makes one local step fewer, the round ends at different times, and the ranks
#   wait for each other for ever, or average what does not belong together.
# - **Judging by updates.** Local steps look bad by updates and good by seconds.
# - **Keeping the learning rate.** On a parabola of curvature λ, plain steps converge for η·λ < 2, with a delay of 1
#   only for η·λ < 1 (the roots of z² − z + η·λ leave the unit circle there). A rate that plain training just bears
#   is too large for a late one.
#
# ## Review
#
# Three figures to look at after every change: how much of the step is exposed communication, what the device does
# meanwhile, and whether the steps are alike.

# %% id="review"
lab.review(runs["yours"].timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - **Reordering is free.** A step per bucket gives the same parameters to the bit, whatever part of the communication
#   is hidden. Nothing has to be left un-overlapped for convergence.
# - Anything **global** excludes stepping early: norm clipping, an overflow check, skipping on NaN.
# - **Staleness is a trade.** A delay hides at most one Tc and costs loss for each update; local steps send 1/H of the
#   bytes and let the ranks drift apart in between.
# - Compare at equal **seconds** on your wire, and say so.
#
# **For your notes.** A colleague switches a new overlap on. The step is 8 % shorter, and after 1000 updates the loss is
# 0.03 higher than before. "That is the usual price of overlap", they say. What do you answer, and what do you look at
# first?
#
# <details><summary>A model answer</summary>
#
# Overlap has no such price: it moves waiting, not operations. Either the change is more than reordering (a delay, local
# steps, a lossy compression, another clipping point), and then the price should be named and compared at equal
# seconds. Or it is a bug. Run both for a few updates from the same checkpoint on the same batches and compare the
# parameters: they must be equal, but for the order of adding. Then look for a buffer that is used while it travels, a
# step before the arrival, and a hook that fires once a micro-step. First of all, repeat the old run with another
# seed: 0.03 may be noise.
#
# </details>
