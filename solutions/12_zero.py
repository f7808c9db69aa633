# %% [markdown] id="title"
# # 12 · ZeRO
#
# **The question.** Every rank of a data-parallel job keeps the same parameters, the same gradient, the same optimizer
# state. What if each kept a part? What does it then have to send, and can that be hidden?
#
# You shard an optimizer, reduce-scatter gradients under backward, and gather parameters one unit ahead of their use.
# Your three pieces become a ZeRO stage 3 that runs on real ranks, beside the library's stages and PyTorch's FSDP2.
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
from course_lib import show
from course_lib.lab.pictures.schedules_widget import explore_schedules
from course_lib.lab.pictures.side_by_side import side_by_side
from course_lib.lab.workbench.held import LAYERS, PARAMETERS, UNIT_BYTES, held_runs
from course_lib.lab.workbench.real import real_runs
from course_lib.lab.workbench.zero import zero_runs
from course_lib.lab.workbench.zero_held import held_bytes
from course_lib.lab.workbench.zero_step import step_runs
from course_lib.launch import Fabric
from course_lib.link_cost import LinkCost
from course_lib.plan.memory import FP32, states
from course_lib.plan.volumes import data_parallel_bytes, shuffle_bytes
from course_lib.show.memory import memory
from course_lib.simulate.buckets import MB
from course_lib.simulate.zero import Units, predict_zero

wire = Fabric(gbit=1.0, latency_us=200, kind=fabric)
repeats = 2 if quick else 7

# %% [markdown] id="symbols"
# ## The words
#
# | symbol | meaning |
# |---|---|
# | n | ranks |
# | N | micro-steps of one update |
# | S | bytes of all parameters; the gradient has as many here |
# | unit | parameters that are gathered, and whose gradient is reduced, as one; here a layer |
# | ahead | how many units are gathered before they are needed |
# | segment, part | the 1/n of a flat tensor that belongs to one rank |
# | exposed | time in which a rank communicates and computes nothing |
#
# | stage | each rank keeps 1/n of | sent in one update, by a ring |
# |---|---|---|
# | 0 (DDP) | nothing | 2(n−1)/n·S |
# | 1 | optimizer state | (n−1)/n·(S + S): reduce-scatter once, gather the parameters once |
# | 2 | and the gradient | (n−1)/n·(N·S + S): the gradient in every micro-step |
# | 3 | and the parameters | (n−1)/n·(N·S + 2N·S): and the parameters for every forward and every backward |
#
# (Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 7, which
# has N = 1.)

# %% [markdown] id="predict-text"
# ## Predict
#
# An all-reduce is a reduce-scatter followed by an all-gather. So stage 1 sends what DDP sends.

# %% id="predict-one"
lab.predict("12.one", "N = 1: how many times the bytes of stage 1 does stage 3 send?", unit="")

# %% id="predict-two"
lab.predict("12.two", "N = 8: how many times the bytes of stage 1 does stage 2 send?", unit="")

# %% id="predict-three"
lab.predict("12.three", "N = 8: and stage 3?", unit="")

# %% id="predict-sync"
lab.predict("12.sync", "Stage 3 with N = 8 under no_sync() sends its gradients once. Its peak of memory is",
            choices=["lower", "the same", "higher"])

# %% [markdown] id="baseline-text"
# ## The baseline
#
# A model of 8 equal layers with AdamW, in fp32. One tracker counts the bytes of all tensors that are alive, whoever
# made them. It runs over plain DDP, over every stage, and over PyTorch's own ZeRO; first look at DDP. The bar shows
# what is alive when the window has been computed and the optimizer has not stepped yet.

# %% id="baseline"
held = held_runs((1, 8), ranks=ranks)


def by_formula(stage):
    return dict(zip(("parameters", "gradients", "optimizer"), states(PARAMETERS, FP32, stage, ranks)))


print(f"{PARAMETERS:,} parameters: S = {4 * PARAMETERS / MB:.2f} MB")
memory({"DDP": held["DDP", 1].parts()}, {"DDP": by_formula(0)}, title="What each rank keeps",
       provenance="measured (cpu), bytes of live tensors")

