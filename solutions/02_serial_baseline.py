# %% [markdown] id="title"
# # 02 · The serial baseline
#
# **The question.** Several ranks train one model. After every micro-step they stop, send their gradients, and wait.
# What does that cost, and can you say so before you run it?
#
# You write this baseline, predict its time from two numbers of the wire, and run it. Everything that later labs gain,
# they gain against it.
#
# About 25 minutes. Two ranks start on this machine; every byte between them crosses a real, rate-limited wire.

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
from course_lib import overlap, show
from course_lib.lab.pictures.sliders import sliders
from course_lib.lab.workbench.serial import baselines
from course_lib.launch import Fabric, RunTimeout, run
from course_lib.link_cost import LinkCost
from course_lib.score import fair_score
from course_lib.simulate.serial import predict_serial
from course_lib.train import emulated

wire = Fabric(gbit=1.0, latency_us=2000, kind=fabric)
repeats = 3 if quick else 7
N = 4

# %% [markdown] id="symbols"
# ## The words
#
# | symbol | meaning |
# |---|---|
# | N | micro-steps in one update: their gradients are added up before the optimizer steps |
# | Tf, Tb | time of the forward and of the backward pass of one micro-step |
# | G | bytes of the whole gradient; here 4 MB (MB is 2²⁰ bytes), in 32 parameters |
# | a | latency of *one collective*: what it costs before the first byte moves; here 2 ms by order |
# | β | time per byte |
# | all-reduce | every rank gives a tensor, every rank gets the sum |
# | exposed | time in which a rank communicates and computes nothing |
#
# The literature often writes α for the latency of one message. A ring all-reduce over n ranks passes 2(n−1) messages
# one after the other, so a = 2(n−1)·α. You measure a directly.
#
# The ranks *emulate* their device: each layer owns real parameters and makes real gradients, but takes a prescribed
# time. Collectives, bytes and the wire are real.
#
# ## The wire and the work
#
# `calibrate` measures a and β, and sizes Tf and Tb so that one all-reduce of the gradient takes as long as one
# micro-step computes.

# %% id="calibrate"
load = lab.calibrate(1.0, wire, ranks=ranks, gradient_mb=4.0)
link, Tf, Tb = load.link, load.forward_ms / 1e3, load.backward_ms / 1e3


def model():
    """16 layers with 2 parameters each, all of the same size."""
    return emulated.equal(16, load.gradient_mb / 16, load.forward_ms / 16, load.backward_ms / 16, parameters=2)


sizes_bytes = [p.numel() * p.element_size() for p in model().parameters()]
a_ms, β_ms = link.a_s * 1e3, link.beta_s_per_byte * 2**20 * 1e3
print(f"a = {a_ms:.2f} ms for one collective, β = {β_ms:.2f} ms for one MB")
print(f"Tf = {Tf * 1e3:.1f} ms, Tb = {Tb * 1e3:.1f} ms")
print(f"{len(sizes_bytes)} parameters, {sum(sizes_bytes) / 2**20:.1f} MB together")

# %% [markdown] id="predict-text"
# ## Predict
#
# One update has N = 4 micro-steps. After each of them every parameter's gradient is sent, one all-reduce a parameter,
# blocking: the rank computes nothing while it sends. Use the numbers above and a piece of paper.

# %% id="predict-step"
lab.predict("2.step", "How long does one update take, with one all-reduce for each parameter?", unit="ms")

# %% [markdown] id="predict-flat-text"
# Now the same bytes in *one* all-reduce a micro-step: all gradients are first copied into one long tensor, a *flat*
# one.

# %% id="predict-ratio"
lab.predict("2.ratio", "The communication of one collective a parameter takes how many times that of one flat one?",
            unit="times")

# %% [markdown] id="average-text"
# ## Exercise 2.1 · the blocking baseline (8 min)
#
# Backward has left each rank with the gradient of its own data. Write `average_gradients(params, ranks, all_reduce)`,
# which every rank calls after every backward:
#
# - `params` lists the parameters of this rank's replica, in the same order on every rank.
# - `all_reduce(tensor)` replaces the tensor by its sum over all ranks, in place, and returns when it has arrived.
# - Afterwards `.grad` of every parameter is the *mean* over the ranks.
# - A rank that did not use a parameter has `.grad` None there. An all-reduce is matched by its order, so that rank
#   must take part all the same. What does it have to give?

# %% id="average" exercise="2.1"
import torch


