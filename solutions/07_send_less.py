# %% [markdown] id="title"
# # 07 · Send less
#
# **The question.** When the wire is slower than the computer, no order of sending helps: the bytes themselves take too
# long. Which of them can you leave out, and what does training say to that?
#
# You write three compressors that are used in practice, half precision, one bit an entry, and the largest entries, and
# you keep what they do not send in a checkpoint. Then you run a race on a slow wire and on a fast one.
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

lab.begin(submission, device)

# %% id="imports"
from functools import partial

from course_lib import show
from course_lib.lab.pictures.lines import lines
from course_lib.lab.pictures.sliders import sliders
from course_lib.lab.workbench.compressed import accuracies, compressed_runs, host_costs, top_k_bytes
from course_lib.lab.workbench.pays import Cost, even_profile, pays_below, predicted
from course_lib.lab.workbench.race import SCHEMES, race
from course_lib.lab.workbench.resume import resumed
from course_lib.launch import Fabric, RunTimeout, run
from course_lib.launch.measure import measure
from course_lib.simulate.buckets import MB
from course_lib.tune import compare

slow, fast = (Fabric(gbit=gbit, latency_us=500, kind=fabric) for gbit in (0.2, 2.0))
repeats = 3 if quick else 7
gradient_mb, layers = (2.0, 4) if quick else (4.0, 8)

# %% [markdown] id="symbols"
# ## The words
#
# | symbol | meaning |
# |---|---|
# | W | the number of ranks |
# | G | bytes of the whole gradient in float32; here 4 MB, 2 with `quick=True` (MB is 2²⁰ bytes) |
# | Tc | all compute of an update |
# | Tm | one all-reduce of all G bytes; r = Tm/Tc |
# | k | the share of a gradient's entries that top-k sends; 0.01 is 1 % |
# | residual | what a rank was to send and has not sent yet |
# | error feedback | adding the residual to the next gradient |
#
# A ring all-reduce makes each rank send 2(W−1)/W·G bytes. With two ranks that is G.
#
# ## Predict

# %% id="predict-bytes"
lab.predict("7.bytes", "One bit for each entry instead of a float32: which part of the bytes is left?", unit="%")

# %% id="predict-accuracy"
lab.predict("7.accuracy", "Training with the whole gradient gets more than half right. With only 1 % of the "
            "gradient's entries sent, and the rest thrown away, it gets", unit="%")

# %% id="predict-fast"
lab.predict("7.fast", "Ten times faster a wire. Which scheme gives the shortest step there?",
            choices=[*SCHEMES, "no single one"])

# %% [markdown] id="baseline-text"
# ## The baseline
#
# The work is sized so that r = 2: communication takes twice as long as compute. The gradient travels in four buckets
# under backward, as in lab 04.

