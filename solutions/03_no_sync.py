# %% [markdown] id="title"
# # 03 · Wait with sending: no_sync
#
# **The question.** The gradients of a window are added up anyway. Why send after every micro-step, if sending once at
# the end gives the same sum? How much does waiting save, and what can go wrong?
#
# You write `no_sync`, the normalisation of a window's loss, the last short window of an epoch, and clipping. For each
# you see what the usual mistakes do to the parameters.
#
# About 35 minutes. Two ranks start on this machine; every byte between them crosses a real, rate-limited wire.

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
from course_lib.lab.pictures.over_n import over_n
from course_lib.lab.pictures.sliders import sliders
from course_lib.lab.workbench.damage import damage
from course_lib.lab.workbench.windows import window_runs
from course_lib.launch import Fabric, run
from course_lib.link_cost import LinkCost
from course_lib.simulate.serial import predict_serial

wire = Fabric(gbit=1.0, latency_us=2000, kind=fabric)
repeats = 3 if quick else 7
lengths = (1, 2, 4, 8)

# %% [markdown] id="symbols"
# ## The words
#
# | symbol | meaning |
# |---|---|
# | window | the micro-steps of one update; N of them |
# | Tf, Tb | time of the forward and of the backward pass of one micro-step |
# | G | bytes of the whole gradient; here 4 MB (MB is 2²⁰ bytes) |
# | c(G) = a + β·G | how long one all-reduce of it takes |
# | exposed | time in which a rank communicates and computes nothing |
# | share | exposed time as a part of the step |
#
# The work is sized so that one all-reduce takes as long as one micro-step computes. The device is emulated, the wire is
# real.

# %% id="calibrate"
load = lab.calibrate(1.0, wire, ranks=ranks, gradient_mb=4.0)
link, Tf, Tb = load.link, load.forward_ms / 1e3, load.backward_ms / 1e3
sizes_bytes = [p.numel() * p.element_size() for p in load.model().parameters()]
print(f"one all-reduce of the gradient: {link.cost(sum(sizes_bytes)) * 1e3:.1f} ms")
print(f"one micro-step: Tf + Tb = {(Tf + Tb) * 1e3:.1f} ms")

# %% [markdown] id="predict-text"
# ## Predict
#
# Lab 02 sent after every micro-step. Now the window accumulates in silence and sends once, after its last backward.
# What happens to the exposed *milliseconds* of an update when N goes from 1 to 8?

# %% id="predict-exposed"
lab.predict("3.exposed", "Exposed milliseconds of an update with N = 8, against N = 1",
            choices=["an eighth", "half", "the same", "eight times"])

# %% id="predict-share"
lab.predict("3.share", "Which part of the step is exposed with N = 8?", unit="%")

# %% [markdown] id="sync-text"
# ## Exercise 3.1 · no_sync (8 min)
#
# Write the switch. `all_reduce()` averages all gradients over the ranks, blocking. Your class is told when a forward
# begins and when a backward has ended:
#
# - `no_sync()` opens a block: a forward that begins in it is not followed by sending. Blocks may be nested. When the
#   block ends, `self.sync` is again what it was before, also if the block raises, and the exception goes on.
# - `before_forward()` decides whether the backward that follows will send. **The forward decides**, as in PyTorch's
#   DDP: a backward sends if its forward began outside `no_sync()`, wherever the backward itself stands.
# - `after_backward()` sends, once, if it was decided so.
#
# `inside_no_sync` is given. The check and the run below open the block through it.

# %% id="sync" exercise="3.1"
from contextlib import contextmanager


class GradientSync:
    def __init__(self, all_reduce):
        self.all_reduce = all_reduce
        self.sync = True  # are we outside no_sync()?
        self.armed = True  # will the next backward send?

    @contextmanager
    def no_sync(self):
        ### BEGIN SOLUTION
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before
        ### END SOLUTION

    def before_forward(self):
        ### BEGIN SOLUTION
        self.armed = self.sync
        ### END SOLUTION

    def after_backward(self):
        ### BEGIN SOLUTION
        if self.armed:
            self.all_reduce()
        ### END SOLUTION

    def inside_no_sync(self, body):
        with self.no_sync():
            body()

# %% id="sync-check"
lab.check("3.1", GradientSync)

