"""Small traces to write by hand, and the folder of real ones where it is there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from course_lib import trace

sys.path.insert(0, str(Path(__file__).parent))
REAL = Path(__file__).parents[3] / "shared" / "traces"


@pytest.fixture(scope="session")
def expected() -> dict[str, Any]:
    """The exact numbers of the real traces. Skips where they are absent."""
    if not (REAL / "expected.json").exists():
        pytest.skip("../shared/traces is not here: the real traces are not part of the project")
    return json.loads((REAL / "expected.json").read_text())


@pytest.fixture(scope="session")
def real(expected) -> Callable[[str], trace.Trace]:
    """Load a real trace by its key in `expected.json`, once a session."""
    loaded: dict[str, trace.Trace] = {}

    def load(key: str) -> trace.Trace:
        if key not in loaded:
            path = REAL / key
            loaded[key] = trace.load(path if path.exists() else Path(f"{path}.gz"))
        return loaded[key]

    return load


@pytest.fixture
def folder() -> Path:
    """Where the real traces lie. Skips where they are absent."""
    if not REAL.exists():
        pytest.skip("../shared/traces is not here: the real traces are not part of the project")
    return REAL


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a trace file: events, or text as it is."""

    def save(content: Any, name: str = "rank-0.json", **head: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps({**head, "traceEvents": content}))
        return path

    return save
