# %% [markdown] id="title"
# # 11 · Tensor and sequence parallel
#
# **The question.** One layer is cut over several devices, and its ranks have to exchange activations inside every
# forward and every backward pass. Can that hide, as gradients hide under backward?
#
# You write the two layers that need one collective between them, cut the rest along the sequence, and then cut a
# matmul itself into chunks, so that one moves while another is multiplied. The result is compared with one process and
# with PyTorch's own tensor parallelism, gradient by gradient.
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
from course_lib import overlap, show
from course_lib.lab.pictures.lines import lines
from course_lib.lab.pictures.schedules_widget import explore_schedules
from course_lib.lab.pictures.side_by_side import side_by_side
from course_lib.lab.workbench.tensor import layer_runs, pair_runs
from course_lib.lab.workbench.tensor_gpt import CONFIG, ROWS, gpt_runs
from course_lib.launch import Fabric, run
from course_lib.link_cost import LinkCost
from course_lib.score import fair_score
from course_lib.simulate.chunked import Operator, predict_chunked, step_s
from course_lib.simulate.collectives import reduce_scatter

wire = Fabric(gbit=1.0, latency_us=500, kind=fabric)
repeats = 2 if quick else 7

# %% [markdown] id="symbols"
# ## The words
#
# | symbol | meaning |
# |---|---|
# | p | ranks of a tensor-parallel group (its *degree*); each has 1/p of a layer's matrices |
# | S | bytes of all rows of an activation: tokens · width · bytes of a number |
# | column-parallel | every rank has a part of the *outputs* of a matrix |
# | row-parallel | every rank has a part of the *inputs*; the products are summands of the output |
# | tc, tm | one matmul; one collective of S bytes; r = tm/tc |
# | k, a | chunks of an operator; latency of one collective |
# | exposed | time in which a rank communicates and computes nothing |
# | F | the fair score: 0 is no better than waiting, 1 is the physical limit max(Tc, Tm) |
#
# PyTorch keeps the matrix of a linear layer as (outputs, inputs): a column-parallel layer cuts dimension 0 of it. Where
# times are measured, the device is *emulated*: arithmetic and bytes are real, and a matmul takes a prescribed time.

# %% [markdown] id="predict-text"
# ## Predict
#
# A tensor-parallel layer ends in an all-reduce of its output. Lab 04 hid most of an all-reduce.

# %% id="predict-async"
lab.predict("11.asynchronous", "Start that all-reduce asynchronously, and wait where its result is needed. How much of "
            "it hides in the forward pass?", unit="%")

# %% id="predict-bytes"
lab.predict("11.bytes", "Sequence parallelism replaces each all-reduce by a reduce-scatter and an all-gather. Its "
            "layers send", choices=["half the bytes", "the same bytes", "twice the bytes"])

# %% id="predict-chunks"
lab.predict("11.hidden", "A matmul and its gather take the same time. Both in four chunks: how much of what can hide "
            "does?", unit="%")

# %% [markdown] id="baseline-text"
# ## The baseline
#
# Three layers of two matmuls each. After them every rank has a summand of the output, and the next layer needs the sum.
# Once the ranks wait for it; once they start it asynchronously, as a gradient bucket is started, and wait where the
# result is used.

# %% id="baseline"
def waiting(x, multiply, wire):
    for _ in range(3):
        x = multiply(multiply(x))
        wire.all_reduce(x)
    return x


def asynchronous(x, multiply, wire):
    coming = None
    for _ in range(3):
        if coming:
            coming.wait()  # the next matmul reads x
        x = multiply(multiply(x))
        coming = wire.start_all_reduce(x)
    coming.wait()
    return x


baseline = layer_runs({"waiting": waiting, "asynchronous": asynchronous}, mb=2, ranks=ranks, fabric=wire,
                      repeats=repeats)
for name, way in baseline.measured.items():
    print(f"{name:>13}: {way.median_s * 1e3:6.1f} ± {way.spread_s * 1e3:.1f} ms, exposed {way.exposed_s * 1e3:6.1f} ms")
hidden = overlap.report(baseline["asynchronous"].timeline).pooled.overlap
lab.compare("11.asynchronous", round(100 * (hidden or 0)))

