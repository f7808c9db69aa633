"""One pass of a schedule on a rank: what each action does to inputs, outputs and gradients on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from course_lib.schedule.action import BACKWARD, COMPUTE, RECEIVES, SENDS, Action, Op, ScheduleError
from course_lib.schedule.mail import describe
from course_lib.schedule.sharded import Sharded
from course_lib.schedule.split import backward_input
from course_lib.tensor.collective import InFlight

if TYPE_CHECKING:
    from course_lib.schedule.execute import Pipeline

LossOf = Callable[[torch.Tensor, Any], torch.Tensor]


class Pass:
    """What lives during one pass: inputs, outputs, and gradients on their way."""

    def __init__(self, pipeline: Pipeline, window: Sequence[Any], denominator: float) -> None:
        self.pipeline, self.window, self.denominator = pipeline, window, denominator
        self.graphs: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.halves: dict[tuple[int, int], Any] = {}
        self.out: dict[Action, torch.Tensor | InFlight] = {}  # what a neighbour will take, by its receive
        self.losses: list[torch.Tensor] = []

    def do(self, action: Action) -> None:
        pipeline, stage, i = self.pipeline, action.stage, action.index
        over = pipeline._over
        if action.op in COMPUTE and isinstance(over, Sharded):
            for work in over.coming(stage):
                pipeline._clock.wait(work)
        if action.op is Op.F:
            self._forward(stage, i)
        elif action.op in BACKWARD:
            self._backward(action)
        elif action.op is Op.W:
            self.halves.pop((stage, i)).run()
        elif action.op in SENDS:
            pipeline._mail.send(action, self.out.pop(action.partner()))
        elif action.op in RECEIVES:
            pipeline._mail.post(action)
        elif action.op is Op.STEP:
            pipeline._step_of(action)
        elif action.op is Op.GATHER:
            over.gather(pipeline._keys(action))
        elif action.op is Op.FREE:
            over.free(stage)
        elif over is not None:
            over.start(stage, i)

    def _take(self, receive: Action) -> torch.Tensor:
        """What a neighbouring stage gave, from this rank or another."""
        if receive in self.out:
            if isinstance(given := self.out.pop(receive), torch.Tensor):
                return given
            self.pipeline._clock.wait(given[2])
            return given[0]
        buffer, work = self.pipeline._mail.take(receive)
        self.pipeline._clock.wait(work)
        return buffer.to(self.pipeline._device)

    def _forward(self, stage: int, i: int) -> None:
        pipeline = self.pipeline
        x = self.window[i][0] if stage == 0 else self._take(Action(Op.RECV_F, stage, i))
        if (x.is_floating_point() or x.is_complex()) and (stage > 0 or stage in pipeline._splits):
            x = x.detach().requires_grad_()
        output = self._through(stage, i, x)
        if stage + 1 < pipeline.schedule.stages:
            pipeline._shapes.tell(stage, i, output)
            self.out[Action(Op.RECV_F, stage + 1, i)] = self._handed(stage, output.detach())
        else:
            output = pipeline.loss_of(output, self.window[i]) / self.denominator
            self.losses.append(output.detach())
        self.graphs[stage, i] = x, output

    def _through(self, stage: int, i: int, x: torch.Tensor) -> torch.Tensor:
        pipeline = self.pipeline
        source = f"stage {stage - 1}" if stage else "the micro-batch"
        where = f"stage {stage} on rank {pipeline.rank}, micro-batch {i}"
        try:
            output = pipeline.stages[stage](x)
        except Exception as error:
            raise ScheduleError(f"{where}: the stage failed on what {source} gives, {describe(x.shape, x.dtype)}: "
                                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}") from error
        if not isinstance(output, torch.Tensor):
            raise ScheduleError(f"{where}: the stage put out a {type(output).__name__}; a stage gives one tensor")
        return output

    def _backward(self, action: Action) -> None:
        pipeline, stage, i = self.pipeline, action.stage, action.index
        x, output = self.graphs.pop((stage, i))
        grad = None if stage + 1 == pipeline.schedule.stages else self._take(Action(Op.RECV_B, stage, i))
        if action.op is Op.I:
            of_x, self.halves[stage, i] = backward_input(output, grad, x, pipeline._params[stage])
        else:
            if output.requires_grad:
                output.backward(grad)
            of_x = x.grad
        if stage > 0:
            of_x = torch.zeros_like(x) if of_x is None else of_x
            self.out[Action(Op.RECV_B, stage - 1, i)] = self._handed(stage - 1, of_x)

    def _handed(self, boundary: int, tensor: torch.Tensor) -> torch.Tensor | InFlight:
        """What goes over a boundary, sent off to other ranks where there is an exchange."""
        exchange = self.pipeline.exchange.get(boundary)
        return tensor if exchange is None else exchange(tensor)
