# %% [markdown] id="title"
# # 05 · Measure it
#
# **The question.** A profiler hands you a hundred thousand events. How much communication was hidden, what did the rest
# wait for, and what should you change?
#
# You write the two pieces of arithmetic that every overlap tool rests on, find a bucket size by formula and by sweep,
# and diagnose three traces. On the way you meet two numbers that look like answers and are none: an overlap of 99 %
# where nothing overlapped, and a utilisation of 100 % where nothing was computed.
#
# About 45 minutes. Real ranks start on this machine; every byte between them crosses a real, rate-limited wire.

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
from course_lib import overlap, show, trace
from course_lib.lab.exercises.lab05.given import STEP, given_steps, given_traces
from course_lib.lab.pictures.sliders import sliders
from course_lib.lab.workbench.busy import waiting
from course_lib.lab.workbench.profiled import events_of, profiled_run
from course_lib.launch import Fabric
from course_lib.show.lanes import lanes
from course_lib.show.utilisation import utilisation
from course_lib.simulate.buckets import MB, predict, uniform_plan
from course_lib.timeline import Timeline, intersect, length
from course_lib.timeline import union as covered
from course_lib.trace import command as trace_command
from course_lib.tune import choose, sweep

wire = Fabric(gbit=0.5, latency_us=4000, kind=fabric)
repeats = 3 if quick else 7
caps_mb = (0.5, 1, 2, 4) if quick else (0.25, 0.5, 0.75, 1, 1.5, 2, 4)

# %% [markdown] id="symbols"
# ## The words
#
# For one rank and one step:
#
# | symbol | meaning |
# |---|---|
# | C, M | the moments in which the device computes, and in which the rank communicates: sets of time |
# | \|C\|, \|M\| | how long they are; a moment counts once, however many streams are busy in it |
# | T | the time of the step |
# | hidden | \|M ∩ C\|, communication with compute beside it |
# | exposed | \|M − C\|, communication with nothing beside it: what you wait for |
# | overlap | hidden / \|M\| |
# | share | \|M\| / T |
# | busy | \|C ∪ M\| / T, what a utilisation counter sees |
# | wait, transfer | a collective's time before the last rank arrives, and what the wire itself takes |
# | G, S | bytes of the gradient, here 4 MB, and of one bucket (MB is 2²⁰ bytes) |
# | a, β | latency of one collective, and time per byte |
# | Tb | time of the backward pass |
#
# ## A profile of real ranks
#
# The ranks train with buckets of 1 MB, as lab 04 left them, and `torch.profiler` watches. Each rank writes a Chrome
# trace: a JSON file that Perfetto and `chrome://tracing` open too. The device is emulated; hooks, buckets, wire and
# profiler are real.

# %% id="profile"
load = lab.calibrate(1.0, wire, ranks=ranks, gradient_mb=4.0)
buckets_of_1_mb = {"bucket_mb": 1, "first_bucket_mb": None}
profile = profiled_run(load.model, "bucketed", buckets_of_1_mb, ranks=ranks, fabric=wire)
for file in sorted(profile.folder.iterdir()):
    print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")
profiled_ms = overlap.report(profile.timeline).step_time / 1e6
print(f"a step takes {profile.plain_ms:.1f} ms without profiler and {profiled_ms:.1f} ms with it")

# %% [markdown] id="profile-cost"
# Look at the last line first, in every profile that you ever take. A profiler costs time with every operator. If the
# profiled step is much slower, the trace describes another program.
#
# ## Predict
#
# One step, as a viewer shows it: a lane for the device and a lane for the wire of each rank. Judge by eye.

# %% id="by-eye" tags=["picture"]
lanes(profile.timeline, step=1, title="One step of your run")

# %% id="predict-overlap"
lab.predict("5.overlap", "How much of the communication in this step is hidden under compute?", unit="%")

# %% [markdown] id="union-text"
# ## Exercise 5.1 · the union of intervals (6 min)
#
# A trace lists spans from several threads and streams, in no particular order, and they overlap. Adding their lengths
# counts a moment twice. So first make a *set of time* of them. Write `union(spans)`:
#
# - `spans` lists `(start, stop)` in whole nanoseconds. A span covers its start and not its stop.
# - Return the `(start, stop)` that cover the same moments, sorted, apart from each other. Spans that overlap or touch
#   become one. A span that starts and stops at the same moment covers nothing.
#
# `union([(6, 9), (0, 4), (4, 5), (2, 3), (7, 7)])` is `[(0, 5), (6, 9)]`.