# %% id="baseline-figure" tags=["picture"]
side_by_side({name: way.timeline for name, way in baseline.measured.items()})

# %% [markdown] id="baseline-why"
# Nothing hides, whatever it is called. A gradient has time: nobody reads it before the optimizer steps. An activation
# has none: the next operator reads it at once. **The all-reduce of a layer lies on the critical path**, and buckets,
# order and hooks have nothing to work with.
#
# Two things can be done: send when it must be sent, and nothing more (11.1, 11.2); and hide inside the operator (11.3).
#
# ## Exercise 11.1 · the column/row pair (12 min)
#
# An MLP is two matrices with a GELU between. The first is cut by its outputs, the second by its inputs, so that a
# hidden unit is computed and used on one rank, and the GELU needs nobody. Where do ranks have to talk?
#
# Write `parallel_mlp(x, p, wire)`. Every rank calls it with the *same* x, (…, time, width), and returns the output of
# the whole MLP:
#
# - `p.up` (hidden/ranks, width), `p.up_bias` (hidden/ranks) and `p.down` (width, hidden/ranks) are this rank's part.
#   `p.down_bias` (width) is whole on every rank. `F.linear(x, matrix, bias)` multiplies.
# - `wire.cross(x, forward=op, backward=op)` gives the collective `forward` of x. On the way back it gives the
#   collective `backward` of the gradient. An op is `"all_reduce"`, `"all_gather"`, `"reduce_scatter"`, or None for
#   nothing.
# - The gradients have to be right too, without anything being sent afterwards: that of x and of `down_bias` whole on
#   every rank, those of the parts complete. The gradient that comes back for the output is the same on every rank.
# - One all-reduce forward, one backward.

# %% id="pair" exercise="11.1"
import torch.nn.functional as F


def parallel_mlp(x, p, wire):
    ### BEGIN SOLUTION
    x = wire.cross(x, backward="all_reduce")
    hidden = F.gelu(F.linear(x, p.up, p.up_bias))
    y = wire.cross(F.linear(hidden, p.down), forward="all_reduce")
    return y + p.down_bias
    ### END SOLUTION

# %% id="pair-check"
lab.check("11.1", parallel_mlp)

# %% [markdown] id="pair-hint"
# Stuck? `lab.hint("11.1")` gives a first step, and a further one each time you run it.
#
# ## Your pair in a GPT
#
# Your function now is the MLP of every block of a small GPT on real ranks. Attention is the same pair: `qkv` is
# column-parallel, so that each rank has some of the heads; `out` is row-parallel. Embedding and loss are cut along the
# vocabulary. Compared is the gradient of every parameter, put together from all ranks, with that of one process.

# %% id="pair-run"
cut = gpt_runs(parallel_mlp, ranks=ranks, fabric=wire)
for name, way in cut.items():
    collectives = ", ".join(f"{count} {op}" for op, count in way.calls.items()) or "no collective"
    print(f"{name:>12}: loss differs by {way.loss_off:.0e}, a gradient by at most {way.from_one_process:.0e} of its "
          f"largest element; {collectives}; {way.sent_mb:.3f} MB sent")

# %% [markdown] id="sequence-text"
# Two blocks with two pairs each make eight all-reduces, four forward and four backward. Embedding and output matrix
# have one each, and the loss two small ones of its own.
#
# ## Exercise 11.2 · the sequence-parallel pair (12 min)
#
# Outside the pairs, every rank has all rows: it computes each norm as often as there are ranks, and keeps all of it for
# backward. But norm and residual work on each row by itself. So cut the *sequence* there: a rank has time/ranks rows.
# Before a pair all rows are gathered. After it, every rank needs the sums of its own rows only.
#
# Complete `SequenceParallelMLP`, the MLP half of a block:
#
# - `forward(x)` returns this rank's rows of x + mlp(norm(x)); x are its rows, (…, time/ranks, width). The norm is
#   `F.layer_norm(x, x.shape[-1:], p.norm_weight, p.norm_bias)`.
# - `"all_gather"` puts the rows of all ranks one after the other, along dimension −2. `"reduce_scatter"` sums over the
#   ranks and leaves each its own rows.
# - `finish()` is called after backward, when every parameter of `self.p` has its `.grad`. Afterwards the gradients of
#   what is whole on every rank are right, on every rank. `wire.all_reduce(tensor)` sums in place.
# - Forward and backward a rank sends what one all-reduce would.

