"""Which rank a file is: what it says itself, else its name, else its place among the files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from course_lib.trace.note import Note
from course_lib.trace.parse import Document, whole

_RANK = re.compile(r"rank[-_ ]?(\d+)", re.IGNORECASE)
_NAMED = re.compile(r"(?:worker|gpu)[-_ ]?(\d+)", re.IGNORECASE)
_LAST = re.compile(r"[-_.](\d{1,5})(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$", re.IGNORECASE)


def own_rank(document: Document) -> int | None:
    """The rank in the file's `distributedInfo`, or None."""
    rank = whole(document.distributed.get("rank"))
    return rank if rank is not None and rank >= 0 else None


def named_rank(name: str) -> int | None:
    """The rank in a file's name: `rank-3…`, else `worker3…`, else `…_3.json`; None without one."""
    base = PurePath(name.replace("!", "/")).name
    match = _RANK.search(base) or _NAMED.search(base) or _LAST.search(base)
    return int(match.group(1)) if match else None


def assign(documents: Sequence[Document]) -> list[tuple[int, tuple[Note, ...]]]:
    """A rank of its own for every file, and what is doubtful about it.

    Two files that say the same rank are both kept: the second gets the next number nobody has, and a note.
    """
    own = [own_rank(d) for d in documents]
    # Names count only if they tell all files apart, else a date or a step number passes for a rank.
    named = [named_rank(d.name) if r is None else None for d, r in zip(documents, own)]
    known = [n for n in named if n is not None]
    if len(set(known)) < len(known) or set(known) & {r for r in own if r is not None}:
        named = [None] * len(own)
    wanted = [r if r is not None else n for r, n in zip(own, named)]
    taken = {w for w in wanted if w is not None}
    first: dict[int, str] = {}
    out: list[tuple[int, tuple[Note, ...]]] = []
    for index, (document, want) in enumerate(zip(documents, wanted)):
        if want is not None and want not in first:
            first[want] = document.name
            out.append((want, ()))
            continue
        rank = index if index not in taken else max(taken) + 1
        taken.add(rank)
        out.append((rank, () if want is None else (Note(
            "duplicate-rank", f"{document.name} says that it is rank {want}, as {first[want]} does: it is shown as "
                              f"rank {rank}. Are both files of one run?"),)))
    return out
