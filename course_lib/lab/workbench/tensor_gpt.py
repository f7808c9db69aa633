"""What was written in 11.1 and 11.2, in every block of a GPT on real ranks, beside the library's and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from course_lib.lab.workbench.crossing import CrossingWire
from course_lib.launch import Fabric

if TYPE_CHECKING:
    from torch import Tensor, nn

CONFIG = {"vocab": 128, "length": 64, "layers": 2, "heads": 4, "width": 64}
ROWS = 2


@dataclass(frozen=True)
class Cut:
    """A GPT cut over the ranks, forward and backward of one batch. `loss_off` and `worst` compare with the same in one
    process: the loss as a fraction of it, and the largest difference of a gradient element as a fraction of the
    largest element, by parameter. `calls` and `sent_mb` are rank 0's; `kept_mb` is what its blocks keep for backward,
    parameters left out. MB are 2**20 bytes, bytes by the formula of a ring."""

    name: str
    loss_off: float
    worst: dict[str, float]
    calls: dict[str, int]
    sent_mb: float
    kept_mb: float

    @property
    def from_one_process(self) -> float:
        """The largest of `worst`."""
        return max(self.worst.values())


def gpt_runs(parallel_mlp: Callable | None = None, sequence: type | None = None, *, twins: bool = False,
             finish: bool = True, ranks: int = 2, fabric: str | Fabric = "auto",
             timeout_s: float = 120.0) -> dict[str, Cut]:
    """One forward and backward of a small GPT: `"one process"`; with the learner's MLPs where they are given, `"your
    pair"` and `"your sequence-parallel pair"`; the library's `"tensor"` and `"sequence"`; with `twins` those of
    PyTorch, `"DTensor"` and `"DTensor, sequence"`. `finish=False` leaves out what sums the gradients of the
    parameters that every rank holds.

    Raises `OwnRunFailed` with one sentence for whatever a piece does wrong on a rank, a hang included."""
    from course_lib.lab.workbench.buckets import _run

    return _run(_on_rank, parallel_mlp, sequence, twins, finish, ranks=ranks, fabric=fabric, timeout_s=timeout_s)[0]


def _collective(op: str, when: str, x: Tensor) -> Tensor:
    import torch

    from course_lib.tensor import regions

    with torch.no_grad():
        return regions.all_reduce(x, None) if op == "all_reduce" else getattr(regions, op)(x, -2, None)


def _on_rank(parallel_mlp, sequence, twins, finish):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from course_lib.tensor import finish_replicated_gradients, full_state, parallel_gpt, parallel_next_byte_loss
    from course_lib.tensor.twin import dtensor_gpt, dtensor_gradients
    from course_lib.train.gpt import GPT, GPTConfig, next_byte_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = GPT(GPTConfig(**CONFIG))
    with torch.no_grad():
        for name, param in plain.named_parameters():  # a bias of zero hides a mistake with it
            if name.endswith("bias"):
                param.normal_(std=0.5)
    batch = tuple(torch.randint(CONFIG["vocab"], (ROWS, CONFIG["length"])) for _ in range(2))

    def ours(how: dict, own: Callable | None = None) -> tuple:
        model = parallel_gpt(plain, **how)
        after = own(model) if own else []

        def end() -> None:
            if finish:
                finish_replicated_gradients(model)
                for each in after:
                    _call(each, shown="finish()")

        return model, parallel_next_byte_loss, end, partial(full_state, model, gradients=True)

    def theirs(cut: bool) -> tuple:
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        model = dtensor_gpt(plain, mesh, cut)
        return model, next_byte_loss, lambda: None, partial(dtensor_gradients, model, mesh)

    def of_plain() -> dict:
        return {name: param.grad for name, param in plain.named_parameters(remove_duplicate=False)}

    wire = CrossingWire(dist.get_rank(), dist.get_world_size(), _collective)
    ways: dict[str, Callable[[], tuple]] = {"one process": lambda: (plain, next_byte_loss, lambda: None, of_plain)}
    if parallel_mlp is not None:
        ways["your pair"] = lambda: ours({}, partial(_put_pair, parallel_mlp, wire))
    if sequence is not None:
        ways["your sequence-parallel pair"] = lambda: ours({"sequence_parallel": True},
                                                           partial(_put_sequence, sequence, wire))
    ways |= {"tensor": lambda: ours({}), "sequence": lambda: ours({"sequence_parallel": True})}
    if twins:
        ways |= {"DTensor": lambda: theirs(False), "DTensor, sequence": lambda: theirs(True)}
    return _compared(ways, batch)


def _compared(ways: dict[str, Callable[[], tuple]], batch: Any) -> dict[str, Cut]:
    """One step of each way, and how far it is from the first."""
    import torch.distributed as dist

    from course_lib.lab.workbench.gradients import difference

    out, right, traffic = {}, {}, dist.group.WORLD.traffic
    for name, build in ways.items():
        model, loss_of, end, gradients = build()
        kept = _Kept(model)
        traffic.reset()
        with kept:
            loss, _ = loss_of(model, batch)
        loss.backward()
        end()
        calls, sent = dict(traffic.calls), traffic.total_bytes
        grads = {key: grad.detach().clone() for key, grad in gradients().items() if grad is not None}
        right = right or {"loss": loss.detach(), **grads}
        off = abs(float(loss.detach()) / float(right["loss"]) - 1)
        worst = {key: difference(grad, right[key]) for key, grad in grads.items()}
        out[name] = Cut(name, off, worst, calls, sent / 2**20, kept.bytes / 2**20)
    return out


class _Kept:
    """Counts the memory that the blocks of a model keep for backward, each tensor's once, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes, self._seen, self._inside = 0, {_memory(p) for p in model.parameters()}, False
        self._hooks = [hook for block in model.blocks for hook in (
            block.register_forward_pre_hook(lambda *_: setattr(self, "_inside", True)),
            block.register_forward_hook(lambda *_: setattr(self, "_inside", False)))]  # fmt: skip
        self._held: list = []  # what was counted stays alive meanwhile, so that no memory is used a second time

    def __enter__(self) -> None:
        import torch

        self._context = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._held.clear()

    def _note(self, tensor: Tensor) -> Tensor:
        place = _memory(tensor)
        if self._inside and place not in self._seen:
            self._seen.add(place)
            self._held.append(tensor)
            self.bytes += tensor.untyped_storage().nbytes() if not hasattr(tensor, "_local_tensor") else (
                tensor._local_tensor.untyped_storage().nbytes())  # fmt: skip
        return tensor