# %% id="union" exercise="5.1"
def union(spans):
    ### BEGIN SOLUTION
    out = []
    for start, stop in sorted(spans):
        if start == stop:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out
    ### END SOLUTION

# %% id="union-check"
lab.check("5.1", union)

# %% [markdown] id="exposed-text"
# Stuck? `lab.hint("5.1")` gives a first step, and a further one each time you run it.
#
# ## Exercise 5.2 · exposed and hidden, per step (12 min)
#
# Now the figure itself. Write `exposed_hidden(events, steps)`:
#
# - `events` lists `(rank, category, name, start, stop)` of all ranks. Device work has the category `kernel`. It is
#   communication if its name contains `nccl`, in any case, or begins with `wire::`; else it is compute. All other
#   categories are neither: `gpu_memcpy` is a copy, `gpu_user_annotation` a label that the profiler puts beside work.
# - `steps` maps `(rank, step)` to `(start, stop)`. A communication belongs to the step in which it *starts*, with all
#   of its time. It is hidden where the *same rank* computes, whatever step that compute belongs to.
# - Return a dictionary with the same keys: `(exposed, hidden)`, or `None` for a step without communication.
#
# With `[(0, "kernel", "gemm", 0, 10), (0, "kernel", "ncclDevKernel_AllReduce", 6, 14), (0, "gpu_memcpy", "Memcpy DtoH",
# 10, 12)]` and `{(0, 0): (0, 15)}` the answer is `{(0, 0): (4, 4)}`.
#
# Why per step? A mean over steps hides the one that stalled. Why None? "Nothing was sent" is not "nothing was exposed".

# %% id="exposed" exercise="5.2"
def exposed_hidden(events, steps):
    ### BEGIN SOLUTION
    def sends(name):
        return "nccl" in name.lower() or name.startswith("wire::")

    found = {}
    for (rank, step), (begin, end) in steps.items():
        kernels = [(name, start, stop) for r, category, name, start, stop in events
                   if r == rank and category == "kernel"]
        comm = union([(start, stop) for name, start, stop in kernels if sends(name) and begin <= start < end])
        compute = union([(start, stop) for name, start, stop in kernels if not sends(name)])
        hidden = sum(max(0, min(b, d) - max(a, c)) for a, b in comm for c, d in compute)
        found[rank, step] = (sum(b - a for a, b in comm) - hidden, hidden) if comm else None
    return found
    ### END SOLUTION

# %% id="exposed-check"
lab.check("5.2", exposed_hidden)

# %% [markdown] id="own-text"
# ## Your figures of the trace
#
# Beside them what `course_lib.trace` measures in the same files.

# %% id="own"
mine = exposed_hidden(*events_of(profile.timeline))
for row in trace.measure(profile.trace).rows:
    exposed, hidden = mine[row.rank, row.step]
    print(f"rank {row.rank}, step {row.step}: exposed {exposed / 1e6:6.2f} ms (library {row.exposed / 1e6:6.2f}), "
          f"hidden {hidden / 1e6:6.2f} ms (library {row.hidden / 1e6:6.2f}), overlap {row.overlap:.0%}")
exposed, hidden = (sum(column) for column in zip(*(mine[rank, 1] for rank in profile.timeline.ranks)))
lab.compare("5.overlap", round(100 * hidden / (exposed + hidden)))
show.figure(profile.timeline, step=1, title="The same step, measured")

# %% [markdown] id="ninety-nine-text"
# ## A number that says 99 % where the truth is 0
#
# The next trace is given: two ranks that send once, blocking, after backward. Nothing can overlap. Let us measure it
# twice. First as you do. Then with one small change in the definition: *compute is every kernel on the device*. That
# sounds reasonable. But a collective is a kernel, too.

# %% id="ninety-nine"
serial = given_traces()["B"]
events, steps = events_of(serial)
yours = exposed_hidden(events, steps)
hidden = sum(part[1] for part in yours.values())
total = sum(sum(part) for part in yours.values())
print(f"your definition:                {hidden / total:.0%} of the communication is hidden")

