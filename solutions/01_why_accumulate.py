# %% [markdown] id="title"
# # 01 · Why accumulate
#
# **The question.** Why would anyone cut a batch into N pieces, work through them one after the other, and add up the
# gradients? What does it save, what does it cost, and what does it leave as it was?
#
# You weigh a real model part by part, derive N, work out what each way of sharing a model sends over the wire, and look
# at a published configuration that does not add up at first sight.
#
# About 25 minutes.

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
import time
from contextlib import nullcontext

import torch

from course_lib import show
from course_lib.lab.pictures.sliders import sliders
from course_lib.launch import Fabric, run
from course_lib.plan import FP32, MIXED, ModelShape, data_degree, per_rank
from course_lib.plan import volumes as by_the_book
from course_lib.show.memory import memory, said
from course_lib.timeline import Timeline
from course_lib.train.data import batches, text
from course_lib.train.gpt import GPT, GPTConfig, next_byte_loss
from course_lib.tune import Measured

# %% [markdown] id="symbols"
# ## The words
#
# | symbol | meaning |
# |---|---|
# | B | global batch: samples of one update of the weights, over all ranks |
# | b | micro-batch: samples that one rank works on at a time |
# | D | data-parallel degree: how many copies of the model work side by side |
# | N | micro-steps: how often each copy runs forward and backward before the weights are updated |
# | G | bytes of one rank's gradient |
# | A | bytes of one activation, micro-batch × tokens × width |
# | T, P | ranks that share each layer (tensor parallel), ranks that hold some layers each (pipeline parallel) |
#
# ## Predict
#
# While it trains, a rank keeps four things: the *parameters*, their *gradients*, the *optimizer* state, and the
# *activations*: what forward leaves behind because backward will need it. Which is the largest?

# %% id="predict-small"
parts = ["parameters", "gradients", "optimizer", "activations"]
lab.predict("1.small", "A GPT of 0.8 million parameters, 8 rows of 128 tokens, on this machine?", choices=parts)

# %% id="predict-seven"
lab.predict("1.seven", "A GPT of 7 billion parameters, 4 rows of 2048 tokens, bf16 and Adam?", choices=parts)

# %% [markdown] id="weigh-text"
# ## Weigh it
#
# The memory of a process says little: libraries and allocators are in it. So this counts tensors. Parameters, gradients
# and optimizer state can be listed. Activations cannot, but autograd calls a hook for every tensor that it puts aside
# for backward. Each piece of memory is counted once.

# %% id="weigh"
def nbytes(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

def weigh(model, optimizer, micro_batches):
    """One update. Returns the bytes by part; of the micro-steps, the one that kept most counts."""
    mine, most = {p.untyped_storage().data_ptr() for p in model.parameters()}, 0
    for batch in micro_batches:
        kept = {}

        def put_aside(tensor, kept=kept):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in mine:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(put_aside, lambda tensor: tensor):
            summed, count = next_byte_loss(model, batch)
        (summed / count / len(micro_batches)).backward()
        most = max(most, sum(kept.values()))
    optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values() if value.ndim]
    gradients = [p.grad for p in model.parameters()]
    return dict(zip(parts, (nbytes(model.parameters()), nbytes(gradients), nbytes(state), most)))

def fresh():
    torch.manual_seed(seed)
    model = GPT(GPTConfig())
    return model, torch.optim.AdamW(model.parameters())

data = text(0.5)
small = weigh(*fresh(), list(batches(data, 8, 128, 1, seed=seed)))
for part, size in small.items():
    print(f"{part:>12}: {said(size):>8}")
lab.compare("1.small", max(small, key=small.get))

# %% [markdown] id="formula-text"
# Can you know that without running it? Three of the parts are bytes per parameter: in fp32 4 for the weight, 4 for the
# gradient, 8 for Adam's two moments. For the activations, count what each layer keeps for one token: 16 numbers per
# unit of width with fused attention and no dropout. (The full formula with attention scores, dropout and tensor
# parallelism is that of [arXiv 2205.05198](https://arxiv.org/abs/2205.05198); `course_lib.plan.memory` has it.)
#
# Now the same model with a batch of 32 in one go, and with 32 as four micro-steps of 8.

