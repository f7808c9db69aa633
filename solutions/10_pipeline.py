# %% [markdown] id="title"
# # 10 · The pipeline
#
# **The question.** A model that is too large for one device is cut into stages, one a rank. Micro-batches travel
# through them, forward and back. While the first one travels, most ranks wait: this idle time is the *bubble*. What
# decides how large it is, and what does it cost to make it small?
#
# You write the schedule that most people train with, 1F1B, as data; place its receives so that nobody waits in a
# circle; and split the backward in two, which fills the bubble with work. Each schedule is proved before it runs, and
# then runs on real ranks, beside PyTorch's.
#
# About 45 minutes. Four ranks start on this machine; every byte between them crosses a real, rate-limited wire.

# %% id="parameters" tags=["parameters"]
ranks = 4
fabric = "auto"
device = "auto"
seed = 0
quick = False
submission = ""

# %% id="begin"
from course_lib import lab

lab.begin(submission, device)

# %% id="imports"
from course_lib.lab.pictures.lines import lines
from course_lib.lab.pictures.pipeline_picture import Drawn, pipelines
from course_lib.lab.pictures.pipeline_widget import explore_pipelines
from course_lib.lab.workbench.pipeline import pipeline_runs
from course_lib.lab.workbench.pipeline_words import placed, schedule_of, words_of
from course_lib.launch import Fabric, run
from course_lib.link_cost import LinkCost
from course_lib.schedule import ScheduleError, add_messages, check, gpipe, interleaved, with_messages, zb_v, zero_bubble
from course_lib.schedule import one_f_one_b as library_1f1b
from course_lib.simulate.pipeline import Costs, ideal_bubble, predict

wire = Fabric(gbit=1.0, latency_us=100, kind=fabric)
p, m = max(2, ranks), max(8, ranks)  # a pipeline of one stage has nobody to wait for
stage_ms, message_kb = (14.0, 14.0, 14.0), 16
repeats = 2 if quick else 7

# %% [markdown] id="symbols"
# ## The words
#
# | symbol | meaning |
# |---|---|
# | p, m | ranks of the pipeline; micro-batches of one step |
# | F, B | forward and backward of one micro-batch through one stage, and the time each takes |
# | I, W | the halves of B: the gradient of the stage's input, and that of its weights; B = I + W |
# | v | stages a rank holds: the model is cut into v·p pieces |
# | bubble | the part of all ranks' time, from the first action to the end of the last, in which they do not compute |
# | activation | what a stage keeps of a micro-batch from its F until its B (or W) is done |
# | replicas | copies of the pipeline that see other data; the gradients of a stage are summed over them |
#
# A schedule is written as words, a list for each rank: `F0 F1 B0 B1`. `send_F0` sends what F0 put out to the next
# stage, `recv_F0` *posts* a receive and does not wait; `send_B0`, `recv_B0` are for gradients, which go the other way.
# Where a rank holds several stages the word says which: `F0@2`.
#
# The ranks emulate their device, as in the labs before: F, I and W take 14 ms each. Autograd, gradients, messages and
# the wire are real.

# %% [markdown] id="predict-text"
# ## Predict
#
# Four ranks, eight micro-batches. *GPipe* does all forwards first and then all backwards. *1F1B* begins with
# backwards as soon as it can: after a few forwards, each rank does one forward and one backward in turn.

# %% id="predict-bubble"
lab.predict("10.bubble", "GPipe: what part of the step does a rank stand idle?", unit="%")

# %% id="predict-against"
lab.predict("10.against", "1F1B instead, with messages that take no time: its bubble is",
            choices=["smaller", "the same", "larger"])

# %% id="predict-split"
lab.predict("10.split", "The backward split in two halves: how much of 1F1B's bubble is left?", unit="%")

# %% [markdown] id="baseline-text"
# ## The baseline
#
# GPipe, with several numbers of micro-batches. In the same run, neighbours play a message to and fro, so that its
# cost is known; with it every schedule can be predicted.