def _memory(tensor: Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage().data_ptr()


def _parameters(block: nn.Module) -> SimpleNamespace:
    """The MLP's parameters of a block by the names of the exercises."""
    return SimpleNamespace(norm_weight=block.norm2.weight, norm_bias=block.norm2.bias, up=block.up.weight,
                           up_bias=block.up.bias, down=block.down.weight, down_bias=block.down.bias)


def _put_pair(parallel_mlp: Callable, wire: CrossingWire, model: nn.Module) -> list[Callable[[], None]]:
    """Let the blocks' MLPs be the learner's function."""
    for number, block in enumerate(model.blocks):
        p = _parameters(block)
        model.blocks[number] = _own_block(block, lambda x, block=block, p=p: x + _call(
            parallel_mlp, block.norm2(x), p, wire, shown="parallel_mlp(x, p, wire)"))
    return []


def _put_sequence(sequence: type, wire: CrossingWire, model: nn.Module) -> list[Callable[[], None]]:
    """Let the blocks' MLPs be objects of the learner's class; their `finish` takes care of their own parameters."""
    finish = []
    for number, block in enumerate(model.blocks):
        own = _call(sequence, _parameters(block), wire, shown=f"{sequence.__name__}(p, wire)")
        model.blocks[number] = _own_block(block, partial(_call, own.forward, shown="forward(x)"))
        block.norm2.partial = block.down.partial = ()
        finish.append(own.finish)
    return finish


def _own_block(block: nn.Module, mlp: Callable[[Tensor], Tensor]) -> nn.Module:
    """A block with the layers of another, the same names, and an MLP half of its own."""
    from torch import nn

    from course_lib.train.gpt import Block

    class OwnBlock(Block):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.heads = block.heads
            for name, layer in block.named_children():
                self.add_module(name, layer)

        def forward(self, x: Tensor) -> Tensor:
            return mlp(x + self._attend(self.norm1(x)))

    return OwnBlock()


def _call(function: Callable, *arguments: Any, shown: str) -> Any:
    from course_lib.lab.workbench.tensor import _call as called

    return called(function, *arguments, shown=shown)