def average_gradients(params, ranks, all_reduce):
    ### BEGIN SOLUTION
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        all_reduce(param.grad)
        param.grad /= ranks
    ### END SOLUTION

# %% id="average-check"
lab.check("2.1", average_gradients)

# %% [markdown] id="average-hint"
# Stuck? `lab.hint("2.1")` gives a first step, and a further one each time you run it.

# %% [markdown] id="cost-text"
# ## Exercise 2.2 · predict its time (6 min)
#
# Write `predict_baseline(sizes_bytes, N, Tf_s, Tb_s, a_s, beta_s_per_byte, flat)`. It returns
# `(collectives, bytes_sent, step_s)` for one update: how many collectives, how many bytes are handed to them, and how
# many seconds the update takes.
#
# - `sizes_bytes` lists the bytes of each parameter's gradient.
# - After *every* micro-step all gradients are sent: one collective for each parameter, or with `flat=True` one for all
#   of them.
# - One collective of S bytes costs `a_s + beta_s_per_byte * S` seconds. Nothing overlaps.
#
# For `[1000, 3000]`, N = 2, Tf = 0.01, Tb = 0.02, a = 0.004, β = 1e-6 and `flat=False` the answer is
# `(4, 8000, 0.084)`.

# %% id="cost" exercise="2.2"
def predict_baseline(sizes_bytes, N, Tf_s, Tb_s, a_s, beta_s_per_byte, flat):
    ### BEGIN SOLUTION
    collectives = N if flat else N * len(sizes_bytes)
    bytes_sent = N * sum(sizes_bytes)
    step_s = N * (Tf_s + Tb_s) + collectives * a_s + bytes_sent * beta_s_per_byte
    return collectives, bytes_sent, step_s
    ### END SOLUTION

# %% id="cost-check"
lab.check("2.2", predict_baseline)

# %% [markdown] id="own-text"
# ## Your baseline on the wire
#
# Your function runs on real ranks after each of the four backward passes. Three other ways to send the same gradients
# run in alternation with it, so that a busy moment of your machine hits all of them alike; they come later. a and β are
# fitted once more in the same alternation, from all-reduces that are waited for one by one, as yours are: a prediction
# and its measurement belong to one state of the machine. a comes out larger than the 2 ms by order, because waking the
# ranks on a few busy cores is part of it.

# %% id="own"
runs = baselines(model, average_gradients, ranks=ranks, fabric=wire, micro_steps=N, repeats=repeats)
link, own = runs.link, runs["yours"]
collectives, sent, step_s = predict_baseline(sizes_bytes, N, Tf, Tb, link.a_s, link.beta_s_per_byte,
                                             flat=own.collectives == N)
print(f"a = {link.a_s * 1e3:.2f} ms for one collective, β = {link.beta_s_per_byte * 2**20 * 1e3:.2f} ms for one MB")
print(f"predicted: {collectives:4d} collectives, {sent / 2**20:5.1f} MB, {step_s * 1e3:6.1f} ms")
print(f"measured:  {own.collectives:4d} collectives, {own.bytes / 2**20:5.1f} MB, {own.median_s * 1e3:6.1f} "
      f"± {own.spread_s * 1e3:.1f} ms")
print(f"your gradients differ from the mean over ranks by {own.from_reference:.1g} of the largest element")

# %% [markdown] id="surprise-text"
# ## The same bytes in one collective
#
# Two of the other ways are the library's own baselines. Both send the same bytes over the same wire. Only the number of
# collectives differs.

# %% id="compare"
measured = {name: runs[name] for name in ("one a parameter", "flat")}
for name, one in measured.items():
    row = overlap.report(one.timeline).pooled
    predicted = predict_baseline(sizes_bytes, N, Tf, Tb, link.a_s, link.beta_s_per_byte, name == "flat")[2]
    print(f"{name:>15}: {one.collectives:3d} collectives, {one.bytes / 2**20:.1f} MB, step {one.median_s * 1e3:6.1f} "
          f"± {one.spread_s * 1e3:.1f} ms (predicted {predicted * 1e3:.1f})")
    print(f"{'':>15}  exposed {one.exposed_s * 1e3:.1f} ms, communication share {row.share:.0%}")
lab.compare("2.step", round(measured["one a parameter"].median_s * 1e3, 1))

# %% id="ratio"
P, G = len(sizes_bytes), sum(sizes_bytes)
by_formula = (P * link.a_s + link.beta_s_per_byte * G) / link.cost(G)
ratio = measured["one a parameter"].exposed_s / measured["flat"].exposed_s
print(f"by a and β: (P·a + β·G) / (a + β·G) = {by_formula:.2f} with P = {P}")
lab.compare("2.ratio", round(ratio, 2))

