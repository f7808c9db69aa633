"""Files as people have them: bad escapes, cut, packed, or no trace at all. Numbers refer to `cases/traces.md`."""

from __future__ import annotations

import gzip
import json
import os
import threading
import zipfile
from pathlib import Path

import pytest
from trace_samples import event, kernel, launch, one_step, step

from course_lib import overlap, trace
from course_lib.trace.events import nanoseconds


def codes(loaded: trace.Trace) -> dict[str, int]:
    return {note.code: note.count for _, note in loaded.notes}


def clean(write) -> overlap.Row:
    return trace.measure(trace.load(write(one_step(), "clean_0.json"))).pooled


def test_a_good_file_has_nothing_to_say(write) -> None:
    loaded = trace.load(write(one_step()))
    row = trace.measure(loaded).pooled
    assert codes(loaded) == {"undescribed": 1}
    assert (row.span, row.compute, row.comm, row.hidden, row.exposed) == (700_000, 400_000, 400_000, 200_000, 200_000)


def test_1_windows_paths(write) -> None:
    text = json.dumps({"traceEvents": [event("python_function", "PATH", 0, 5), *one_step()]})
    bad = text.replace("PATH", r"C:\Users\me\x.py(3): good\\already \u00e9")
    loaded = trace.load(write(bad))
    assert codes(loaded)["escapes"] == 3
    assert trace.measure(loaded).pooled == clean(write)


def test_2_unescaped_quotes_and_newlines_cost_only_their_events(write) -> None:
    text = json.dumps({"distributedInfo": {"rank": 5}, "traceEvents": [
        event("python_function", "QUOTE", 0, 5), event("python_function", "LINE", 0, 5), *one_step()]}, indent=1)
    loaded = trace.load(write(text.replace("QUOTE", '<lambda> "x"').replace("LINE", "a\nb")))
    assert codes(loaded)["lost-events"] == 1
    assert loaded.timeline.ranks == [5]
    assert trace.measure(loaded).pooled.hidden == 200_000


@pytest.mark.parametrize("value", ["inf", "-inf", "Infinity", "NaN", "nan", "N/A"])
def test_4_5_values_that_are_not_json(write, value: str) -> None:
    text = json.dumps({"traceEvents": [*one_step(), kernel("k", 900, 1, 99, bandwidth="V")]}).replace('"V"', value)
    loaded = trace.load(write(text))
    assert codes(loaded)["values"] == 1
    assert trace.measure(loaded).pooled.compute == 401_000


def test_4_but_never_as_a_time(write) -> None:
    text = json.dumps({"traceEvents": [*one_step(), kernel("k", 900, "V", 99)]}).replace('"V"', "inf")
    loaded = trace.load(write(text))
    assert codes(loaded)["bad-time"] == 1
    assert trace.measure(loaded).pooled == clean(write)


def test_7_a_trailing_comma(write) -> None:
    text = json.dumps({"traceEvents": one_step()})
    loaded = trace.load(write(text[:-2] + ",]}"))
    assert codes(loaded)["comma"] == 1
    assert trace.measure(loaded).pooled == clean(write)


@pytest.mark.parametrize("indent", [None, 2])
def test_7_a_cut_file_keeps_whole_events_and_drops_the_cut_step(write, indent: int | None) -> None:
    second = one_step(2000)
    second[0]["name"] = "ProfilerStep#2"
    text = json.dumps({"distributedInfo": {"rank": 3}, "traceEvents": one_step() + second}, indent=indent)
    loaded = trace.load(write(text[:-40]))
    found = codes(loaded)
    assert found["truncated"] == 1 and found["lost-events"] == 1 and found["dropped-step"] == 1
    assert loaded.timeline.steps == [1] and loaded.timeline.ranks == [3]
    assert trace.measure(loaded).pooled.hidden == 200_000


