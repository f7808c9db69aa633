"""What a wrapper was given must stay what it was: replaced, added and converted parameters would train in silence on
each rank by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def dense_strides(param: torch.Tensor) -> tuple[int, ...]:
    """The order of the parameter's dimensions in memory, as strides without gaps. Its gradient has the same, and fused
    optimizers count on it."""
    return torch.empty_like(param, device="meta").stride()


def stored_shape(param: torch.Tensor) -> tuple[int, ...]:
    """The parameter's dimensions in their order in memory, the outermost first."""
    strides = dense_strides(param)
    return tuple(param.shape[d] for d in sorted(range(param.dim()), key=lambda d: -strides[d]))


class AsWrapped:
    """The parameters of `module` as they are now. `whole=False` leaves their shapes out, where a wrapper changes them.
    """

    def __init__(self, module: nn.Module, whole: bool) -> None:
        self._whole = whole
        self._kinds = {id(p): (n, p.requires_grad, self._kind(p)) for n, p in module.named_parameters()}

    def refuse_change(self, module: nn.Module) -> None:
        """Raises `RuntimeError` that names a parameter which is new, was unfrozen or was converted since."""
        for name, param in module.named_parameters():
            known = self._kinds.get(id(param))
            if known is None:
                # torch.func.functional_call lends a module plain tensors, whose gradients are its caller's business
                if param.requires_grad and isinstance(param, nn.Parameter):
                    raise RuntimeError(f"{name!r} was added or replaced after the module was wrapped, so its gradient "
                                       "would never be sent; change the model first, then wrap it (again)")
                continue
            _, trainable, kind = known
            if param.requires_grad and not trainable:
                raise RuntimeError(f"{name!r} was frozen when the module was wrapped, so its gradient would never be "
                                   "sent; wrap the module again after unfreezing")
            if trainable and (now := self._kind(param)) != kind:
                raise RuntimeError(f"{name!r} was {_text(kind)} when the module was wrapped and is {_text(now)} now; "
                                   "convert the model first, then wrap it (again)")

    def _kind(self, param: torch.Tensor) -> tuple[Any, ...]:
        kind = param.dtype, param.device
        return (*kind, tuple(param.shape), param.stride()) if self._whole else kind


def _text(kind: tuple[Any, ...]) -> str:
    dtype, device, *memory = kind
    return f"{dtype} on {device}" + (" of shape {} and strides {}".format(*memory) if memory else "")