# %% id="baseline"
counts = sorted({2, m} if quick else {2, 4, m, 16})
first = pipeline_runs({f"GPipe, m = {count}": gpipe(p, count) for count in counts}, stage_ms=stage_ms,
                      message_kb=message_kb, fabric=wire, repeats=repeats)
hop_ms = first.link.cost(first.message_bytes) * 1e3
print(f"one message of {first.message_bytes // 1024} KB takes {hop_ms:.1f} ms, from the end of compute on one rank to "
      "its begin on the next")
for count in counts:
    one = first.runs[f"GPipe, m = {count}"]
    print(f"m = {count:2d}: step {one.median_s * 1e3:5.0f} ± {one.spread_s * 1e3:.0f} ms, bubble {one.bubble:.1%}; "
          f"(p−1)/(m+p−1) = {ideal_bubble(p, count):.1%}; a rank keeps {max(one.kept):g} activations")
base = first.runs[f"GPipe, m = {m}"]
lab.compare("10.bubble", round(100 * base.bubble))

# %% id="baseline-picture" tags=["picture"]
pipelines({"GPipe": Drawn(first.predict(gpipe(p, m)).timeline, base.timeline, base.kept)})

# %% [markdown] id="baseline-why"
# Every rank waits for (p−1)·(F+B), at the beginning, in the middle and at the end together: until the first
# micro-batch has come to it, and until the last has come back. The rest, m·(F+B), is work. So the bubble is
# (p−1)/(m+p−1) of the step. (Some papers divide by the work alone and write (p−1)/m. Look which one is meant.)
#
# And every rank keeps the activations of *all* m micro-batches, because no backward begins before the last forward.
# More micro-batches make the bubble smaller, and GPipe pays with memory.
#
# ## Exercise 10.1 · generate 1F1B (12 min)
#
# A rank can begin with backwards as soon as a gradient can have come to it. Until then it warms up with forwards; and
# for each activation that it frees from then on, it makes one new one.
#
# Write `one_f_one_b(p, m, rank)`. It returns the list of words of one rank, with stage r on rank r:
#
# - **warm-up**: p − 1 − rank forwards (or m, if there are not as many);
# - then, as long as there are forwards: one forward, one backward, the oldest that is still to do;
# - **cool-down**: the backwards that are left;
# - at the end, on every rank, `reduce0`: the stage's gradient is summed over its replicas.
#
# For p = 3, m = 4 rank 1 does `["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3", "reduce0"]`.

# %% id="one-f-one-b" exercise="10.1"
def one_f_one_b(p, m, rank):
    ### BEGIN SOLUTION
    warm = min(p - 1 - rank, m)
    words = [f"F{i}" for i in range(warm)]
    for i in range(warm, m):
        words += [f"F{i}", f"B{i - warm}"]
    words += [f"B{i}" for i in range(m - warm, m)]
    return [*words, "reduce0"]
    ### END SOLUTION

# %% id="one-f-one-b-check"
lab.check("10.1", one_f_one_b)

# %% [markdown] id="one-f-one-b-hint"
# Stuck? `lab.hint("10.1")` gives a first step, and a further one each time you run it.
#
# ## A schedule is data
#
# So it can be looked at before anything runs. `check` plays it through: does everybody do all of its work, can
# everybody always go on, and what does each rank keep?

# %% id="proof"
own = schedule_of([one_f_one_b(p, m, rank) for rank in range(p)], reduces=True)
print(own)
print("activations kept:", check(own).peak_activations)

# %% [markdown] id="refused-text"
# That was compute alone. Now add messages as one would write them down first: send what was computed, right after it;
# receive what is needed, right before it.

# %% id="refused"
naive = add_messages(own)
print(f"rank {p - 2}: {' '.join(words_of(naive)[p - 2][:9])} …")
try:
    check(naive)
except ScheduleError as refused:
    print(refused)

