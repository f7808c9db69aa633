"""Which gradients travel together: parameters to buckets. Pure arithmetic, no tensors.

Gradients become ready in about the reverse of the order in which parameters were registered, and a
bucket is full when its *last* gradient is ready. So parameters are dealt out in the order in which
their gradients are expected, and a bucket closes as soon as it holds at least its cap (as in PyTorch,
where a bucket may overshoot and a parameter is never split).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MB = 2**20
"""What `bucket_cap_mb` means in PyTorch, and everywhere here: 2**20 bytes."""


@dataclass(frozen=True)
class Gradient:
    """One gradient as the assignment sees it. Gradients of different `kind` (dtype and device) never share a bucket."""

    name: str
    bytes: int
    kind: Hashable = None


def assign_by_size(gradients: Sequence[Gradient], order: Sequence[int], bucket_mb: float,
                   first_bucket_mb: float | None = None) -> list[list[int]]:
    """Deal the gradients out in `order` (indices into `gradients`, expected ready order).

    The first bucket of each kind closes at `first_bucket_mb` (None: no small first bucket), all others, and
    the first if it would be larger, at `bucket_mb`. Returns buckets of indices in the order in which they
    will be full. Raises `ValueError` on a cap that is not above 0.
    """
    for name, cap in (("bucket_mb", bucket_mb), ("first_bucket_mb", first_bucket_mb)):
        if cap is not None and not cap > 0:
            raise ValueError(f"{name}={cap!r}: give a size in MB above 0 (PyTorch's default is 25)")
    small = bucket_mb if first_bucket_mb is None else min(first_bucket_mb, bucket_mb)
    closed: list[list[int]] = []
    open_: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    opened: set[Hashable] = set()
    for i in order:
        gradient = gradients[i]
        open_.setdefault(gradient.kind, []).append(i)
        filled[gradient.kind] = filled.get(gradient.kind, 0) + gradient.bytes
        if filled[gradient.kind] >= (bucket_mb if gradient.kind in opened else small) * MB:
            closed.append(open_.pop(gradient.kind))
            filled[gradient.kind] = 0
            opened.add(gradient.kind)
    place = {i: at for at, i in enumerate(order)}
    return sorted(closed + list(open_.values()), key=lambda bucket: place[bucket[-1]])


def assign_by_plan(gradients: Sequence[Gradient], plan: Sequence[Sequence[str]],
                   alias: dict[str, str] | None = None) -> list[list[int]]:
    """Buckets exactly as `plan` lists them, by parameter name. `alias` maps the other names of a tied
    parameter to the one it is listed under. Raises `ValueError` that names what is unknown, missing,
    twice in the plan, or of another dtype than the rest of its bucket."""
    alias = alias or {}
    index = {gradient.name: i for i, gradient in enumerate(gradients)}
    buckets: list[list[int]] = []
    seen: dict[int, int] = {}
    for b, names in enumerate(plan):
        if not names:
            raise ValueError(f"bucket {b} of the plan is empty: leave it out")
        buckets.append([])
        for name in names:
            i = index.get(alias.get(name, name))
            if i is None:
                raise ValueError(f"bucket {b} of the plan names {name!r}, which is not a trainable parameter; "
                                 f"trainable are {', '.join(list(index)[:6])}{', …' if len(index) > 6 else ''}")
            if i in seen:
                raise ValueError(f"{name!r} is in bucket {seen[i]} and again in bucket {b} of the plan; "
                                 "list a parameter (and all names of a tied one) once")
            seen[i] = b
            buckets[-1].append(i)
        kinds = {gradients[i].kind for i in buckets[-1]}
        if len(kinds) > 1:
            raise ValueError(f"bucket {b} of the plan mixes {', '.join(sorted(map(str, kinds)))}; "
                             "give each dtype and device its own bucket")
    missing = [gradient.name for i, gradient in enumerate(gradients) if i not in seen]
    if missing:
        raise ValueError(f"the plan leaves out {', '.join(missing[:6])}{', …' if len(missing) > 6 else ''}; "
                         "every trainable parameter needs a bucket")
    return buckets