hidden = 0
for rank in serial.ranks:
    spans = serial.select(rank=rank)
    comm = covered(spans.select(kind="comm").intervals())
    every_kernel = covered([span[-2:] for span in events if span[0] == rank])
    hidden += length(intersect(comm, every_kernel))
print(f"compute is 'every kernel':      {hidden / total:.0%}")
show.figure(serial, title="Given trace B: nothing overlaps")

# %% [markdown] id="ninety-nine-why"
# Communication hides behind itself. This is not made up. PyTorch's TensorBoard plugin takes a kernel for communication
# only if it finds the collective that launched it; else the kernel counts as compute, while the label `nccl:…` that
# covers it counts as communication (`event_parser.py` and `overall_parser.py` of `tb_plugin` in pytorch/kineto, retired
# since). For a public trace of eight A100s that train Megatron with tensor parallelism (astra-sim/astra-sim, commit
# ab5d3e62, rank 0), in which exactly 0.00 % overlaps, it reports 99.16 %.
#
# Two lessons. Ask of every overlap figure what counts as compute. And test a tool on a trace whose answer you know:
# serial code must give 0.

# %% [markdown] id="wait-text"
# ## What looks like communication
#
# A collective begins, for the rank that comes first, when *it* comes. It ends for all when the last has come and the
# bytes have moved. A trace shows both as one bar.
#
# Four ranks follow. One of them waits for its input before each step, three times as long as a step computes. Nothing
# else has changed.

# %% id="predict-waiting"
lab.predict("5.waiting", "One of four ranks comes late. Which part of all time in collectives is waiting?", unit="%")

# %% id="late" tags=["picture"]
late = profiled_run(load.model, "bucketed", buckets_of_1_mb, ranks=max(4, ranks), fabric=wire,
                    late_ms={1: 3 * (load.forward_ms + load.backward_ms)})
found = trace.measure(late.trace)
total = trace.waits(found)
for rank in late.timeline.ranks:
    wait, transfer = (sum(part) / 1e6 for part in zip(*(value for key, value in total.items() if key[0] == rank)))
    print(f"rank {rank}: {wait:6.1f} ms waiting, {transfer:6.1f} ms of transfers")
wait, transfer = (sum(part) for part in zip(*total.values()))
print(f"late: rank {', '.join(map(str, found.late))}")
lab.compare("5.waiting", round(100 * wait / (wait + transfer)))
show.figure(late.timeline, title="One late rank")

# %% [markdown] id="late-why"
# The ranks that are *not* late show the most communication; yellow is waiting. Whoever looks at one of them alone
# blames the wire. A faster wire would shorten the transfers and leave the yellow part as it is.
#
# To tell them apart you need the traces of all ranks. The k-th collective of a group is the same on every rank:
# **wait = last arrival − own arrival**, the rest is transfer. (`course_lib.arrivals` does it, and names who was late.)
#
# In the public eight-rank trace above, ranks 0 and 6 are late. On the other six, collectives take 67 to 78 % of the
# step, and 88 to 90 % of that is waiting for those two (`course trace` on its eight files). The transfers themselves
# take 50 ms of a step of 620 ms.

# %% [markdown] id="busy-text"
# ## What a utilisation counter sees
#
# `nvidia-smi dmon` prints a GPU's utilisation once a second: the percent of time in which *one or more kernels was
# executing* (NVML's `nvmlUtilization_t`, over sample periods of 1/6 s to 1 s). A collective that spins on a late rank
# is a kernel that executes.
#
# The same can be measured on a CPU. Rank 0 computes for 100 ms, then waits 300 ms for rank 1, twice. Once it *spins*:
# it asks in a loop whether the all-reduce is complete, as a NCCL kernel does. Once it *sleeps* until it is woken. The
# counter is the process's CPU time, with the moments in which it wanted a core that another program had.

# %% id="predict-busy"
lab.predict("5.busy", "A rank computes for a quarter of the time and spins for the rest. What does its counter show?",
            unit="%")

# %% id="busy" tags=["picture"]
seen = {f"waits and {how}": waiting(how, fabric=wire) for how in ("spins", "sleeps")}
for name, one in seen.items():
    print(f"{name}: the counter says {one.busy_share:.0%}, useful was {one.useful_share:.0%}")
lab.compare("5.busy", round(100 * seen["waits and spins"].busy_share))
utilisation(seen, title="What a counter shows, and what was useful", provenance="measured (cpu)")

