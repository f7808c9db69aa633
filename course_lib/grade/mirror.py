"""Tensors that both sides hold: memory by number, kept equal at every message.

A view stays a view and a gradient that points into a bucket still does, because memory is mirrored, not
tensors. What changed in place counts as changed (torch's version counters go up on the other side as well), so
that a check can see a bucket that was touched while it was on the wire. Both sides run the same code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from course_lib.grade.channel import BadMessage

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_ELEMENTS = 1 << 16
KINDS = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")


class Mirror:
    """All memory and parameters known to both sides. `side` begins the names that this side gives."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._roots: dict[str, Tensor] = {}
        self._by_address: dict[int, str] = {}
        self._seen: dict[str, tuple[int, bytes]] = {}
        self._params: dict[str, Tensor] = {}
        self._by_param: dict[int, str] = {}
        self._grads: dict[str, Any] = {}

    def describe(self, tensor: Tensor) -> dict:
        """The tensor as JSON: which memory, and what part of it. Raises `BadMessage` for large or exotic ones."""
        import torch

        root = self._know(tensor)
        described = {"m": root, "o": tensor.storage_offset(), "s": list(tensor.shape), "st": list(tensor.stride())}
        if isinstance(tensor, torch.nn.Parameter):
            if id(tensor) not in self._by_param:
                name = f"{self._side}{len(self._by_param)}"
                self._by_param[id(tensor)], self._params[name] = name, tensor
            described["p"] = self._by_param[id(tensor)]
        return described

    def tensor(self, described: dict) -> Tensor:
        """The tensor that the other side described. Raises `BadMessage` where it does not fit its memory."""
        import torch

        if "p" in described and described["p"] in self._params:
            return self._params[described["p"]]
        root = self._roots.get(described["m"])
        shape, stride, offset = list(described["s"]), list(described["st"]), described["o"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, *stride, offset)) and len(shape) == len(stride)
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride)) if whole else 0
        if root is None or not whole or last >= root.numel() or 0 in shape:
            raise BadMessage("a tensor that does not fit its memory")
        part = root.as_strided(shape, stride, offset)
        if "p" not in described:
            return part
        param = torch.nn.Parameter(part.detach(), requires_grad=part.is_floating_point())
        self._by_param[id(param)], self._params[described["p"]] = described["p"], param
        return param

    def changes(self) -> dict:
        """What the other side has to know before it goes on; empty when nothing changed."""
        if not self._roots:
            return {}
        grads = {}
        for name, param in self._params.items():
            now = None if param.grad is None else self.describe(param.grad)
            if name not in self._grads or self._grads[name] != now:
                grads[name] = self._grads[name] = now
        memory = {}
        for name, root in self._roots.items():
            state = _state(root)
            if self._seen.get(name) != state:
                memory[name] = [str(root.dtype).removeprefix("torch."), root.detach().reshape(-1).tolist()]
                self._seen[name] = state
        return {"memory": memory, "grads": grads} if memory or grads else {}

    def apply(self, changes: Any) -> None:
        """Bring this side up to what the other side says. Raises `BadMessage` for what cannot be."""
        if not changes:
            return
        try:
            for name, (kind, values) in dict(changes["memory"]).items():
                self._write(name, kind, values)
            for name, described in dict(changes["grads"]).items():
                self._params[name].grad = None if described is None else self.tensor(described)
                self._grads[name] = described
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise BadMessage(f"tensors that cannot be ({error})") from None

    def _write(self, name: str, kind: str, values: list) -> None:
        import torch

        if kind not in KINDS or len(values) > LARGEST_ELEMENTS or not all(type(v) in (int, float, bool) for v in values):
            raise ValueError("numbers of an unknown kind, or too many")
        if name in self._roots:
            with torch.no_grad():
                root = self._roots[name]
                root.view(-1).copy_(torch.tensor(values, dtype=root.dtype))
        else:
            if len(self._roots) > 4096:
                raise ValueError("too many tensors")
            root = torch.tensor(values, dtype=getattr(torch, kind))
            self._roots[name], self._by_address[root.untyped_storage().data_ptr()] = root, name
        self._seen[name] = _state(self._roots[name])

    def _know(self, tensor: Tensor) -> str:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._by_address:
            root = tensor
            while root._base is not None:
                root = root._base
            plain = root.is_contiguous() and root.storage_offset() == 0 and root.device.type == "cpu"
            if not plain or root.untyped_storage().nbytes() != root.numel() * root.element_size():
                raise BadMessage("a tensor of a kind that is not sent: make it contiguous, on the CPU")
            if root.numel() > LARGEST_ELEMENTS or str(root.dtype).removeprefix("torch.") not in KINDS:
                raise BadMessage("a tensor that is too large, or of a kind that is not sent")
            name = f"{self._side}{len(self._roots)}"
            self._roots[name], self._by_address[address] = root, name
        return self._by_address[address]


def _state(root: Tensor) -> tuple[int, bytes]:
    import torch

    return root._version, root.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
