# %% [markdown] id="title"
# # 00 · Start here
#
# **The question.** *Overlap* is communication that runs while the device computes. Can this machine show you any? And
# what is there to overlap at all?
#
# You see which wires work here, time one all-reduce over three of them, and read a first timeline. On the way you
# write two small functions, so that you know what an exercise and its check look like.
#
# About 10 minutes. No GPU is needed: ranks are processes on this machine, and the wires between them are real sockets
# at a given speed.

# %% [markdown] id="howto"
# Run the cells from top to bottom with Shift+Enter. Every lab has the same rhythm: predict, run, write the interesting
# lines, check, look at the timeline, explain. The cell below holds the lab's parameters. `quick = True` measures with
# fewer repeats.

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

# %% [markdown] id="doctor-text"
# ## What works here
#
# A *rank* is one process of a training job. A *fabric* is what joins the ranks. Each kind is tried with two ranks that
# send a buffer. This is a part of `course doctor`; run that in a terminal for versions, variables and noise as well.

# %% id="doctor"
import os

import torch

from course_lib.doctor import fabrics
from course_lib.launch import PRESETS, Fabric, run

found, facts = fabrics.examine()
print(f"torch {torch.__version__}, {os.cpu_count()} CPU cores, {torch.cuda.device_count()} CUDA devices")
for each in found:
    print(f"{each.title:>13}: {each.value}; {each.detail}" + (f" ({each.remedy})" if each.remedy else ""))
print(f"this lab uses: {Fabric('1GbE', kind=fabric).resolved(ranks).kind}")

# %% [markdown] id="doctor-seen"
# - `nccl`: real GPU links.
# - `shaped`: the kernel limits the rate. Each rank lives in a network namespace of its own.
# - `paced`: our own code limits the rate. It works everywhere, and every lab runs on it.
# - `loopback`: no limit. Its rate is the ceiling of this machine; a wire cannot be faster here.
#
# ## Predict
#
# In data-parallel training every rank has its own gradient, and all need the mean. The operation that adds a buffer up
# over all ranks, and gives everyone the sum, is *all-reduce*. Take 16 MB of gradient (MB is 2²⁰ bytes), which is a
# model of four million parameters in fp32. How long does its all-reduce take on each of these wires?

# %% id="predict-nvlink"
lab.predict("0.nvlink", "Seconds to all-reduce 16 MB over an NVLink-class wire (2400 Gbit/s)?", unit="s")

# %% id="predict-10gbe"
lab.predict("0.10gbe", "Seconds over a 10GbE-class wire (10 Gbit/s)?", unit="s")

# %% id="predict-1gbe"
lab.predict("0.1gbe", "Seconds over a 1GbE-class wire (1 Gbit/s)?", unit="s")

# %% [markdown] id="ranks-text"
# ## Exercise 0.1 · a function that runs on every rank (3 min)
#
# `run(function, …)` starts the ranks, calls the *same* function on every one of them, and returns a list of results,
# one per rank. What differs is the rank's number.
#
# Write `part_of_mean(rank, ranks, numbers)`. Every rank is given all `numbers`.
#
# - Rank r takes the numbers at the places r, r + ranks, r + 2·ranks, …
# - It returns the sum of those, divided by how many numbers there are *in all*. A rank without numbers returns 0.
# - The results of all ranks then add up to the mean.
#
# For `[3, 5, 10, 6]` on two ranks, rank 0 returns (3 + 10)/4 = 3.25 and rank 1 returns (5 + 6)/4 = 2.75.

# %% id="ranks" exercise="0.1"
def part_of_mean(rank, ranks, numbers):
    ### BEGIN SOLUTION
    return sum(numbers[rank::ranks]) / len(numbers)
    ### END SOLUTION

# %% id="ranks-check"
lab.check("0.1", part_of_mean)

# %% [markdown] id="ranks-hint"
# Stuck? `lab.hint("0.1")` gives a first step, and a further one each time you run it.
#
# Now let it run on real ranks. Each computes its part, and one all-reduce adds the parts up.

# %% id="ranks-run"
def on_every_rank(numbers):
    import torch.distributed as dist

    from course_lib.launch import context
    mine = torch.tensor(float(part_of_mean(context().rank, context().ranks, numbers)))
    total = mine.clone()
    dist.all_reduce(total)
    return mine.item(), total.item()

results = run(on_every_rank, [3, 5, 10, 6], ranks=ranks)
for rank, (mine, total) in enumerate(results):
    print(f"rank {rank}: its part is {mine:g}, after the all-reduce it holds {total:g}")

