"""How many micro-steps an update has, and how many bytes each rank sends for it.

B is the global batch (samples of one update, over all ranks), b the micro-batch of one rank, D the
data-parallel degree, N = B/(b·D) the micro-steps. Bytes are those that one rank *sends*, by ring collectives
over n ranks: 2(n−1)/n·S for an all-reduce of S bytes, (n−1)/n·S for a reduce-scatter, an all-gather or an
all-to-all. A sum over ranks, or one that counts sending and receiving, is another number; say which.
"""

from __future__ import annotations

from operator import index


class Impossible(ValueError):
    """A combination of degrees and batches that cannot be. The message says why, and what would do."""


def accumulation_steps(B: int, b: int, D: int) -> int:
    """N = B/(b·D), a whole number. Raises `Impossible`, in words, for every combination that has none."""
    for name, value, what in (("B", B, "global batch"), ("b", b, "micro-batch"), ("D", D, "data-parallel degree")):
        _whole(name, value, what)
    each = b * D
    if each > B:
        raise Impossible(f"one micro-step alone takes b·D = {b}·{D} = {each} samples, more than B = {B}: a smaller b, "
                         f"a smaller D, or a B of {each} at least")
    N, rest = divmod(B, each)
    if rest:
        raise Impossible(f"B = {B} is not a multiple of b·D = {b}·{D} = {each}: {N} micro-steps leave {rest} samples "
                         f"out and {N + 1} need {(N + 1) * each}. Choose B = {N * each} or {(N + 1) * each}")
    return N


def data_degree(gpus: int, tensor: int = 1, pipeline: int = 1) -> int:
    """D = gpus/(tensor·pipeline): how many copies of the model there are. Raises `Impossible` where it is not whole."""
    _whole("gpus", gpus, "number of GPUs")
    _whole("tensor", tensor, "tensor-parallel degree")
    _whole("pipeline", pipeline, "number of pipeline stages")
    one = tensor * pipeline
    if one > gpus:
        raise Impossible(f"one copy of the model takes {tensor}·{pipeline} = {one} GPUs, and there are {gpus}")
    if gpus % one:
        raise Impossible(f"{gpus} GPUs are not a multiple of the {tensor}·{pipeline} = {one} that one copy of the "
                         f"model takes: {gpus % one} would stand idle")
    return gpus // one


def all_reduce_bytes(S: float, n: int) -> float:
    """Sent by each of n ranks for an all-reduce of S bytes on a ring."""
    _whole("n", n, "number of ranks")
    return 2 * (n - 1) * S / n


def shuffle_bytes(S: float, n: int) -> float:
    """Sent by each of n ranks for a reduce-scatter or an all-gather on a ring, or for an all-to-all, of S bytes."""
    _whole("n", n, "number of ranks")
    return (n - 1) * S / n


def data_parallel_bytes(G: float, n: int, N: int = 1, *, stage: int = 0, every_micro_step: bool = False) -> float:
    """Per update and rank. G: gradient bytes of this rank; parameters are counted as equally large.

    Stages 0 and 1 reduce once: 2(n−1)/n·G, whatever N is. Stage 2 keeps only its part of the gradient and
    reduces in every micro-step, then gathers the parameters once: (N+1)/2 times that. Stage 3 gathers the
    parameters for forward and for backward and reduces, in every micro-step: 3N(n−1)/n·G. `every_micro_step`
    is stage 0 or 1 without `no_sync`. (Rajbhandari 2020, ZeRO, section 7, for N = 1.)
    """
    _whole("N", N, "number of micro-steps")
    if stage not in (0, 1, 2, 3):
        raise Impossible(f"there is no ZeRO stage {stage!r}: choose 0, 1, 2 or 3")
    half = shuffle_bytes(G, n)
    if stage == 3:
        return 3 * N * half
    if stage == 2:
        return (N + 1) * half
    return 2 * half * (N if every_micro_step else 1)


def tensor_parallel_bytes(A: float, n: int, layers: int, N: int) -> float:
    """Per update and rank. A: bytes of one activation b·s·h; `layers` on this rank.

    Two all-reduces of A in a layer's forward and two in its backward, in every micro-step. Sequence
    parallelism replaces each by a reduce-scatter and an all-gather: the same bytes. (arXiv 1909.08053, 2205.05198.)
    """
    _whole("N", N, "number of micro-steps")
    return 4 * layers * N * all_reduce_bytes(A, n)


def pipeline_parallel_bytes(A: float, stages: int, N: int, *, interleaved: int = 1) -> float:
    """Per update, sent by a stage with two neighbours: in every micro-step A forward to the next stage, and its
    gradient back to the one before. The first and the last stage send half. 0 with one stage."""
    _whole("stages", stages, "number of pipeline stages")
    _whole("N", N, "number of micro-steps")
    _whole("interleaved", interleaved, "number of parts of a stage")
    return 2 * N * interleaved * A if stages > 1 else 0.0


def expert_parallel_bytes(A: float, n: int, layers: int, N: int, *, experts_per_token: int = 1) -> float:
    """Per update and rank. A: bytes of one activation b·s·h of this rank's tokens; `layers` are those with experts.

    Every token goes to its experts and comes back, forward and backward: four all-to-alls a layer in every
    micro-step, each of `experts_per_token`·A, (n−1)/n of it to other ranks when tokens spread evenly.
    """
    _whole("N", N, "number of micro-steps")
    _whole("experts_per_token", experts_per_token, "number of experts a token goes to")
    return 4 * layers * N * experts_per_token * shuffle_bytes(A, n)


def _whole(name: str, value: object, what: str) -> None:
    """Refuse what does not count things: 2.5, True, 0, -8, "8". Integers of other types (numpy's) are fine."""
    if type(value) is int and value >= 1:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise Impossible(f"{name} = {value!r}: the {what} is a whole number")
    if index(value) < 1:
        raise Impossible(f"{name} = {value}: the {what} is 1 at least")