# %% [markdown] id="sync-hint"
# Stuck? `lab.hint("3.1")` gives a first step, and a further one each time you run it.
#
# ## Your no_sync on the wire
#
# Windows of 1, 2, 4 and 8 micro-steps run with your class on the same ranks, in alternation, and one of four with stock
# DDP's own `no_sync`. The gradients are compared with the mean over ranks.

# %% id="own"
runs = window_runs(load.model, GradientSync, lengths, ranks=ranks, fabric=wire, repeats=repeats, ddp=(4,))
for N in lengths:
    one, predicted = runs[f"N={N}"], predict_serial(sizes_bytes, link, Tf, Tb, N, every=False)
    print(f"N = {N}: {one.collectives} all-reduce, step {one.median_s * 1e3:6.1f} ms (predicted "
          f"{predicted.step_s * 1e3:6.1f}), exposed {one.exposed_s * 1e3:5.1f} ms, share {one.share:4.0%}; gradients "
          f"off by {one.from_reference:.1g}")

# %% id="own-compare"
times = runs["N=8"].exposed_s / runs["N=1"].exposed_s
choices = {"an eighth": 1 / 8, "half": 0.5, "the same": 1, "eight times": 8}
nearest = min(choices, key=lambda name: abs(choices[name] - times))
print(f"exposed with N = 8: {times:.2f} times the exposed milliseconds of N = 1")
lab.compare("3.exposed", nearest)
lab.compare("3.share", round(100 * runs["N=8"].share))

# %% [markdown] id="own-why"
# **The milliseconds do not change. Only the share falls.** One all-reduce follows the last backward, and nothing hides
# it, whether one micro-step came before it or eight. A larger N spreads the same tail over more work:
#
# > share = c(G) / (N·(Tf + Tb) + c(G))
#
# So a step that "hides communication better" with a large N hides nothing. Report exposed milliseconds as well.

# %% id="over-n"
predicted = {N: predict_serial(sizes_bytes, link, Tf, Tb, N, every=False) for N in range(1, 9)}
over_n({N: (one.exposed_s * 1e3, one.exposed_s / one.step_s) for N, one in predicted.items()},
       {N: (runs[f"N={N}"].exposed_s * 1e3, runs[f"N={N}"].share) for N in lengths},
       provenance=runs["N=4"].timeline.provenance)

# %% [markdown] id="figure-text"
# And one of the windows as it ran:

# %% id="figure" tags=["picture"]
show.figure(runs["N=4"].timeline, predicted=predict_serial(sizes_bytes, link, Tf, Tb, 4, every=False).timeline,
            title="N = 4: three silent micro-steps, then one all-reduce")

# %% [markdown] id="slider-text"
# ## Move the sliders
#
# - N from 1 to 8: watch the exposed milliseconds, then the share.
# - Send after every micro-step instead: which of the two falls with N now?
# - The link ten times faster: at which N does the tail matter less than 5 %?

# %% id="slider"
wire_bytes = 2 * (ranks - 1) / ranks  # a ring moves this many bytes for each byte of gradient


def drawn(N, gbit, latency_ms, send):
    found = predict_serial(sizes_bytes, LinkCost(latency_ms / 1e3, wire_bytes * 8e-9 / gbit), Tf, Tb, N,
                           every=send == "every micro-step")
    return show.figure(found.timeline, title=f"exposed {found.exposed_s * 1e3:.0f} ms, "
                                             f"{found.exposed_s / found.step_s:.0%} of the step")


sliders(drawn, {"N": "micro-steps N", "gbit": "link, Gbit/s", "latency_ms": "latency a, ms", "send": "send"},
        N=(4, [1, 2, 4, 8, 16]), gbit=(1, [0.3, 1, 3, 10, 100]), latency_ms=(2, [0, 0.1, 0.5, 2, 5]),
        send=("once", ["once", "every micro-step"]))

# %% [markdown] id="ragged-text"
# ## Exercise 3.2 · the loss of a window (8 min)
#
# Splitting a batch must not change the update. With equal micro-batches it is enough to divide each mean loss by N.
# Real text is *ragged*: micro-batches, and ranks, have different numbers of tokens that count. The update wanted is
# that of the mean loss over **all tokens of the window on all ranks**.
#
# Write `window_factors(my_counts, ranks, all_reduce_sum)`, which every rank calls before the first forward of a window:
#
# - `my_counts[i]` is the number of tokens in this rank's micro-batch i. It may be 0.
# - `all_reduce_sum(number)` returns the sum of a number over all ranks. It is a collective.
# - Return one factor for each micro-batch. Micro-batch i then runs `(factor * summed_loss).backward()`, where
#   `summed_loss` is the *sum* over its tokens. At the end the gradients are *averaged* over the ranks, as DDP does.