# %% [markdown] id="baseline-seen"
# All of this is on every rank, and alike. Half of it is optimizer state, which nobody reads but the optimizer. So that
# is what goes first.
#
# ## Exercise 12.1 · shard the optimizer (10 min)
#
# Each rank updates one segment of the parameters, with state for that segment alone, and afterwards everybody gets
# everybody's segment. Write the end of `__init__`, and `step(gradient, max_norm)`:
#
# - `self.flat` holds all parameters, 1-D, whole on every rank. Segment r of `flat.tensor_split(n)` is rank r's;
#   segments are views, and may be empty. `make_optimizer([tensor])` makes an optimizer, whose `step()` reads `.grad`.
# - `gradient` is as long as `flat`. This rank's segment of it holds the mean over ranks, and the rest holds nothing of
#   use: that is how a reduce-scatter leaves it.
# - Clip as one process would: if the norm of the *whole* gradient is above `max_norm`, scale it down to `max_norm`.
# - `self.wire.rank` and `self.wire.ranks`; `self.wire.all_reduce(tensor)` sums over the ranks, and
#   `self.wire.all_gather(flat)` brings every rank's own segment to all. Both block and work in place.
# - Afterwards `self.flat` is the same on all ranks, and what one process would have.

# %% id="step" exercise="12.1"
class ShardedOptimizer:
    def __init__(self, flat, wire, make_optimizer):
        self.flat = flat
        self.wire = wire
        ### BEGIN SOLUTION
        self.mine = flat.tensor_split(wire.ranks)[wire.rank]
        self.optimizer = make_optimizer([self.mine])
        ### END SOLUTION

    def step(self, gradient, max_norm):
        ### BEGIN SOLUTION
        mine = gradient.tensor_split(self.wire.ranks)[self.wire.rank]
        squares = mine.square().sum()
        self.wire.all_reduce(squares)
        self.mine.grad = mine * min(1, max_norm / squares.sqrt())
        self.optimizer.step()
        self.wire.all_gather(self.flat)
        ### END SOLUTION

# %% id="step-check"
lab.check("12.1", ShardedOptimizer)

# %% [markdown] id="step-hint"
# Stuck? `lab.hint("12.1")` gives a first step, and a further one each time you run it.
#
# ## On ranks
#
# Eight updates of a small network with clipping, on real ranks, beside the library's stage 1, PyTorch's
# `ZeroRedundancyOptimizer`, and a stage 1 in which every rank clips by the norm of what it holds.

# %% id="step-run"
stepped = step_runs(ShardedOptimizer, ranks=ranks)
for way in stepped.ways:
    print(way)

# %% [markdown] id="step-why"
# The state is divided and the parameters are DDP's, but for the order of adding. Nothing in an elementwise optimizer
# needs its neighbours. **Clipping does**: the norm is a property of the whole gradient. Clipped by the shard, each
# segment is scaled by a factor of its own, the update points elsewhere, and the more ranks, the more so. Nothing
# raises; only the loss will tell, later.
#
# ## Exercise 12.2 · reduce-scatter under backward (12 min)
#
# Stage 2 keeps no whole gradient. When a bucket is full, it is reduce-scattered, under the rest of backward, and each
# rank keeps its part. Under accumulation that has to happen in **every** micro-step: the other parts have nowhere to
# stay. Write three methods:
#
# - `bucket_full(b, gradient)` is called inside backward, which fills the buckets in an order of its own, the same on
#   all ranks. `gradient` is 1-D, bucket b's of *this* micro-step, and yours. Start its reduce-scatter in this call, and
#   do not wait for it here.
# - `self.wire.reduce_scatter(part, whole)` starts the sum over ranks and returns a handle. `whole` has to be n times as
#   long as `part`; after `handle.wait()`, `part` holds the elements r·k to (r+1)·k of the sum, with k the length of
#   `part`. Until then both belong to the wire.
# - A bucket's length need not be a multiple of n: take k = ⌈size/n⌉, and zeros behind the gradient.
# - `end_of_backward()` is called after each micro-step. Afterwards nothing whole is left in memory.
# - `finish()` returns, for each bucket in order, the mean over ranks of this rank's part of the window's gradient,
#   *without* the zeros that were added: on the last ranks it can be shorter than k, or empty. The next window starts
#   from nothing.

# %% id="scatter" exercise="12.2"
import torch


