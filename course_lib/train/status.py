"""What a rank has done in the present window, and the judgement on all ranks' accounts of it.

A *window* is the micro-steps of one optimizer update, ended by `finish_gradient_synchronization()`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from course_lib.train.control import ranks_text


class Call(IntEnum):
    """Where a rank is when it compares notes."""

    FINISH = 0
    """in finish_gradient_synchronization()"""
    SYNC = 1
    """a synchronised backward ended inside the window, and its gradients are wanted now"""
    STEP = 2
    """the optimizer wants to step before finish_gradient_synchronization()"""
    GIVE_UP = 3
    """an exception ended a synchronised backward; the rank is in its next forward"""


@dataclass(frozen=True)
class Status:
    """One rank's account. `seen` has bit i set when parameter i got a gradient in this window."""

    call: Call
    window: int
    forwards: int
    backwards: int
    synced: int
    loose: int
    """1 if the last backward pass of the window ran under no_sync(), 2 if no forward pass came before it."""
    broken: int
    """1 if the last backward pass raised."""
    launched: int
    """Buckets launched since the ranks last compared notes."""
    steps: int
    """Optimizer steps since the module was wrapped."""
    armed: int = 0
    """1 if the last forward pass ran outside no_sync() and had no backward pass yet."""
    places: int = 0
    """After how many other collectives of the group each bucket of this window left, as one number."""
    touched: int = 0
    """1 if a gradient on the wire was changed."""
    seen: int = 0

    @property
    def whole(self) -> bool:
        """Nothing is wrong with this window as far as one rank can tell (unused parameters apart)."""
        return (self.call <= Call.SYNC and self.backwards > 0 and self.synced > 0
                and not self.loose and not self.broken and not self.touched)

    def pack(self, parameters: int) -> bytes:
        head = struct.pack("<12q", self.call, self.window, self.forwards, self.backwards, self.synced, self.loose,
                           self.broken, self.launched, self.steps, self.armed, self.places, self.touched)
        return head + self.seen.to_bytes(parameters // 8 + 1, "little")

    @classmethod
    def unpack(cls, data: bytes) -> Status:
        call, *numbers = struct.unpack("<12q", data[:96])
        return cls(Call(call), *numbers, seen=int.from_bytes(data[96:], "little"))


class Progress:
    """This rank's side of the window that is open now. Written by hooks, so it is small and plain."""

    __slots__ = ("armed", "asked", "backwards", "forwards", "in_backward", "loose", "places", "running", "seen",
                 "synced", "unasked")

    def __init__(self) -> None:
        self.forwards = self.backwards = self.synced = self.seen = self.places = 0
        self.armed = False
        """The next backward is synchronised."""
        self.running = False
        """The present (or last) backward is synchronised."""
        self.in_backward = False
        """A backward began and has not come to its end."""
        self.asked = self.unasked = False
        """A forward came since the last backward began; the present (or last) backward had none before it."""
        self.loose = 0

    def begin_backward(self) -> None:
        self.in_backward, self.running, self.armed = True, self.armed, False
        self.unasked, self.asked = not self.asked, False

    def end_backward(self) -> None:
        self.in_backward = False
        self.backwards += 1
        self.synced += self.running
        self.loose = 0 if self.running else 1 + self.unasked

    def status(self, call: Call, window: int, launched: int, steps: int, touched: bool) -> Status:
        return Status(call, window, self.forwards, self.backwards, self.synced, self.loose, self.in_backward, launched,
                      steps, self.armed, self.places, touched, self.seen)

    def left(self, others: int) -> None:
        """A bucket leaves after that many other collectives."""
        self.places = (self.places * 1_000_003 + others + 1) % 2**61


def verdict(ranks: Sequence[int], statuses: Sequence[Status], names: Sequence[str], find_unused: bool) -> str | None:
    """What is wrong with the window, in one sentence with the remedy, or None. `ranks` are the global
    ranks of `statuses`, `names` the trainable parameters in bit order. Every rank comes to the same verdict."""
    def where(wrong) -> list[int]:
        return [r for r, s in zip(ranks, statuses) if wrong(s)]

    window = f"window {max(s.window for s in statuses)}"
    most = max(s.backwards for s in statuses)
    if bad := where(lambda s: s.call == Call.STEP):
        return (f"{window}: the optimizer of {ranks_text(bad)} was about to step before "
                "finish_gradient_synchronization(); call it after the last backward pass of every window")
    if bad := where(lambda s: s.call == Call.GIVE_UP or s.broken):
        return (f"{window}: an exception ended the backward pass of {ranks_text(bad)}; the gradients of this window "
                "were dropped on all ranks: start the next window, on all ranks")
    # a rank in SYNC is still inside its window, so fewer backward passes than elsewhere are no skipped ones
    if bad := where(lambda s: (s.backwards < most and s.call != Call.SYNC) or not s.backwards):
        counts = ", ".join(f"rank {r}: {s.backwards} backward of {s.forwards} forward passes"
                           for r, s in zip(ranks, statuses))
        return (f"{window}: {ranks_text(bad)} skipped a backward pass ({counts}); run every backward pass on every "
                "rank, with a loss of 0 where there is nothing to learn")
    if bad := where(lambda s: s.loose == 2 and not s.forwards):
        return (f"{window}: the backward passes of {ranks_text(bad)} had no forward pass of the wrapper before them, "
                "so nothing was sent; call model(…) and not model.module(…), and checkpoint with use_reentrant=False")
    if bad := where(lambda s: s.loose == 2):
        return (f"{window}: {ranks_text(bad)} ran two backward passes without a forward pass between them, and only "
                "the first was sent; add up the losses and run one backward pass, or one after each forward pass, and "
                "checkpoint with use_reentrant=False")
    if bad := where(lambda s: s.touched):
        return (f"{window}: a gradient of {ranks_text(bad)} was changed while it was on the wire; clip, unscale, "
                "average and zero gradients after finish_gradient_synchronization(), not before it")
    if bad := where(lambda s: s.armed and (s.loose or not s.synced)):
        return (f"{window}: the last forward pass of {ranks_text(bad)} ran outside no_sync() but had no backward pass, "
                "so the gradients were not sent; give a micro-step that is skipped on all ranks a loss of 0 instead")
    if bad := where(lambda s: not s.synced):
        return (f"{window}: every forward pass of {ranks_text(bad)} ran under no_sync(), so nothing was sent; run the "
                "last micro-step's forward outside no_sync(), also in a short last window")
    if bad := where(lambda s: s.loose):
        return (f"{window}: the last forward pass of {ranks_text(bad)} ran under no_sync(), so its gradients were not "
                "sent; run the last micro-step's forward outside no_sync()")
    if len({(s.call, s.synced) for s in statuses}) > 1:
        counts = ", ".join(f"rank {r}: {s.synced} of {s.backwards}" for r, s in zip(ranks, statuses))
        return (f"{window}: the ranks synchronised different micro-steps ({counts} backward passes so far); enter and "
                "leave no_sync() at the same micro-steps on every rank")
    if len({(s.window, s.steps) for s in statuses}) > 1:
        counts = ", ".join(f"rank {r}: {s.steps} steps in {s.window} windows" for r, s in zip(ranks, statuses))
        return (f"{window}: the ranks are not at the same update ({counts}), so their parameters differ; step the "
                "optimizer on all ranks or on none; with ZeRO a loss scaler must be a ShardedGradScaler "
                "(torch.distributed.fsdp.sharded_grad_scaler), which looks for overflows in the shards of all ranks")
    if len({s.places for s in statuses}) > 1:
        return (f"{window}: the ranks sent their buckets at different places among other collectives of the group, so "
                "these were paired with each other; give collectives inside backward a process group of their own "
                "(on our wire with a `queue` of its own)")
    if not find_unused and (missing := _missing(ranks, statuses, names)):
        return (f"{window}: no gradient for {missing}; if some forward passes do not use every parameter, pass "
                "find_unused=True, else freeze what is never used (requires_grad_(False)) before wrapping")
    return None


def _missing(ranks: Sequence[int], statuses: Sequence[Status], names: Sequence[str]) -> str:
    """`'a' and 'b' on rank 1`; at most six names."""
    absent = {name: [r for r, s in zip(ranks, statuses) if not s.seen >> i & 1] for i, name in enumerate(names)}
    absent = {name: where for name, where in absent.items() if where}
    parts = [f"{name!r} on {ranks_text(where)}" for name, where in list(absent.items())[:6]]
    return ", ".join(parts) + (f" and {len(absent) - 6} more" if len(absent) > 6 else "")
