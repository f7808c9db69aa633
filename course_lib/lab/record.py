"""What was tried and what passed, per exercise: the records behind `course status`."""

from __future__ import annotations

from datetime import UTC, datetime

from course_lib.lab import store

NAME = "progress"


def progress() -> store.Record:
    """By exercise number: `attempts`, `passed`, `first_passed` and `last_tried` (UTC), `hints` revealed."""
    return store.read(NAME)


def note_attempt(number: str, passed: bool) -> None:
    """Count an attempt. An exercise that passed once stays passed."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with store.update(NAME) as records:
        entry = records.setdefault(number, {})
        entry["attempts"] = entry.get("attempts", 0) + 1
        entry["last_tried"] = now
        entry["passed"] = entry.get("passed", False) or passed
        if passed:
            entry.setdefault("first_passed", now)


def reveal_hint(number: str, of: int) -> int:
    """Count one more hint as revealed, up to `of`. Returns how many are revealed now."""
    with store.update(NAME) as records:
        entry = records.setdefault(number, {})
        entry["hints"] = min(entry.get("hints", 0) + 1, of)
        return entry["hints"]
