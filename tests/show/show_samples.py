"""Small timelines with known numbers, for tests and for looking at."""

from __future__ import annotations

import random

from course_lib.simulate.buckets import MB, GradientProfile
from course_lib.timeline import Span, Timeline

MS = 1_000_000


def profile(gradients: int = 16, size: int = MB, tf_ms: float = 36, tb_ms: float = 72) -> GradientProfile:
    """Equal gradients, ready at equal distances."""
    return GradientProfile(tuple(f"p{i}" for i in range(gradients)), (size,) * gradients,
                           tuple((i + 1) * tb_ms / 1e3 / gradients for i in range(gradients)), tf_ms / 1e3, tb_ms / 1e3,
                           5e-3)


def update(ranks: int = 2, layers: int = 12, buckets: int = 5, late_ms: float = 0.0, seed: int = 0,
           micro_steps: int = 1, provenance: str = "measured (real wires, emulated device)") -> Timeline:
    """One update of an emulated model. Rank 1's device is `late_ms` slower; the wire starts with the last rank."""
    rng = random.Random(seed)
    spans, ready = [], {}
    for rank in range(ranks):
        t = 0.0
        for micro in range(micro_steps):
            for phase, each in (("forward", 3.0), ("backward", 6.0)):
                for layer in range(layers):
                    d = each * rng.uniform(0.9, 1.1) + (late_ms / layers / 2 if rank == 1 else 0)
                    spans.append((rank, "compute", "device", f"{phase} layer {layer}", t, t + d))
                    t += d
                    if phase == "backward" and micro == micro_steps - 1:
                        ready[rank, layer] = t
        ready[rank, "end"] = t
    free = 0.0
    per = -(-layers // buckets)
    for b in range(buckets):
        last = min(layers, (b + 1) * per) - 1
        asked = [ready[rank, last] for rank in range(ranks)]
        begin = max(max(asked), free)
        free = begin + 4.0 + 1.6 * (last + 1 - b * per) * 2
        for rank in range(ranks):
            own = max(asked[rank], 0 if b == 0 else spans_end(spans, rank))
            spans.append((rank, "comm", "wire", "all_reduce", own, free, (last + 1 - b * per) << 20, b))
    out = []
    for rank in range(ranks):
        end = max(free, ready[rank, "end"])
        out += [Span(rank, "compute", "device", "optimizer step", ns(end), ns(end + 5), step=0),
                Span(rank, "step", "step", "step 0", 0, ns(end + 5), step=0)]
    for rank, kind, lane, name, start, stop, *rest in spans:
        out.append(Span(rank, kind, lane, name, ns(start), ns(stop), *rest)._replace(step=0))
    return Timeline.of(out, provenance)


def spans_end(spans: list, rank: int) -> float:
    return max((s[5] for s in spans if s[0] == rank and s[1] == "comm"), default=0.0)


def ns(ms: float) -> int:
    return round(ms * MS)