# %% [markdown] id="refused-why"
# **Refused, and with the cycle.** A send goes on only when its receiver has posted the receive: on a real wire there is
# no place for the bytes to stay. (Small messages are buffered by most libraries, so that such a program runs in the
# test and hangs with the real model.)
#
# ## Exercise 10.2 · place the receives (12 min)
#
# Posting a receive takes no time, so it can be done early. But how early? Write
# `place_receives(lists, receive_of, needs)`, for *any* schedule:
#
# - `lists[r]` are the words of rank r, compute and sends. Here each word names its stage: `"F0@1"`, `"send_F0@1"`.
# - `receive_of(send)` gives `(rank, word)`: who has to receive it, and as what: `receive_of("send_F0@0")` is
#   `(1, "recv_F0@1")`.
# - `needs(word)` gives the receive whose message this word takes in, or `None`: `needs("F0@1")` is `"recv_F0@1"`,
#   `needs("F0@0")` and `needs("send_F0@1")` are `None`.
# - Return the lists with every receive once, in new lists; what was there stays in its order.
# - Messages carry no names: what comes from one rank is received in the order in which that rank sends. Where a rank
#   holds several stages, forwards and gradients come from the same peer, mixed.
# - A posted receive holds a buffer. In long windows of 1F1B no rank may hold more than p + 1 that are not used yet.
#
# For `[["F0@0", "send_F0@0", "B0@0"], ["F0@1", "B0@1", "send_B0@1"]]` one answer is
# `[["F0@0", "send_F0@0", "recv_B0@0", "B0@0"], ["recv_F0@1", "F0@1", "B0@1", "send_B0@1"]]`.

# %% id="receives" exercise="10.2"
def place_receives(lists, receive_of, needs):
    ### BEGIN SOLUTION
    out, at, posted = [[] for _ in lists], [0] * len(lists), set()
    while any(at[r] < len(words) for r, words in enumerate(lists)):
        for r, words in enumerate(lists):
            if at[r] == len(words) or not (needs(words[at[r]]) is None or needs(words[at[r]]) in posted):
                continue
            word = words[at[r]]
            if word.startswith("send"):
                peer, receive = receive_of(word)
                out[peer].append(receive)
                posted.add(receive)
            out[r].append(word)
            at[r] += 1
    return out
    ### END SOLUTION

# %% id="receives-check"
lab.check("10.2", place_receives)

# %% [markdown] id="own-text"
# ## Your 1F1B on ranks
#
# Your schedule, with your receives, in alternation with GPipe. A third one warms up with one forward more on every
# rank but the last; what it is good for comes in a moment.

# %% id="own"
yours = placed(own, place_receives)


def warmed(rank):
    """1F1B with one more forward to warm up, except on the last rank."""
    warm = min(p - 1 - rank + (rank < p - 1), m)
    steady = [word for i in range(warm, m) for word in (f"F{i}", f"B{i - warm}")]
    return [*(f"F{i}" for i in range(warm)), *steady, *(f"B{i}" for i in range(m - warm, m))]


schedules = {"GPipe": gpipe(p, m), "your 1F1B": yours, "1F1B, one F more": schedule_of(map(warmed, range(p)))}
second = pipeline_runs(schedules, stage_ms=stage_ms, message_kb=message_kb, fabric=wire, repeats=repeats)


def free(schedule):
    """Its bubble where messages take no time."""
    v = schedule.stages // len(schedule.ranks)
    return predict(schedule, Costs(*(ms / 1e3 / v for ms in stage_ms))).bubble


def told(found, name):
    """One run in two lines. Gradients are compared with those of one process, as a part of the largest."""
    one, schedule = found.runs[name], schedules[name]
    return (f"{name:>18}: step {one.median_s * 1e3:4.0f} ± {one.spread_s * 1e3:.0f} ms, bubble {one.bubble:.1%} "
            f"(predicted {found.predict(schedule).bubble:.1%}; with free messages {free(schedule):.1%})\n{'':20}keeps "
            f"{', '.join(f'{kept:g}' for kept in one.kept)} activations; rank 0 sends "
            f"{check(with_messages(schedule)).sends[0]} messages; gradients off by {one.from_reference:.0e}")