# %% id="baseline"
shorter = {"sizes": (MB // 4, MB, 2 * MB)} if quick else {}
link = run(partial(measure, **shorter), ranks=ranks, fabric=slow)[0]
load = lab.calibrate(2.0, slow, ranks=ranks, gradient_mb=gradient_mb, layers=layers, link=link)
quarter_mb = gradient_mb / 4
baseline = compare(load.model, {"buckets": ("bucketed", {"bucket_mb": quarter_mb, "first_bucket_mb": None})},
                   ranks=ranks, fabric=slow, repeats=repeats)["buckets"]
Tc, Tm = (load.forward_ms + load.backward_ms) / 1e3, load.link.cost(gradient_mb * MB)
print(f"Tc = {Tc * 1e3:.0f} ms, Tm = {Tm * 1e3:.0f} ms")
print(f"step {baseline.median_s * 1e3:.0f} ms, of which exposed {baseline.exposed_s * 1e3:.0f} ms")
show.figure(baseline.timeline, limit_ns=round(max(Tc, Tm) * 1e9), title="Overlapped, and still waiting for the wire")

# %% [markdown] id="baseline-seen"
# The wire is busy from the first full bucket to the end. No plan of buckets gets below the dashed line max(Tc, Tm),
# because Tm itself lies above Tc. What is left is to make Tm smaller.
#
# ## Exercise 7.1 · half precision (5 min)
#
# The mildest scheme: send float16. Half the bytes, nothing to remember. There is one trap. float16 ends at 65504.
#
# - `encode(gradient, ranks)` returns what this rank puts on the wire: a float16 tensor.
# - The wire adds up, *in float16*, what all ranks put on it.
# - `decode(total, ranks)` returns the mean over ranks in float32.
#
# Divide by the number of ranks *before* the cast to float16, and by nothing else. Then a sum above 65504 does no harm,
# nor does one rank's gradient above it, as long as its W-th part fits. And small gradients keep what float16 has for
# them: below 6e-5 it loses digit after digit, so nothing should be made smaller than it has to be.

# %% id="half" exercise="7.1"
import torch


class Half:
    def encode(self, gradient, ranks):
        ### BEGIN SOLUTION
        return (gradient / ranks).to(torch.float16)
        ### END SOLUTION

    def decode(self, total, ranks):
        ### BEGIN SOLUTION
        return total.to(torch.float32)
        ### END SOLUTION

# %% id="half-check"
lab.check("7.1", Half)

# %% [markdown] id="half-hint"
# Stuck? `lab.hint("7.1")` gives a first step, and a further one each time you run it.
#
# ## Exercise 7.2 · one bit an entry (10 min)
#
# Now a rank sends the sign of each entry, and one number for their common size. That is wrong for nearly every entry.
# It works all the same, if you keep what is missing and add it to the next gradient: **error feedback**.
#
# - `encode(name, gradients)` is called once a window for each parameter. `gradients` are those of its micro-steps, 1-D;
#   under `no_sync` all but the last have stayed here. What there is to send is their sum plus the residual. Return
#   `(scale, positive)`: the mean of its magnitudes, and a bool tensor that says which entries are positive.
# - An entry then counts as `scale` where positive is True and as `-scale` where it is False. What that leaves of the
#   total is the new `self.residual[name]`. There is none before the first window.
# - `decode(name, messages)` gets the messages of all ranks and returns the mean of what they stand for.
#
# `[3, -1, 0.5, -1.5]` is sent as 1.5 and `[True, False, True, False]`.

# %% id="bit" exercise="7.2"
class OneBit:
    def __init__(self):
        self.residual = {}  # name -> what was not sent yet

    def encode(self, name, gradients):
        ### BEGIN SOLUTION
        total = sum(gradients) + self.residual.get(name, 0)
        scale, positive = total.abs().mean(), total > 0
        self.residual[name] = total - torch.where(positive, scale, -scale)
        return scale, positive
        ### END SOLUTION

    def decode(self, name, messages):
        ### BEGIN SOLUTION
        return sum(torch.where(positive, scale, -scale) for scale, positive in messages) / len(messages)
        ### END SOLUTION

# %% id="bit-check"
lab.check("7.2", OneBit)

# %% [markdown] id="top-text"
# ## Exercise 7.3 · the largest entries (10 min)
#
# The other way to send less: a few entries, but these exactly. The same three steps as before. Now the places must
# travel too, because every rank chooses others.
#
# - `encode(name, gradient)` returns two tensors, `(values, places)`, for the `max(1, round(k * len))` entries of
#   gradient plus residual whose magnitude is largest. The residual keeps the others.
# - `decode(name, messages, numel)` returns the mean over ranks, 1-D of length `numel`, zero where nobody sent anything.
#
# With k = 0.5, `[0.5, -4, 1, 3]` is sent as the values -4 and 3 at places 1 and 3.

# %% id="top" exercise="7.3"
class TopK:
    def __init__(self, k):
        self.k = k  # the share of entries that travels
        self.residual = {}  # name -> what was not sent yet

    def encode(self, name, gradient):
        ### BEGIN SOLUTION
        total = gradient + self.residual.get(name, 0)
        places = total.abs().topk(max(1, round(self.k * len(total)))).indices
        self.residual[name] = total.index_fill(0, places, 0)
        return total[places], places
        ### END SOLUTION

    def decode(self, name, messages, numel):
        ### BEGIN SOLUTION
        mean = torch.zeros(numel)
        for values, places in messages:
            mean[places] += values
        return mean / len(messages)
        ### END SOLUTION

# %% id="top-check"
lab.check("7.3", TopK)

# %% [markdown] id="own-text"
# ## Your compressors on the wire
#
# Your classes become comm hooks: a hook is called with each full bucket and returns a future of the mean gradient. They
# run on the ranks and the wire of the baseline, in alternation with those of the library. PowerSGD is the library's
# alone: it sends a gradient matrix as the product of two thin ones.

# %% id="own"
own = {"your Half": Half, "your OneBit": OneBit, "your TopK": lambda: TopK(0.01)}
runs = compressed_runs(load, own, ranks=ranks, fabric=slow, repeats=repeats, bucket_mb=quarter_mb)
whole = runs["float32"].bytes
for name, one in runs.items():
    kernel = f"; kernel {one.kernel_bytes:9,.0f}" if one.kernel_bytes else ""
    print(f"{name:>11}: step {one.median_s * 1e3:3.0f} ± {one.spread_s * 1e3:2.0f} ms, exposed "
          f"{one.exposed_s * 1e3:3.0f} ms, {one.bytes:9,.0f} bytes, {one.bytes / whole:6.1%}{kernel}")
for name in ("your Half", "your TopK"):
    print(f"{name}: largest difference of a gradient from the library's {runs[name].from_library:.1g}")
lab.compare("7.bytes", round(100 * runs["1-bit"].bytes / whole, 1))

# %% id="own-figure" tags=["picture"]
show.figure(runs["your OneBit"].timeline, title="Your OneBit: the wire is idle now")

# %% [markdown] id="own-why"
# The bytes are counted by the wire, and where the wire is shaped by the kernel too (the last number): a scheme that
# silently sends everything would show here. The kernel also counts headers and the notes that ranks compare.
#
# Yours and the library's 1-bit differ in one thing. You gather every rank's signs, so a rank sends (W−1)/8 bytes an
# entry: 1/32 of float32 with two ranks, more with each further one. The library sends in two phases, like a ring: each
# rank first averages one part of the gradient for all, compresses that mean again with a residual of its own, and then
# everybody gets every part. It stays at 1/32.
#
# ## What training says
#
# A small classifier is trained on four simulated ranks by plain SGD, with the arithmetic of the real schemes. How many
# of the samples that it has not seen does it get right? Once with error feedback, once without.

# %% id="accuracy"
schemes = {"float32": {}, "fp16": {"scheme": "fp16"}, "1-bit": {"scheme": "onebit"}, "top 1 %": {"scheme": "topk"},
           "PowerSGD": {"scheme": "powersgd"}}
forgetting = {name: options | {"error_feedback": False} for name, options in schemes.items()
              if name in ("1-bit", "top 1 %", "PowerSGD")}
momentum = {"float32": {"momentum": 0.9}, "top 1 %": forgetting["top 1 %"] | {"momentum": 0.9}}
cases = {**{(n, "kept"): o for n, o in schemes.items()}, **{(n, "dropped"): o for n, o in forgetting.items()},
         **{(n, "momentum"): o for n, o in momentum.items()}}
training = {"steps": 100, "lr": 0.15} if quick else {"steps": 400, "lr": 0.1}
right = accuracies(cases, workers=4, **training, seed=seed)
for name in schemes:
    lost = f", without error feedback {right[name, 'dropped']:.0f} %" if (name, "dropped") in right else ""
    print(f"{name:>8}: {right[name, 'kept']:.0f} % right{lost}")
lab.compare("7.accuracy", round(right["top 1 %", "dropped"]))

# %% [markdown] id="accuracy-why"
# **Keep what you did not send.** With error feedback nothing is lost, it is only late. Without it, an entry that is
# never among the largest is never sent at all, and a sign that is rounded the same way every time is wrong the same way
# every time. The scheme is *biased*, and more steps do not help.
#
# **Momentum hides the fault:**

# %% id="momentum"
for way, without, whole_gradient in (("plain SGD", "dropped", "kept"), ("momentum 0.9", "momentum", "momentum")):
    print(f"{way:>12}: top 1 % without error feedback {right['top 1 %', without]:.0f} % right, float32 "
          f"{right['float32', whole_gradient]:.0f} %")

# %% [markdown] id="momentum-why"
# Momentum repeats what little was sent, and on an easy task that is nearly enough. A test with momentum on an easy task
# does not find a missing residual. Test without.
#
# ## Top-k and many ranks
#
# A ring adds up on the way, so a rank sends the same bytes however many ranks there are. Top-k cannot be added on the
# way, because every rank chose other places. It is gathered: every rank gets the 8 bytes (value and place) of every
# entry that every other rank has chosen, (W−1)·k·8 bytes for each entry of the gradient, against 2(W−1)/W·4 for the
# ring. How large may k be?

# %% id="crossover"
shares, worlds = (0.01, 0.03, 0.1, 0.3, 0.6), (2, 4) if quick else (2, 4, 8)
formula = {f"W = {W}": [(100 * k, W * k) for k in (0.01, 0.03, 0.1, 0.3, 1.0)] for W in worlds}
counted = {f"W = {W}": list(zip([100 * k for k in shares], top_k_bytes(shares, W))) for W in worlds}
lines(formula, counted, x="k, % of the entries", y="bytes sent, as a multiple of a float32 ring", log="xy",
      level=("float32 ring", 1), title="Top-k by all-gather", provenance="bytes counted by the wire of real ranks")

# %% [markdown] id="crossover-why"
# The ratio of the two is k·W. **Top-k loses to a plain float32 ring once k is above 1/W**, and to fp16 once it is above
# 1/(2W). 1 % is fine for 8 ranks. For 100 it sends as much as no compression at all.
#
# ## Where it pays
#
# Compression costs the host time. So it pays where the wire is slow, and somewhere it stops. The last column is
# computed for the model above: from its compute, the bytes you measured, and what compressing costs this machine's
# processor, it predicts the step on links of every speed.

# %% id="table"
host = host_costs(repeats=3 if quick else 7)
model = even_profile(round(gradient_mb * MB), load.layers, Tc)
ring = 2 * (ranks - 1) / ranks  # bytes that a rank sends for each byte of gradient
cost = {name: Cost(runs[name].bytes / whole * ring, host[name], 2 if name in ("1-bit", "PowerSGD") else 1)
        for name in SCHEMES}
sent = {"a_s": load.link.a_s, "bucket_bytes": quarter_mb * MB}
print(f"{'scheme':>9} {'bytes':>7} {'right':>6} {'no residual':>12} {'host, ms/MB':>12} {'pays below':>13}")
for name in SCHEMES:
    border = pays_below(model, cost[name], cost["float32"], **sent)
    dropped = f"{right[name, 'dropped']:.0f} %" if (name, "dropped") in right else ""
    print(f"{name:>9} {runs[name].bytes / whole:7.1%} {right[name, 'kept']:4.0f} % {dropped:>12} "
          f"{host[name] * MB * 1e3:12.1f} {f'{border:.2f} Gbit/s' if border else '':>13}")
print(f"Tm = Tc at {8e-9 * ring * gradient_mb * MB / (Tc - load.link.a_s):.2f} Gbit/s")

# %% [markdown] id="table-why"
# The borders lie above the speed at which Tm = Tc. On a faster link most of the gradient hides under backward, but
# never the **tail**: the last bucket leaves when backward ends, and every byte of it is waited for. A scheme still pays
# as long as it shortens this one bucket's journey by more than its host takes for *all* buckets, because compressing
# stands in the way of backward. So fp16, which costs the host little, pays longest, although it saves least.
#
# A smaller last bucket leaves less to win, and so does a slower host.
#
# Check two points of the prediction: the slow wire, and one that is ten times faster.

# %% id="fast"
quicker = compressed_runs(load, ranks=ranks, fabric=fast, repeats=repeats, bucket_mb=quarter_mb)
rates = {"slow": (0.2, runs), "fast": (2.0, quicker)}
for word, (gbit, measured) in rates.items():
    print(f"the {word} wire, {gbit:g} Gbit/s")
    for name in SCHEMES:
        one, step_s = measured[name], predicted(model, gbit, cost[name], **sent).step_s
        print(f"  {name:>9}: step {one.median_s * 1e3:4.0f} ± {one.spread_s * 1e3:2.0f} ms, predicted "
              f"{step_s * 1e3:4.0f}")
best = min(SCHEMES, key=lambda name: quicker[name].median_s)
near = [name for name in SCHEMES
        if quicker[name].median_s - quicker[best].median_s <= quicker[name].spread_s + quicker[best].spread_s]
print(f"the fastest, as far as the spread tells: {', '.join(near)}")
lab.compare("7.fast", best if len(near) == 1 else "no single one")

# %% id="speeds" tags=["picture"]
speeds = [0.2 * 1.25**i for i in range(18)]
plain = [predicted(model, gbit, cost["float32"], **sent).step_s for gbit in speeds]
said = {name: [(gbit, predicted(model, gbit, cost[name], **sent).step_s / step_s)
               for gbit, step_s in zip(speeds, plain)] for name in SCHEMES}
seen = {name: [(gbit, measured[name].median_s / measured["float32"].median_s) for gbit, measured in rates.values()]
        for name in SCHEMES}
lines(said, seen, x="link, Gbit/s", y="step, as a multiple of float32's", log="x", title="Where each scheme pays",
      provenance="measured (real wires, emulated device)")

# %% [markdown] id="race-text"
# ## The race
#
# Neither bytes nor accuracy decides, but the loss you have after the time you have. A small GPT learns real text (the
# standard library of your Python) with each scheme, on the same ranks, from the same weights, with the same data. Each
# has its own clock, and they take turns, update by update. Now the compute is real as well.

# %% id="race"
budgets = {"slow": 0.8 if quick else 10.0, "fast": 0.4 if quick else 5.0}
crawl = Fabric(gbit=0.05, kind=fabric)
laps = {word: race(fabric=wire, ranks=ranks, seconds=budgets[word], seed=seed, look_every=3 if quick else 5)
        for word, wire in (("slow", crawl), ("fast", fast))}
for word, found in laps.items():
    print(f"the {word} wire, after {budgets[word]:g} s")
    for name, lap in found.items():
        print(f"  {name:>9}: {len(lap.seconds):3d} updates of {lap.step_s * 1e3:4.0f} ms, loss {lap.losses[-1]:.2f}")

# %% id="race-slow" tags=["picture"]
lines({name: lap.points() for name, lap in laps["slow"].items()}, x="seconds of the scheme's own clock",
      y="held-out loss, nats a byte", title=f"The slow wire, {crawl.gbit:g} Gbit/s",
      provenance="measured (cpu), real ranks and wire, real text")

# %% id="race-fast"
lines({name: lap.points() for name, lap in laps["fast"].items()}, x="seconds of the scheme's own clock",
      y="held-out loss, nats a byte", title=f"The fast wire, {fast.gbit:g} Gbit/s",
      provenance="measured (cpu), real ranks and wire, real text")

# %% [markdown] id="race-why"
# On the slow wire every scheme that sends less makes more updates than float32 in the same time. On the fast wire fp16
# may still make a few more; the others make as many, or fewer: most bytes were hidden already, and the host pays for
# compressing. Where their curve is lower there all the same, it is not the wire: the scheme has learnt more by the same
# update. The first dozens of updates say little about the last.
#
# All curves here use SGD without momentum. A scheme that sends a part of the gradient late changes what an optimizer
# with momentum or Adam sees. Each has its own remedy: top-k accumulates the momentum *before* it chooses (Deep Gradient
# Compression, arXiv 1712.01887), 1-bit Adam freezes its variance after a warm-up (arXiv 2102.02888).
#
# ## Move the sliders
#
# The step of the race's model on a link of any speed, and with it the loss after equal seconds: what each scheme has
# learnt by the update it has then reached. The compute is that of the fast wire's run.
#
# - Find the link speed at which fp16 stops paying, then the same for 1-bit.
# - Stay below it and make the time longer: does the order of the schemes change?

# %% id="slider"
gradient_bytes = laps["fast"]["float32"].bytes / ring
gpt = even_profile(round(gradient_bytes), 8, laps["fast"]["float32"].step_s)
longest = {name: max((laps[word][name] for word in laps), key=lambda lap: len(lap.seconds)) for name in SCHEMES}


def drawn(gbit, seconds):
    curves, steps = {}, []
    for name, lap in longest.items():
        one = Cost(lap.bytes / gradient_bytes, host[name], cost[name].phases)
        step = predicted(gpt, gbit, one, bucket_bytes=MB / 4).step_s
        steps.append(f"{name} {step * 1e3:.0f}")
        curves[name] = [(n * step, loss) for n, loss in zip(lap.looked, lap.losses) if n * step <= seconds]
    return lines(curves, x="seconds", y="held-out loss, nats a byte", title=f"Steps in ms: {', '.join(steps)}",
                 provenance="steps simulated, losses measured by update")


sliders(drawn, {"gbit": "link, Gbit/s", "seconds": "seconds"}, gbit=(0.05, [0.01, 0.02, 0.05, 0.1, 0.3, 1, 3]),
        seconds=(2, [1, 2, 4, 8, 16]))

# %% [markdown] id="checkpoint-text"
# ## Exercise 7.4 · keep the residual (8 min)
#
# The residual is a part of the training state: gradient that belongs to the model and has not arrived there yet. A
# checkpoint without it loses that. Two things make it harder than the weights, which are the same on all ranks:
#
# - Every rank has **its own** residuals, and only rank 0 writes the file.
# - Fast code keeps one flat residual for each *bucket*, and buckets are rebuilt.
#
# Write both sides. `buckets[b]` lists the parameter names in bucket b, in order; `sizes[name]` is the number of
# entries.
#
# - `save(residuals, buckets, sizes, rank, gather)` runs on every rank. `residuals[b]` is this rank's flat residual of
#   bucket b. `gather(value)` is a collective and returns the values of all ranks. Rank 0 writes what its call returns.
# - `load(saved, buckets, sizes, rank)` runs on every rank with what rank 0 wrote, and with buckets that may be other
#   ones. Return this rank's flat residuals, one for each bucket.

# %% id="checkpoint" exercise="7.4"
class Checkpoint:
    def save(self, residuals, buckets, sizes, rank, gather):
        ### BEGIN SOLUTION
        mine = {}
        for flat, names in zip(residuals, buckets):
            mine.update(zip(names, flat.split([sizes[name] for name in names])))
        return gather(mine)
        ### END SOLUTION

    def load(self, saved, buckets, sizes, rank):
        ### BEGIN SOLUTION
        return [torch.cat([saved[rank][name] for name in names]) for names in buckets]
        ### END SOLUTION

# %% id="checkpoint-check"
lab.check("7.4", Checkpoint)

# %% [markdown] id="resume-text"
# A GPT is trained by top-1 %, stopped in the middle, and started again with your checkpoint. How far are its parameters
# from those of a run that never stopped?

# %% id="resume"
for way, off in resumed(Checkpoint, ranks=ranks).items():
    print(f"{way:>18}: parameters differ by {off:.1g}")

# %% [markdown] id="twin-text"
# ## What you would use in production
#
# PyTorch has `fp16_compress_hook`, `bf16_compress_hook` and `powerSGD_hook`, for `ddp.register_comm_hook(state, hook)`.
# 1-bit Adam is DeepSpeed's (`"optimizer": {"type": "OneBitAdam"}`). There is no top-k in PyTorch. Here are PyTorch's
# hooks and the library's on the same ranks and the same gradients. PowerSGD of rank 2 cannot send such a gradient in
# one update; with error feedback the mean of many updates comes near it.

# %% id="twin"
def twins():
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    from course_lib.compress import FP16, PowerSGD, hook
    from course_lib.train import StockDDP

    group, rank = dist.new_group(backend="gloo"), dist.get_rank()
    batch = torch.randn(4, 256, generator=torch.Generator().manual_seed(rank))

    def mean_of_updates(make_hook, make_state):
        """The mean of the gradients that updates 11 to 60 deliver; the parameters stay as they are."""
        model = torch.nn.Linear(256, 256, bias=False)
        torch.nn.init.eye_(model.weight)
        hooked = {} if make_hook is None else {"comm_hook": make_hook, "hook_state": make_state(model)}
        ddp, delivered = StockDDP(model, process_group=group, **hooked), []
        for _ in range(60):
            ddp.zero_grad()
            ddp(batch).square().mean().backward()
            delivered.append(model.weight.grad.clone())
        return torch.stack(delivered[10:]).mean(0)

    exact = mean_of_updates(None, None)
    found = {"fp16, PyTorch": (fp16_compress_hook, lambda model: group),
             "fp16, library": (hook, lambda model: FP16(model, process_group=group)),
             "PowerSGD, PyTorch": (powerSGD_hook, lambda model: PowerSGDState(group, 2, start_powerSGD_iter=2)),
             "PowerSGD, library": (hook, lambda model: PowerSGD(model, rank=2, process_group=group))}
    return {name: float((mean_of_updates(*how) - exact).norm() / exact.norm()) for name, how in found.items()}


for name, off in run(twins, ranks=ranks, fabric="loopback")[0].items():
    print(f"{name:>17}: the mean gradient of 50 updates is off by {off:.0e}")

# %% [markdown] id="pitfall-text"
# ## Pitfalls
#
# **PyTorch's PowerSGD hook can hang on gloo.** It has two phases, and it waits for the second inside the callback of
# the first. With NCCL that wait is the GPU's. With gloo it blocks a thread that the collectives of other buckets need.
# One bucket gets through, several do not. The second run below is ended when its time is up:

# %% id="hang"
def two_phases(bucket_mb):
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    group = dist.new_group(backend="gloo")
    layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
    ddp = DistributedDataParallel(layers, bucket_cap_mb=bucket_mb, process_group=group)
    ddp.register_comm_hook(PowerSGDState(group, 1, start_powerSGD_iter=2), powerSGD_hook)
    for _ in range(6):
        ddp(torch.ones(4, 256)).square().mean().backward()
    return 6


for bucket_mb, limit_s in ((25, 30), (0.3, 1 if quick else 3)):
    try:
        print(f"buckets of {bucket_mb} MB: {run(two_phases, bucket_mb, ranks=ranks, timeout_s=limit_s)[0]} updates")
    except RunTimeout as stuck:
        print(f"buckets of {bucket_mb} MB: {str(stuck).splitlines()[0]}")

# %% [markdown] id="pitfalls"
# - **A mean of float16 needs the division first.** A sum of 64 gradients of 2000 is out of range; their mean is not.
# - **Nobody checks that you compress.** A hook that is registered on another module, or a warm-up that never ends,
#   trains well and sends everything. Count bytes.
# - **Compress once a window**, after accumulation. Compressing every micro-step sends N times, and rounds N times.
# - **PyTorch's PowerSGD keeps its residual by the number of the bucket.** Buckets are rebuilt after the first update,
#   so `start_powerSGD_iter` must be 2 or more there. Its state goes into the checkpoint, one a rank.
# - **On another number of ranks** there is no residual to load: whose would it be? The library's schemes refuse such a
#   state; start without one, and say so in the log.
# - **Residuals cost memory**: one float32 for each parameter, as much as the weights. The library keeps each twice, so
#   that a skipped update changes none. 1-bit in two phases has a second one, for the part a rank owns.
# - **Compress first, overlap second?** The other way round. What hides under backward costs nothing; look at exposed
#   milliseconds before you give away accuracy.
#
# ## Review

# %% id="review"
lab.review(runs["1-bit"].timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - Overlap hides Tm up to Tc. Where r is above 1, only fewer bytes help.
# - **Compress when the wire is the wall, and keep what you did not send.**
# - fp16 halves the bytes, and training does not notice. It needs no residual, and little of the host. Divide first.
# - One bit, top-k and PowerSGD need error feedback, and their residual belongs to a rank and a parameter. Save it.
# - Top-k by all-gather loses to a float32 ring once k is above 1/W.
# - Judge by the loss after equal seconds, on your wire.
#
# **For your notes.** On 64 ranks joined by 10 Gbit/s your step is 40 % exposed communication. A colleague proposes
# top-k with k = 5 %, "twenty times fewer bytes". What do you answer, and what would you try first?
#
# <details><summary>A model answer</summary>
#
# k·W = 0.05·64 = 3.2: by all-gather it sends more than three times the bytes of a float32 ring. With 64 ranks k would
# have to be well below 1/64. First fp16 or bf16 on the wire: half the bytes, no residual, no new hyperparameter. If 40
# % exposed means r is about 1, that may be enough, together with a look at the buckets. Then PowerSGD or two-phase
# 1-bit, whose bytes do not grow with W, with error feedback, and compared by the loss after equal hours.
#
# </details>
