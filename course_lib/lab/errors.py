"""The three things that go wrong in a lab, each told in one sentence instead of a traceback."""

from __future__ import annotations


class Told(Exception):
    """An error whose message is all that a reader needs: IPython shows one line for it.

    It still is an exception, so papermill, nbval and CI stop at the cell that raised it.
    """

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class LabError(Told):
    """A lab was asked for something that it does not have: an unknown exercise, an impossible question."""


class CheckFailed(Told):
    """A check found at least one ✘, or an exercise that is not written yet."""


class BuildError(Exception):
    """A solution that cannot become a lab. The message names the file, the cell and the remedy."""
