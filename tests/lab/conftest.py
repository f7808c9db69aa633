"""Each test has a learner's folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from course_lib.lab import store


@pytest.fixture(autouse=True)
def learner(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that holds this test's progress and predictions."""
    folder = tmp_path_factory.mktemp("learner")
    monkeypatch.setenv("COURSE_DIR", str(folder))
    monkeypatch.setattr(store, "_in_memory", {})
    return folder
