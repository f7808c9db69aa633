"""What the training command sends: the bytes of the scheme that was asked for, in every update."""

from __future__ import annotations

import pytest
import torch

from course_lib.compress import volumes
from course_lib.job.metrics import rows
from course_lib.launch import run
from course_lib.train.gpt import GPT
from tests.job.runs import options, several

RANKS = 2
TOPK, RANK = 0.01, 2
WIRE = {"none": volumes.float32, "fp16": volumes.half, "bf16": volumes.half, "onebit": volumes.one_bit,
        "topk": lambda shapes, ranks: volumes.top_k(shapes, ranks, TOPK),
        "powersgd": lambda shapes, ranks: volumes.power_sgd(shapes, ranks, RANK)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("bytes")
    made = {scheme: options(folder / scheme, compress=scheme, topk=TOPK, powersgd_rank=RANK, layers=1)
            for scheme in WIRE}
    run(several, list(made.values()), ranks=RANKS, fabric="loopback")
    return made


@pytest.mark.parametrize("scheme", WIRE)
def test_compressed_is_what_travels(scheme: str, runs: dict) -> None:
    """A scheme that is asked for and silently left out would send the bytes of none."""
    asked = runs[scheme]
    shapes = [tuple(p.shape) for p in GPT(asked.config).parameters()]
    sent = [row["sent_bytes"] for row in rows(asked.out / "metrics.jsonl")]
    # The first update also sends what all ranks begin with.
    assert len(sent) == asked.steps and torch.tensor(sent[1:]).eq(sent[1]).all()
    assert sent[-1] == pytest.approx(WIRE[scheme](shapes, RANKS), rel=0.02), scheme