# %% [markdown] id="ratio-why"
# **Latency times tensors.** Both send the same bytes, so β·G is the same. But each collective pays a before its first
# byte moves, and there is one for each parameter: P·a. Nothing about the bandwidth of the wire can buy that back. A
# real model has hundreds of small parameters (every bias, every norm), and each of them pays a for next to no bytes.
# How much that is of the whole depends on its large ones.
#
# ## See it
#
# Vermilion, hatched: communication that nothing hides. A yellow outline: the rank waits there for the other one, which
# enters the collective later. The outline above the lanes is what a and β predict. A hairline of green is no overlap:
# the emulated device may date its work back by up to 2 ms, as a queue in front of a real one would.
#
# A blocking collective is as late as its latest rank. With one a parameter there are many chances to be late, so a busy
# machine shows here first: the measured step is then longer than predicted, and there is more yellow.

# %% id="figure" tags=["picture"]
flat = predict_serial(sizes_bytes, link, Tf, Tb, N, flat=True)
show.figure(measured["flat"].timeline, predicted=flat.timeline,
            title="All-reduce after every micro-step, flat: predicted above measured")

# %% id="figure-each"
each = predict_serial(sizes_bytes, link, Tf, Tb, N, flat=False)
show.figure(measured["one a parameter"].timeline, predicted=each.timeline,
            title="The same bytes, one collective a parameter")

# %% [markdown] id="score-text"
# ## The zero of the scale
#
# All labs score a step by F. It is 0 for the serial run that you start from and 1 at the physical limit, max(Tc, Tm):
# Tc is all compute of the update and Tm one flat all-reduce of the gradient. No step can be shorter than either.
#
# Here the start is all-reduce after every micro-step, flat. So its F is 0, *by definition*: it hides nothing. A step
# that is slower than the start has a negative F.

# %% id="score"
Tc, Tm = N * (Tf + Tb), link.cost(G)
for name, one in measured.items():
    score = fair_score(measured["flat"].median_s, one.median_s, Tc, Tm, spread=one.spread_s)
    print(f"{name:>15}: F = {score.value:.2f}")
print(f"physical limit: max(Tc, Tm) = {max(Tc, Tm) * 1e3:.1f} ms; the flat baseline takes "
      f"{measured['flat'].median_s * 1e3:.1f} ms")

# %% [markdown] id="slider-text"
# ## Move the sliders
#
# The picture is computed from the Tf and Tb of your run. Before you move one, say what will happen:
#
# - N from 1 to 8: does the communication *share* fall?
# - The link ten times faster: which of the two ways gains more?
# - Latency to 0: what is left of the difference?

# %% id="slider"
wire_bytes = 2 * (ranks - 1) / ranks  # a ring moves this many bytes for each byte of gradient


def drawn(N, gbit, latency_ms, how):
    found = predict_serial(sizes_bytes, LinkCost(latency_ms / 1e3, wire_bytes * 8e-9 / gbit), Tf, Tb, N,
                           flat=how == "flat")
    return show.figure(found.timeline, title=f"{found.collectives} collectives, step {found.step_s * 1e3:.0f} ms, "
                                             f"{found.exposed_s / found.step_s:.0%} of it exposed")


sliders(drawn, {"N": "micro-steps N", "gbit": "link, Gbit/s", "latency_ms": "latency a, ms", "how": "collectives"},
        N=(4, [1, 2, 4, 8]), gbit=(1, [0.3, 1, 3, 10, 100]), latency_ms=(2, [0, 0.1, 0.5, 2, 5]),
        how=("flat", ["flat", "one a parameter"]))

# %% [markdown] id="slider-why"
# The share does not fall with N. Every micro-step brings its own compute and its own communication, so the ratio stays.
# Accumulation alone saves nothing on the wire, as long as you send each time. Lab 03 stops doing that.
#
# A faster link takes the same milliseconds off both, for they send the same bytes. Of the flat way's communication that
# is nearly all, of the other's about a third: the rest is latency. Without latency the two are the same.
#
# ## What you would use in production
#
# Not this. `DistributedDataParallel` sends after every backward too, unless you tell it otherwise, but in buckets that
# are several MB large, and while backward runs. Here is stock DDP in its default form, on the same ranks and the same
# four micro-steps, synchronised after each: the last of the four ways.

