# %% [markdown] id="title"
# # 09 · Know the wires
#
# **The question.** Two nodes: fast wires inside, one slow wire between. Which all-reduce belongs on them, and how large
# should a bucket be there?
#
# You write the ring all-reduce from sends and receives, then one in two levels that spares the slow wire, and choose
# the bucket for each link from its α and β. Then a published success story is taken apart and rebuilt, and the
# environment variables around it are looked up, one by one.
#
# About 45 minutes. Four ranks start on this machine, on two nodes; every byte between them crosses a real,
# rate-limited wire.

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
from course_lib.doctor.environment import judge
from course_lib.lab.pictures.hops import flat_hops, hops, measured_hops, two_level_hops
from course_lib.lab.pictures.sliders import sliders
from course_lib.lab.workbench.wires import reduce_runs, train_runs
from course_lib.launch import Fabric, run
from course_lib.launch.measure import measure
from course_lib.link_cost import LinkCost
from course_lib.simulate.buckets import MB, predict, uniform_plan
from course_lib.simulate.collectives import (
    Nodes,
    best_equal_bucket,
    bytes_for_share,
    flat_ring,
    hierarchical,
    ring,
)
from course_lib.simulate.reconstruct import even_profile, reconstruct, speedup_of
from course_lib.train.emulated import equal
from course_lib.tune import compare

two_nodes = Fabric(gbit=1.0, latency_us=200, nodes=2, inter_gbit=0.1, inter_latency_us=1000, kind=fabric)
repeats = 2 if quick else 7
tensor_mb = 1.0

# %% [markdown] id="symbols"
# ## The words
#
# | symbol | meaning |
# |---|---|
# | n, m, g | all ranks; nodes; ranks on each node: n = m·g. Here 4 = 2·2 |
# | S | bytes of one all-reduce; here 1 MB (MB is 2²⁰ bytes) |
# | α, β | of *one message*: seconds before its first byte, and seconds per byte |
# | hop | all ranks send one message at the same time; a hop ends when the slowest has arrived |
# | a, b | of *one collective*: c(S) = a + b·S. For a ring of messages a = 2(n−1)·α and b = 2(n−1)/n·β |
# | G, Tf, Tb | bytes of the whole gradient; time of the forward and of the backward pass |
# | r = Tm/Tc | one all-reduce of all G bytes, over all compute of the step |
# | uplink | the wire of a node to the others; all its ranks share it |
#
# "MB" and "Gbit/s" are not the same kind of mega and giga: 1 Gbit/s is 10⁹ bits, or 119 MB of 2²⁰ bytes, a second.

# %% [markdown] id="predict-text"
# ## Predict
#
# The wires inside a node carry 1 Gbit/s, the one between the nodes a tenth of that. Four ranks, two on each node.

# %% id="predict-ring"
lab.predict("9.between", "A flat ring over all four ranks, 1 MB each. How much crosses from node 0 to node 1?",
            unit="MB")

# %% id="predict-gain"
lab.predict("9.gain", "Two levels instead of one flat ring: by what factor is the all-reduce faster?", unit="")

# %% id="predict-bucket"
lab.predict("9.latency", "The same wire with sixteen times the latency. Its best bucket is",
            choices=["smaller", "the same", "larger"])

# %% [markdown] id="baseline-text"
# ## The baseline
#
# First the wires are measured: α and β of a message inside a node, and between. The wires add 0.2 and 1 ms of latency
# to a message; α also holds what this machine's processor spends on one, a millisecond or so. Then four ranks
# all-reduce 1 MB with the backend's own `all_reduce` (gloo's here), and by *recursive doubling*, which has only log₂ n
# hops, as many as a tree is deep, but sends the whole tensor in each. What would a ring cost if all wires were like
# those inside?

# %% id="baseline"
baseline = reduce_runs(mb=tensor_mb, fabric=two_nodes, repeats=repeats)
for where, wire in (("inside a node", baseline.nodes.inner), ("between", baseline.nodes.uplink)):
    print(f"{where:>13}: α = {wire.a_s * 1e3:.2f} ms, {8e-9 / wire.beta_s_per_byte:.2f} Gbit/s")
for name, one in baseline.reduced.items():
    print(f"{name:>13}: {one.median_s * 1e3:6.1f} ± {one.spread_s * 1e3:.1f} ms")
