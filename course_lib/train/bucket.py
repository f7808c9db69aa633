"""A bucket: one flat tensor, and for each of its parameters a view into it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from course_lib.train.unchanged import dense_strides


class Bucket:
    """Gradients that travel together. A comm hook sees it as it sees DDP's `GradBucket`.

    `order` is the bucket's number in launch order. The flat buffer has the parameters' dtype and
    device and holds their gradients one after the other, each in its parameter's order in memory.
    """

    def __init__(self, order: int, params: Sequence[nn.Parameter], last: bool) -> None:
        self.order, self._params, self._last = order, list(params), last
        total = sum(p.numel() for p in params)
        self.flat = torch.zeros(total, dtype=params[0].dtype, device=params[0].device)
        ends = list(accumulate(p.numel() for p in params))
        self._places = [(p.shape, dense_strides(p), end - p.numel()) for p, end in zip(params, ends)]
        self.views = [self._view(*place) for place in self._places]
        self._addresses = [view.data_ptr() for view in self.views]
        self.bytes = total * self.flat.element_size()
        self.waiting = len(params)
        self.first_ready = self.full = 0

    def _view(self, shape: torch.Size, strides: tuple[int, ...], start: int) -> torch.Tensor:
        # .data: the same memory, but not a view to autograd, so that `.grad.detach_()` stays allowed
        return self.flat.as_strided(shape, strides, start).data

    def hold(self) -> None:
        """Make again the views that `param.grad.data = …` has led elsewhere."""
        for i, (view, address) in enumerate(zip(self.views, self._addresses)):
            if view.data_ptr() != address:
                self.views[i] = self._view(*self._places[i])

    # what DDP's GradBucket offers to a comm hook

    def buffer(self) -> torch.Tensor:
        """The flat gradient, 1-D."""
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        """One view a parameter, in the parameter's shape."""
        return self.views

    def parameters(self) -> list[nn.Parameter]:
        return self._params

    def index(self) -> int:
        return self.order

    def is_last(self) -> bool:
        """Is it the last bucket of this backward?"""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the contents. The storage stays, because `.grad` points into it."""
        if tensor.numel() != self.flat.numel():
            raise ValueError(f"bucket {self.order} holds {self.flat.numel()} elements, but {tensor.numel()} were given")
        if tensor.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(tensor.view(-1))


def factor(number: float | None) -> torch.Tensor | None:
    """`number` as `take_in` wants it: torch takes twice as long over a Python number. Double precision and no
    dimensions, so that it neither rounds nor changes the dtype of what it multiplies."""
    return None if number is None else torch.tensor(number, dtype=torch.float64)


def take_in(param: nn.Parameter, view: torch.Tensor, scale: torch.Tensor | None, as_view: bool = True) -> None:
    """Put `scale`·`.grad` into its view (zeros where there is no gradient); with `as_view` the view becomes
    `.grad`, so that what is accumulated next is in the bucket already."""
    grad = param.grad
    if grad is None:
        view.zero_()
        return
    if scale is not None:
        torch.mul(grad, scale, out=view)
    elif grad is not view:
        view.copy_(grad)
    if as_view and grad is not view:
        param.grad = view