# %% id="formula" tags=["picture"]
shape = ModelShape(layers=4, width=128, heads=4, vocab=256, length=128)
measured, formula, gradients = {}, {}, {}
for name, b, N in (("b = 8", 8, 1), ("b = 32", 32, 1), ("b = 8, N = 4", 8, 4)):
    rows = torch.cat([torch.stack(batch) for batch in batches(data, 8, 128, 4, seed=seed)], dim=1)[:, :b * N]
    seconds = []
    for _ in range(3):  # the quickest counts: the first sets up threads and memory, and other work only adds
        model, optimizer = fresh()
        start = time.perf_counter()
        measured[name] = weigh(model, optimizer, list(zip(rows[0].split(b), rows[1].split(b))))
        seconds.append(time.perf_counter() - start)
    formula[name] = per_rank(shape, b, precision=FP32).parts()
    gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
    print(f"{name:>12}: {said(sum(measured[name].values())):>8} measured, "
          f"{said(sum(formula[name].values())):>8} by the formula, {min(seconds):.2f} s")
worst = (gradients["b = 8, N = 4"] - gradients["b = 32"]).abs().max() / gradients["b = 32"].abs().max()
print(f"gradient of 4 × 8 against 1 × 32: differs by {worst:.1g} of its largest element")
memory(measured, formula, title="What fills the memory of a small GPT", provenance="counted tensors, measured (cpu)")

# %% [markdown] id="formula-why"
# Only the activations grow with the micro-batch. Four micro-steps of 8 give the gradient of 32 (up to the order of
# adding) with the activations of 8. They take the time of all 32 samples: **N buys batch with time.** And the other
# three parts are the same in all bars: accumulation does nothing for the memory of weights.
#
# ## Seven billion
#
# The same formula for 7B in mixed precision: bf16 weights and gradients, and an optimizer that keeps an fp32 copy of
# the weights beside Adam's two moments. One GPU, one micro-batch of 4 rows.

# %% id="seven"
seven = ModelShape(layers=32, width=4096, heads=32, vocab=32000, length=2048, tied=False)
alone = per_rank(seven, 4, precision=MIXED)
print(f"{seven.parameters / 1e9:.2f} billion parameters")
lab.compare("1.seven", alone.largest, how="computed")
memory(formula={"one rank": alone.parts()}, limit_bytes=80e9, title="7B on one A100", provenance="computed")

# %% [markdown] id="seven-why"
# The order has changed. Per parameter a large model sees few tokens at a time, so the state of the optimizer
# outweighs everything, and it alone would fill an A100. Smaller micro-batches do not help against that. Two
# things do: sharing the state out over the ranks (ZeRO), and sharing the model out (T and P).
#
# ## Exercise 1.1 · how many micro-steps (5 min)
#
# One micro-step of all copies together takes b·D samples. An update takes B. So
#
# > N = B / (b·D)
#
# Write `accumulation_steps(B, b, D)`. Return N as a whole number. Where there is none, raise `ValueError` with a
# sentence that says what is wrong: a B that is no multiple of b·D, and anything below 1. A silent answer would be a
# batch that you did not ask for. For (1024, 4, 8) it is 32.

# %% id="steps" exercise="1.1"
def accumulation_steps(B, b, D):
    ### BEGIN SOLUTION
    for name, value in (("B", B), ("b", b), ("D", D)):
        if value < 1:
            raise ValueError(f"{name} = {value}: it is 1 at least")
    if B % (b * D):
        raise ValueError(f"B = {B} is not a multiple of b·D = {b * D}: {B % (b * D)} samples are left over")
    return B // (b * D)
    ### END SOLUTION

# %% id="steps-check"
lab.check("1.1", accumulation_steps)

# %% [markdown] id="steps-hint"
# Stuck? `lab.hint("1.1")` gives a first step, and a further one each time you run it.
#
# Here is what your function says to some batches that somebody may ask for.