print(f"a ring, by α and β: {flat_ring(baseline.nodes).cost(tensor_mb * MB) * 1e3:.0f} ms; with the wires inside alone "
      f"{ring(4, baseline.nodes.inner).cost(tensor_mb * MB) * 1e3:.0f} ms")

# %% [markdown] id="ring-text"
# Most of that time is the uplink's. To see where it goes, build the ring yourself.
#
# ## Exercise 9.1 · the ring (12 min)
#
# Four ranks in a circle. Each sends to its right neighbour and receives from its left one, *at the same time*. That is
# what makes a ring good: every wire works in both directions in every hop.
#
# The tensor is cut into n segments. In the first n−1 hops a segment travels around and gathers a summand at every rank;
# then each rank holds one finished segment. In n−1 more hops the finished ones travel around.
#
# Write `ring_all_reduce(flat, wire)`. Every rank calls it with its own 1-D tensor, and afterwards each tensor holds
# the sum over all ranks.
#
# - `wire.rank` is this rank's number, `wire.ranks` how many there are (perhaps only one).
# - `wire.send(tensor, to)` and `wire.recv(tensor, source)` return a handle at once; `handle.wait()` blocks. A send ends
#   when its receiver has begun to receive, as it does on real wires for all but small messages.
# - `flat.tensor_split(n)` cuts into n segments, as views. Some may be longer by one element, some empty.
# - Each rank sends 2(n−1)/n of the tensor, no more. Nothing is returned.
#
# With two ranks that hold `[1, 2, 3, 4]` and `[10, 20, 30, 40]`, both end with `[11, 22, 33, 44]`.

# %% id="ring" exercise="9.1"
import torch


def ring_all_reduce(flat, wire):
    ### BEGIN SOLUTION
    n, r = wire.ranks, wire.rank
    left, right = (r - 1) % n, (r + 1) % n
    parts = flat.tensor_split(n)
    for k in range(n - 1):
        going, coming = parts[(r - k) % n], parts[(r - k - 1) % n]
        summand = torch.empty_like(coming)
        handles = wire.recv(summand, left), wire.send(going, right)
        for handle in handles:
            handle.wait()
        coming += summand
    for k in range(n - 1):
        handles = wire.recv(parts[(r - k) % n], left), wire.send(parts[(r + 1 - k) % n], right)
        for handle in handles:
            handle.wait()
    ### END SOLUTION

# %% id="ring-check"
lab.check("9.1", ring_all_reduce)

# %% [markdown] id="ring-hint"
# Stuck? `lab.hint("9.1")` gives a first step, and a further one each time you run it.
#
# ## Your ring on two nodes
#
# Now it runs on the four ranks, in alternation with the two of the baseline.

# %% id="own"
own = reduce_runs(ring_all_reduce, mb=tensor_mb, fabric=two_nodes, repeats=repeats)
for name, one in own.reduced.items():
    print(f"{name:>13}: {one.median_s * 1e3:6.1f} ± {one.spread_s * 1e3:.1f} ms, differs from the sum by "
          f"{one.from_reference:.0e} of the largest")
lab.compare("9.between", round(own.reduced["your ring"].sent_between / MB, 2))

# %% id="own-hops"
timeline = own.reduced["your ring"].timeline
hops({"your ring": flat_hops(own.nodes, tensor_mb * MB)}, {"your ring": measured_hops(timeline)},
     provenance=timeline.provenance)

# %% [markdown] id="own-why"
# **A ring is as fast as its slowest wire.** In a hop the two ranks of a node send one message each. One leaves the
# node; the other arrives ten times as fast, and then everybody waits. The uplink carries 2(n−1)/n·S = 1.5 MB each way,
# although each node has only one thing to tell the other: the sum of its own ranks, 1 MB.
#
# ## Exercise 9.2 · two levels (8 min)
#
# So sum up inside first, where wires are fast. Then only finished node sums cross. And let all ranks of a node take
# part in the crossing, each with a part of its own.
#
# Write `two_level_all_reduce(flat, node_of, wire)`:
#
# - `node_of[r]` is the node of rank r. Each node has as many ranks; they need not follow each other.
# - `wire.group(members)` gives the group of some ranks, of which this one has to be a member. A group has its own
#   `rank` and `ranks`, and three collectives, which block and work in place: `reduce_scatter(flat)` leaves the sum in
#   segment `rank` of `flat.tensor_split(ranks)`, and nothing of use in the others; `all_reduce(flat)` leaves it
#   everywhere; `all_gather(flat)` brings every member's own segment to all.
# - Afterwards `flat` holds the sum over all ranks. Between the nodes a rank sends 2(m−1)/m of a g-th of it.