# %% id="sequence" exercise="11.2"
class SequenceParallelMLP:
    def __init__(self, p, wire):
        self.p, self.wire = p, wire

    def forward(self, x):
        ### BEGIN SOLUTION
        p, wire = self.p, self.wire
        rows = F.layer_norm(x, x.shape[-1:], p.norm_weight, p.norm_bias)
        rows = wire.cross(rows, forward="all_gather", backward="reduce_scatter")
        y = F.linear(F.gelu(F.linear(rows, p.up, p.up_bias)), p.down)
        return x + wire.cross(y, forward="reduce_scatter", backward="all_gather") + p.down_bias
        ### END SOLUTION

    def finish(self):
        ### BEGIN SOLUTION
        for param in (self.p.norm_weight, self.p.norm_bias, self.p.down_bias):
            self.wire.all_reduce(param.grad)
        ### END SOLUTION

# %% id="sequence-check"
lab.check("11.2", SequenceParallelMLP)

# %% id="sequence-run"
cut = gpt_runs(parallel_mlp, SequenceParallelMLP, ranks=ranks, fabric=wire)
for name, way in cut.items():
    print(f"{name:>26}: a gradient differs by at most {way.from_one_process:.0e}; {way.sent_mb:.3f} MB sent, the "
          f"blocks keep {way.kept_mb:.3f} MB for backward")
pair_bytes, sequence_bytes = cut["your pair"].sent_mb, cut["your sequence-parallel pair"].sent_mb
if pair_bytes:
    times = round(sequence_bytes / pair_bytes, 1)  # the small sums of `finish` do not count
    lab.compare("11.bytes", {0.5: "half the bytes", 2.0: "twice the bytes"}.get(times, "the same bytes"))

# %% [markdown] id="sequence-why"
# **The same bytes, and less memory.** A ring's all-reduce *is* a reduce-scatter and an all-gather; sequence parallelism
# does something useful between the two. The few kilobytes more are the small sums that finish what every rank holds
# whole.
#
# How much memory? Counted in tensors of rows · width, a block keeps for backward: what goes into the two norms (2),
# what comes out of them (2), q, k and v (3), the attention's output (1), and the hidden units before and after GELU
# (8).

# %% id="memory"
whole_mb = CONFIG["layers"] * ROWS * CONFIG["length"] * CONFIG["width"] * 4 / 2**20  # one tensor of each block
counted = {name: way.kept_mb / whole_mb for name, way in cut.items()}
print(f"counted in the run: one process {counted['one process']:.1f}, tensor parallel over {ranks} "
      f"{counted['tensor']:.1f}, with the sequence cut {counted['sequence']:.1f}, yours {counted[list(cut)[2]]:.1f}")
for degree in (2, 4, 8):
    print(f"p = {degree}: tensor parallel 4 + 12/p = {4 + 12 / degree:4.1f}; sequence parallel, gathered rows kept, "
          f"2 + 14/p = {2 + 14 / degree:4.1f}; gathered again in backward 16/p = {16 / degree:4.1f}")

# %% [markdown] id="memory-why"
# What tensor parallelism alone leaves whole on every rank are the norms' inputs and outputs. Here, and in your class,
# the *gathered* rows are kept, because the gradient of `up` needs them. Megatron gathers them a second time in
# backward: more bytes, and everything is 1/p.
#
# ## What happens without `finish`?
#
# Nothing that you would see. No rank waits, no shape is wrong, the loss is finite.

# %% id="unfinished"
unfinished = gpt_runs(sequence=SequenceParallelMLP, finish=False, ranks=ranks,
                      fabric=wire)["your sequence-parallel pair"]
wrong = {name: off for name, off in unfinished.worst.items() if off > 1e-3}
print(f"loss: differs by {unfinished.loss_off:.0e}. {len(wrong)} of {len(unfinished.worst)} gradients are wrong:")
for name, off in wrong.items():
    print(f"{name:>22}: off by {off:.2f} of the largest element")

