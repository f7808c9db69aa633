"""Exercise 11.3: gather and matmul in chunks.

The learner writes `gather_matmul(x, multiply, chunks, wire)`; every rank calls it with its own rows of a sequence:

- x is (rows, width), on every rank as many rows; 1 ≤ chunks ≤ rows, and chunks need not divide rows.
- `wire.start_gather(part)` starts an all-gather and returns a handle at once; `handle.wait()` blocks until the parts of
  all ranks are there and returns them, (ranks, rows of the part, width).
- `multiply(rows)` is the matmul, (…, width) to (…, out). The device is busy meanwhile.
- The result is (ranks · rows, out): the products of rank 0's rows, then rank 1's, and so on.
- While a chunk is multiplied, the next one is on its way.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from course_lib.lab.exercises.lab09.replay import play
from course_lib.lab.exercises.lab11.chunk_clock import Case, ClockedWire, close
from course_lib.lab.exercises.lab11.meeting import Meeting
from course_lib.lab.guard import Broke, call
from course_lib.lab.model import Row, Verdict, exercise

if TYPE_CHECKING:
    from torch import Tensor

HINTS = (
    "One gather is always ahead of the multiplication. Before you multiply chunk i, gather i + 1 has to be under way. "
    "And who multiplies the last chunk, after which nothing comes?",
    "Cut x by rows, with x.tensor_split(chunks). Start the first gather. For every further part: start it, then wait "
    "for the one before, then multiply that. After the loop one handle is left. The products are (ranks, rows of the "
    "chunk, out): joined along dimension 1 they are every rank's rows in order.",
    "coming = wire.start_gather(parts[0]); for part in parts[1:]: arrived, coming = coming, wire.start_gather(part); "
    "products.append(multiply(arrived.wait())). After the loop products.append(multiply(coming.wait())). Result: "
    "torch.cat(products, dim=1).flatten(0, 1).",
)

MISTAKES = {
    "no_result": "Your function returned None. Is there a `return` at its end?",
    "waits_each_chunk": "Each chunk is waited for before the next one starts, so wire and device take turns, as "
    "without chunks, and every chunk pays its latency on top. Start the next gather before you multiply.",
    "multiplies_at_the_end": "All chunks arrive before the first is multiplied. The wire was never idle, and the "
    "device always: multiply each chunk while the next one travels.",
    "drops_the_last_chunk": "The last chunk is missing. A loop that is one gather ahead leaves one handle behind when "
    "it ends.",
    "drops_the_rest": "Rows are missing where the chunks do not divide them. rows // chunks rounds down; "
    "tensor_split deals out the rest.",
    "chunk_after_chunk": "Your rows come chunk after chunk: rank 0's first rows, rank 1's first rows, rank 0's next. "
    "The sequence wants all rows of rank 0, then all of rank 1.",
    "own_rows_only": "Your result holds the products of this rank's own rows. The matmul needs those of all ranks.",
    "other_chunks": "You cut into more parts than `chunks` says. Each part pays a latency, so how many is up to the "
    "caller: few on a late wire, one where nothing can hide.",
    "never_cuts": "You gather everything in one piece. Nothing is multiplied meanwhile, because nothing has arrived.",
    "gathers_more": "You gather more rows than there are. Each row travels once.",
}

SHOWN = "gather_matmul(x, multiply, chunks, wire)"


@exercise("11.3", title="gather and matmul in chunks", minutes=12, needs="gather_matmul", hints=HINTS,
          mistakes=MISTAKES)
def gather_in_chunks(answer: Callable, draw: random.Random) -> Verdict:
    """Rows over one to four ranks; chunks that divide the rows and that do not; fast wires and slow ones."""
    even = [_played(answer, _drawn(draw, ranks, chunks, 0, slow)) for ranks, chunks in ((2, 3), (3, 2), (2, 4), (4, 1))
            for slow in (False, True)]  # fmt: skip
    if even[0].broke:
        raise Broke(even[0].broke)
    uneven = [_played(answer, _drawn(draw, ranks, chunks, draw.randrange(1, chunks), slow))
              for ranks, chunks in ((2, 3), (3, 4), (1, 2)) for slow in (False, True)]  # fmt: skip
    cases = [*even, *uneven]
    if odd := _refused(cases):
        return Verdict((odd,), "no_result" if "gave None" in odd.seen else "")
    rows = (
        _row("all ranks come to an end", "nobody waits for ever", cases, Case.ended),
        _row("the product, in the order of the sequence", "rows of rank 0, then of rank 1, …", even, Case.right),
        _row("chunks that do not divide the rows", "the same", uneven, Case.right),
        _row("in chunks, each row once", "as many chunks as asked for", cases, lambda c: c.ended() and c.cut()),
        _row("the next chunk travels while one is multiplied", "no later than with one gather ahead", cases,
             Case.overlaps),
    )  # fmt: skip
    return Verdict(rows, "" if all(row.ok for row in rows) else _mistake(even, uneven))


def _mistake(even: list[Case], uneven: list[Case]) -> str:
    """The mistake that explains what is seen; what is wrong in numbers before what is late."""
    several = [c for c in even if c.ended() and c.chunks > 1]
    if not several:
        return ""
    if all(c.right() for c in several):
        if not all(c.right() for c in uneven):
            return "drops_the_rest" if all(c.right() for c in even) else ""
        if all(len(c.wires[0].pieces) == 1 for c in several):
            return "never_cuts"
        if any(sum(c.wires[0].pieces) > c.rows for c in several):
            return "gathers_more"
        if any(len(c.wires[0].pieces) > c.chunks for c in even):
            return "other_chunks"
        if any(c.multiplied() for c in several):
            return ""
        waits = {c.wires[0].events.partition("M")[0].count("W") == len(c.wires[0].pieces) for c in several}
        return "" if all(c.overlaps() for c in several) else (
            "multiplies_at_the_end" if waits == {True} else "waits_each_chunk")  # fmt: skip
    if all(close(c.outputs[r], c.xs[r] @ c.weight.t()) for c in several for r in range(c.ranks)):
        return "own_rows_only"
    if all(close(c.outputs[0], _by_chunks(c)) for c in several):
        return "chunk_after_chunk"
    return "drops_the_last_chunk" if all(c.lacks_the_last() for c in several) else ""


def _by_chunks(c: Case) -> Tensor:
    import torch

    starts = [sum(c.wires[0].pieces[:i]) for i in range(len(c.wires[0].pieces))]
    parts = [x[start:start + rows] for start, rows in zip(starts, c.wires[0].pieces) for x in c.xs]
    return torch.cat(parts) @ c.weight.t() if parts else torch.zeros(0)


def _played(answer: Callable, case: Case) -> Case:
    """One operator on all ranks. An exception is part of what was seen."""
    meeting = Meeting()

    def one(rank: int) -> None:
        wire = case.wires[rank] = ClockedWire(meeting, rank, case)
        got = call(answer, case.xs[rank].clone(), lambda rows: wire.multiply(rows), case.chunks, wire,
                   shown=f"{SHOWN} on rank {rank} of {case.ranks}, {case.rows} rows, chunks={case.chunks}")
        case.outputs[rank] = got

    try:
        case.waits = play(case.ranks, one, meeting.known).waits
    except Broke as error:
        case.broke = str(error)
    return case


def _drawn(draw: random.Random, ranks: int, chunks: int, rest: int, slow: bool) -> Case:
    """Rows that leave `rest` when divided by chunks. On a `slow` wire a row travels longer than it is multiplied."""
    import torch

    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    rows, width, out = chunks * draw.randint(2, 4) + rest, draw.randint(2, 5), draw.randint(2, 5)
    xs = [torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(ranks)]
    weight = torch.randn(out, width, generator=generator, dtype=torch.float64)
    row_s, ratio = 0.004, draw.uniform(1.2, 1.8) if slow else draw.uniform(0.5, 0.9)
    return Case(xs, weight, chunks, 0.0005 * draw.randint(1, 4), ratio * row_s / width, row_s)


def _refused(cases: list[Case]) -> Row | None:
    """The row for a result that is no tensor."""
    import torch

    for c in cases:
        for rank, got in sorted(c.outputs.items()):
            if not isinstance(got, torch.Tensor):
                return Row("returns the product", False, f"a tensor of {tuple(c.wanted().shape)}",
                           f"{SHOWN} on rank {rank} gave {got!r}")
    return None


def _row(name: str, expected: str, cases: list[Case], holds: Callable[[Case], bool]) -> Row:
    """One rule over all its cases. The smallest case that breaks it is shown."""
    broken = sorted((c for c in cases if not holds(c)), key=lambda c: (c.ranks, c.rows))
    seen = str(broken[0]) if broken else f"held in {len(cases)} of {len(cases)} operators"
    return Row(name, not broken, expected, seen)
