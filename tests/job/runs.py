"""What the tests of the training command share: a small run, and what it must come to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.job.batches import Batches
from course_lib.job.loop import train
from course_lib.job.metrics import rows
from course_lib.job.model import learning_rate, make_optimizer
from course_lib.job.options import Options
from course_lib.train.clip import clip_grad_norm
from course_lib.train.gpt import GPT, next_byte_loss

SMALL = {"layers": 2, "heads": 2, "width": 16, "length": 16, "batch": 2, "micro_steps": 2, "data_mb": 0.02,
         "bucket_mb": 0.01, "steps": 3, "max_norm": 0.5, "warmup": 2, "checkpoint_every": 2}


def options(out: Path, **changed) -> Options:
    return Options(**{**SMALL, "out": out, **changed})


def alone(asked: Options, ranks: int) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Parameters after training, and loss and norm of every update, in one process that sees all rows: written apart
    from the loop."""
    asked = asked.laid_out(ranks)
    torch.manual_seed(asked.seed)
    model, data, seen = GPT(asked.config), Batches(asked, torch.device("cpu")), []
    optimizer = make_optimizer(asked, model.parameters())
    for update in range(asked.steps):
        window = [batch for replica in range(asked.dp) for batch in data.window(update, replica)]
        losses = [next_byte_loss(model, batch) for batch in window]
        loss = sum(summed for summed, _ in losses) / sum(count for _, count in losses)
        loss.backward()
        norm = clip_grad_norm(model.parameters(), asked.max_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(asked, update)
        optimizer.step()
        optimizer.zero_grad()
        seen.append({"loss": float(loss.detach()), "grad_norm": float(norm)})
    return model.state_dict(), seen


def differs(asked: Options, want: tuple[dict, list], tolerance: float = 2e-5) -> dict[str, float]:
    """What a finished run has otherwise than `want`, by how much."""
    got = torch.load(asked.out / "model.pt", weights_only=True)["model"]
    assert got.keys() == want[0].keys()
    apart = {name: float((got[name] - value).abs().max()) for name, value in want[0].items()}
    lines = rows(asked.out / "metrics.jsonl")
    assert [row["step"] for row in lines] == list(range(1, asked.steps + 1))
    for row, said in zip(lines, want[1]):
        apart |= {f"{key} of update {row['step']}": abs(row[key] - value) for key, value in said.items()}
    return {name: by for name, by in apart.items() if not by <= tolerance}


def several(runs: list[Options]) -> None:
    """One after the other, on a rank; no file is read while another rank still writes."""
    torch.set_num_threads(1)
    for one in runs:
        train(one)
        dist.barrier()


def whole_and_in_two(runs: list[Options]) -> None:
    """Each without a pause into its folder, and, with a new model and all, in two parts into another one."""
    several([part for one in runs for part in (one, replace(one, out=parts_of(one), steps=2),
                                               replace(one, out=parts_of(one)))])


def parts_of(one: Options) -> Path:
    return one.out.with_name(one.out.name + "-parts")


def not_the_same(one: Options) -> list[str]:
    """Where a run and the one in two parts differ in a bit of anything that they saved."""
    parts, last = parts_of(one), f"checkpoints/step-{one.steps:08d}"
    same = {f"{at} {key}": ok for at in ("model.pt", last)
            for key, ok in same_bits(one.out / at, parts / at).items()}
    assert len(same) > 20
    return [key for key, ok in same.items() if not ok]


def same_bits(one: Path, other: Path) -> dict[str, bool]:
    """Every tensor of two checkpoint folders or files, by where it is: False where bits differ."""
    if one.is_dir():
        assert sorted(p.name for p in one.glob("*.pt")) == sorted(p.name for p in other.glob("*.pt"))
        return {f"{p.name} {key}": same for p in one.glob("*.pt") for key, same in same_bits(p, other / p.name).items()}
    return _same(*(torch.load(path, weights_only=True) for path in (one, other)), one.name)


def _same(a, b, where: str) -> dict[str, bool]:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        return {key: same for k in a for key, same in _same(a[k], b[k], f"{where} {k}").items()}
    if isinstance(a, list | tuple):
        return _same(dict(enumerate(a)), dict(enumerate(b)), where)
    return {where: torch.equal(a, b) if torch.is_tensor(a) else a == b}