# %% [markdown] id="busy-why"
# The useful work is the same. The counter of the rank that spins stays up while the other rank is not even there. It
# measures that *something ran*, not that something came of it. In the public trace, the device of rank 4 is busy for
# 99 % of the step, and computes for 21 % of it.
#
# On a GPU this cell shows the same with NVML: one kernel that only spins.

# %% id="busy-device"
import torch

if torch.cuda.is_available():
    from course_lib.lab.workbench.busy import device_waiting

    print(f"a kernel that only spins: NVML says {device_waiting():.0%} utilisation")
else:
    print("no GPU here: the CPU's counter above will have to do")

# %% [markdown] id="size-text"
# ## Exercise 5.3 · the best bucket size (8 min)
#
# Measured figures are for deciding something. Lab 04 found the best bucket size by trying. A formula says where to
# look. Backward takes Tb and produces G bytes evenly; they are cut into equal buckets of S bytes; one bucket costs
# a + β·S. When has the last one arrived?
#
# - **The wire cannot keep up:** A(S) = Tb·S/G + a·G/S + β·G. The first bucket has to fill, then the wire never pauses.
# - **The wire keeps up:** B(S) = Tb + a + β·S. Only the last bucket is left when backward ends.
#
# Whichever is later counts. Write `best_size(G_bytes, a_s, beta_s_per_byte, Tb_s)`: the S, in bytes, between 0 and G,
# for which the last bucket arrives first. G/S need not be whole.
#
# For G = 16 MB, a = 4 ms, β = 8 ns and Tb = 100 ms it is 3.2 MB.

# %% id="predict-size"
lab.predict("5.size", "The latency a of the wire grows four times. The best bucket becomes …",
            choices=["a quarter as large", "half as large", "twice as large", "four times as large"])

# %% id="size" exercise="5.3"
from math import inf, sqrt


def best_size(G_bytes, a_s, beta_s_per_byte, Tb_s):
    ### BEGIN SOLUTION
    root = G_bytes * sqrt(a_s / Tb_s)
    spare = Tb_s - beta_s_per_byte * G_bytes
    keeps_up = a_s * G_bytes / spare if spare > 0 else inf
    return min(root, keeps_up, G_bytes)
    ### END SOLUTION

# %% id="size-check"
lab.check("5.3", best_size)

# %% [markdown] id="sweep-text"
# ## The formula against the sweep
#
# The sweep runs every size in alternation on the same ranks, and fits a, β and Tb in the same rounds. Your formula gets
# those.

# %% id="sweep" tags=["picture"]
swept = sweep(load.model, caps_mb=caps_mb, ranks=ranks, fabric=wire, repeats=repeats)
a, β, Tb, G = swept.link.a_s, swept.link.beta_s_per_byte, swept.profile.Tb, swept.profile.total_bytes
best_cap = min(caps_mb, key=lambda cap: swept.measured[f"{cap:g} MB"].median_s)
S_star = best_size(G, a, β, Tb)
four_times = best_size(G, 4 * a, β, Tb) / S_star
lab.compare("5.size", "twice as large" if abs(four_times - 2) < 0.2 else f"{four_times:.1f} times as large",
            how="computed")
print(f"S* = {S_star / MB:.1f} MB by your formula, {best_cap:g} MB is the best size that was measured")
print(f"without latency it would be {best_size(G, 1e-9, β, Tb) / MB:.3f} MB")
for cap in caps_mb:
    one = swept.measured[f"{cap:g} MB"]
    print(f"{cap:4g} MB: {one.median_s * 1e3:6.1f} ± {one.spread_s * 1e3:.1f} ms")
line = [(cap / 4, predict(swept.profile, swept.link, uniform_plan(swept.profile, cap / 4 * MB)).step_s * 1e3)
        for cap in range(1, 17)]
show.curve(line, swept.points(), limit_ms=max(swept.Tc, swept.Tm) * 1e3, title="Step time over bucket size",
           serial_ms=swept.measured["serial"].median_s * 1e3, provenance=swept.measured["plan"].timeline.provenance)