# %% [markdown] id="unfinished-why"
# Exactly those that every rank holds whole and whose rows it sees in part. Each rank would make another step with its
# copy, and from then on they are different models that share matrices. Only a comparison of the replicas finds it.
#
# ## Hide inside the operator
#
# A gather and the matmul behind it: the first rows that arrive could be multiplied while the next ones travel.
#
# ## Exercise 11.3 · gather and matmul in chunks (12 min)
#
# Write `gather_matmul(x, multiply, chunks, wire)`. Every rank calls it with its own rows, (rows, width):
#
# - Cut x into `chunks` parts by rows. They need not divide it: `x.tensor_split(chunks)`.
# - `wire.start_gather(part)` starts an all-gather and returns a handle at once. `handle.wait()` blocks until the parts
#   of all ranks are there, and returns them, (ranks, rows of the part, width).
# - `multiply(rows)` is the matmul, (…, width) to (…, out). The device is busy meanwhile.
# - While a chunk is multiplied, the next one is on its way.
# - Return (ranks · rows, out) in the order of the sequence: all rows of rank 0, then all of rank 1, and so on.

# %% id="chunks" exercise="11.3"
import torch


def gather_matmul(x, multiply, chunks, wire):
    ### BEGIN SOLUTION
    first, *others = x.tensor_split(chunks)
    coming, products = wire.start_gather(first), []
    for part in others:
        arrived, coming = coming, wire.start_gather(part)
        products.append(multiply(arrived.wait()))
    products.append(multiply(coming.wait()))
    return torch.cat(products, dim=1).flatten(0, 1)
    ### END SOLUTION

# %% id="chunks-check"
lab.check("11.3", gather_matmul)

# %% [markdown] id="chunks-run-text"
# ## Your chunks on the wire
#
# The matmul takes as long as the gather: r = 1. All numbers of chunks run in alternation on the same ranks, and beside
# them four chunks of which each is waited for before the next one starts.

# %% id="chunks-run"
def waits_each(x, multiply, wire):
    return torch.cat([multiply(wire.start_gather(part).wait()) for part in x.tensor_split(4)], dim=1).flatten(0, 1)


counts = (1, 2, 4, 8, 16)
ways = {f"{k}": lambda x, multiply, wire, k=k: gather_matmul(x, multiply, k, wire) for k in counts}
found = layer_runs(ways | {"4, each waited for": waits_each}, shards=True, mb=8, ranks=ranks, fabric=wire,
                   repeats=repeats)
Tc, Tm = found.matmul_s, found.links["all_gather"].cost(found.bytes)
print(f"matmul {Tc * 1e3:.1f} ms; gather {Tm * 1e3:.1f} ms, of which latency {found.links['all_gather'].a_s * 1e3:.1f}")
for name, way in found.measured.items():
    score = fair_score(found["1"].median_s, way.median_s, Tc, Tm).value
    said = "" if score is None or name == "1" else f", {score:.0%} of what can hide is hidden"
    print(f"{name:>18}: {way.median_s * 1e3:5.1f} ± {way.spread_s * 1e3:.1f} ms{said}; differs from one process by "
          f"{way.from_reference:.0e}")
four = fair_score(found["1"].median_s, found["4"].median_s, Tc, Tm).value
lab.compare("11.hidden", round(100 * (four or 0)))

# %% id="chunks-curve" tags=["picture"]
predicted = {"in chunks": [(k, step_s(predict_chunked([found.operator()], k)) * 1e3) for k in range(1, 33)]}
measured = {"in chunks": [(k, found[f"{k}"].median_s * 1e3) for k in counts],
            "each waited for": [(4, found["4, each waited for"].median_s * 1e3)]}
lines(predicted, measured, x="chunks", y="gather and matmul, ms", title="One operator in chunks", log="x",
      level=("max(tc, tm)", max(Tc, Tm) * 1e3), provenance=found["4"].timeline.provenance)

# %% id="chunks-figure"
side_by_side({"4, measured": found["4"].timeline, "4, predicted": predict_chunked([found.operator()], 4),
              "each waited for": found["4, each waited for"].timeline})