for name in schedules:
    print(told(second, name))
bubbles = [free(schedules[name]) for name in ("GPipe", "your 1F1B")]
answer = "the same" if bubbles[0] == bubbles[1] else "smaller" if bubbles[1] < bubbles[0] else "larger"
lab.compare("10.against", answer, how="computed")

# %% id="own-picture" tags=["picture"]
pipelines({name: Drawn(second.predict(schedules[name]).timeline, one.timeline, one.kept)
           for name, one in second.runs.items() if name != "1F1B, one F more"})

# %% [markdown] id="own-why"
# **The bubble is the same; 1F1B saves memory.** The first micro-batch still has to come to the last rank, and the last
# one still has to come back. What has changed is that a rank keeps at most p − rank activations instead of m. That is
# why m can grow, and it is m that makes the bubble small.
#
# What is measured is a little larger than the formula: messages take time here. And larger for 1F1B than for GPipe.
# In its steady phase 1F1B has no slack at all: the gradient that a rank waits for was sent by a rank that waited for
# its forward. **Every round pays a message there and one back.** One more forward to warm up puts a micro-batch
# between them, for one more activation: the last of the three above. On a late wire that is worth it.
#
# ## Exercise 10.3 · split the backward (10 min)
#
# The stage before waits for the gradient of *its output*, and for nothing else. Half of each backward is for it (I);
# the other half, the gradient of the weights (W), nobody waits for before the end. So send early, and keep W for the
# moments in which there is nothing else to do. That is *zero bubble* (Qi et al., arXiv 2401.10241).
#
# Write `split_backward(words, delay)`, for the words of one rank under 1F1B, with sends and receives:
#
# - Each B becomes I at its place; the send of its gradient stays right behind it.
# - W of a micro-batch is done when `delay` further I (and their sends) are done, before whatever comes next; the oldest
#   first.
# - What is left at the end comes before `reduce0`, which needs all of them. All else stays as it is.
#
# `split_backward(["recv_F0", "F0", "recv_F1", "B0", "send_B0", "F1", "B1", "send_B1", "reduce0"], 1)` returns
# `["recv_F0", "F0", "recv_F1", "I0", "send_B0", "F1", "I1", "send_B1", "W0", "W1", "reduce0"]`.

# %% id="split" exercise="10.3"
def split_backward(words, delay):
    ### BEGIN SOLUTION
    waiting, out = [], []
    for word in words:
        if len(waiting) > delay and not word.startswith("send_B"):
            out.append(waiting.pop(0))
        if word.startswith("B"):
            out.append("I" + word[1:])
            waiting.append("W" + word[1:])
        elif word.startswith("reduce"):
            out += [*waiting, word]
            waiting = []
        else:
            out.append(word)
    return out + waiting
    ### END SOLUTION

# %% id="split-check"
lab.check("10.3", split_backward)

# %% [markdown] id="split-run-text"
# ## Your zero bubble on ranks
#
# Rank r puts W off by r backwards: the later ranks have the longer cool-down to fill. Two more schedules run beside it,
# with your receives: *interleaved* 1F1B, where every rank holds two stages of half the size, and *ZB-V*, where the
# stages go down the ranks and up again, so that rank 0 has the first and the last. And PyTorch's own
# `torch.distributed.pipelining`, with the same stages on the same ranks.

# %% id="split-run"
halves = schedule_of([split_backward(words, rank) for rank, words in enumerate(words_of(yours))], reduces=True)
schedules = {"your 1F1B": yours, "your zero bubble": halves,
             "interleaved, v = 2": placed(interleaved(p, m, 2), place_receives),
             "ZB-V": placed(zb_v(p, m), place_receives)}
