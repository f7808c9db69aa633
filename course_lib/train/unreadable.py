"""What stands in `.grad` where reading it would be a mistake: clipping and scaling pass over None without a word."""

from __future__ import annotations

from typing import Any, ClassVar

import torch


class Unreadable(torch.Tensor):
    """It can be zeroed, dropped, or converted with its module; all else is a `RuntimeError` that gives the `reason`."""

    reason: ClassVar[str]
    zeroed = False
    """Was it zeroed in place?"""

    _zeroing = (torch.Tensor.zero_, torch._foreach_zero_)
    _passed = (torch.Tensor.requires_grad_, torch.Tensor.detach_, torch.Tensor.is_floating_point,
               torch.Tensor.is_complex, torch.Tensor.to, torch.Tensor.double, torch.Tensor.float, torch.Tensor.half,
               torch.Tensor.bfloat16, torch.Tensor.cpu, torch.Tensor.cuda, torch._has_compatible_shallow_copy_type)

    @classmethod
    def in_place_of(cls, param: torch.Tensor) -> Unreadable:
        """One for `param`, that takes no memory."""
        return torch.Tensor._make_subclass(cls, param.detach().new_zeros(()).expand_as(param))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls._zeroing:
            for grad in [args[0]] if isinstance(args[0], torch.Tensor) else args[0]:
                if isinstance(grad, Unreadable):
                    grad.zeroed = True
                else:
                    grad.zero_()
            return args[0]
        if func in cls._passed or getattr(func, "__name__", "") in ("__get__", "__set__"):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise RuntimeError(cls.reason)