# %% [markdown] id="chunks-why"
# The first chunk travels while nothing is multiplied: 1/k of the gather stays exposed, and k chunks pay k latencies:
#
# > T = max(tc, tm) + min(tc, tm)/k, and latency where the wire is the one that everybody waits for
#
# **More chunks hide more until latency eats it.** On a GPU a second thing grows with k: a small matmul does not fill
# the device, so that the chunks together take longer than the whole. Nothing here shows that; a trace of your model
# does.
#
# ## The whole pair, forward and backward
#
# Forward, `up` waits for a gather and `down` is followed by a reduce-scatter: multiply chunk i while chunk i − 1
# leaves. Backward has the same two, turned round, and one thing for which nobody waits: the gradient of a *weight*. It
# can be computed while the gradient of the input travels. "1 chunk" hides under that, and under nothing else.

# %% id="pair-chunks"
whole = pair_runs((1, 4, 8), r=0.6, mb=3, ranks=ranks, fabric=wire, repeats=repeats)
limits = [sum(span.stop - span.start for span in predict_chunked(whole.pair(), None).select(kind=kind)) / 1e9
          for kind in ("compute", "comm")]
print(f"Tc = {limits[0] * 1e3:.0f} ms, Tm = {limits[1] * 1e3:.0f} ms")
for name, way in whole.measured.items():
    chunks = None if name == "waiting" else int(name.split()[0])
    score = fair_score(whole["waiting"].median_s, way.median_s, *limits).value
    said = "" if score is None or chunks is None else f"; F = {score:.2f}"
    print(f"{name:>9}: {way.median_s * 1e3:6.1f} ± {way.spread_s * 1e3:.1f} ms, predicted "
          f"{step_s(predict_chunked(whole.pair(), chunks)) * 1e3:6.1f}{said}; differs by {way.from_reference:.0e}")

# %% id="pair-figure" tags=["picture"]
show.figure(whole["4 chunks"].timeline, predicted=predict_chunked(whole.pair(), 4),
            title="A pair in four chunks, forward and backward")

# %% [markdown] id="slider-text"
# ## Move the sliders
#
# The forward pass of one transformer layer: 8192 tokens of width 8192 in bf16, its four matmuls at an assumed 400
# TFLOP/s, and rings with 5 µs a hop. Above every collective is waited for, below everything is in chunks. The picture
# needs no kernel.
#
# - 450 GB/s, as inside a node: take p from 2 to 16. Compute falls as 1/p. What does communication do?
# - p = 16 at 50 GB/s, as between nodes: how much can chunks still hide, and why no more?
# - 1024 tokens: from how many chunks on does it get slower again?

# %% id="slider"
def drawn(p, chunks, gbyte, tokens):
    width, flops, link = 8192, 400e12, reduce_scatter(p, LinkCost(5e-6, 1e-9 / gbyte))
    layers = (("gather", 3, "qkv"), ("scatter", 1, "out"), ("gather", 4, "up"), ("scatter", 4, "down"))
    layer = [Operator(kind, 2 * tokens * width * width * times / p / flops, 2 * tokens * width, link, name=name)
             for kind, times, name in layers]
    return {"waiting": predict_chunked(layer, None), f"{chunks} chunks": predict_chunked(layer, chunks)}


explore_schedules(drawn, {"p": "tensor-parallel degree p", "chunks": "chunks", "gbyte": "a rank's wire, GB/s",
                          "tokens": "tokens"}, p=(8, [2, 4, 8, 16]), chunks=(4, [1, 2, 4, 8, 16]),
                  gbyte=(450, [50, 200, 450]), tokens=(8192, [1024, 8192]))

# %% [markdown] id="slider-why"
# With p the compute of a rank falls as 1/p, and its bytes *grow*, as (p−1)/p. Once the wire is the longer of the two,
# chunks hide the compute under the wire, and the wire is what remains. **Tensor parallelism stays inside a node** for
# that reason, and chunks do not change it.
#
# ## What you would use in production
#
# PyTorch cuts a model with `parallelize_module` and a plan, and its DTensor inserts the collectives; the optimizer sees
# DTensors. Here is the same GPT cut so, on the same ranks:

# %% id="twin"
twins = gpt_runs(parallel_mlp, SequenceParallelMLP, twins=True, ranks=ranks, fabric=wire)
for name, way in twins.items():
    collectives = ", ".join(f"{count} {op}" for op, count in sorted(way.calls.items())) or "no collective"
    print(f"{name:>26}: a gradient differs by at most {way.from_one_process:.0e}; {collectives}; {way.sent_mb:.3f} MB")