def test_7_a_cut_gzip_file(write, tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps({"traceEvents": [e for i in range(300) for e in one_step(2000 * i)]}).encode())
    path = tmp_path / "rank-0.json.gz"
    path.write_bytes(packed[:-100])
    assert "cut-gzip" in codes(trace.load(path))
    path.write_bytes(packed[:-4])
    loaded = trace.load(path)
    assert "cut-gzip" in codes(loaded) and len(loaded.timeline.steps) == 300, "only the checksum is gone, no event"


def test_a_gzip_file_of_several_members(write, tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": one_step()}).encode()
    members = gzip.compress(text[:300]) + gzip.compress(text[300:])
    for tail in (b"", b"\0" * 50, b"padding"):
        (tmp_path / "rank-0.json.gz").write_bytes(members + tail)
        loaded = trace.load(tmp_path / "rank-0.json.gz")
        assert trace.measure(loaded).pooled == clean(write) and "cut-gzip" not in codes(loaded)


def test_8_the_list_of_the_old_profiler(write) -> None:
    events = [{"name": "mul", "ph": "X", "ts": 1.5, "dur": 10, "tid": 1, "pid": "CPU functions", "args": {}}]
    loaded = trace.load(write(json.dumps(events)))
    assert {"legacy", "no-device-events"} <= codes(loaded).keys()
    assert trace.measure(loaded).pooled.comm is None


def test_9_10_kernels_without_time_and_with_a_negative_one(write) -> None:
    loaded = trace.load(write([*one_step(), kernel("k", 0, 0, 50), kernel("k", 600, -600, 51)]))
    assert codes(loaded)["empty-kernel"] == 1 and codes(loaded)["negative-duration"] == 1
    assert trace.measure(loaded).pooled == clean(write)


def test_11_marks_with_huge_times_are_not_work(write) -> None:
    marks = [{"ph": "i", "name": "Record Window End", "ts": 9e15, "pid": "", "tid": "", "s": "g"},
             {"ph": "M", "name": "process_name", "ts": 9e15, "pid": 1, "tid": 0, "args": {"name": "python"}}]
    loaded = trace.load(write([*one_step(), *marks]))
    assert trace.measure(loaded).pooled == clean(write)
    assert max(s.stop for s in loaded.timeline) == 1_000_000


@pytest.mark.parametrize(("microseconds", "ns"), [
    (12, 12_000), (0.001, 1), (4458677009853.422, 4458677009853422), ("1712195495519689.047", 1712195495519689047),
    (1712195495519689.25, 1712195495519689250), (-1.5, -1500), (True, None), ("x", None), (None, None),
    (float("inf"), None), (float("nan"), None), ("nan", None), (1e300, None), (10**40, None), ([1], None)])
def test_13_14_times_are_whole_nanoseconds(microseconds: object, ns: int | None) -> None:
    assert nanoseconds(microseconds) == ns


def test_14_a_copy_shifted_to_absolute_time_gives_the_same_numbers(write) -> None:
    events = one_step(0.007)
    shifted = json.dumps({"traceEvents": events})
    for e in events:
        whole, fraction = f"{e['ts']:.3f}".split(".")
        shifted = shifted.replace(f'"ts": {e["ts"]}', f'"ts": {1712195495000000 + int(whole)}.{fraction}', 1)
    near, far = (trace.read(write(content, f"r_{i}.json")) for i, content in enumerate((events, shifted)))
    assert [s[1:] for s in near] == [s[1:] for s in far]


def test_16_ranks_of_two_bases_are_aligned(write, tmp_path: Path) -> None:
    base, later = 1711964646000000000, 1719853884000000000
    gap = (later - base) // 1000
    write(one_step(gap + 100), "run/rank-0.json", baseTimeNanoseconds=base)
    write(one_step(100), "run/rank-1.json", baseTimeNanoseconds=later)
    timeline = trace.read(tmp_path / "run")
    assert [s.start for s in timeline if s.kind == "step"] == [0, 0]


def test_30_ranks_from_the_file_the_name_and_the_place(write, tmp_path: Path) -> None:
    write(one_step(), "a/x.json", distributedInfo={"rank": 7})
    write(one_step(), "a/worker2.1623143089861.pt.trace.json")
    assert trace.read(tmp_path / "a").ranks == [2, 7]
    write(one_step(), "b/host_a.json")
    write(one_step(), "b/host_b.json")
    assert trace.read(tmp_path / "b").ranks == [0, 1]
    for rank in (2, 10):
        write(one_step(), f"c/megatron_kineto_{rank}.json")
    assert trace.read(tmp_path / "c").ranks == [2, 10]
    for rank in (3, 5):
        write(one_step(), f"d/gpu8-worker1_rank{rank}.json")
    assert trace.read(tmp_path / "d").ranks == [3, 5]


def test_31_two_files_of_one_rank(write, tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        write(one_step(), f"run/{name}", distributedInfo={"rank": 1, "world_size": 2})
    loaded = trace.load(tmp_path / "run")
    assert loaded.timeline.ranks == [1, 2] and codes(loaded)["duplicate-rank"] == 1


@pytest.mark.parametrize("events", [[], [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {}}]])
def test_33_metadata_only(write, events: list) -> None:
    loaded = trace.load(write(events))
    assert codes(loaded) == {"no-events": 1}
    row = trace.measure(loaded).pooled
    assert row.comm is None and row.sentence.startswith("Cannot know")
    assert [f.code for f in trace.diagnose(loaded)] == ["no-events"]


def test_packed_files_and_folders(write, tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": one_step()})
    (tmp_path / "rank-0.json.gz").write_bytes(gzip.compress(text.encode()))
    with zipfile.ZipFile(tmp_path / "rank.zip", "w") as archive:
        archive.writestr("run/rank-1.json", text)
        archive.writestr("run/rank-2.json.gz", gzip.compress(text.encode()))
        archive.writestr("__MACOSX/run/rank-3.json", "")
    assert trace.read(tmp_path / "rank-0.json.gz").ranks == [0]
    assert trace.read(tmp_path / "rank.zip").ranks == [1, 2]
    assert trace.read(tmp_path).ranks == [0, 1, 2]


def test_what_is_no_trace_beside_one_that_is(write, tmp_path: Path) -> None:
    write(one_step(), "run/rank-0.json")
    write("{}", "run/settings.json")
    loaded = trace.load(tmp_path / "run")
    assert codes(loaded)["refused"] == 1 and loaded.timeline.ranks == [0]


@pytest.mark.parametrize(("content", "words"), [
    ("", "is empty"), ("  \n", "is empty"), ("{}", "nothing in it"), ("[1, 2]", "not of trace events"),
    ("3", "not JSON"), ("hello", "not JSON"), ('{"schema": "1.0.1", "nodes": []}', "PyTorch execution trace"),
    ('{"workload_graph": []}', "Chakra"), ('{"traceEvents": 3}', "not a Chrome trace"),
    (b"\x00\x01\x02\xff\xfe", "not JSON"), (b"\x1f\x8b\x08nonsense", "cannot be unpacked")])
def test_refusals_say_what_the_file_is(write, content: str | bytes, words: str) -> None:
    with pytest.raises(trace.TraceError, match=words):
        trace.read(write(content))


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(trace.TraceError, match="does not exist"):
        trace.read(tmp_path / "none.json")
    with pytest.raises(trace.TraceError, match="holds no"):
        trace.read(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"\x80\x02")
    with pytest.raises(trace.TraceError, match="no trace file"):
        trace.read(tmp_path / "model.pt")


def damaged(archive: bytes, what: str) -> bytes:
    """A .zip of one member with a mistake in its first header and in the directory's copy of it."""
    spoilt, entry = bytearray(archive), archive.find(b"PK\x01\x02")
    if what == "data":
        spoilt[60] ^= 0xFF
    elif what == "encrypted":
        spoilt[6] |= 1
        spoilt[entry + 8] |= 1
    elif what == "method":
        spoilt[8] = spoilt[entry + 10] = 99
    return bytes(spoilt[:len(archive) // 2] if what == "cut" else spoilt)


@pytest.mark.parametrize("what", ["data", "encrypted", "method", "cut"])
def test_an_archive_that_cannot_be_unpacked_costs_only_itself(write, tmp_path: Path, what: str) -> None:
    with zipfile.ZipFile(tmp_path / "whole.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rank-1.json", json.dumps({"traceEvents": one_step()}))
    bad = write(damaged((tmp_path / "whole.zip").read_bytes(), what), "run/a.zip")
    with pytest.raises(trace.TraceError, match=r"a\.zip.*cannot be unpacked"):
        trace.load(bad)
    write(one_step(), "run/rank-0.json")
    write(gzip.compress(json.dumps({"traceEvents": one_step()}).encode())[:-8] + bytes(8), "run/rank-2.json.gz")
    loaded = trace.load(tmp_path / "run")
    assert loaded.timeline.ranks == [0] and codes(loaded)["refused"] == 1
    assert sum(note.code == "refused" for _, note in loaded.notes) == 2


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """`course trace <(zcat …)`: a name without an ending, and nothing left for whoever opens it twice."""
    pipe = tmp_path / "63"
    os.mkfifo(pipe)
    packed = gzip.compress(json.dumps({"traceEvents": one_step()}).encode())
    writer = threading.Thread(target=pipe.write_bytes, args=(packed,), daemon=True)
    writer.start()
    assert len(trace.read(pipe)) > 0
    writer.join(10)


def test_a_file_given_twice_is_one_rank(write) -> None:
    path = write(one_step(), "a.json")
    assert len(trace.load(path, path).ranks) == 1


@pytest.mark.parametrize("far", [9.5e15, 9_500_000_000_000_000, -9.5e15, "9500000000000000", 10**30])
def test_a_time_that_cannot_be_is_left_out_and_the_rest_measured(write, far: object) -> None:
    """Times so far apart that their distance would not fit into 64 bits."""
    odd = [kernel("k", far, 1, 50), kernel("k", 600, far, 51), event("overhead", "o", far, 1)]
    loaded = trace.load(write([*one_step(), *odd]))
    assert codes(loaded)["bad-time"] + codes(loaded).get("negative-duration", 0) == 3
    assert trace.measure(loaded).pooled == clean(write)


def test_where_all_events_are_bad_no_schedule_is_blamed(write) -> None:
    loaded = trace.load(write([{k: v for k, v in e.items() if k != "dur"} for e in one_step()]))
    (said,) = (note.text for _, note in loaded.notes if note.code == "no-events")
    assert "could not be used" in said and "prof.step()" not in said


def test_nesting_without_end_is_damage(write) -> None:
    loaded = trace.load(write('{"traceEvents":[{"ph":"X","name":"a","args":' + '{"a":' * 20_000))
    assert codes(loaded)["lost-events"] == 1


def test_ranks_and_bases_that_are_written_as_text(write, tmp_path: Path) -> None:
    write(one_step(), "run/a.json", distributedInfo={"rank": "3", "world_size": "2"}, baseTimeNanoseconds="0")
    write(one_step(), "run/b.json", distributedInfo={"rank": 5.0}, baseTimeNanoseconds="1000000")
    loaded = trace.load(tmp_path / "run")
    assert [r.rank for r in loaded.ranks] == [3, 5]
    first = [min(s.start for s in loaded.timeline.select(rank=r)) for r in (3, 5)]
    assert first[1] - first[0] == 1_000_000


def test_odd_events_never_stop_the_reading(write) -> None:
    odd = [None, 3, [], "x", {"ph": "X"}, {"ph": "X", "cat": "kernel"}, {"ph": "X", "cat": ["kernel"], "ts": 1},
           event("kernel", "k", 1, 1) | {"args": None}, event("kernel", "k", 1, 1) | {"name": None},
           launch("seven", 3), step(1, 0, -5), {"ph": "B", "cat": "kernel", "ts": 1}]
    assert len(trace.read(write([*odd, *one_step()]))) > 0