# %% id="steps-asked"
for asked in ((1024, 4, 8), (1000, 4, 8), (1024, 4, 6), (16, 4, 8), (1024, 0, 8)):
    try:
        print(asked, "→", accumulation_steps(*asked))
    except ValueError as refused:
        print(asked, "→ refused:", refused)

# %% [markdown] id="zero-exercise"
# ## Exercise 1.2 · bytes per rank by ZeRO stage (6 min)
#
# With plain data parallelism, stage 0, all D copies hold all the state. ZeRO divides it evenly over the D ranks, one
# kind more at each stage: stage 1 the optimizer state, stage 2 the gradients too, stage 3 the weights too.
#
# Write `bytes_per_rank(parameters, D, stage)`. Return `(weights, gradients, optimizer)` in bytes, for mixed precision:
# bf16 weights and gradients of 2 bytes, and per parameter in the optimizer an fp32 master copy and Adam's two moments,
# fp32 as well.

# %% id="zero" exercise="1.2"
def bytes_per_rank(parameters, D, stage):
    ### BEGIN SOLUTION
    weights = 2 * parameters / (D if stage >= 3 else 1)
    gradients = 2 * parameters / (D if stage >= 2 else 1)
    optimizer = (4 + 4 + 4) * parameters / (D if stage >= 1 else 1)
    return weights, gradients, optimizer
    ### END SOLUTION

# %% id="zero-check"
lab.check("1.2", bytes_per_rank)

# %% [markdown] id="zero-text"
# Your function, for 7B on 64 GPUs without any sharing of layers. The activations of a micro-batch of 4 come on top.

# %% id="zero-seven"
stages = {}
for stage in range(4):
    state = dict(zip(parts, bytes_per_rank(seven.parameters, 64, stage)))
    stages[f"ZeRO stage {stage}"] = state | {"activations": alone.activations}
memory(formula=stages, limit_bytes=80e9, title="7B, D = 64, by your function", provenance="computed")

# %% [markdown] id="traffic-text"
# ## Exercise 1.3 · bytes on the wire per update (8 min)
#
# Sharing has a price: bytes. Write `bytes_per_update(kind, n, N, G, A, layers)`: the bytes that one rank *sends* in one
# update of N micro-steps. n ranks share the work, G are the bytes of the rank's gradient, A those of one activation,
# `layers` the layers on the rank.
#
# - A ring all-reduce of S bytes over n ranks sends 2(n−1)/n·S from each. An all-to-all sends (n−1)/n·S: one part of n
#   stays at home.
# - `"DP"`, data parallel: one all-reduce of G, after the last micro-step.
# - `"TP"`, tensor parallel: in every layer and micro-step two all-reduces of A in forward, and two in backward.
# - `"PP"`, pipeline parallel: a stage sends A to the next stage, and the gradient of its input, as large, to the one
#   before. Take a stage that has both neighbours.
# - `"EP"`, expert parallel: in every layer and micro-step the tokens go to their experts and come back, two all-to-alls
#   of A in forward, and two in backward.

# %% id="traffic" exercise="1.3"
def bytes_per_update(kind, n, N, G, A, layers):
    ### BEGIN SOLUTION
    all_to_all = (n - 1) / n
    all_reduce = 2 * all_to_all
    return {
        "DP": all_reduce * G,
        "TP": 4 * layers * N * all_reduce * A,
        "PP": 2 * N * A,
        "EP": 4 * layers * N * all_to_all * A,
    }[kind]
    ### END SOLUTION

# %% id="traffic-check"
lab.check("1.3", bytes_per_update)

# %% [markdown] id="traffic-kinds"
# For 7B on eight ranks, each kind of sharing alone, your function says:

# %% id="traffic-seven"
A = 4 * seven.length * seven.width * 2  # a micro-batch of 4, bf16
for kind, layers in (("DP", 32), ("TP", 32), ("PP", 4), ("EP", 32)):
    once, many = (bytes_per_update(kind, 8, N, 2 * seven.parameters, A, layers) for N in (1, 32))
    print(f"{kind}: N = 1 {said(once):>8}, N = 32 {said(many):>8}")

