"""Error feedback is what makes compressed training arrive. Judged without momentum, which hides its absence."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
import torch

from course_lib.compress.convergence import Simulated, accuracy
from tests.compress.given import RANK, SHAPES, K, Reference, flat, gradient

# points of accuracy that are lost at least without error feedback: half of what was seen
WORSE = {"topk": 10, "onebit": 5, "powersgd": 10}


dense = cache(partial(accuracy, "dense"))


def judge(scheme: str, seed: int, **size) -> None:
    uncompressed = dense(seed=seed, **size)
    assert uncompressed > 50  # chance is 10 %
    assert accuracy(scheme, seed=seed, **size) == pytest.approx(uncompressed, abs=2)
    if scheme in WORSE:
        assert accuracy(scheme, error_feedback=False, seed=seed, **size) < uncompressed - WORSE[scheme]


@pytest.mark.parametrize("scheme", ["topk", pytest.param("onebit", marks=pytest.mark.slow)])
def test_within_two_points_of_dense_with_error_feedback_and_far_below_without(scheme) -> None:
    torch.set_num_threads(1)
    judge(scheme, seed=0, workers=4, steps=300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("scheme", ["fp16", "bf16", *WORSE])
def test_the_same_on_eight_workers(scheme, seed) -> None:
    torch.set_num_threads(1)
    judge(scheme, seed)


@pytest.mark.parametrize("scheme, names", [("fp16", SHAPES), ("bf16", SHAPES), ("topk", SHAPES), ("powersgd", SHAPES),
                                           ("onebit", ["scalar", "bias"])])  # parameters that one rank owns whole
def test_simulated_ranks_do_what_real_ranks_do(scheme, names) -> None:
    first_q = {n: torch.randn(shape[1:].numel(), RANK, generator=torch.Generator().manual_seed(0))
               for n, shape in ((n, torch.Size(s)) for n, s in SHAPES.items())}
    simulated = Simulated(scheme, k=K, rank=RANK)
    real = Reference(scheme, 3, first_q=first_q.__getitem__)
    for update in range(4):
        grads = [gradient(rank, update) for rank in range(3)]
        for n in names:
            want = real.mean(n, [flat(g[n]) for g in grads])
            got = flat(simulated.mean(n, [g[n] for g in grads]))
            tolerance = {"fp16": 2e-3, "bf16": 2e-2}.get(scheme, 1e-4)
            np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max(initial=1e-6), err_msg=n)


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="choose dense"):
        Simulated("middle-out")