twins = {"torch's 1F1B": ("1F1B", m, 1), "torch's interleaved": ("interleaved", m, 2)}
if not quick:
    twins["torch's zero bubble"] = ("zero bubble", m, 1)
third = pipeline_runs(schedules, twins, stage_ms=stage_ms, message_kb=message_kb, fabric=wire, repeats=repeats)
for name in schedules:
    print(told(third, name))
print(f"with free messages zero bubble would leave {free(halves) / free(yours):.0%} of 1F1B's bubble, ZB-V "
      f"{free(schedules['ZB-V']) / free(yours):.0%}")
lab.compare("10.split", round(100 * third.runs["your zero bubble"].bubble / third.runs["your 1F1B"].bubble))

# %% id="split-picture" tags=["picture"]
pipelines({name: Drawn(third.predict(schedules[name]).timeline, third.runs[name].timeline, third.runs[name].kept)
           for name in ("your zero bubble", "ZB-V")})

# %% [markdown] id="split-why"
# Look at rank 0 of your zero bubble, at its end: where 1F1B waited for the next gradient, it now does W. On the last
# rank W waits, and fills the cool-down that it did not have. With free messages a rank now waits (p−1)·(F+I−W) instead
# of (p−1)·(F+I+W): a third, where the three are equal. (The bubble is a share of the step, and the step has become
# shorter with it; so a little more than a third of the *bubble* is left.) Messages are not free here, and each one that
# a rank waits for is bubble in either schedule; the figures in brackets tell the two apart.
#
# The price is memory: a micro-batch's activations are kept until its W is done. Here every rank keeps p of them, as
# much as 1F1B's first rank and no more; that is what the delay was chosen for. Interleaving buys its smaller bubble
# with activations and with v times the messages.
#
# Interleaved and ZB-V come out above their predictions here. Their stages are half as long and they send two or three
# times as many messages, while four ranks share this machine's cores; a message was timed with less going on.
#
# ## Exercise 10.4 · micro-batches against depth (5 min)
#
# All these bubbles shrink with m. How many micro-batches does a deep pipeline need? With v stages a rank the bubble of
# interleaved 1F1B is (p−1)/(v·m+p−1), if p divides m; with v = 1 this is 1F1B's, for any m.
#
# Write `micro_batches(p, percent, v)`: the smallest m ≥ 1 (with v > 1: the smallest multiple of p) whose bubble is at
# most `percent` % of the *step*, a whole number from 1 to 100. `micro_batches(4, 20, 1)` is 12.

# %% id="depth" exercise="10.4"
import math


def micro_batches(p, percent, v):
    ### BEGIN SOLUTION
    needed = (p - 1) * (100 - percent) / percent / v
    unit = p if v > 1 else 1
    return max(unit, unit * math.ceil(needed / unit))
    ### END SOLUTION

# %% id="depth-check"
lab.check("10.4", micro_batches)

# %% id="depth-table"
for depth in (4, 8, 16, 64):
    print(f"p = {depth:2d}: a bubble of 5 % takes m = {micro_batches(depth, 5, 1):4d}, with v = 4 "
          f"{micro_batches(depth, 5, 4):3d}; one of 20 %: {micro_batches(depth, 20, 1):3d} and "
          f"{micro_batches(depth, 20, 4):2d}")

# %% [markdown] id="depth-why"
# The global batch B is given by what the model still learns from, so m = B/(b·D) with micro-batches of b and D
# replicas: **a deep pipeline and many replicas compete for the same micro-batches.** Below are the runs from the
# beginning again, on the curve.