# %% [markdown] id="real-text"
# EP is counted as if every layer had experts, and each token went to one. Three of the four grow with N. The exception
# is the gradient.
#
# ## On real ranks
#
# Does your number for DP come out there? Two ranks run updates of four micro-steps, on a model with 8 MB of gradient
# whose layers take a given time: in one run the gradient is sent after every micro-step, in the other after the last
# only. Every all-reduce writes down how many bytes it was given, and a ring sends 2(n−1)/n of them from each rank.

# %% id="predict-real"
lab.predict("1.saved", "How much shorter is the step when the gradient is sent once and not four times?", unit="%")

# %% id="real"
MB = 2**20

def model():
    from course_lib.train.emulated import equal
    return equal(layers=8, mb=1.0, forward_ms=1.5, backward_ms=3.0)

def updates_on_rank(repeats):
    from course_lib.launch import context
    from course_lib.train import emulated, wrap
    from course_lib.tune.alternate import Step, alternate

    def update(module, silent):
        def step():
            for micro_step in range(4):
                with module.no_sync() if silent and micro_step < 3 else nullcontext():
                    (module(torch.ones(4)).square().mean() / 4).backward()
            module.finish_gradient_synchronization()
        return Step(step, lambda: module.zero_grad(set_to_none=False))

    steps = {"every": update(wrap("serial", model(), flat=True), False), "once": update(wrap("no_sync", model()), True),
             "stock DDP": update(wrap("ddp", model()), True)}
    return alternate(steps, repeats, provenance=f"{emulated.PROVENANCE}, {context().spec.provenance}")

rows = run(updates_on_rank, 3 if quick else 7, ranks=ranks, fabric=Fabric("1GbE", kind=fabric))
runs = {name: Measured(name, tuple(rows[0][0][name]), Timeline.merge(lines[name] for _, lines in rows))
        for name in rows[0][0]}
ring = 2 * (ranks - 1) / ranks
for name, N in (("every", 4), ("once", 1)):
    given = sum(span.bytes for span in runs[name].timeline.select(rank=0, kind="comm", step=0))
    yours = N * bytes_per_update("DP", ranks, 4, 8 * MB, 0, 8)
    print(f"{name:>5}: {given / MB:.0f} MB were all-reduced, rank 0 sent {ring * given / MB:.0f} MB for it; by your "
          f"function {yours / MB:.0f} MB; step {runs[name].median_s * 1e3:.0f} ms")
lab.compare("1.saved", round(100 * (1 - runs["once"].median_s / runs["every"].median_s)))
show.figure(runs["every"].timeline, title="An all-reduce after each of four micro-steps")

# %% id="real-once"
show.figure(runs["once"].timeline, title="Four micro-steps, then one all-reduce")

# %% [markdown] id="real-why"
# That is the second reason to accumulate: the gradient crosses the wire once an update, however many micro-steps it
# took. What is left is exposed, all of it. The labs from 02 on are about that.
#
# ## A published configuration
#
# This table is from the article that this course grew out of: a 7B model on 64 A100. The lines with ← are computed by
# your functions.

# %% id="article"
gpus, B, b, D, bucket_mb = 64, 1024, 4, 8, 25
share = gpus // D
G = 2 * seven.parameters / share
lines = [
    ("GPUs", f"{gpus} × A100, 80 GB"), ("model", f"7B ({seven.parameters / 1e9:.2f} billion parameters)"),
    ("global batch B", B), ("micro-batch b", b), ("data-parallel degree D", D),
    ("micro-steps N", f"{accumulation_steps(B, b, D)} ←"), ("bucket", f"{bucket_mb} MB"), ("backend", "NCCL"),
    ("strategy", "no_sync, then asynchronous buckets"),
    ("gradient of one rank, bf16", f"{said(G)}, in {-(-G // (bucket_mb * MB)):.0f} buckets ←"),
    ("bytes sent for it per update", f"{said(bytes_per_update('DP', D, 32, G, 0, 0))} ←"),
    ("… if sent in every micro-step", f"{said(32 * bytes_per_update('DP', D, 32, G, 0, 0))} ←"),
]
for name, value in lines:
    print(f"{name:>30}   {value}")