# %% [markdown] id="twin-why"
# ```python
# plan = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1)),
#         "norm2": SequenceParallel()}
# parallelize_module(block, mesh, plan)
# ```
#
# The same gradients. DTensor gathers the scores before the loss unless told otherwise (`loss_parallel()`). It keeps the
# norms' gradients as *partial* DTensors, which are summed when the optimizer reads them: that is its `finish`, and why
# its backward has no all-reduce.
#
# Chunks are there too, under other names. PyTorch's *asynchronous tensor parallelism* has the compiler replace a gather
# and the matmul behind it by one operator that pulls chunks from its neighbours through symmetric memory; torchtitan
# turns it on with one option. Megatron's `--tp-comm-overlap` uses the operators of Transformer Engine, and needs
# `--sequence-parallel`: an all-reduce has only the matmul before it to hide under; its two halves have one each.
#
# ## Pitfalls
#
# - **Every chunk waited for** gives right numbers and hides nothing: you measured it above, beside the four chunks.
# - **The unfinished norm** trains without an error. You measured that too.
# - **Dropout.** On rows that all ranks hold, their masks have to agree; on shards they have to differ. One seed gives
#   agreeing masks everywhere:

# %% id="dropout"
def masks():
    from course_lib.tensor import ShardedDropout

    torch.manual_seed(0)
    shard = torch.ones(4096)
    plain = torch.dropout(shard, 0.5, True) == 0
    own = ShardedDropout(0.5, None)(shard) == 0
    again = torch.dropout(shard, 0.5, True) == 0  # the common stream goes on
    return plain, own, again


of_ranks = run(masks, ranks=ranks, fabric=wire)
for name, column in zip(("plain dropout", "ShardedDropout", "plain, afterwards"), zip(*of_ranks)):
    alike = (column[0] == column[-1]).float().mean()
    print(f"{name:>18}: the masks of two ranks agree in {alike:.0%} of places")

# %% [markdown] id="gloo-text"
# - **Bytes are not seconds.** The bytes above are those of a ring. Gloo, which carries ours, makes a reduce-scatter of
#   one reduction for each rank, and that moves as much as an all-reduce. NCCL's is a ring's.

# %% id="gloo"
for kind, link in found.links.items():
    print(f"{kind:>14} of 1 MB: {link.cost(2**20) * 1e3:5.1f} ms on this wire")

# %% [markdown] id="review-text"
# - **Two halves of the batch.** What one half waits for can hide under the other half's compute: the same idea, one
#   level up. It needs two independent halves in flight, and their memory.
#
# ## Review
#
# Three figures to look at after every change: how much of the step is exposed communication, what the device does
# meanwhile, and whether the steps are alike.

# %% id="review"
lab.review(whole["4 chunks"].timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - Activations have no time to spare: **hide inside the operator, or not at all.**
# - Column after row needs one collective at each end and none between. What is summed forward is passed on backward,
#   and the other way round.
# - Sequence parallelism sends the same bytes and keeps less. What every rank holds whole and sees in part, it must
#   *finish*.
# - In k chunks all but 1/k of the shorter side hides, and every chunk pays its latency.
# - With p compute falls and bytes do not: tensor parallelism belongs on the fastest wire there is.
#
# **For your notes.** A colleague trains with p = 8 inside a node. Communication of the tensor-parallel layers is 30 %
# of the step, all exposed. He proposes p = 16 over two nodes, "to halve the compute and hide the rest with chunks".
# What do you answer, and what would you try first?
#
# <details><summary>A model answer</summary>
#
# With p = 16 the compute of a rank halves, its bytes grow a little, and they now cross the wire between nodes, perhaps
# nine times as slow. Communication, 30 parts of 100 beside 70 of compute, becomes some 290 beside 35. Chunks hide at
# most the shorter side: the 35 under the 290. So no. First: sequence parallelism, if it is off, for its memory and
# because its two collectives have a matmul each to hide under; then chunks at p = 8, where 30 parts can go under 70.
# Four chunks leave a quarter of the 30 exposed, if the smaller matmuls still fill the device. And if the memory allows,
# p = 4 with more data parallelism: gradients have time to hide, activations have none.
#
# </details>