# %% id="ragged" exercise="3.2"
def window_factors(my_counts, ranks, all_reduce_sum):
    ### BEGIN SOLUTION
    total = all_reduce_sum(sum(my_counts))
    return [ranks / total] * len(my_counts)
    ### END SOLUTION

# %% id="ragged-check"
lab.check("3.2", window_factors)

# %% [markdown] id="epoch-text"
# ## Exercise 3.3 · the last short window (5 min)
#
# An epoch has 1000 micro-batches and N is 16. The last window has 8. Write
# `train_epoch(batches, N, micro_step, update)`, called once an epoch:
#
# - `micro_step(batch, factor)` adds `factor` times the gradient of the batch's *mean* loss to what is there. All
#   batches have the same size.
# - `update()` averages over the ranks, steps the optimizer, and sets the gradients to zero.
# - Every N batches are one update, and what is left at the end is one more. Each is the mean over its own window.

# %% id="epoch" exercise="3.3"
def train_epoch(batches, N, micro_step, update):
    ### BEGIN SOLUTION
    for start in range(0, len(batches), N):
        window = batches[start:start + N]
        for batch in window:
            micro_step(batch, 1 / len(window))
        update()
    ### END SOLUTION

# %% id="epoch-check"
lab.check("3.3", train_epoch)

# %% [markdown] id="clip-text"
# ## Exercise 3.4 · clip at the right place (5 min)
#
# Clipping scales the gradient so that its norm over all parameters together, the *global* norm, is at most `max_norm`.
# Write `clipped_update(params, N, micro_step, synchronise, step, max_norm)`:
#
# - `micro_step(i)` runs forward and backward of micro-batch i; its gradient, scaled by 1/N, is added to `.grad`.
# - `synchronise()` replaces every `.grad` by its mean over the ranks. It is a collective.
# - `step()` steps the optimizer.
#
# `torch.nn.utils.clip_grad_norm_(params, max_norm)` does the arithmetic. Where does it belong?

# %% id="clip" exercise="3.4"
import torch


def clipped_update(params, N, micro_step, synchronise, step, max_norm):
    ### BEGIN SOLUTION
    for i in range(N):
        micro_step(i)
    synchronise()
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    step()
    ### END SOLUTION

# %% id="clip-check"
lab.check("3.4", clipped_update)

# %% [markdown] id="damage-text"
# ## What the mistakes do
#
# None of the mistakes below raises an error. A small GPT is trained for a few updates on ragged rows of real text, on
# two ranks, with your functions and with each mistake. What counts is the largest difference of any parameter from
# **one process that sees all the data**.

# %% id="damage"
drift = damage(window_factors, train_epoch, clipped_update, ranks=ranks)
titles = {"split": "The same tokens, cut into N micro-batches, with your factors",
          "loss": "The loss of a ragged window",
          "short": "The last short window", "clip": "Clipping"}
for topic, title in titles.items():
    print(title)
    for name, off in drift[topic].items():
        print(f"  {name:>24}: {off:.1e}")

# %% [markdown] id="damage-why"
# About 1e-7 is another order of adding. Everything else is another training run.
#
# **Same update for any split, or it is a bug.** That sentence is also the test to write: cut the same tokens into
# N = 1, 2, 4, 8 micro-batches, on one rank and on several, and compare parameters. Neither will do alone: a rank that
# divides by its own count gives the same for every N. The mean of means stood in several widely used training libraries
# until the end of 2024 (pull requests huggingface/transformers 34191 and pytorch/torchtune 1875 took it out).
#
# ## Precision: what accumulates in bf16 is lost
#
# K gradients of one parameter are added up, once into a bf16 tensor and once into an fp32 tensor. Both get the same
# bf16 gradients; the reference adds the exact values in fp64.

# %% id="bf16"
def accumulation_errors(K, elements=4096):
    generator = torch.Generator().manual_seed(seed)
    half, full, exact = torch.zeros(elements).bfloat16(), torch.zeros(elements), torch.zeros(elements).double()
    for _ in range(K):
        gradient = torch.randn(elements, generator=generator) + 0.5
        half += gradient.bfloat16()
        full += gradient.bfloat16()
        exact += gradient
    return [((sum_.double() - exact).norm() / exact.norm()).item() for sum_ in (half, full)]


