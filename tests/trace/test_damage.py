"""Damage of every kind: whatever happens to a file, it is read or refused with a sentence."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from trace_samples import event, one_step

from course_lib import trace
from course_lib.trace.files import Source
from course_lib.trace.parse import parse
from course_lib.trace.reader import load

GOOD = json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": 2}, "traceEvents": [
    *one_step(), event("cpu_op", "aten::mm", 5, 10), *one_step(2000)]}, indent=1).encode()


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, len(GOOD)), cut=st.integers(0, 40), put=st.binary(max_size=6))
def test_any_damage_is_read_or_refused(tmp_path_factory, at: int, cut: int, put: bytes) -> None:
    path = tmp_path_factory.mktemp("damage") / "rank-0.json"
    path.write_bytes(GOOD[:at] + put + GOOD[at + cut:])
    try:
        loaded = load(path)
    except trace.TraceError as error:
        assert "rank-0.json" in str(error)
        return
    trace.diagnose(loaded)


@settings(max_examples=100, deadline=None)
@given(at=st.integers(GOOD.index(b'"traceEvents"') + 40, len(GOOD) - 5))
def test_a_cut_file_never_loses_a_whole_event(at: int) -> None:
    document = parse(Source("rank-0.json", GOOD[:at]))
    # In indented JSON only an event ends at this depth.
    whole = GOOD[:at].count(b"\n  }")
    assert len(document.events) == whole and document.truncated
    assert document.distributed == {"rank": 2}