# %% id="twin"
for name in ("DDP", "flat", "yours"):
    one = runs[name]
    print(f"{name:>5}: {one.collectives:3d} collectives, step {one.median_s * 1e3:6.1f} ± {one.spread_s * 1e3:.1f} ms, "
          f"gradients differ from the mean over ranks by {one.from_reference:.1g} of the largest element")

# %% [markdown] id="pitfall-hang"
# ## Pitfalls
#
# **A rank that skips a collective.** Rank 1 has no gradient for a parameter and passes the all-reduce by. The others
# wait. On a cluster this is a job that stands still at 100 % utilisation. Here every wait has a time limit, and the
# message names the rank:

# %% id="hang"
def one_skips():
    import torch
    import torch.distributed as dist

    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(4))


try:
    run(one_skips, ranks=ranks, timeout_s=3)
except RunTimeout as stuck:
    print("\n".join(str(stuck).splitlines()[:4]))

# %% [markdown] id="pitfall-drift"
# **A sum where a mean is meant, or the parameter where the gradient is meant.** Both run through without an error. The
# same small model is trained for five updates in each of three ways, and compared with one process that sees all data:

# %% id="drift"
def train_wrongly(how):
    import torch
    import torch.distributed as dist

    from course_lib.train import data
    from course_lib.train.gpt import squared_loss
    from course_lib.train.reference import reference

    rank, ranks = dist.get_rank(), dist.get_world_size()

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    batches = [list(data.synthetic(8, 6, 5, rank=r)) for r in range(ranks)]
    model = make()
    stepper = optimizer(model.parameters())
    for batch in batches[rank]:
        summed, count = squared_loss(model, batch)
        (summed / count).backward()
        for param in model.parameters():
            travels = param.data if how == "the parameter" else param.grad
            dist.all_reduce(travels)
            if how != "the sum":
                travels /= ranks
        stepper.step()
        stepper.zero_grad()
    right = reference(make, [[[batches[r][k]] for r in range(ranks)] for k in range(5)], squared_loss, optimizer,
                      normalise="micro")
    mine = dict(model.named_parameters())
    wrong = max((mine[name].detach() - tensor).abs().max().item() for name, tensor in right.items())
    apart = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = apart.clone()
    dist.broadcast(first, 0)
    gap = (apart - first).abs().max()
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return wrong, float(gap)


def all_three():
    return {how: train_wrongly(how) for how in ("the mean", "the sum", "the parameter")}


for how, (wrong, apart) in run(all_three, ranks=ranks, fabric="loopback")[0].items():
    print(f"{how:>13}: parameters differ from one process by {wrong:.1g}, replicas from each other by {apart:.1g}")

# %% [markdown] id="pitfall-why"
# The sum trains with a learning rate that is as many times too large as there are ranks. All replicas agree, so a test
# that compares replicas finds nothing. Sending the parameter lets every rank train alone for a step. Its replicas
# differ, and nothing says so.
#
# **Timing without a barrier.** A rank that arrives late makes the others wait inside their all-reduce, and the wait
# looks like communication. All times here start when every rank is ready.
#
# ## Review
#
# Three figures to look at after every change: how much of the step is exposed communication (above 30 % there is
# something to gain), what the device does meanwhile, and whether the steps are alike.

# %% id="review"
lab.review(measured["flat"].timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - A blocking all-reduce after each micro-step costs N·(a + β·G) in flat form, and N·(P·a + β·G) with one collective a
#   parameter. **Latency counts collectives, β counts bytes.**
# - All of it is exposed. The communication share does not depend on N.
# - F = 0 is where you start, by definition. It says nothing about how good the start was.
# - Every rank enters every collective, in the same order, with something or with zeros.
#
# **For your notes.** Your model has 300 parameters and 1.4 GB of gradients. The wire has a = 0.1 ms and carries 10 GB
# of gradient a second. Is it worth making the all-reduce flat? And for a model of 300 parameters and 14 MB?
#
# <details><summary>A model answer</summary>
#
# The bytes of the large model take 1.4 GB / 10 GB/s = 140 ms, the latencies 300 · 0.1 ms = 30 ms, so flat takes 140 ms
# in place of 170: worth something. The bytes of the small one take 1.4 ms and the latencies 30 ms, so flat takes 1.5 ms
# in place of 31, twenty times less. What decides is the size of one tensor against a/β, here 1 MB: below it a
# collective is mostly latency. That is also why buckets exist: flat enough for the latency, small enough to go early.
#
# </details>