# %% id="curve" tags=["picture"]
many = range(2, 2 * max(counts) + 1)
costs = first.costs()
lines({"GPipe": [(count, 100 * predict(gpipe(p, count), costs).bubble) for count in many],
       "formula": [(count, 100 * ideal_bubble(p, count)) for count in many],
       "zero bubble": [(count, 100 * predict(zero_bubble(p, count), costs).bubble) for count in many]},
      {"GPipe": [(count, 100 * first.runs[f"GPipe, m = {count}"].bubble) for count in counts],
       "zero bubble": [(m, 100 * third.runs["your zero bubble"].bubble)]},
      x="micro-batches m", y="bubble, % of the step", title=f"The bubble over m, p = {p}",
      provenance=base.timeline.provenance)

# %% [markdown] id="slider-text"
# ## Move the sliders
#
# - Messages that take nothing: GPipe, then 1F1B. What differs?
# - p = 8, m = 8, then m = 16. And interleaved with p = 8, m = 4, where p does not divide m?
# - ZB-V with free messages and m ≥ 2p−1: how much bubble is left? Now a message of a quarter of F: which
#   schedule suffers most, and which least?

# %% id="slider"
MAKERS = {"GPipe": gpipe, "1F1B": library_1f1b, "interleaved, v = 2": lambda p, m: interleaved(p, m, 2),
          "zero bubble": zero_bubble, "ZB-V": zb_v}
explore_pipelines(MAKERS, schedule="1F1B", p=(p, sorted({2, 4, 8, p})), m=(m, sorted({2, 4, 8, 16, m})),
                  message=(0, [0, 0.25, 1]))

# %% [markdown] id="twin-text"
# ## What you would use in production
#
# `torch.distributed.pipelining` is what ran beside yours: a `PipelineStage` for each piece of the model, and a schedule
# around them. Megatron has the same schedules behind `--pipeline-model-parallel-size` and
# `--num-layers-per-virtual-pipeline-stage`.
#
# ```python
# stage = PipelineStage(module, stage_index=rank, num_stages=p, device=device)
# schedule = Schedule1F1B(stage, n_microbatches=m, loss_fn=loss_fn, scale_grads=False)
# schedule.step(x)                # on the first rank
# schedule.step(target=target)    # on the last
# ```

# %% id="twin"
for mine, theirs in (("your 1F1B", "torch's 1F1B"), ("your zero bubble", "torch's zero bubble"),
                     ("interleaved, v = 2", "torch's interleaved")):
    if theirs in third.runs:
        ours, torchs = third.runs[mine], third.runs[theirs]
        print(f"{theirs:>20}: step {torchs.median_s * 1e3:4.0f} ± {torchs.spread_s * 1e3:.0f} ms, {mine} "
              f"{ours.median_s * 1e3:4.0f}; keeps {max(torchs.kept):g} and {max(ours.kept):g}; gradients differ from "
              f"one process's by {torchs.from_reference:.0e} and {ours.from_reference:.0e}")

# %% [markdown] id="pitfalls"
# The gradients are the same numbers. Torch's 1F1B sends and receives in pairs and waits for both; yours lets a send go
# and computes on.
#
# ## Pitfalls
#
# **Gradients scaled twice.** Torch's default `scale_grads=True` divides `.grad` by m at the end of *every* `step()`.
# That is the mean over one window. If an update takes several windows, the first ones are divided again each time.
# Two windows with the same data; the mean gradient over all micro-batches is 1:

# %% id="pitfall-scale"
def two_windows(scale_grads, m=4):
    import torch
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    layer = torch.nn.Linear(1, 1, bias=False)
    schedule = ScheduleGPipe(PipelineStage(layer, 0, 1, torch.device("cpu")), m, loss_fn=lambda y, _: y.sum(),
                             scale_grads=scale_grads)
    for _ in range(2):
        schedule.step(torch.ones(m, 1), target=torch.ones(m, 1))
    return layer.weight.grad.item() / (2 if scale_grads else 2 * m)


means = run(lambda: [two_windows(True), two_windows(False)], ranks=1, fabric="loopback")[0]
print(f"scale_grads=True: {means[0]:.3g}, scale_grads=False: {means[1]:.3g}")