# %% [markdown] id="wires-text"
# ## Three wires
#
# No laptop core can fill an NVLink. So each wire is *scaled*: its rate is divided until this machine can carry it, and
# the bytes are divided by the same factor. The time of the bytes stays what it is in life. The time to start a
# *collective*, an operation that all ranks take part in, does not: that is software, and takes far longer between
# processes on a CPU than between GPUs.

# %% id="wires"
import time

MB = 2**20

def all_reduce_s(nbytes, repeats):
    import torch.distributed as dist
    buffer, times = torch.zeros(nbytes // 4), []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        times.append(time.perf_counter() - start)
    return times[1:]  # the first one makes the connections

measured = {}
for name in ("NVLink", "10GbE", "1GbE"):
    wire = Fabric(name, kind=fabric).resolved(ranks)
    scale = wire.scale if wire.kind in ("shaped", "paced") else 1
    nbytes = round(16 * MB / scale)
    times = run(all_reduce_s, nbytes, 5 if quick else 9, ranks=ranks, fabric=wire)
    measured[name] = min(map(max, zip(*times)))  # the slowest rank counts; of the repeats the quickest, for other
    # work on this machine only adds
    gbit, latency_us = PRESETS[name]
    physics = 2 * (ranks - 1) / ranks * 16 * MB * 8 / (gbit * 1e9) + latency_us * 1e-6
    print(f"{name:>6}: measured {measured[name] * 1e3:6.2f} ms, by the label on the cable {physics * 1e3:6.2f} ms "
          f"(a buffer of {nbytes:,} bytes; {wire.provenance_note()})")

# %% id="wires-compare"
for name, key in (("NVLink", "0.nvlink"), ("10GbE", "0.10gbe"), ("1GbE", "0.1gbe")):
    lab.compare(key, round(measured[name], 5))

# %% [markdown] id="wires-why"
# The label on the cable gives the time of the bytes: a ring all-reduce over n ranks sends 2(n−1)/n of the buffer from
# each rank. Bytes divided by rate is physics, and no clever code makes it shorter. At the fast end something else is
# left: the fixed cost of one collective, its *latency*. On this machine nearly all of the NVLink-class time is that.
# Both come back in every lab.
#
# ## Does it matter?
#
# The model that follows has 16 layers of 1 MB. Its forward pass takes 40 ms, its backward pass 80 ms. It *emulates* its
# device: real parameters, real gradients, but the layers take a prescribed time. Two laptop cores cannot run several
# ranks of real compute without a fight over the cores.

# %% id="predict-share"
lab.predict("0.against_backward", "On the 1GbE wire: how long is the all-reduce, in % of the backward pass?", unit="%")

# %% id="first"
from course_lib import show
from course_lib.tune import compare


def model():
    from course_lib.train.emulated import equal
    return equal(layers=16, mb=1.0, forward_ms=2.5, backward_ms=5.0)

variants = {"after": ("no_sync", {}), "during": ("bucketed", {"bucket_mb": 2}), "stock DDP": ("ddp", {})}
runs = compare(model, variants, ranks=ranks, fabric=Fabric("1GbE", kind=fabric), repeats=3 if quick else 7)
lab.compare("0.against_backward", round(100 * measured["1GbE"] / 80e-3))
show.figure(runs["after"].timeline, title="One all-reduce after the backward pass", width_px=700)

# %% [markdown] id="first-read"
# **How to read it.** Time goes to the right. Each rank has two lanes. *Compute* is blue. The *wire* shows when this
# rank communicates: vermilion and hatched where it computes nothing meanwhile. That is *exposed* communication, the
# time in which the device waits. A yellow outline is a rank that waits for a late one; nothing moves yet. The thin line
# is the end of the backward pass. On this wire the all-reduce takes longer than the whole backward pass before it.
#
# ## Exercise 0.2 · exposed time (4 min)
#
# Write `exposed_ms(compute, comm)`. Both are lists of `(start, stop)` in whole milliseconds, of one rank, in no
# particular order. A span covers its start and not its stop: (4, 7) covers three milliseconds, 4, 5 and 6. Transfers
# may overlap each other. Return how many milliseconds there are in which something is sent and nothing is computed.
#
# For `compute = [(0, 10)]` and `comm = [(4, 13)]` the answer is 3.

# %% id="exposed" exercise="0.2"
def exposed_ms(compute, comm):
    ### BEGIN SOLUTION
    computing = {t for start, stop in compute for t in range(start, stop)}
    sending = {t for start, stop in comm for t in range(start, stop)}
    return len(sending - computing)
    ### END SOLUTION

# %% id="exposed-check"
lab.check("0.2", exposed_ms)

# %% [markdown] id="same-text"
# ## The same bytes, another moment
#
# Here is a second run of the same model on the same wire. The same 16 MB cross it. But they leave in pieces, and each
# piece leaves as soon as backward has produced it. Before you look at the numbers: where is the waiting now?

# %% id="second" tags=["picture"]
show.figure(runs["during"].timeline, title="The same bytes, sent while backward runs", width_px=700)

# %% [markdown] id="count-text"
# Green is communication with compute beside it: hidden. It costs bytes and time on the wire, but nobody waits for it.
# Now count it with your function, on rank 0, in the first step of both runs.

# %% id="count"
from course_lib.overlap import report


def whole_ms(timeline, kind):
    begin = timeline.select(rank=0, kind="step", step=0).spans[0].start
    return [(round((s.start - begin) / 1e6), round((s.stop - begin) / 1e6))
            for s in timeline.select(rank=0, kind=kind, step=0)]

for name in ("after", "during"):
    one = runs[name]
    compute, comm = whole_ms(one.timeline, "compute"), whole_ms(one.timeline, "comm")
    found = report(one.timeline)
    row = next(row for row in found.rows if (row.rank, row.step) == (0, 0))
    moving = sum(collective.transfer for collective in found.collectives if collective.step == 0)
    print(f"sent {name:>6} backward: bytes moving {moving / 1e6:.0f} ms, exposed {exposed_ms(compute, comm)} ms by "
          f"your function, {row.exposed / 1e6:.0f} ms by the library; median step {one.median_s * 1e3:.0f} ms")

# %% [markdown] id="count-why"
# The same bytes need about the same time, and a little more in pieces, because each piece has a latency of its own:
# that is physics. What you *wait* for has shrunk: that is scheduling. The rest of this course is about the difference.
#
# ## What you would use in production
#
# `run` stands in for `torchrun`. On a machine with eight GPUs the same function is a script, and `torchrun` starts it
# once per GPU:
#
# ```
# torchrun --nproc-per-node=8 train.py
# ```
#
# ```python
# torch.distributed.init_process_group("nccl")            # rank and world size come from the environment
# torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
# model = torch.nn.parallel.DistributedDataParallel(model)  # sends buckets while backward runs
# ```
#
# `DistributedDataParallel` with its defaults ran on the same ranks, in alternation with the two runs above.

# %% id="twin"
for name in ("after", "during", "stock DDP"):
    print(f"{name:>9}: step {runs[name].median_s * 1e3:.0f} ms, exposed {runs[name].exposed_s * 1e3:.0f} ms")

# %% [markdown] id="twin-why"
# DDP's pieces are called *buckets*, and it sends its first one early, too. The others are as large as 25 MB by default,
# so here nearly all of the gradient is one bucket, and that one cannot leave before backward has ended. Lab 04 is about
# the size.
#
# ## Pitfalls
#
# - **The first collective is slow.** It makes the connections. Never time it.
# - **A result per rank is not a result.** What one rank prints or returns is its own. Say which rank, or combine them.
# - **A busy device is not a computing one.** `nvidia-smi` reports the share of time in which *a* kernel ran, and a
#   collective that waits is a kernel. Lab 05 shows it.
# - **An environment variable that does not exist changes nothing,** and nobody tells you: `NCCL_NUM_THREADS` is one
#   (the real one is `NCCL_NTHREADS`), and `NCCL_P2P_LEVEL=PCI` is a value that NCCL ignores.
#
# ## Review
#
# Three figures end every lab: how much of the step is communication and how much of that is exposed, what the device
# does meanwhile, and whether the steps are alike.

# %% id="review"
lab.review(runs["during"].timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - Time on the wire is physics: latency, plus bytes divided by rate.
# - Whether you *wait* for it is scheduling. What you wait for is called **exposed**.
# - A timeline shows it. Two totals do not.
#
# **For your notes.** Somebody reports: "communication takes 135 ms of our 255 ms step, compute takes 120 ms. So at best
# we can save the 15 ms by which communication is longer." What is wrong, and how much could be saved?
#
# <details><summary>A model answer</summary>
#
# 135 and 120 add up to 255: so nothing overlaps at all, and all 135 ms are exposed. If communication and compute ran
# side by side, the step could come close to the longer of the two, max(120, 135) = 135 ms, and save up to 120 ms. The
# last piece of the gradient is only ready when backward ends, so a little of it always stays exposed. The difference
# of the two totals says nothing about when they happened.
#
# </details>