class ScatterBuckets:
    def __init__(self, sizes, wire):
        self.sizes = list(sizes)
        self.wire = wire
        self.flying = []
        self.sums = {}

    def bucket_full(self, b, gradient):
        ### BEGIN SOLUTION
        n = self.wire.ranks
        k = -(-self.sizes[b] // n)
        whole = torch.cat([gradient, gradient.new_zeros(n * k - self.sizes[b])])
        part = gradient.new_empty(k)
        self.flying.append((b, part, self.wire.reduce_scatter(part, whole)))
        ### END SOLUTION

    def end_of_backward(self):
        ### BEGIN SOLUTION
        for b, part, handle in self.flying:
            handle.wait()
            self.sums[b] = self.sums.get(b, 0) + part
        self.flying = []
        ### END SOLUTION

    def finish(self):
        ### BEGIN SOLUTION
        n, r = self.wire.ranks, self.wire.rank
        means = []
        for b, size in enumerate(self.sizes):
            k = -(-size // n)
            means.append(self.sums[b][:max(0, size - r * k)] / n)
        self.sums = {}
        return means
        ### END SOLUTION

# %% id="scatter-check"
lab.check("12.2", ScatterBuckets)

# %% [markdown] id="prefetch-text"
# ## Exercise 12.3 · prefetch ahead (10 min)
#
# Stage 3 keeps no whole parameters either. A unit is gathered before it is used, and freed after. Gathered when it is
# needed, it is waited for. So the *next* unit travels while this one is computed: that takes memory for one unit more.
#
# Write `run_pass(order, wire, compute, ahead)`:
#
# - `order` lists the units in the order of their use in one pass, forward or backward. A tied unit (an embedding that
#   is also the output layer) occurs more than once.
# - `wire.gather(u)` starts to gather unit u and returns a handle at once; after `handle.wait()` its parameters are
#   there. `wire.free(u)` gives the memory back. `compute(u)` uses the unit.
# - While the unit at place i is computed, those at places i+1 to i+ahead are on their way (or there already), and none
#   that is first used behind these.
# - Each unit is gathered once in a pass, and freed after its last use.

# %% id="prefetch" exercise="12.3"
def run_pass(order, wire, compute, ahead):
    ### BEGIN SOLUTION
    last = {u: i for i, u in enumerate(order)}
    coming = {}
    for i, u in enumerate(order):
        for v in order[i:i + 1 + ahead]:
            if v not in coming:
                coming[v] = wire.gather(v)
        coming[u].wait()
        compute(u)
        if last[u] == i:
            wire.free(u)
    ### END SOLUTION

# %% id="prefetch-check"
lab.check("12.3", run_pass)

# %% [markdown] id="own-text"
# ## Your stage 3 on the wire
#
# Now `run_pass` and `ScatterBuckets` train a model on real ranks: 4 units of 1 MB (0.75 MB with `quick=True`), N = 2
# micro-steps, a real AdamW on each rank's part. The device is emulated, and sized so that the forward of a unit takes
# 1.3 times as long as its gather. Beside it, in alternation: DDP, the library's stages, and stock FSDP2. At the end the
# parameters of all are compared with DDP's.

# %% id="own"
N = 2
found = zero_runs(ScatterBuckets, run_pass, N, mb=0.75 if quick else 1.0, ranks=ranks, fabric=wire, repeats=repeats)
runs, costs, fed = found.runs, found.costs, found.fed
print(f"of one unit: gather {costs.gather.cost(fed.bytes) * 1e3:.1f} ms, reduce-scatter "
      f"{costs.reduce.cost(fed.bytes) * 1e3:.1f} ms, forward {fed.Tf * 1e3:.1f} ms, backward {fed.Tb * 1e3:.1f} ms")
for name in ("DDP", "stage 1", "stage 2", "stage 3, 0 ahead", "stage 3, 1 ahead", "yours"):
    one = runs[name]
    print(f"{name:>16}: update {one.median_s * 1e3:5.0f} ± {one.spread_s * 1e3:2.0f} ms, exposed "
          f"{one.exposed_s * 1e3:4.0f} ms, sent {one.sent / MB:4.1f} MB, parameters differ from DDP's by "
          f"{one.from_ddp:.0e}")

# %% id="stages" tags=["picture"]
shown = ("DDP", "stage 1", "stage 2", "stage 3, 0 ahead", "stage 3, 1 ahead")
side_by_side({name: runs[name].timeline for name in shown})

# %% [markdown] id="stages-seen"
# Read each wire lane. Stage 1 gathers all parameters when the window begins, and reduces in its last backward. Stage 2
# reduces in both. Stage 3 gathers in every forward and every backward. Without prefetch the device waits for each
# gather; one ahead, nearly all of it is hidden. What is left is the first gather, when nothing is computed yet, and the
# last reduction, when nothing is left.
#
# Measured and predicted, from the costs of a gather and of a reduce-scatter alone:

# %% id="figure" tags=["picture"]
window = predict_zero(fed, N, *costs, stage=3, ahead=1)
show.figure(runs["stage 3, 1 ahead"].timeline, predicted=window.timeline, title="Stage 3, one unit ahead")

# %% [markdown] id="bytes-text"
# ## What each stage holds and sends
#
# Back to the tracker, which has run all stages on the 8 layers. First the bytes on the wire.

# %% id="bytes"
for steps in (1, 8):
    for stage in (1, 2, 3):
        one, base = held[f"stage {stage}", steps], held["stage 1", steps]
        formula = data_parallel_bytes(4 * PARAMETERS, ranks, steps, stage=stage)
        print(f"N = {steps}, stage {stage}: sent {one.sent / MB:5.2f} MB, by the formula {formula / MB:5.2f}; "
              f"{one.sent / (base.sent or 1):5.2f} times stage 1")
kept = shuffle_bytes(UNIT_BYTES, ranks)
print(f"stage 3 sends less than the formula by one unit a micro-step ({kept / MB:.3f} MB): the last unit of forward is "
      "the first of backward, and stays")
for key, stage, steps in (("12.one", 3, 1), ("12.two", 2, 8), ("12.three", 3, 8)):
    lab.compare(key, round(held[f"stage {stage}", steps].sent / (held["stage 1", steps].sent or 1), 2))

# %% [markdown] id="bytes-why"
# **Stage 3 pays its gathers N times.** For N = 1 it sends 1.5 times what DDP does, the figure that one reads. Under
# accumulation DDP and stage 1 send once, however large N is, and stages 2 and 3 in every micro-step. Whoever turns a
# micro-batch of 8 into 8 micro-batches of 1 under stage 3 sends 8 times the bytes for the same update.
#
# And this is what they buy:

# %% id="memory" tags=["picture"]
bars = {"DDP": 0, "stage 1": 1, "stage 2": 2, "stage 3": 3}
memory({name: held[name, 8].parts() for name in bars}, {name: by_formula(stage) for name, stage in bars.items()},
       title="What each rank keeps", provenance="measured (cpu), bytes of live tensors, N = 8")

# %% [markdown] id="memory-why"
# The formula counts what has to be kept. Stage 1 here has the whole gradient *and* the reduced part of it beside each
# other, until the optimizer has stepped. And at some moment of the update more is alive than at its end: units that are
# gathered, a gradient on its way, what the optimizer computes with. That is the peak, and it decides whether a job
# fits.
#
# ## no_sync under stage 3
#
# Labs 03 and 06 taught: leave out the reductions of all micro-steps but the last. Under stage 3?

# %% id="no-sync"
for name in ("DDP", "stage 1", "stage 2", "stage 3", "stage 3, no_sync", "FSDP2", "FSDP2, no sync"):
    one = held[name, 8]
    print(f"{name:>16}: peak {one.peak / MB:5.2f} MB, sent {one.sent / MB:5.2f} MB")
plain, under = held["stage 3", 8].peak, held["stage 3, no_sync", 8].peak
print(f"stage 3 under no_sync: {(under - plain) / MB:+.2f} MB; the whole gradient has {4 * PARAMETERS / MB:.2f} MB, "
      f"this rank's part {4 * PARAMETERS / ranks / MB:.2f}")
lab.compare("12.sync", "higher" if under > 1.02 * plain else "lower" if under < 0.98 * plain else "the same")

# %% [markdown] id="no-sync-why"
# What is not sent has to stay, and it can only stay whole. `no_sync` **quietly brings the full gradient back into
# memory** of every rank, and saves a third of the bytes at best: the gathers go on. The library refuses it, unless you
# say `whole_gradients=True`. FSDP2's name for it is `set_requires_gradient_sync(False)`, and it refuses nothing.
#
# ## What prefetch can hide, and what not
#
# Two devices on the same wire. The first is the one above. The second is faster, or the layers thinner: the forward of
# a unit takes 0.4 times as long as its gather.

# %% id="depth"
for layers, units in (("stage 3", fed), ("starved", found.starved)):
    for ahead in (0, 1, 2):
        one, said = runs[f"{layers}, {ahead} ahead"], predict_zero(units, N, *costs, stage=3, ahead=ahead)
        print(f"{layers}, {ahead} ahead: update {one.median_s * 1e3:4.0f} ± {one.spread_s * 1e3:2.0f} ms, predicted "
              f"{said.step_s * 1e3:4.0f}; exposed {one.exposed_s * 1e3:4.0f} ms, predicted "
              f"{said.exposed_s * 1e3:4.0f}; gathered at a time: {1 + ahead}")

# %% id="starved" tags=["picture"]
shown = ("stage 3, 0 ahead", "stage 3, 1 ahead", "starved, 0 ahead", "starved, 1 ahead")
side_by_side({name: runs[name].timeline for name in shown})

# %% [markdown] id="depth-why"
# **Prefetch hides a gather only behind compute that is left.** Where a unit computes longer than its gather takes, one
# ahead hides it, and the second buys nothing but memory. Where the wire is slower, no depth helps: the wire is busy
# from end to end, and the device waits for it. What does help is to send less (another stage, fewer and larger
# micro-steps, a lower precision) or a faster wire.
#
# ## Move the sliders
#
# A model of 12 units with 200 MB of parameters each, in fp32, on 8 ranks; above what a rank holds, below its step. The
# picture needs no kernel.
#
# - Stage 1, 2, 3 at 200 Gbit/s: memory falls, and what happens to the step? Now take N from 1 to 4.
# - At which link speed does one ahead stop hiding the gathers? Does two ahead help there?
# - 0 ahead at 800 Gbit/s: when would you not care?

# %% id="slider"
model = Units(12, 200 * MB, Tf=0.020, Tb=0.040)


def named(stage, ahead):
    return f"stage {stage}" + (f", {ahead} ahead" if stage == 3 else "")


def drawn(stage, ahead, N, gbit):
    ring = LinkCost(7 * 10e-6, 7 / 8 * 8e-9 / gbit)  # 7 hops of 10 µs, 7/8 of the bytes
    return {named(stage, ahead): predict_zero(model, N, ring, ring, stage, ahead).timeline}


def holds(stage, ahead, N, gbit):
    return {"DDP": held_bytes(model, 8, 0), named(stage, ahead): held_bytes(model, 8, stage, ahead)}


explore_schedules(drawn, {"stage": "ZeRO stage", "ahead": "units ahead (stage 3)", "N": "micro-steps N",
                          "gbit": "link, Gbit/s a rank"}, holds,
                  stage=(3, [1, 2, 3]), ahead=(1, [0, 1, 2]), N=(1, [1, 2, 4]), gbit=(200, [50, 100, 200, 800]))

# %% [markdown] id="twin-text"
# ## What you would use in production
#
# Stock FSDP2 ran above, on the same ranks: `fully_shard` on each layer and on the model, with one unit ahead.

# %% id="twin"
for name in ("DDP", "stage 3, 1 ahead", "yours", "FSDP2"):
    one = runs[name]
    print(f"{name:>16}: update {one.median_s * 1e3:5.0f} ± {one.spread_s * 1e3:2.0f} ms, exposed "
          f"{one.exposed_s * 1e3:4.0f} ms, sent {one.sent / MB:4.1f} MB, parameters differ from DDP's by "
          f"{one.from_ddp:.0e}")
for name in ("DDP", "ZeroRedundancyOptimizer", "stage 1", "FSDP2", "stage 3"):
    one = held[name, 8]
    print(f"{name:>23}: optimizer state {one.optimizer / MB:4.2f} MB, peak {one.peak / MB:5.2f} MB, sent "
          f"{one.sent / MB:5.2f} MB with N = 8")

# %% [markdown] id="twin-why"
# ```python
# for layer in model.layers:
#     fully_shard(layer)              # a unit each
# fully_shard(model)                  # what is left: the root
# optimizer = torch.optim.AdamW(model.parameters())    # after it, so that it holds shards
# ```
#
# The same parameters, the same memory, and one unit's gather more. It is slower *here* because on a CPU FSDP2 waits for
# each reduce-scatter, and because gloo's own reduce-scatter moves as much as an all-reduce (the bytes printed are those
# of a ring; `make bench ONLY=sharded_against_fsdp2` has the kernel's count). On GPUs both run on streams of their own.
# `set_modules_to_forward_prefetch` and its backward twin choose how far ahead; `reshard_after_forward=False` keeps all
# parameters from forward to backward, and sends N·S less. DeepSpeed's `"zero_optimization": {"stage": …}` has the same
# three stages, with `stage3_prefetch_bucket_size` in place of a number of units. `ZeroRedundancyOptimizer` is stage 1
# behind DDP: it all-reduces the gradient, where half of that would do, and then broadcasts each rank's parameters.

# %% [markdown] id="real-text"
# ## On devices of your own
#
# The timed updates above emulate their devices. Set `device = "cuda"` in the first cell, and this part trains a small
# GPT on your GPUs, a rank on each and NCCL between them. `device = "cpu"` trains a smaller one on this machine's cores
# and over the wire of this lab, where ranks and wires take the cores from each other. N is 4: stages 2 and 3 send after
# each micro-step.

# %% id="real"
if device == "auto":
    print('left out, because device = "auto"')
else:
    ways = {"DDP": ("ddp", {}), "stage 1": ("zero1", {}), "stage 2": ("zero2", {}), "stage 3": ("zero3", {})}
    for name, one in real_runs(ways, device=device, ranks=ranks, fabric=wire, seed=seed).items():
        print(f"{name:>7}: {one.sentence}")

# %% [markdown] id="pitfalls-text"
# ## Pitfalls
#
# Each has run above. **One unit for everything**: without `fully_shard` on the layers the root holds all of them.

# %% id="pitfall-units"
for name, key in (("stage 3, 1 ahead", "stage 3"), ("one unit", "stage 3, one unit")):
    print(f"{key:>17}: update {runs[name].median_s * 1e3:4.0f} ms, exposed {runs[name].exposed_s * 1e3:4.0f} ms; peak "
          f"{held[key, 8].peak / MB:5.2f} MB on {LAYERS} layers")

# %% [markdown] id="pitfall-text"
# It is whole from the beginning of forward to the end of backward, nothing can be prefetched, and its reduction leaves
# when backward is over. It still trains, and `nvidia-smi` shows sharded memory between the steps.
#
# **The usual calls on what is not whole any more.** Three mistakes, and what the library says:

# %% id="pitfall-refused"
for mistake, said in stepped.refused.items():
    print(f"{mistake}:\n    {said}")

# %% [markdown] id="pitfalls"
# - **An optimizer made before sharding** steps tensors that nobody reads afterwards. `fully_shard` puts new parameters
#   into the module, so make the optimizer after it.
# - **`state_dict()` on one rank** saves a part, or hangs in a gather. Save with all ranks: `full_state_dict()` here,
#   `torch.distributed.checkpoint` with FSDP2.
# - **A decision by one shard.** Clipping by the shard's norm (exercise 12.1) is one; skipping the step because *this*
#   shard has overflowed is another. A norm, a check for NaN, a logged average have to be agreed on by all ranks.
# - **Accumulation under stage 3.** See above: N times the gathers, or the whole gradient. Larger micro-batches first,
#   then stage 2 or 1 if they fit.
# - **A tied weight in two units** has to be whole for both. The library puts it into the root; your `run_pass` frees it
#   at its last use.
#
# ## Review
#
# Three figures to look at after every change: how much of the step is exposed communication, what the device does
# meanwhile, and whether the steps are alike.

# %% id="review"
lab.review(runs["stage 3, 1 ahead"].timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - **Each stage trades a kind of memory for a kind of traffic.** Stage 1 costs nothing on the wire. Stage 2 costs the
#   gradient in every micro-step. Stage 3 costs the parameters twice in every micro-step.
# - The often quoted 1.5 times is for N = 1.
# - **`no_sync` under stages 2 and 3 brings the whole gradient back.**
# - One unit ahead hides a gather if the unit computes longer than it. More depth is more memory.
# - What concerns the whole (a norm, an overflow, a checkpoint) has to be agreed on by all ranks.
#
# **For your notes.** A job trains under FSDP2 with N = 16 micro-steps of one sample each. It is 40 % slower than on one
# node, and the profile shows gathers everywhere. A colleague proposes to gather four units ahead. What do you measure
# first, and which three changes would you rather try?
#
# <details><summary>A model answer</summary>
#
# Measure one gather and one reduce-scatter of a unit alone on the wire between the nodes, against the forward and the
# backward of a unit. If a unit computes longer than its gather takes, and gathers are exposed all the same, prefetch is
# off or blocked (a host synchronisation, an order of units that is not that of their use), and *one* ahead is enough.
# If the gather takes longer, depth buys nothing: the wire is full. Then send less. Larger micro-batches, so that N
# falls: the bytes of stages 2 and 3 grow with it. `reshard_after_forward=False`, if the parameters fit: a third
# less. Or shard inside the node and replicate between the nodes (a two-dimensional mesh): gathers stay on the fast
# wires, and the slow one carries 1/g of the gradient. Leaving out the gradient's synchronisation would help the wire,
# too, and needs memory for the whole gradient: look at the peak before you try.
#
# </details>
