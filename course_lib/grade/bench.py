"""The measurement as it runs inside the sandbox: ranks that do one step when the grader says so.

Every rank talks to the grader through a socket in the work directory, so that the grader's clock times each
step and what a rank has to compute is only known when it begins. Ranks without the learner's code are the
baseline; they are in a sandbox of their own.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

from course_lib.grade.cell import new_namespace, run_cell
from course_lib.grade.channel import Channel
from course_lib.launch import Fabric, run

SECONDS = 240.0


def main() -> None:
    """`python -m course_lib.grade.bench FOLDER`: start the ranks that `FOLDER/bench.json` asks for."""
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    run(_on_rank, ranks=plan["ranks"], fabric=Fabric(**plan["fabric"]), timeout_s=SECONDS)


def _on_rank() -> None:
    from course_lib.launch import context

    sock = socket.socket(socket.AF_UNIX)
    sock.connect("gate")  # in the folder that it runs in, whose path may be too long for a socket's address
    gate = Channel(sock)
    gate.send({"rank": context().rank, "kind": context().fabric.kind})
    try:
        steps = _Steps(gate.receive())
        gate.send({"ready": steps.ready()})
        while True:
            asked = gate.receive()
            if "stop" in asked:
                gate.send({"spans": steps.spans(), "provenance": steps.recorder.provenance})
                return
            if "link" in asked:
                gate.send({"link": steps.link()})
            elif "load" in asked:
                gate.send({"buckets": steps.build(asked["load"])})
            elif "step" in asked:
                steps.nonce.value = asked["nonce"]
                steps.step(asked["step"], asked["number"])
                gate.send({"done": asked["number"], "said": steps.sent_bytes()})
            else:
                gate.send({"values": steps.values(asked["places"])})
    except Exception as error:
        gate.send({"fault": str(error)[:2000], "kind": type(error).__name__})


class _Steps:
    """What one rank can be asked to do. `plan` holds the sources of the learner's cells, or none."""

    def __init__(self, plan: dict) -> None:
        import torch

        from course_lib.launch import context
        from course_lib.record import Recorder

        self.plan, self.namespace = plan, new_namespace()
        self.recorder = Recorder(context().rank, f"measured (real wires, emulated device), {context().spec.provenance}")
        self.nonce = _scaling_layer()
        self.model = self.bench = None
        self.flat = torch.zeros(0)

    def ready(self) -> bool:
        """Run the learner's cells."""
        for name, source in self.plan["cells"]:
            try:
                run_cell(name, source, self.namespace)
            except Exception:
                if name == "<imports>":
                    continue
                raise
        return True

    def link(self) -> list[float]:
        """Measure the wire: seconds of a collective, seconds per byte."""
        from course_lib.launch.measure import measure

        found = measure()
        return [found.a_s, found.beta_s_per_byte]

    def build(self, load: dict) -> list[list[int]]:
        """Make the model, and the learner's buckets and reducer where there are any."""
        import torch
        from torch import nn

        from course_lib.lab.workbench.rank import Bench
        from course_lib.train import emulated

        layers, each = load["layers"], load["gradient_mb"] / load["layers"]
        stack = emulated.equal(layers, each, load["forward_ms"] / layers, load["backward_ms"] / layers)
        self.model = nn.Sequential(self.nonce, *stack)
        self.flat = torch.zeros(sum(p.numel() for p in self.model.parameters()))
        if not self.plan["cells"]:
            return []
        finish = self.plan["finish"]
        reducer = self.namespace["CompleteReducer" if finish else "Reducer"]
        self.bench = Bench(self.model, self.namespace["assign_buckets"], reducer, load["cap_mb"] * 2**20, True, finish,
                           1, 60.0)  # fmt: skip
        return self.bench.buckets

    def step(self, what: str, number: int) -> None:
        """One timed step: `own`, `serial`, `compute` or `comm`."""
        import torch.distributed as dist

        from course_lib.lab.workbench.gradients import loss_of
        from course_lib.record import recording

        with recording(into=self.recorder), self.recorder.measure_step(number):
            if what == "own":
                self.bench.prepare()
                self.bench.window()
                return
            if what in ("serial", "compute"):
                for param in self.model.parameters():
                    param.grad = None
                loss_of(self.model, dist.get_rank(), 0, 1).backward()
            if what in ("serial", "comm"):
                self._all_reduce(what == "serial")

    def _all_reduce(self, gradients: bool) -> None:
        import torch.distributed as dist

        params = list(self.model.parameters())
        parts = self.flat.split([p.numel() for p in params])
        if gradients:
            for part, param in zip(parts, params):
                part.copy_(param.grad)
        dist.all_reduce(self.flat)
        if gradients:
            self.flat /= dist.get_world_size()
            for part, param in zip(parts, params):
                param.grad.copy_(part)

    def sent_bytes(self) -> float:
        """What this rank's Wire says it has sent; only believed where the kernel cannot be asked."""
        from course_lib.launch import current_wire

        return float(current_wire().traffic.total_bytes)

    def values(self, places: list[list[int]]) -> list[float]:
        params = list(self.model.parameters())
        return [float(params[p].grad[i]) for p, i in places]

    def spans(self) -> list[list[Any]]:
        return [list(row) for row in self.recorder.rows[-4000:]]


def _scaling_layer() -> Any:
    """A layer that multiplies its input by a number which the grader draws for each step and rank."""
    from torch import nn

    class Scaling(nn.Module):
        value = 1.0

        def forward(self, x: Any) -> Any:
            return x * self.value

    return Scaling()


if __name__ == "__main__":
    main()