for K in (8, 32, 128, 512):
    in_bf16, in_fp32 = accumulation_errors(K)
    print(f"{K:4d} micro-steps: relative error {in_bf16:.4f} in bf16, {in_fp32:.4f} in fp32")
counter = torch.zeros(1).bfloat16()
for _ in range(1000):
    counter += 1
print(f"1 added 1000 times in bf16: {counter.item():.0f}")

# %% [markdown] id="bf16-why"
# bf16 keeps 8 bits of a number. Once the sum is 256 times as large as what is added, nothing is added any more. In fp32
# only the rounding of each gradient is left, and that averages out. Accumulate in fp32, also when you compute in bf16.
#
# ## What no split can keep: dropout and BatchNorm
#
# Two kinds of layer make the split visible by design. The same 64 samples are cut into N micro-batches, and the
# gradient is compared with N = 1.

# %% id="layers"
def split_gradient(layer, N):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), layer(), torch.nn.Tanh(), torch.nn.Linear(32, 32), layer(),
                                torch.nn.Linear(32, 1))
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed + 1)
    for part in x.chunk(N):
        ((model(part) - part.sum(1, keepdim=True)).square().sum() / len(x)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


layers = {"LayerNorm": lambda: torch.nn.LayerNorm(32), "Dropout": lambda: torch.nn.Dropout(0.1),
          "BatchNorm": lambda: torch.nn.BatchNorm1d(32)}
for name, layer in layers.items():
    whole = split_gradient(layer, 1)
    off = {N: ((split_gradient(layer, N) - whole).norm() / whole.norm()).item() for N in (2, 4, 8)}
    print(f"{name:>10}: " + ", ".join(f"N = {N}: {value:.1e}" for N, value in off.items()))

# %% [markdown] id="layers-why"
# LayerNorm looks at one sample at a time, so it does not see the split. Two dropout layers draw in turns, so the
# samples get other masks when the batch is cut: another draw of the same distribution, not a bug (turn dropout off in
# the test above). BatchNorm normalises with the mean of the *micro-batch*, so the function itself changes. Accumulation
# does not replace a large batch there; use another norm, or freeze it.
#
# ## What you would use in production
#
# `DistributedDataParallel.no_sync()` is your class, with buckets. It ran beside yours:

# %% id="twin"
for name in ("N=4", "DDP N=4"):
    one = runs[name]
    print(f"{name:>8}: {one.collectives} collectives, step {one.median_s * 1e3:6.1f} ± {one.spread_s * 1e3:.1f} ms, "
          f"exposed {one.exposed_s * 1e3:5.1f} ms, gradients differ from the mean over ranks by "
          f"{one.from_reference:.0e} of the largest element")

# %% [markdown] id="pitfall-text"
# DDP's last backward sends buckets while it runs, so its tail can be shorter. Lab 04 builds that.
#
# ## Pitfalls
#
# Measured with stock DDP on two ranks: how many all-reduces four micro-steps cost, depending on what stands inside
# `no_sync`; and what an exception does to a flag that was set by hand.

# %% id="pitfalls"
def ddp_pitfalls():
    from contextlib import nullcontext

    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from course_lib.train import StockDDP

    calls = [0]

    def counted(state, bucket):
        calls[0] += 1
        return allreduce_hook(state, bucket)

    def fresh():
        torch.manual_seed(0)
        return StockDDP(torch.nn.Linear(6, 1), comm_hook=counted)

    def window(ddp, forward_inside, backward_inside, N=4):
        calls[0] = 0
        for i in range(N):
            quiet = i < N - 1
            with ddp.no_sync() if quiet and forward_inside else nullcontext():
                loss = ddp(torch.full((2, 6), 1.0 + dist.get_rank() + i)).square().mean() / N
            with ddp.no_sync() if quiet and backward_inside else nullcontext():
                loss.backward()
        return calls[0]

    said = {"around backward only": window(fresh(), False, True), "around forward only": window(fresh(), True, False),
            "around both": window(fresh(), True, True)}

    by_hand = fresh()
    try:
        by_hand.require_backward_grad_sync = False
        raise ValueError("a bad batch")
        by_hand.require_backward_grad_sync = True  # never reached
    except ValueError:
        pass
    said["both, after an exception with a flag set by hand"] = window(by_hand, False, False)

    silent = fresh()
    optimizer = torch.optim.SGD(silent.parameters(), lr=0.05)
    with silent.no_sync():
        silent(torch.full((2, 6), 1.0 + dist.get_rank())).square().mean().backward()
    optimizer.step()
    mine = torch.cat([p.detach().flatten() for p in silent.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    gap = (mine - first).abs().max()
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return said, float(gap)


said, gap = run(ddp_pitfalls, ranks=ranks, fabric="loopback")[0]
for name, count in said.items():
    print(f"{name}: {count} all-reduces for 4 micro-steps")
print(f"an optimizer step after silent micro-steps only: replicas differ by {gap:.2g}")

# %% [markdown] id="schedule-text"
# - **Around backward only** sends in every micro-step. The forward decides.
# - **A flag set by hand** stays off after an exception: no all-reduce any more, and no error.
# - **A step after silent micro-steps only**, for instance because the last micro-batch was skipped, leaves every rank
#   with its own parameters.
# - **The learning-rate schedule counts updates**, not micro-steps:

# %% id="schedule"
def last_rate(steps_of_schedule, micro_batches=100, N=8):
    """The learning rate after one epoch of a schedule that should fall from 1 to 0.1 in that epoch."""
    updates = -(-micro_batches // N)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=updates)
    optimizer.step()  # nothing to step yet: without it PyTorch warns of the very mistake that is shown here
    reached = None
    for i in range(1, micro_batches + 1):
        is_update = i % N == 0 or i == micro_batches
        if is_update:
            optimizer.step()
        if is_update or steps_of_schedule == "micro-step":
            schedule.step()
        if reached is None and optimizer.param_groups[0]["lr"] < 0.1001:
            reached = i
    return updates, reached


for kind in ("update", "micro-step"):
    updates, reached = last_rate(kind)
    print(f"schedule stepped at every {kind}: {updates} updates in the epoch, lowest rate reached after {reached} of "
          "100 micro-batches")

# %% [markdown] id="scaler-text"
# - **With a loss scaler, unscale before you clip.** In fp16 the loss is multiplied by a large factor, and so is the
#   gradient. Clipped first, it is as many times too small when the factor is taken out. Once an update:
#   synchronise, unscale, clip, step. A gradient of norm 5, max_norm 1, and a factor of 2¹⁶:

# %% id="scaler"
for order in ("unscale, clip", "clip, unscale"):
    param, factor = torch.nn.Parameter(torch.zeros(100)), 2.0**16
    param.grad = torch.full((100,), 0.5) * factor
    for action in order.split(", "):
        if action == "unscale":
            param.grad /= factor
        else:
            torch.nn.utils.clip_grad_norm_([param], 1.0)
    print(f"{order}: the optimizer sees a gradient of norm {param.grad.norm().item():.2g}")

# %% [markdown] id="review-text"
# ## Review
#
# Three figures to look at after every change: how much of the step is exposed communication (above 30 % there is
# something to gain), what the device does meanwhile, and whether the steps are alike.

# %% id="review"
lab.review(runs["N=4"].timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - Sending once a window leaves one exposed tail where there were N. **That tail is not a millisecond shorter.**
# - The **forward decides** whether a backward sends. Put both inside `no_sync`, and let a `finally` end it.
# - Σ loss / Σ tokens, over micro-steps **and** ranks. A mean-reducing all-reduce divides by the ranks already.
# - The last window is short: its own update, divided by its own length.
# - Clip once: after synchronisation, before the step, by the global norm. Step the schedule once an update.
# - **Same update for any split, or it is a bug.**
#
# **For your notes.** A colleague doubles N, and the communication share falls from 30 % to 18 %. "Overlap works much
# better now", says the report. What happened, and what would you ask for?
#
# <details><summary>A model answer</summary>
#
# Nothing overlaps better. With c(G) = 0.30 of a step and compute 0.70, doubling N doubles the compute: 0.30 / (1.40 +
# 0.30) = 18 %. The exposed milliseconds are the same, there are only half as many updates for the same data, each on
# twice the batch. Ask for exposed milliseconds of an update, for F against a serial run with the *same* N, and whether
# the larger batch needs another learning rate or more epochs.
#
# </details>
