"""Something that every rank does by itself and that must have worked on all of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from course_lib.train.control import Control, ranks_text


class JobError(RuntimeError):
    """The run cannot go on as it was asked to; the same sentence on every rank says why and what to do."""


class Diverged(JobError):
    """Its numbers are not finite any more, and no later update would make them so."""


def together(control: Control, what: str, do: Callable[[], Any]) -> list[Any]:
    """Call `do` on every rank, and give all ranks' answers (JSON values), in rank order.

    Where it raised `JobError`, `ValueError` or `OSError` on a rank, all ranks raise `JobError` that names it. `what`
    is what they do, for whoever waits in vain.
    """
    try:
        mine = {"answer": do()}
    except (JobError, ValueError, OSError) as error:
        mine = {"error": str(error)}
    text = json.dumps(mine).encode()
    lengths = [struct.unpack("<q", note)[0] for note in control.exchange(struct.pack("<q", len(text)), what)]
    notes = [json.loads(note) for note in control.exchange(text.ljust(max(lengths)), what)]
    failed = {rank: note["error"] for rank, note in zip(control.ranks, notes) if "error" in note}
    if failed:
        sentence = next(iter(failed.values()))
        same = [rank for rank, error in failed.items() if error == sentence]
        raise JobError(sentence if len(same) == len(notes) else f"{ranks_text(same)}: {sentence}")
    return [note["answer"] for note in notes]