# %% id="two-levels" exercise="9.2"
def two_level_all_reduce(flat, node_of, wire):
    ### BEGIN SOLUTION
    on_node = {node: [r for r in range(wire.ranks) if node_of[r] == node] for node in node_of}
    mates = on_node[node_of[wire.rank]]
    place = mates.index(wire.rank)
    inner = wire.group(mates)
    inter = wire.group(ranks[place] for ranks in on_node.values())
    inner.reduce_scatter(flat)
    inter.all_reduce(flat.tensor_split(inner.ranks)[inner.rank])
    inner.all_gather(flat)
    ### END SOLUTION

# %% id="two-levels-check"
lab.check("9.2", two_level_all_reduce)

# %% id="two-levels-run"
both = reduce_runs(ring_all_reduce, two_level_all_reduce, mb=tensor_mb, fabric=two_nodes, repeats=repeats)
nodes, flat, two = both.nodes, both.reduced["your ring"], both.reduced["your two levels"]
for name, one in both.reduced.items():
    crossed = f", {one.sent_between / MB:.2f} MB left node 0" if one in (flat, two) else ""
    print(f"{name:>15}: {one.median_s * 1e3:6.1f} ± {one.spread_s * 1e3:.1f} ms{crossed}")
gain = flat_ring(nodes).cost(tensor_mb * MB) / hierarchical(nodes).cost(tensor_mb * MB)
print(f"by α and β two levels are {gain:.2f} times as fast as the ring")
lab.compare("9.gain", round(flat.median_s / two.median_s, 2))

# %% id="hops" tags=["picture"]
hops({"flat ring": flat_hops(nodes, tensor_mb * MB), "two levels": two_level_hops(nodes, tensor_mb * MB)},
     {"flat ring": measured_hops(flat.timeline), "two levels": measured_hops(two.timeline)},
     provenance=flat.timeline.provenance)

# %% [markdown] id="two-levels-why"
# One short hop inside; between, two hops, in which the two ranks of a node share the work; one inside again. **The
# bytes inside are cheap, and they buy fewer bytes between.** Two things are easily overlooked:
#
# - Both ranks of a node send at once, and share its uplink: each has half of its rate. The gain is not "each rank
#   sends a g-th", it is 2(n−1)/n against 2(m−1)/m. (Where each GPU has a network card of its own, and on this course's
#   paced wire, nothing is shared, and the gain is larger. The model asks which it is.)
# - The number of hops over the late wire falls from 2(n−1) to 2(m−1). For small tensors that is the whole gain.
#
# ## Move the sliders
#
# - An uplink as good as the wires inside: what are two levels worth?
# - 8 nodes of 8, 0.1 MB, then 100 MB: what decides in each?
# - One rank on each node: what is left of the two levels?

# %% id="slider"
def drawn(count, per_node, uplink_gbit, uplink_us, mb):
    cluster = Nodes(count, per_node, LinkCost(10e-6, 8e-9 / 100), LinkCost(uplink_us * 1e-6, 8e-9 / uplink_gbit))
    return hops({"flat ring": flat_hops(cluster, mb * MB), "two levels": two_level_hops(cluster, mb * MB)},
                provenance="simulated; 100 Gbit/s and 10 µs inside a node")


sliders(drawn, {"count": "nodes", "per_node": "ranks on each", "uplink_gbit": "uplink, Gbit/s",
                "uplink_us": "uplink, µs a message", "mb": "tensor, MB"},
        count=(2, [2, 4, 8]), per_node=(4, [1, 2, 4, 8]), uplink_gbit=(25, [10, 25, 50, 100]),
        uplink_us=(30, [10, 30, 100, 300]), mb=(10, [0.1, 1, 10, 100]))

# %% [markdown] id="latency-text"
# ## Which bucket for which wire?
#
# Now two ranks, and the all-reduce sits under a backward pass, in buckets. Three wires: a base, one with *less rate*
# (0.6 of it, same latency), and one with *more latency* (same rate, sixteen times as late). The same model trains on
# each, and each size runs in alternation with the others.
#
# The all-reduce is the backend's own now. This course's wire lets such a collective wait its latency *once*, whatever
# happens inside it, where messages of your own wait in every hop. So a is not 2(n−1)·α here: it is the latency and some
# ms of this machine's processor, and with sixteen times the latency it grows less than sixteenfold.

