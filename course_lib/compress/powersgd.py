"""PowerSGD: a gradient matrix as a product of two thin ones, found by one step of power iteration.

M ≈ P·Qᵀ with P = orth(mean M·Q_old) and Q = mean Mᵀ·P. Both means are all-reduces of thin matrices, so bytes do
not grow with the ranks (Vogels 2019, arXiv 1905.13727, algorithm 1 and 2).
"""

from __future__ import annotations

import math
import zlib

import torch
import torch.distributed as dist
from torch import nn

from course_lib.compress.compressor import Compressor, NonFiniteGradient, Phases
from course_lib.compress.memory import Memory
from course_lib.train.bucket import Bucket

Thin = tuple[int, int, int]


def factors(shape: tuple[int, ...], rank: int, min_saving: float = 2.0) -> Thin | None:
    """(rows, columns, rank) of a parameter seen as a matrix (all dimensions but the first are one), or None where
    P and Q together are not `min_saving` times smaller than the matrix: it then travels as it is."""
    if len(shape) < 2 or 0 in shape:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rank, rows, columns)
    return (rows, columns, rank) if (rows + columns) * rank * min_saving < rows * columns else None


def orthonormal(p: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis (n, r) whose first j columns span at least those of p (n, r); p may be zero."""
    return torch.linalg.qr(p).Q


def times(matrix: torch.Tensor, thin: torch.Tensor) -> torch.Tensor:
    """Their product, the same bits wherever `matrix` lies. With one column it would be a matrix by a vector, which is
    added up in another order at other addresses, and a rebuilt bucket lies at others."""
    if thin.shape[1] > 1:
        return matrix @ thin
    return (matrix @ thin.expand(-1, 2))[:, :1]


def compress(matrix: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(P, Q) of shapes (n, r) and (m, r) with matrix (n, m) ≈ P·Qᵀ, from a guess q (m, r) of its row space."""
    p = orthonormal(times(matrix, q))
    return p, times(matrix.T, p)


def decompress(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """P·Qᵀ, (n, m)."""
    return p @ q.T


class PowerSGD(Compressor):
    """Every matrix that gets smaller by it travels as P and Q of `rank` columns; the rest of a bucket goes with P.

    `warm_start` begins with the Q of the last update, so that the iteration goes on from step to step; without it, with
    the same random Q each time. `error_feedback` adds to the next gradient what this rank's own P·Qᵀ left of it.
    PyTorch's hook keeps the gradient less the *mean* P·Qᵀ: the same sum over the ranks and so the same training, but
    there each rank's part grows with every difference between ranks. Raises `ValueError` for a rank below 1.
    """

    scheme = "powersgd"
    has_second_phase = True

    def __init__(self, module: nn.Module, rank: int = 1, *, warm_start: bool = True, error_feedback: bool = True,
                 min_saving: float = 2.0, seed: int = 0, on_nonfinite: str = "raise",
                 process_group: dist.ProcessGroup | None = None) -> None:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ValueError(f"rank={rank!r}: give the number of columns of P and Q, a whole number of 1 or more")
        if not min_saving >= 0:
            raise ValueError(f"min_saving={min_saving}: give how many times smaller P and Q have to be, 0 or more")
        super().__init__(module, process_group, on_nonfinite, rank=rank, warm_start=warm_start,
                         error_feedback=error_feedback, min_saving=min_saving, seed=seed)
        self.warm_start, self.seed = warm_start, seed
        found = {n: factors(shape, rank, min_saving) for n, shape in self.shapes.items()}
        self.factors: dict[str, Thin] = {n: f for n, f in found.items() if f}
        if error_feedback:
            self.keep_residual()
        self.memories["q"] = Memory({n: columns * r for n, (_, columns, r) in self.factors.items()}, self._first_q)

    def _first_q(self, name: str) -> torch.Tensor:
        """Normal numbers from the name alone: the same on every rank and in every layout of buckets."""
        generator = torch.Generator().manual_seed(self.seed + zlib.crc32(name.encode()))
        return torch.randn(self.memories["q"].sizes[name], generator=generator)

    def phases(self, bucket: Bucket) -> Phases:
        names = self.names(bucket)
        thin = tuple(n for n in names if n in self.factors)
        left = self.compensated(bucket)
        sizes = self.sizes(bucket)
        pieces = dict(zip(names, left.split(sizes)))
        matrices = [pieces[n].view(self.factors[n][:2]) for n in thin]
        whole = [pieces[n] for n in names if n not in self.factors]

        first = torch.cat([times(m, q).reshape(-1) for m, q in zip(matrices, self._q(thin, left))] + whole)
        yield dist.all_reduce(first, group=self.group, async_op=True)

        self.demand_finite(bucket, first, lambda: NonFiniteGradient(
            f"a gradient of some rank in bucket {bucket.index()} is not finite; the residuals are as they were"))
        ps, rest = self._split(thin, first, 0)
        out = dict(zip(names, bucket.buffer().split(sizes)))
        for name, mean in zip((n for n in names if n not in self.factors), _like(whole, rest)):
            out[name].copy_(mean.div_(self.size))
        for piece in whole:
            piece.zero_()  # it was sent as it is
        if not thin:
            return
        ps = [orthonormal(p) for p in ps]
        second = self.memories["q"].write(thin, left) if self.warm_start else left.new_empty(0)
        second = torch.cat([times(m.T, p).reshape(-1) for m, p in zip(matrices, ps)], out=second)
        mine, _ = self._split(thin, second.clone(), 1)
        work = dist.all_reduce(second, group=self.second_group(bucket), async_op=True)
        for matrix, p, q in zip(matrices, ps, mine):
            matrix.addmm_(p, q.T, alpha=-1)
        yield work

        second.div_(self.size)
        for name, p, q, before in zip(thin, ps, self._split(thin, second, 1)[0], self._q(thin, left)):
            out[name].copy_(decompress(p, q).view(-1))
            if self.warm_start:  # a matrix of zeros is no place to begin
                q.copy_(torch.where(q.any(), q, before))

    def _q(self, thin: tuple[str, ...], like: torch.Tensor) -> list[torch.Tensor]:
        return self._split(thin, self.memories["q"].read(thin, like), 1)[0] if thin else []

    def _split(self, thin: tuple[str, ...], flat: torch.Tensor, side: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Views of the factors of side 0 (P) or 1 (Q) that lie one after the other in `flat`, and what is behind."""
        views, start = [], 0
        for name in thin:
            length, r = self.factors[name][side], self.factors[name][2]
            views.append(flat[start:start + length * r].view(length, r))
            start += length * r
        return views, flat[start:]


def _like(pieces: list[torch.Tensor], flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return flat.split([p.numel() for p in pieces])
