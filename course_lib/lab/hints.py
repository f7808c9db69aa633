"""`hint("4.1")`: a step further each time it is called."""

from __future__ import annotations

from course_lib.lab import record, registry
from course_lib.lab.present import note


def hint(number: str) -> None:
    """Show the hints of an exercise that you have seen so far, and one more.

    The first says where to look, the second how to go about it, the third nearly what to write. What you
    have revealed is remembered with your progress. Raises `LabError` for an unknown exercise.
    """
    exercise = registry.find(number)
    revealed = record.reveal_hint(number, of=len(exercise.hints))
    steps = [f"Hint {i} of {len(exercise.hints)}. {text}" for i, text in enumerate(exercise.hints[:revealed], start=1)]
    more = f'Another hint("{number}") shows the next.' if revealed < len(exercise.hints) else "There are no more."
    note("\n\n".join([f"Exercise {number}, {exercise.title} (about {exercise.minutes} minutes)", *steps, more]))
