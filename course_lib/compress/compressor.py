"""What all schemes share: one comm hook, phases, memory that a skipped update leaves alone, checkpoints.

A scheme is a generator, `phases(bucket)`: it issues a collective, yields its handle, is resumed when the bytes are
there, and leaves the mean gradient in the bucket's buffer. Who resumes it, and on which thread, is decided here.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from course_lib import record
from course_lib.compress.memory import Memory, Names
from course_lib.compress.second import second
from course_lib.compress.stream import answer, beside
from course_lib.compress.window import Window
from course_lib.launch.wire import Wire
from course_lib.train.bucket import Bucket
from course_lib.train.control import Control, ranks_text
from course_lib.train.saved import refuse_other
from course_lib.train.unchanged import stored_shape

Phases = Iterator[dist.Work]


class NonFiniteGradient(RuntimeError):
    """A gradient held an infinity or a NaN. Every rank raises it for the same bucket. Where it was raised in a future's
    callback, torch hands it on as a `RuntimeError` whose text begins with another sentence and has this one's."""


class Compressor(ABC):
    """The state of a comm hook. Build it on every rank, from the module that is then wrapped:

        state = TopK(model, k=0.01)
        model = wrap("bucketed", model, comm_hook=hook, hook_state=state)        # or "ddp"

    What is kept by parameter (residuals, velocity, warm start) changes only when every bucket of a backward pass
    has arrived with finite numbers, and not by one whose window `Bucketed` drops. A gradient that is not finite ends
    the backward with `NonFiniteGradient` on every rank, or, with `on_nonfinite="nan"`, becomes NaN in its whole bucket
    on every rank, so that a gradient scaler skips the update everywhere; then call `follow(scaler)` too. Raises
    `ValueError` where the ranks were given different settings or models.

    What is owed to a parameter that no rank uses in an update is kept. Stock DDP hides from the hook which those are
    unless their gradients are dropped, as `zero_grad()` does unasked: with `set_to_none=False` it would be lost there.
    """

    scheme = ""
    has_second_phase = False

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None, on_nonfinite: str,
                 **settings: Any) -> None:
        name = type(self).__name__
        if not dist.is_initialized():
            raise RuntimeError(f"{name} needs a process group: construct it inside the function given to launch.run()")
        if on_nonfinite not in ("raise", "nan"):
            raise ValueError(f"on_nonfinite={on_nonfinite!r}: choose 'raise' or 'nan'")
        self.group = dist.group.WORLD if process_group is None else process_group
        self.ranks = dist.get_process_group_ranks(self.group)
        self.size, self.rank = len(self.ranks), dist.get_rank(self.group)
        self.on_nonfinite = on_nonfinite
        self.settings = {"scheme": self.scheme, **settings}
        trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if imaginary := [n for n, p in trainable.items() if p.is_complex()]:
            raise ValueError(f"{imaginary[0]!r} is complex, and {name} compresses real numbers; make the parameter "
                             "real and take torch.view_as_complex() of it in the forward")
        self.shapes = {n: stored_shape(p) for n, p in trainable.items()}
        """As the values lie in a bucket: the shape, with its dimensions in their order in memory."""
        self._name_of = {id(p): n for n, p in trainable.items()}
        self.memories: dict[str, Memory] = {}
        self._window = Window(self.memories)
        self._scaler: torch.amp.GradScaler | None = None
        self._scale = 1.0
        """What the memories' gradients were multiplied by."""
        self._finite: dict[int, torch.Tensor] = {}
        """By bucket on its way over NCCL: whether its numbers are, on the GPU."""
        self._agree()
        self._second = second(self.group) if self.has_second_phase else None

    @abstractmethod
    def phases(self, bucket: Bucket) -> Phases:
        """Replace the bucket's gradient by the (approximate) mean over ranks. Raises `NonFiniteGradient`, on all
        ranks or none, from a place that all ranks reach."""

    def reduce(self, bucket: Bucket) -> Future:
        """What the hook does: a future of the bucket's buffer, in which the mean gradient then lies."""
        if self._window.enter(bucket) and self._scaler is not None:
            self._bring_to(self._scaler.get_scale())
        steps = self.phases(bucket)
        if self._on_stream(bucket):
            return self._reduce_on_stream(steps, bucket)
        try:
            first = next(steps)
        except Exception:
            self._window.leave(False)
            raise
        if self._second is None:
            return first.get_future().then(lambda done: self._finish(steps, bucket, done.value))
        arrived: Future = Future()
        self._second.put(lambda: self._issue_second(first, steps, bucket.index(), arrived))
        return arrived.then(lambda done: self._finish(steps, bucket, lambda: _raise(done.value())))

    def _issue_second(self, first: dist.Work, steps: Phases, index: int, arrived: Future) -> None:
        """On the thread for second phases. `arrived` gets the error, or None once phase 2 is there."""
        try:
            first.wait()
            with record.tag(index):
                work = next(steps, None)
        except Exception as error:  # belongs to whoever waits for the bucket
            arrived.set_result(error)
            return
        if work is None:
            arrived.set_result(None)
        else:
            work.get_future().then(lambda done: arrived.set_result(_error_of(done)))

    def _reduce_on_stream(self, steps: Phases, bucket: Bucket) -> Future:
        """NCCL: both phases are issued by the hook on one group, so their order is that of the buckets everywhere.
        To wait for one is to let a side stream wait, and the host goes on with the backward pass."""
        device = bucket.buffer().device
        future: Future = Future(devices=[device])
        with beside(device):
            def all_phases() -> None:
                for work in steps:
                    work.wait()
            flat = self._finish(steps, bucket, all_phases)
            if (finite := self._finite.pop(bucket.index(), None)) is not None:
                flat.masked_fill_(~finite, float("nan"))
            future.set_result(flat)
        return future

    def demand_finite(self, bucket: Bucket, numbers: torch.Tensor, error: Callable[[], NonFiniteGradient]) -> None:
        """For schemes, between phases: `numbers` are the same on every rank. Raises `error()` if one of them is not
        finite. On a GPU the host does not wait to hear it: the bucket becomes NaN there, and the error is raised when
        the backward pass has issued everything; with `on_nonfinite="nan"` the host looks before the next one."""
        finite = torch.isfinite(numbers).all()
        if not self._on_stream(bucket):
            if not finite:
                raise error()
            return
        self._finite[bucket.index()] = finite
        if self._window.doubt(answer(finite), error) and self.on_nonfinite == "raise":
            try:
                torch.autograd.Variable._execution_engine.queue_callback(self._judge)
            except RuntimeError:  # no backward pass is under way, whose end could be awaited
                self._judge()

    def _judge(self) -> None:
        if error := self._window.judge():
            raise error

    def _finish(self, steps: Phases, bucket: Bucket, wait: Any) -> torch.Tensor:
        """Take the last step of a bucket, and of a backward pass if no other bucket of it is on its way."""
        finite = False
        try:
            wait()
            for _ in steps:
                raise AssertionError(f"{self.scheme}: a phase too many")
            finite = True
        except NonFiniteGradient:
            if self.on_nonfinite == "raise":
                raise
            bucket.buffer().fill_(float("nan"))
        finally:
            self._window.leave(finite)
        return bucket.buffer()

    @property
    def updates(self) -> int:
        """Backward passes that were sent in full."""
        self._window.judge()
        return self._window.updates

    def take_back(self) -> None:
        """The last backward pass never was: `Bucketed` drops its window, and what was not sent of it must not come
        later. Nothing of it is on its way any more."""
        self._window.take_back()

    # for schemes

    def second_group(self, bucket: Bucket) -> dist.ProcessGroup:
        """Where phase 2 of a bucket is issued."""
        return self.group if self._on_stream(bucket) else self._second.group

    def sizes(self, bucket: Bucket) -> list[int]:
        return [p.numel() for p in bucket.parameters()]

    def names(self, bucket: Bucket) -> Names:
        try:
            return tuple(self._name_of[id(p)] for p in bucket.parameters())
        except KeyError:
            raise ValueError(f"{type(self).__name__} was built from another module than the one that is wrapped: a "
                             "bucket holds a parameter it does not know; build it from the module you wrap") from None

    def compensated(self, bucket: Bucket, gradient: torch.Tensor | None = None) -> torch.Tensor:
        """Gradient plus residual, 1-D, in float32 at least. With error feedback it lies in the residual's next
        value: subtract from it what is sent. Without, it is the caller's to change.

        Of a parameter that this rank did not use it is zero, and what is kept of it stays: where no rank uses it, both
        reducers leave its `.grad` alone, and what was sent would be lost."""
        flat = bucket.buffer() if gradient is None else gradient
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        if "residual" not in self.memories:
            return wide.clone()
        names, residual = self.names(bucket), self.memories["residual"]
        total = torch.add(wide, residual.read(names, wide), out=residual.write(names, wide))
        pieces = (x.split(self.sizes(bucket)) for x in (total, bucket.buffer()))
        for name, param, piece, mine in zip(names, bucket.parameters(), *pieces):
            if param.grad is None and not mine[:1].any() and not mine.any():
                piece.zero_()
                for kept in ("residual", "velocity"):
                    if kept in self.memories:
                        self.memories[kept].stay(name)
        return total

    def keep_residual(self) -> None:
        """Error feedback: what is not sent now is added to the next gradient. It belongs to this rank."""
        self.memories["residual"] = Memory({n: _numel(shape) for n, shape in self.shapes.items()})

    def follow(self, scaler: torch.amp.GradScaler) -> None:
        """The loss is multiplied by a scale that changes. What is owed from before a change is brought to the new one,
        so that it counts once. On a GPU the host reads the scale as a backward pass begins, when `scaler.step()` has
        waited for it already."""
        if self.on_nonfinite != "nan":
            raise ValueError(f"a gradient scaler looks for overflows by itself: build {type(self).__name__} with "
                             "on_nonfinite=\"nan\"")
        self._scaler = scaler

    def _bring_to(self, scale: float) -> None:
        if scale != self._scale:
            for key in self.memories.keys() & {"residual", "second residual", "velocity"}:
                self.memories[key].scale(scale / self._scale)
            self._scale = scale

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on as if it had not stopped. Save one a rank: residuals differ."""
        self._window.judge()
        return {**self._whose(), "updates": self._window.updates, "scale": self._scale,
                "memories": {n: m.state_dict() for n, m in self.memories.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `ValueError`, with nothing changed, for the state of another scheme, model, rank or number of
        ranks."""
        refuse_other(type(self).__name__, state, self._whose(), updates=int, scale=float, memories=dict)
        if (kept := state["memories"].keys()) != self.memories.keys():
            raise ValueError(f"the state is damaged: it keeps {sorted(kept)} and not {sorted(self.memories)}")
        for key, memory in self.memories.items():
            memory.refuse_other(state["memories"][key])
        for key, memory in self.memories.items():
            memory.load_state_dict(state["memories"][key])
        self._scale = state["scale"]
        self._window.restart(state["updates"])

    def _whose(self) -> dict[str, Any]:
        """What a state must have in common with this to be its own."""
        return {"settings": dict(self.settings), "size": self.size, "rank": self.rank, "shapes": dict(self.shapes)}

    # small things

    def wire_bytes(self) -> float:
        """Bytes this rank has sent on the wires of both phases, by the ring formula. Raises `RuntimeError` where the
        groups are not Wires."""
        groups = [self.group] + ([self._second.group] if self._second else [])
        if not all(isinstance(g, Wire) for g in groups):
            raise RuntimeError("only a Wire counts bytes: use fabric='shaped', 'paced' or 'loopback'")
        return sum(g.traffic.total_bytes for g in groups)

    def _on_stream(self, bucket: Bucket) -> bool:
        """Does NCCL carry this bucket?"""
        return (bucket.buffer().is_cuda and not isinstance(self.group, Wire)
                and "nccl" in dist.get_backend_config(self.group))

    def _agree(self) -> None:
        mine = hashlib.sha256(repr((self.settings, self.on_nonfinite, self.shapes)).encode()).digest()
        theirs = Control(self.group).exchange(mine, f"the start of {type(self).__name__}")
        if other := [r for r, d in zip(self.ranks, theirs) if d != theirs[0]]:
            raise ValueError(f"{ranks_text(other)} built {type(self).__name__} with other settings or another model "
                             f"than rank {self.ranks[0]}; give every rank the same")


def hook(state, bucket):  # DDP takes no annotations that are strings, as they are in this file
    """The comm hook of every scheme: `comm_hook=hook, hook_state=TopK(model, k=0.01)`, or DDP's own
    `register_comm_hook(state, hook)`."""
    return state.reduce(bucket)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _error_of(done: Future) -> Exception | None:
    try:
        done.value()
    except Exception as error:
        return error
    return None