# %% [markdown] id="sweep-why"
# The formula's buckets are equal and of any size; the real ones close at a layer of 0.25 MB. So take S* as the place to
# look. The curve is flat there: half the size or twice the size costs some per cent of the step, and sizes that are
# closer together the measurement can hardly tell apart. Whoever leaves a out of the formula is sent to the far left of
# the picture, where every bucket pays it.
#
# ## Exercise 5.4 · diagnose three traces (12 min)
#
# Three steps that real ranks ran, one of each given trace. Each has another cause. Look at them first.

# %% id="given-A"
lanes(given_traces()["A"], step=STEP, title="Given trace A")

# %% id="given-B"
lanes(given_traces()["B"], step=STEP, title="Given trace B")

# %% id="given-C"
lanes(given_traces()["C"], step=STEP, title="Given trace C")

# %% [markdown] id="diagnose-text"
# All three wait for communication, and each has a rank that is busy, computing or sending, nearly all the time. The
# cure is different for each. Write `diagnose(spans)`:
#
# - `spans` lists `(rank, kind, start, stop)` of one step of all n ranks, in ns; kind is `"forward"`, `"backward"` or
#   `"comm"`. The communications of a rank come in the order in which it issued them and do not overlap each other. The
#   k-th of every rank is the same collective.
# - M and C add up all communication and all compute of all ranks. W adds up the waiting: last arrival − own start, for
#   each collective and rank. E adds up the exposed communication. T runs from the first start to the last stop.
# - Return the cause and the number that proves it, by the first rule that fits:
#
# | cause | when | number |
# |---|---|---|
# | `"late rank"` | more than half of M is waiting | W / M |
# | `"held back"` | no rank begins to communicate before its own backward ends | E / (n·T) |
# | `"slow wire"` | what is not waiting takes longer than compute: M − W > C | (M − W) / C |
# | `"nothing to gain"` | otherwise | E / (n·T) |

# %% id="diagnose" exercise="5.4"
def diagnose(spans):
    ### BEGIN SOLUTION
    ranks = sorted({rank for rank, *_ in spans})
    comm = {rank: [(a, b) for r, kind, a, b in spans if r == rank and kind == "comm"] for rank in ranks}
    compute = {rank: [(a, b) for r, kind, a, b in spans if r == rank and kind != "comm"] for rank in ranks}
    backward_end = {rank: max(b for r, kind, _, b in spans if r == rank and kind == "backward") for rank in ranks}
    M = sum(b - a for each in comm.values() for a, b in each)
    C = sum(b - a for each in compute.values() for a, b in each)
    W = 0
    for same in zip(*comm.values()):
        last = max(start for start, _ in same)
        W += sum(last - start for start, _ in same)
    hidden = sum(max(0, min(b, d) - max(a, c)) for rank in ranks for a, b in comm[rank] for c, d in compute[rank])
    T = max(stop for *_, stop in spans) - min(start for _, _, start, _ in spans)
    exposed = (M - hidden) / (len(ranks) * T)
    if W > M / 2:
        return "late rank", W / M
    if all(comm[rank][0][0] >= backward_end[rank] for rank in ranks):
        return "held back", exposed
    if M - W > C:
        return "slow wire", (M - W) / C
    return "nothing to gain", exposed
    ### END SOLUTION

# %% id="diagnose-check"
lab.check("5.4", diagnose)

# %% id="diagnosed"
for name, spans in given_steps().items():
    cause, number = diagnose(spans)
    rows = [row for row in overlap.report(given_traces()[name]).rows if row.step == STEP]
    row = max(rows, key=lambda row: row.busy)
    print(f"trace {name}: {cause}, {number:.2f}   (rank {row.rank} is busy for {row.busy:.0%} of the time, "
          f"and computes for {row.compute_busy:.0%})")

# %% [markdown] id="diagnosed-why"
# Look at the figures in brackets. *Busy* is what a counter shows; it does not tell the three apart.
#
# - **late rank**: find out what that rank does before the collective. Data loading, uneven shapes, a slow node. Do not
#   touch the wire.
# - **held back**: the wire was idle while gradients were ready. Overlap is missing: buckets, their order, a
#   synchronisation in the wrong place. Lab 04.
# - **slow wire**: overlap works and there is too much to hide. Send less often (lab 03), send less (lab 07), or larger
#   micro-batches.
#
# ## Look around
#
# Your own trace again. Choose a step and one bucket, and follow it from the step in which it is quick to the one in
# which it is not.

# %% id="viewer"
buckets = sorted({span.bucket for span in profile.timeline.select(kind="comm")})


