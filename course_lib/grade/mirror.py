"""Tensors that both sides hold: memory by number, kept equal at every message.

A view stays a view and a gradient that points into a bucket still does, because memory is mirrored, not
tensors. What changed in place counts as changed (torch's version counters go up on the other side as well), so
that a check can see a bucket that was touched while it was on the wire. Both sides run the same code.

The grader's side holds nothing: what its check has let go of is dropped on the other side too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from course_lib.grade.channel import BadMessage

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_ELEMENTS = 1 << 16
MOST_TENSORS = 4096
KINDS = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")


class Mirror:
    """All memory and parameters known to both sides. `side` begins the names that this side gives; the side that
    `holds` keeps them alive until it is told to drop them."""

    def __init__(self, side: str, holds: bool) -> None:
        self._side, self._holds, self._made = side, holds, 0
        self._roots: dict[str, Callable[[], Tensor | None]] = {}
        self._addresses: dict[int, str] = {}
        self._seen: dict[str, Any] = {}
        self._params: dict[str, Callable[[], Tensor | None]] = {}
        self._names: dict[int, str] = {}
        self._grads: dict[str, Any] = {}
        self._early: dict[str, dict] = {}
        self._arrived: list[Tensor] = []
        self._bytes: dict[str, Any] = {}
        self._dropped: list[str] = []
        self._assembled: set[str] = set()

    def describe(self, tensor: Tensor) -> dict:
        """The tensor as JSON: which memory, and what part of it. Raises `BadMessage` for large or exotic ones."""
        import torch

        if not tensor.numel() and not isinstance(tensor, torch.nn.Parameter):
            return {"k": str(tensor.dtype).removeprefix("torch."), "s": list(tensor.shape)}
        described = {"m": self._name_of(tensor), "o": tensor.storage_offset(), "s": list(tensor.shape),
                     "st": list(tensor.stride())}  # fmt: skip
        if isinstance(tensor, torch.nn.Parameter):
            if id(tensor) not in self._names:
                self._add_param(self._new_name(), tensor)
            described["p"] = self._names[id(tensor)]
        return described

    def tensor(self, described: dict) -> Tensor:
        """The tensor that the other side described. Raises `BadMessage` where it does not fit its memory."""
        import torch

        if "k" in described:
            return _empty(described["k"], described["s"])
        name = described.get("p")
        if name in self._params:
            return self._params[name]()
        root = self._roots.get(described["m"], lambda: None)()
        shape, stride, offset = list(described["s"]), list(described["st"]), described["o"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, *stride, offset)) and len(shape) == len(stride)
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride)) if whole else 0
        if root is None or not whole or last >= root.numel() or 0 in shape:
            raise BadMessage("a tensor that does not fit its memory")
        self._arrived.append(root)
        part = root.as_strided(shape, stride, offset)
        if name is None:
            return part
        param = torch.nn.Parameter(part.detach(), requires_grad=part.is_floating_point())
        self._add_param(str(name), param)
        self._arrived.append(param)
        if name in self._early:
            param.grad = self.tensor(self._early.pop(name))
        return param

    def changes(self) -> dict:
        """What the other side has to know before it goes on; empty when nothing changed."""
        grads = self._new_grads()  # before memory: that of a new gradient has no name yet
        memory = self._new_memory()
        self._arrived.clear()  # not before: what a check wrote into a tensor that it does not keep is told as well
        dropped, self._dropped = self._dropped, []
        found = {"memory": memory, "grads": grads, "dropped": dropped}
        return {key: value for key, value in found.items() if value}

    def _new_grads(self) -> dict:
        """Gradients that are other ones than before. Their memory is given a name here."""
        grads = {}
        for name, held in list(self._params.items()):
            param = held()
            now = None if param.grad is None else self.describe(param.grad)
            if name not in self._grads or self._grads[name] != now:
                grads[name] = self._grads[name] = now
        return grads

    def _new_memory(self) -> dict:
        memory = {}
        for name, held in list(self._roots.items()):
            root = held()
            state = self._state(name, root)
            if self._seen.get(name) != state:
                memory[name] = [str(root.dtype).removeprefix("torch."), root.detach().reshape(-1).tolist()]
                self._seen[name] = state
        return memory

    def apply(self, changes: Any) -> None:
        """Bring this side up to what the other side says. Raises `BadMessage` for what cannot be."""
        if not changes:
            return
        try:
            for name, (kind, values) in dict(changes.get("memory", {})).items():
                self._write(name, kind, values)
            for name, described in dict(changes.get("grads", {})).items():
                self._grads[name] = described
                if name in self._params:
                    self._params[name]().grad = None if described is None else self.tensor(described)
                elif described is not None:
                    self._early[name] = described  # the parameter itself comes later in this message
            for name in changes.get("dropped", ()) if self._holds else ():
                self._forget(name)
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, AttributeError) as error:
            raise BadMessage(f"tensors that cannot be ({error})") from None

    def _write(self, name: str, kind: str, values: list) -> None:
        import torch

        plain = len(values) <= LARGEST_ELEMENTS and all(type(v) in (int, float, bool) for v in values)
        if kind not in KINDS or not plain:
            raise ValueError("numbers of an unknown kind, or too many")
        root = self._roots[name]() if name in self._roots else None
        if root is None:
            if len(self._roots) > MOST_TENSORS:
                raise ValueError("too many tensors")
            root = torch.tensor(values, dtype=getattr(torch, kind))
            self._add_root(name, root)
            self._arrived.append(root)
        else:
            with torch.no_grad():
                root.view(-1).copy_(torch.tensor(values, dtype=root.dtype))
        self._seen[name] = self._state(name, root)

    def _name_of(self, tensor: Tensor) -> str:
        """The name of a tensor's memory, given now if it has none."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._addresses:
            root = tensor
            while root._base is not None:
                root = root._base
            if root.device.type != "cpu" or str(root.dtype).removeprefix("torch.") not in KINDS:
                raise BadMessage("a tensor of a kind that is not sent: it has to be on the CPU, and of plain numbers")
            if root.untyped_storage().nbytes() > LARGEST_ELEMENTS * root.element_size():
                raise BadMessage("a tensor that is too large")
            name = self._new_name()
            whole = root.is_contiguous() and root.storage_offset() == 0
            if not whole or root.untyped_storage().nbytes() != root.numel() * root.element_size():
                root = _whole(root)
                self._assembled.add(name)
            self._add_root(name, root)
        name = self._addresses[address]
        if (root := self._roots[name]()) is not None and root.dtype != tensor.dtype:
            raise BadMessage(f"a tensor that shows memory of {root.dtype} as {tensor.dtype}: clone it before")
        return name

    def _new_name(self) -> str:
        self._made += 1
        return f"{self._side}{self._made}"

    def _add_root(self, name: str, root: Tensor) -> None:
        address = root.untyped_storage().data_ptr()
        self._roots[name], self._addresses[address] = self._kept(root, name, address, self._addresses), name

    def _add_param(self, name: str, param: Tensor) -> None:
        self._params[name], self._names[id(param)] = self._kept(param, name, id(param), self._names), name

    def _kept(self, value: Tensor, name: str, key: int, keys: dict[int, str]) -> Callable[[], Tensor | None]:
        if self._holds or name in self._assembled:
            return lambda: value

        def gone(_: object) -> None:
            if keys.get(key) == name:
                del keys[key]
            self._forget(name)
            self._dropped.append(name)

        return weakref.ref(value, gone)

    def _forget(self, name: str) -> None:
        for names, key in ((self._addresses, lambda t: t.untyped_storage().data_ptr()), (self._names, id)):
            table = self._roots if names is self._addresses else self._params
            held = table.pop(name, lambda: None)()
            if held is not None:
                names.pop(key(held), None)
        self._bytes.pop(name, None)
        self._seen.pop(name, None)
        self._grads.pop(name, None)

    def _state(self, name: str, root: Tensor) -> Any:
        """Changes when the tensor does. A learner can write past the version counter, the grader's checks do not;
        but tensors that only share their memory, as loaded ones do, have a counter each."""
        import torch

        if not self._holds and name not in self._assembled:
            return root._version
        if name not in self._bytes:
            self._bytes[name] = root.detach().reshape(-1).view(torch.uint8).numpy()
        return root._version, self._bytes[name].tobytes()


def _empty(kind: str, shape: list) -> Tensor:
    """Without elements there is no memory to share."""
    import torch

    sizes = list(shape)
    if kind not in KINDS or 0 not in sizes or not all(type(n) is int and 0 <= n <= LARGEST_ELEMENTS for n in sizes):
        raise BadMessage("an empty tensor that cannot be")
    return torch.empty(sizes, dtype=getattr(torch, kind))


def _whole(part: Tensor) -> Tensor:
    """All of the memory in which this tensor lies: of tensors that were loaded, say, none need have the whole."""
    import torch

    count = part.untyped_storage().nbytes() // part.element_size()
    return torch.empty(0, dtype=part.dtype).set_(part.untyped_storage(), 0, (count,), (1,))