# %% id="predict-factor"
lab.predict("1.factor", "D = 8, but there are 64 GPUs. What is the other factor of 8 doing?",
            choices=["nothing, those GPUs are spare", "it holds further copies of the model",
                     "it shares one copy of the model", "it works on further micro-batches"])

# %% [markdown] id="factor-text"
# The table does not say. But D·b·N = 8·4·32 is already all of B: further copies or micro-batches would make the batch
# larger. So each of the 8 copies is spread over 8 GPUs: T·P = 8. There are four ways to do that. Here they are, and
# below them three others for the same 64 GPUs and the same B.

# %% id="factor"
lab.compare("1.factor", "it shares one copy of the model", how="computed")
A = b * seven.length * seven.width * 2
published = {(8, 1, 0): "11.86", (4, 2, 0): "9.21", (2, 4, 0): "8.05", (2, 1, 0): "7.37"}
bars = {}
print("  T  P   D   N  stage    memory        DP        TP        PP   s per update (calculon)")
for T, P, stage in ((8, 1, 0), (4, 2, 0), (2, 4, 0), (1, 8, 0), (2, 1, 0), (1, 1, 0), (1, 1, 1)):
    degree = data_degree(gpus, T, P)
    N = accumulation_steps(B, b, degree)
    held = per_rank(seven, b, gpus=gpus, tensor=T, pipeline=P, stage=stage, micro_steps=N)
    sent = (by_the_book.data_parallel_bytes(held.gradients, degree),
            bytes_per_update("TP", T, N, 0, A, seven.layers // P) if T > 1 else 0,
            bytes_per_update("PP", P, N, 0, A, 0) if P > 1 else 0)
    bars[f"D {degree}, ZeRO-1" if stage else f"T {T}, P {P}, D {degree}"] = held.parts()
    print(f"{T:3} {P:2} {degree:3} {N:3} {stage:6} {said(held.total):>9}", *(f"{said(s):>9}" for s in sent),
          f"{published.get((T, P, stage), '–'):>7}")
memory(formula=bars, limit_bytes=80e9, title="Seven ways to put 7B on 64 A100", provenance="computed")

# %% [markdown] id="factor-why"
# The last column is not ours: it is what [calculon](https://github.com/calculon-ai/calculon), an analytical model by
# others, says for the same cluster where it was asked, with unfused attention and no recomputation. Two things stand
# out.
#
# - With D = 8 the memory is easy. But where layers are shared (T above 1), the bytes are enormous: they are sent in
#   every layer of every micro-step, and N is 32. The gradient, which this course is about, is the small number there.
# - By that model D = 8 is the slow choice. With D = 32 or 64 the same batch needs N = 8 or 4. That sends more gradient
#   and far fewer activations. (With D = 64, ZeRO-1 and recomputation it says 7.33 s.) Lab 13 plans this cluster in
#   earnest.
#
# The memory here leaves out buffers and fragmentation; it counts fused attention, no dropout, no recomputation. On 64
# plain copies (T 1, P 1) the model does not fit; dividing only the optimizer state already makes it.
#
# ## Move the sliders
#
# Make N large by raising B, and look at which numbers follow it. Then make it small by raising D. Which combination
# fits 80 GB and sends the fewest bytes? And why do the bytes of TP stay where they are when you change b? Impossible
# batches are refused, by your function.

# %% id="slider"
def plan(B, b, T, P, stage):
    degree = data_degree(gpus, T, P)
    A = b * seven.length * seven.width * 2
    try:
        N = accumulation_steps(B, b, degree)
    except ValueError as refused:
        notes, N = [f"D = {degree}. Refused: {refused}"], None
    held = per_rank(seven, b, gpus=gpus, tensor=T, pipeline=P, stage=stage, micro_steps=N)
    if N:
        sent = {"DP": by_the_book.data_parallel_bytes(2 * seven.parameters / (T * P), degree, N, stage=stage),
                "TP": by_the_book.tensor_parallel_bytes(A, T, seven.layers // P, N),
                "PP": by_the_book.pipeline_parallel_bytes(A, P, N)}
        notes = [f"D = {degree}, N = {N}. One rank sends in an update: "
                 + ", ".join(f"{kind} {said(size)}" for kind, size in sent.items())]
    return memory(formula={f"T {T}, P {P}, D {degree}": held.parts()}, limit_bytes=80e9, notes=notes,
                  title=f"7B on {gpus} A100", provenance="computed; the fullest rank, the first pipeline stage")

sliders(plan, {"B": "global batch B", "b": "micro-batch b", "T": "tensor parallel T", "P": "pipeline stages P",
               "stage": "ZeRO stage"}, B=(1024, [64, 256, 1000, 1024, 2048, 4096]), b=(4, [1, 2, 4, 8, 16]),
        T=(8, [1, 2, 4, 8]), P=(1, [1, 2, 4, 8]), stage=(0, [0, 1, 2, 3]))

# %% [markdown] id="twin-text"
# ## What you would use in production
#
# Frameworks derive N from the batches, or check it. They refuse what does not divide, as your function does.

# %% id="twin"
N = accumulation_steps(B, b, D)
print(f"Megatron-LM:  --global-batch-size {B} --micro-batch-size {b} --tensor-model-parallel-size {share}")
print(f'DeepSpeed:    {{"train_batch_size": {B}, "train_micro_batch_size_per_gpu": {b}, '
      f'"gradient_accumulation_steps": {N}}}')
print(f"PyTorch DDP:  with model.no_sync(): … {N - 1} micro-steps …; then one without")
carried = ring * sum(span.bytes for span in runs["stock DDP"].timeline.select(rank=0, kind="comm", step=0))
print(f"stock DDP on the ranks above, no_sync around three of four micro-steps: carried {carried / MB:.0f} MB, "
      f"step {runs['stock DDP'].median_s * 1e3:.0f} ms")

# %% [markdown] id="twin-why"
# On a GPU, `torch.cuda.max_memory_allocated()` gives the peak, and `torch.cuda.memory._record_memory_history()` with
# `_dump_snapshot()` a picture of who holds what. Compare it with the formula: what the formula lacks is what to look
# for.
#
# ## Pitfalls
#
# - **N does not save the memory of weights.** If the optimizer state does not fit, a smaller micro-batch will not help.
# - **A batch that does not divide** is not rounded. A floor drops samples of every batch, and the learning rate is then
#   meant for another batch.
# - **The fp32 copy is easily forgotten.** bf16 weights do not make the state a half: of 16 bytes a parameter, 12 belong
#   to the optimizer.
# - **"2·S for an all-reduce"** is a limit for many ranks. On two ranks it is S.
# - **Accumulation does not save activation traffic.** TP, PP and EP send in every micro-step, N times A. Half the b is
#   half the A and twice the N: every sample's activations cross the wire, however you cut the batch. Only the gradient
#   is sent once, and with ZeRO-2 and 3 not even that: sharded gradients are reduced in every micro-step.
# - **A larger N is not a faster run.** It makes the gradient's *share* of the step smaller by making the step longer.
#
# ## Review
#
# The run with one all-reduce after four micro-steps.

# %% id="review"
lab.review(runs["once"].timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - **N = B/(b·D)**, whole, or refused.
# - N buys batch with time, not with memory of weights: activations follow b, the rest follows the parameters.
# - Per update the gradient is sent once; what TP, PP and EP send, they send in every one of the N micro-steps.
# - A configuration is complete only when all factors of the number of GPUs have a job.
#
# **For your notes.** A colleague has 16 GPUs, B = 512, b = 8, D = 16, and runs out of memory by a little. They propose
# b = 4. What happens to N, to the four parts of memory, and to the bytes per update? And what would you do if it is the
# optimizer state that is too large?
#
# <details><summary>A model answer</summary>
#
# N goes from 4 to 8. The activations are halved; parameters, gradients and optimizer state stay. The bytes of the
# gradient stay as well, because it is sent once per update. The micro-steps are half as long and twice as many, so the
# step takes about as long, or a little longer, because small micro-batches use the device less well. If the optimizer
# state is what does not fit, b is the wrong knob: ZeRO stage 1 divides it by D at the same bytes on the wire.
#
# </details>