def view(step, bucket):
    """One step, with all buckets or a single one."""
    line = profile.timeline
    if bucket != "all":
        line = Timeline.of((s for s in line if s.kind != "comm" or s.bucket == bucket), line.provenance)
    return show.figure(line, step=step, title=f"Step {step}, bucket {bucket}")


sliders(view, {"step": "step", "bucket": "bucket"}, step=(1, profile.timeline.steps), bucket=("all", ["all", *buckets]))

# %% [markdown] id="twin-text"
# ## What you would use in production
#
# Profile a few steps of *every* rank, after the first ones (buckets are rebuilt, memory is warmed up):
#
# ```python
# from torch.profiler import ProfilerActivity, profile, schedule
#
# with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
#              schedule=schedule(wait=5, warmup=2, active=3),
#              on_trace_ready=lambda p: p.export_chrome_trace(f"trace/rank-{rank}.json")) as prof:
#     for batch in loader:
#         train_step(batch)
#         prof.step()
# ```
#
# Then `course trace trace/` reads what the ranks wrote. It is what you did in this lab, for any trace of PyTorch, with
# the causes it knows. This is its answer for your run, and then what it says of the late rank in the other.

# %% id="twin"
trace_command.run([profile.folder], unprofiled_ms=profile.plain_ms)

# %% id="twin-late"
for finding in (finding for finding in trace.diagnose(late.trace, found) if finding.code == "late-rank"):
    print(f"{finding.says}\n  {finding.evidence}\n  {finding.do}")

# %% [markdown] id="choose-text"
# And `course tune --model train.py:factory --ranks 2 --fabric 10GbE` chooses the buckets of your own model: it profiles
# one run without communication, fits the wire, predicts every size, measures at most four of stock DDP's layouts, and
# says whether the winner is worth anything. The same as a function, on the model of this lab:

# %% id="choose"
choice = choose(load.model, ranks=ranks, fabric=wire, caps_mb=caps_mb, repeats=repeats)
print(choice.table())
print(choice.verdict)
print(f"DistributedDataParallel(model, **{choice.ddp_arguments})")

# %% [markdown] id="pitfalls"
# ## Pitfalls
#
# - **The mean over steps.** One step of ten that stalls for a second is a tenth of a second in the mean. Keep the
#   steps apart, and report how they vary.
# - **The first steps.** DDP builds its buckets in the first iteration, allocators fill, kernels are chosen. Drop them.
# - **Taking the launch for the transfer.** On a GPU the host's `nccl:all_reduce` lasts microseconds: it only launches.
#   Without device events you cannot know, and "cannot know" is not 0.
# - **Names.** `ncclKernel_…` became `ncclDevKernel_…`; a tool that looked for the old one found no communication at
#   all. Custom all-reduces and DeepEP's kernels do not contain `nccl` either.
# - **Sums of streams.** Two transfers at a time are one wait. Join before you add.
# - **One rank's trace.** It cannot tell waiting from transferring.
# - **Utilisation as a goal.** It rises when ranks wait. Report exposed time and compute busy.
#
# ## Review

# %% id="review"
lab.review(profile.timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - Overlap is **set arithmetic**: union first, then intersect. Compute is what is not communication.
# - Report **exposed time per step**, and **wait apart from transfer**. None, 0 and "cannot know" are three answers.
# - **Busy is not useful.** A waiting collective keeps a counter at 100 %.
# - The best bucket is near **G·√(a/Tb)** on a slow wire, and the smallest with which the wire keeps up on a fast one.
#   Then measure.
# - A diagnosis is a cause *and* the number that proves it.
#
# **For your notes.** A colleague shows you a job at 98 % GPU utilisation with 45 % of each step in NCCL kernels, and
# asks for faster network cards. What do you ask for before you answer?
#
# <details><summary>A model answer</summary>
#
# The traces of all ranks for the same steps. First split the 45 % into waiting and transfer: if most of it is waiting,
# find the late ranks; the cards would change nothing. Then see how much of the transfer is exposed: what is hidden
# costs nothing, however long it is. If transfers are exposed, see whether they began as soon as their gradients were
# ready; if not, overlap is missing and costs nothing to buy. Only if they began early, ran without a pause and still
# took longer than compute is it the wire. The 98 % say nothing about any of this: the waiting kernels are in them.
#
# </details>