# %% id="latency-runs"
caps_mb = (1, 2, 4) if quick else (0.25, 0.5, 1, 2, 4, 8)
shorter = {"sizes": (MB // 4, MB, 2 * MB)} if quick else {}
model = partial(equal, layers=32, mb=0.25, forward_ms=1.0, backward_ms=2.0)
gradient = even_profile(8, layers=32, Tb=0.064)
best = {}
for name, gbit, latency_us in (("base", 1.0, 1000), ("less rate", 0.6, 1000), ("more latency", 1.0, 16000)):
    link_wire = Fabric(gbit=gbit, latency_us=latency_us, kind=fabric)
    cost = run(partial(measure, **shorter), ranks=ranks, fabric=link_wire)[0]
    found = compare(model, {f"{cap:g} MB": ("bucketed", {"bucket_mb": cap, "first_bucket_mb": None})
                            for cap in caps_mb}, ranks=ranks, fabric=link_wire, repeats=repeats)
    points = [(cap, found[f"{cap:g} MB"].median_s * 1e3) for cap in caps_mb]
    line = [(8 / k, predict(gradient, cost, uniform_plan(gradient, 8 / k * MB)).step_s * 1e3) for k in range(1, 17)]
    fastest = min(ms for _, ms in points)
    smallest = min(cap for cap, ms in points if ms <= 1.03 * fastest)  # what differs by less than 3 % is equal here
    best[name] = best_equal_bucket(8 * MB, 0.064, cost) / MB, smallest, line, points
    print(f"{name:>12}: latency {latency_us / 1e3:g} ms, a = {cost.a_s * 1e3:.1f} ms; best bucket: formula "
          f"{best[name][0]:.2f} MB, measured {best[name][1]:g} MB")
    print("      ms with buckets of " + ", ".join(f"{cap:g} MB: {ms:.0f}" for cap, ms in points))
late, base = best["more latency"][1], best["base"][1]
lab.compare("9.latency", "larger" if late > base else "the same" if late == base else "smaller")

# %% id="latency-curve" tags=["picture"]
show.curve(*best["more latency"][2:], title="Step time over bucket size, on the wire with more latency",
           provenance=found["4 MB"].timeline.provenance)

# %% [markdown] id="latency-why"
# **Latency asks for larger buckets; a low rate alone does not.** Each bucket pays a once. While the wire is what
# everybody waits for, the best size is G·√(a/Tb): the rate is not in it. "2 to 5 MB for high-latency links" is advice
# that circulates, and it is backwards: small buckets suit the *low* latency inside a node.
#
# How large is large enough to use a wire well? A ring has 90 % of its rate when latency is a tenth of its time:
# S = 9·a/b = 9·n·α/β.

# %% id="ninety"
for n, alpha_us, gbyte in ((8, 5, 200), (64, 10, 20), (64, 50, 20)):
    size = bytes_for_share(0.9, ring(n, LinkCost(alpha_us * 1e-6, 1e-9 / gbyte)))
    print(f"{n:2d} ranks, {alpha_us:2d} µs a hop, {gbyte:3d} GB/s: 90 % of the rate from {size / MB:4.0f} MB on")

# %% [markdown] id="choose-text"
# That is for the wire alone. Under a backward pass the wire need not be used well: if it keeps up, the smallest bucket
# with which it does is the best, and if it does not, G·√(a/Tb) is.
#
# ## Exercise 9.3 · a bucket for each wire (8 min)
#
# Put the two decisions together. Write `choose(G_bytes, Tb_s, nodes, per_node, inner, uplink)`, which returns
# `("flat", S)` or `("hierarchical", S)`, whichever brings the last gradient first:
#
# - `inner` and `uplink` are (α, β) of one message inside a node, and between.
# - **flat**: 2(n−1) hops of S/n bytes. A hop is as slow as its slowest message, in α and in β; the one that leaves a
#   node has the uplink to itself.
# - **hierarchical**: 2(g−1) hops of S/g bytes inside, and 2(m−1) hops of S/(g·m) bytes between. Between nodes all g
#   ranks of a node send at once and share the uplink: a byte takes g·β there (or the inner β, if that is more).
# - Either way a bucket costs c(S) = a + b·S. Add the hops up to find a and b.
# - Nodes may be 1, and so may ranks a node. No message crosses then, or none stays inside: both algorithms are the same
#   ring, and either name is right.
# - `best_equal_bucket(G_bytes, Tb_s, LinkCost(a, b))` is your formula of lab 05. With buckets of S, which need not
#   divide G, the last one arrives at max(Tb·S/G + a·G/S + b·G, Tb + a + b·S).

# %% id="choose" exercise="9.3"
from course_lib.link_cost import LinkCost
from course_lib.simulate.collectives import best_equal_bucket


def choose(G_bytes, Tb_s, nodes, per_node, inner, uplink):
    ### BEGIN SOLUTION
    (alpha_in, beta_in), (alpha_up, beta_up) = inner, uplink
    m, g, n = nodes, per_node, nodes * per_node
    between = max(g * beta_up, beta_in)
    costs = {
        "flat": (2 * (n - 1) * max(alpha_in, alpha_up), 2 * (n - 1) / n * max(beta_in, beta_up)),
        "hierarchical": (2 * (g - 1) * alpha_in + 2 * (m - 1) * alpha_up,
                         2 * (g - 1) / g * beta_in + 2 * (m - 1) / (m * g) * between),
    }
    candidates = []
    for name, (a, b) in costs.items():
        S = best_equal_bucket(G_bytes, Tb_s, LinkCost(a, b))
        candidates.append((max(Tb_s * S / G_bytes + a * G_bytes / S + b * G_bytes, Tb_s + a + b * S), name, S))
    _, name, S = min(candidates)
    return name, S
    ### END SOLUTION

# %% id="choose-check"
lab.check("9.3", choose)

# %% id="choose-table"
G = 1400 * MB  # some 730 million parameters in bf16
print("1400 MB of gradient, a backward pass of 0.3 s; 8 ranks a node, inside it 5 µs and\n200 GB/s; uplinks of a node:")
for label, count, uplink in (("one node of 8", 1, (5e-6, 1 / 200e9)), ("8 nodes, 100 Gbit/s", 8, (30e-6, 8e-9 / 100)),
                             ("8 nodes, 400 Gbit/s", 8, (10e-6, 8e-9 / 400)),
                             ("8 nodes, 8 × 400 Gbit/s", 8, (10e-6, 8e-9 / 3200))):
    name, S = choose(G, 0.3, count, 8, (5e-6, 1 / 200e9), uplink)
    print(f"{label:>23}: {name:>12}, buckets of {S / MB:5.1f} MB")

# %% [markdown] id="case-text"
# ## A published success, taken apart
#
# A guide reports: 8 nodes of 8 A100, buckets from 25 to 60 MB, **communication from 37 % to 12 %, 1.6 times as fast**.
# It names neither the link nor the model. Do the figures fit together?

# %% id="case-arithmetic"
print(f"shares alone give {speedup_of(0.37, 0.12):.2f} times; hiding all of 37 % would give {speedup_of(0.37, 0):.2f}")
case = reconstruct(even_profile(1400, layers=56, Tb=0.3, parameters=5))
hop = case.message(64)
print(f"the link that gives these shares: a = {case.link.a_s * 1e3:.1f} ms a collective; for a ring of 64 ranks\n"
      f"that is {hop.a_s * 1e6:.0f} µs a hop and {8e-9 / hop.beta_s_per_byte:.0f} Gbit/s a rank")
print(f"r = Tm/Tc = {case.r:.2f}: one all-reduce of everything would take {case.r:.0%} of the compute")
print(f"step {case.before.step_s * 1e3:.0f} ms with 25 MB, {case.after.step_s * 1e3:.0f} ms with 60 MB: "
      f"{case.speedup:.2f} times")

# %% [markdown] id="case-why"
# With the same compute before and after, a step is C/(1 − share), so the two shares give (1 − 0.12)/(1 − 0.37) = 1.40.
# The 1.6 is what hiding *everything* would have given; something else changed as well, or it was rounded generously.
#
# The link is found by bisection for a gradient of 1400 MB and a backward pass of 0.3 s, which we chose; with other
# figures it scales. What does not scale away: **latency has to be high**, some 50 µs a hop. Larger buckets save latency
# and nothing else. If your hop takes 5 µs, going from 25 to 60 MB gains you nothing. And where it does take 50, there
# is more to gain in two levels, which make 28 hops of 126:

# %% id="case-other"
for alpha_us in (5, 20, hop.a_s * 1e6):
    link = ring(64, LinkCost(alpha_us * 1e-6, hop.beta_s_per_byte))
    steps = [predict(case.profile, link, uniform_plan(case.profile, cap * MB)) for cap in (25, 60)]
    shares = [one.exposed_s / one.step_s for one in steps]
    print(f"{alpha_us:4.0f} µs a hop: exposed {shares[0]:4.0%} with 25 MB, {shares[1]:4.0%} with 60 MB; "
          f"{steps[0].step_s / steps[1].step_s:.2f} times")
fewer = LinkCost(28 * hop.a_s, case.link.beta_s_per_byte)
in_two = predict(case.profile, fewer, uniform_plan(case.profile, 25 * MB))
print(f"{hop.a_s * 1e6:4.0f} µs a hop, 28 hops, if a byte costs the same: exposed "
      f"{in_two.exposed_s / in_two.step_s:4.0%} with 25 MB;\n{case.before.step_s / in_two.step_s:.2f} times as fast as "
      "the ring")

# %% [markdown] id="case-measure-text"
# Now measured. The case is brought to this machine's wire: compute and gradient are scaled until they stand to *this* a
# and b as they stood to that link's, and buckets keep their part of the gradient.

# %% id="case-measured"
case_wire = Fabric(gbit=1.0, latency_us=4000, kind=fabric)
often = partial(measure, sizes=(MB // 4, MB // 2, MB, 2 * MB), repeats=3 if quick else 5)
cost = run(often, ranks=ranks, fabric=case_wire)[0]
print(f"this wire: a = {cost.a_s * 1e3:.1f} ms a collective, {case_wire.latency_us / 1e3:g} ms of it latency")
here = case.on(cost)
scaled = partial(equal, layers=56, mb=here.total_bytes / 56 / MB, parameters=5, forward_ms=1e3 * here.Tf / 56,
                 backward_ms=1e3 * here.Tb / 56)
scale = 0.999 * here.bytes[0] / case.profile.bytes[0]  # a little below the bucket, whose bytes were rounded
rebuilt = compare(scaled, {f"{cap} MB": ("bucketed", {"bucket_mb": cap * scale, "first_bucket_mb": None})
                           for cap in (25, 60)}, ranks=ranks, fabric=case_wire, repeats=repeats)
for (name, one), share in zip(rebuilt.items(), case.shares):
    print(f"{name}, here {float(name.split()[0]) * scale:.2f} MB: step {one.median_s * 1e3:.0f} ± "
          f"{one.spread_s * 1e3:.0f} ms, exposed {one.exposed_s / one.median_s:.0%}; the report says {share:.0%}")
print(f"{rebuilt['25 MB'].median_s / rebuilt['60 MB'].median_s:.2f} times as fast; the model says {case.speedup:.2f}, "
      "the report 1.6")

# %% id="case-figure" tags=["picture"]
show.figure(rebuilt["60 MB"].timeline, title="The rebuilt case, with the larger buckets")

# %% [markdown] id="variables-text"
# ## Variables that exist, that do not, and that only hide a fault
#
# The same guides list environment variables. A name that nobody reads raises no error: NCCL passes over it, and over
# many wrong values too. `course doctor` looks them up. Suppose all of these stood in a job script:

# %% id="variables"
script = {
    "NCCL_NUM_THREADS": "256", "NCCL_P2P_LEVEL": "PCI", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "eth0", "NCCL_MAX_NCHANNELS": "4", "NCCL_ALGO": "Tree", "NCCL_PROTO": "LL128",
    "NCCL_BUFFSIZE": "8388608", "NCCL_CROSS_NIC": "1", "NCCL_DEBUG": "INFO",
}
for finding in judge(script, interfaces=("eth0", "ib0"), files=()):
    remedy = f" → {finding.remedy}" if finding.remedy else ""
    print(f"{finding.level:>4}  {finding.title}={finding.value}")
    print(fill(finding.detail + remedy, 86, initial_indent=" " * 6, subsequent_indent=" " * 6))

# %% [markdown] id="variables-why"
# Three kinds, and only one of them tunes anything:
#
# - **Nobody reads it.** `NCCL_NUM_THREADS` is `NCCL_NTHREADS` misspelt; the level `PCI` is none. The job runs as if the
#   line were not there, and whoever wrote it believes that it helped.
# - **It takes something away.** `…_DISABLE=1` turns a transport off. If that makes a hang go away, the transport is
#   what is broken, and you now train over the slower one.
# - **It is a limit or a choice.** Channels are blocks on the GPU: fewer leave more of it to compute and give less
#   bandwidth, and that can be right under overlap. A fixed algorithm or protocol is right for one message size and
#   wrong for the others; NCCL chooses for each call.
#
# `NCCL_SOCKET_IFNAME` chooses interfaces for IP sockets, by prefix: the bootstrap and, *without* InfiniBand, the data.
# With InfiniBand, data goes where `NCCL_IB_HCA` says.
#
# ## What you would use in production
#
# NCCL knows rings, trees and more, and chooses by size and by the topology that it finds; `NCCL_DEBUG=INFO` with
# `NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING` shows what it found and chose. Inside your program, two-level gradients are a
# comm hook on stock DDP, or hybrid sharding: FSDP2's `fully_shard` on a two-dimensional mesh reduce-scatters inside the
# shard dimension and all-reduces over the other. Here is the hook, on the two nodes:

# %% id="twin"
bucket_mb = 0.5 if quick else 1.0
twins = train_runs(partial(equal, layers=8, mb=bucket_mb / 4, forward_ms=4.0, backward_ms=8.0), bucket_mb,
                   fabric=two_nodes, repeats=repeats)
for name, one in twins.items():
    print(f"{name:>15}: step {one.median_s * 1e3:5.1f} ± {one.spread_s * 1e3:.1f} ms, exposed "
          f"{one.exposed_s * 1e3:5.1f} ms; gradients off DDP's by {one.from_stock:.0e}")

# %% [markdown] id="pitfalls"
# ```python
# inner, inter = node_groups()
# model.register_comm_hook(functools.partial(all_reduce_hierarchical, inner=inner, inter=inter), hook)
# ```
#
# ## Pitfalls
#
# - **Ranks in the wrong order.** A flat ring over ranks 0 2 1 3 crosses between the nodes at every hop. Launchers
#   number ranks node by node; if yours does not, every ring pays for it.
# - **Sending first on all ranks** works while messages are small enough to be buffered, and hangs when they grow.
# - **A group of ranks must be made by all ranks**, members or not, in the same order.
# - **One bucket size for every cluster.** A size found on one node is too small for eight.
# - **Adding in another order** rounds otherwise: two levels and a flat ring agree to the last bits, not in them.
#
# ## Review
#
# Three figures to look at after every change: how much of the step is exposed communication, what the device does
# meanwhile, and whether the steps are alike.

# %% id="review"
lab.review(twins["DDP, two levels"].timeline)

# %% [markdown] id="summary"
# ## What to carry away
#
# - A ring sends 2(n−1)/n of the tensor in 2(n−1) hops, and is **as fast as its slowest wire**.
# - Two levels send less over the slow wire and cross it less often. In all they send as much as a ring: on an uplink
#   that is just as good as a wire inside, the ranks of a node only queue.
# - **Latency wants larger buckets.** 90 % of a ring's rate takes 9·n·α/β bytes.
# - Larger buckets save latency and nothing else. From 37 % to 12 % they can; 1.6 times does not follow from it.
# - A variable that nobody reads does not complain. Look it up.
#
# **For your notes.** A colleague moves a job from one node of 8 GPUs to four nodes. Exposed communication goes from 5 %
# to 30 %. "The network is too slow, we need compression." Which two numbers would you measure first, and what would
# each of their values make you do?
#
# <details><summary>A model answer</summary>
#
# α and β of the wire between the nodes, from trains of all-reduces of several sizes. If α dominates (a = 2(n−1)·α
# times the number of buckets is a large part of the exposed time), make buckets larger, towards 9·n·α/β, or reduce in
# two levels: compression would save bytes that cost little. If β dominates, compare G·b with the backward pass: above
# it no bucket size helps, and fewer bytes do, by two levels, more micro-steps for each update, or compression. And look
# whether the wire is what was paid for: a job on IP sockets because `NCCL_IB_DISABLE=1` was left in a script has both
# numbers wrong.
#
# </details>