# %% [markdown] id="pitfall-uneven-text"
# **Stages of unequal length.** Everybody moves at the pace of the slowest stage, in every round. The last stage has
# the output matrix and the loss, and is the usual suspect. Simulated, with one stage half as long again as the others:

# %% id="pitfall-uneven"
even = predict(library_1f1b(p, m), Costs(0.01, 0.01, 0.01))
slow = [0.01] * (p - 1) + [0.015]
uneven = predict(library_1f1b(p, m), Costs(slow, slow, slow))
print(f"work {sum(slow) / 0.01 / p - 1:+.1%}, step {uneven.step_s / even.step_s - 1:+.1%}, bubble {even.bubble:.1%} → "
      f"{uneven.bubble:.1%}")

# %% [markdown] id="pitfall-messages-text"
# **A late wire turns the order around.** Interleaving sends v times as many messages, 1F1B waits for two in every
# round, GPipe for none between its first and its last. Simulated, with messages that take this part of F:

# %% id="pitfall-messages"
for part in (0.0, 0.25, 0.5, 1.0, 2.0):
    found = {name: predict(MAKERS[name](p, m), Costs(*[0.01 / v] * 3, link=LinkCost(0.01 * part, 0.0))).step_s * 1e3
             for name, v in (("GPipe", 1), ("1F1B", 1), ("interleaved, v = 2", 2), ("zero bubble", 1))}
    print(f"message {part:4.0%} of F: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in found.items()))

# %% [markdown] id="review-text"
# **A reduction before the last W.** Under zero bubble a gradient is complete only after W, and the hooks that DDP and
# FSDP put on parameters count backward calls. Their reduction has to be started by the schedule; `check` refuses one
# that comes early:

# %% id="pitfall-reduce"
words = words_of(halves)
last = words[p - 1]
words[p - 1] = [*last[:-2], "reduce0", last[-2]]
try:
    check(schedule_of(words, reduces=True))
except ScheduleError as refused:
    print(refused)

# %% [markdown] id="review-heading"
# ## Review
#
# Three figures to look at after every change: how much of the step is exposed communication, what the device does
# meanwhile, and whether the steps are alike. Read the first with care: a receive counts as communication from when it
# is posted, so that most of what stands there as exposed is a rank that waits for work.

# %% id="review"
lab.review(third.runs["your zero bubble"].timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - GPipe and 1F1B have **the same bubble**, (p−1)/(m+p−1) of the step. 1F1B keeps p − rank activations instead of m.
# - The bubble falls with m, with v (for v times the messages), and with B split into **I, which somebody waits for, and
#   W, which nobody does**.
# - Receives are posted before the rank begins to send, and in the order of their sender.
# - 1F1B has no slack: each round pays for its messages. A forward more to warm up hides them, for one activation.
# - **A schedule is data.** You can check it before you run it.
#
# **For your notes.** A job trains on 8 stages with 16 micro-batches under 1F1B, and is out of memory on rank 0 by
# a little. One colleague wants to halve the size of a micro-batch and double their number, another wants zero
# bubble, a third wants GPipe with recomputation. What does each do to memory on rank 0 and to the bubble?
#
# <details><summary>A model answer</summary>
#
# Halving b and doubling m: rank 0 still keeps p = 8 activations, each half the size, so half the memory; the bubble
# falls from 7/23 = 30 % to 7/39 = 18 %. It is the best of the three, as long as half a micro-batch still fills the
# device. Zero bubble (with W put off by r backwards) keeps p activations on *every* rank: nothing is gained on rank 0,
# and the last ranks keep more than before; the bubble falls to well under half. GPipe with recomputation keeps only the
# stage's *inputs* of all 16 micro-batches, which may be less than 8 full activations, and pays with another forward,
# some third of the compute; its bubble as a share of the step stays 30 %. Recomputation works just as well under 1F1B,
# with 8 inputs instead of 16.
#
# </details>
