"""Does a saved state belong to this compressor on this rank?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from course_lib.train import saved


def refuse_other(name: str, state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    saved.refuse_other(name, state, mine, updates=int, memories=dict)
