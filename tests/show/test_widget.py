"""The widget without a browser: Python and JavaScript agree, and every host gets something to show."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from show_samples import MS, profile, update

from course_lib.show import TimelineWidget, explore, words
from course_lib.show import payload as sent
from course_lib.show.export import ESM
from course_lib.show.payload import Setting
from course_lib.show.scene import scene
from course_lib.simulate.buckets import MB, GradientProfile, LinkCost, best_plan, predict, step_serial, uniform_plan
from course_lib.timeline import Span, Timeline

LINK = LinkCost(4e-3, 3.2e-3 / MB)


def javascript(tmp_path: Path, body: str, data: object) -> object:
    """Run `body` in node with the widget's module as `w` and `data` as `d`; returns what it returns."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: JavaScript cannot be compared with Python")
    (tmp_path / "widget.mjs").write_text(ESM.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "run.mjs").write_text(
        'import * as w from "./widget.mjs"; import { readFileSync } from "node:fs";\n'
        'const d = JSON.parse(readFileSync("data.json"));\n'
        f"console.log(JSON.stringify((() => {{ {body} }})()));", encoding="utf-8")
    (tmp_path / "data.json").write_text(json.dumps(data), encoding="utf-8")
    done = subprocess.run([node, "run.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def cases() -> list[tuple[GradientProfile, Setting]]:
    """Random models and settings, among them the awkward: one gradient, ties, no latency, no optimizer."""
    rng, out = random.Random(7), []
    for i in range(60):
        count = rng.choice([1, 2, 7, 40, 120])
        ready = sorted(rng.choice([rng.uniform(0, 0.2), 0.1]) for _ in range(count))
        sizes = [rng.choice([4, 4096, MB, rng.randrange(1, 9 * MB)]) for _ in range(count)]
        one = GradientProfile(tuple(f"p{j}" for j in range(count)), tuple(sizes), tuple(ready), rng.uniform(0.01, 0.1),
                              max(ready) + rng.choice([0, 0.01]), rng.choice([0.0, 0.005]), 1)
        out.append((one, Setting(rng.choice([0.5, 1, 4, 25, 1000]), rng.choice([0.1, 1, 10.0]),
                                 rng.choice([0, 0.1, 4.0]), rng.choice([1, 3, 8]), sent.PLANS[i % 3])))
    return out


def test_python_and_javascript_predict_the_same(tmp_path):
    given = cases()
    ranks = 4
    data = [{"wire_factor": sent.wire_factor(ranks), "at": asdict(at),
             "profile": {"bytes": p.bytes, "ready": p.ready_s, "Tf": p.Tf, "Tb": p.Tb, "To": p.To}} for p, at in given]
    answers = javascript(tmp_path, """return d.map((one) => {
        const link = w.linkOf(one, one.at), ends = w.endsOf(one, one.at, link);
        const p = w.predict(one.profile, link, ends, one.at.micro_steps);
        return { ...p, rows: w.rows(one.profile, p) };
    });""", data)
    for (one, at), answer in zip(given, answers, strict=True):
        want = sent.predicted(one, ranks, at)
        assert tuple(answer["sizes"]) == want.plan.bytes
        assert answer["finish"] == pytest.approx(want.finish_s, rel=1e-12)
        assert answer["step"] == pytest.approx(want.step_s, rel=1e-12)
        assert answer["exposed"] == pytest.approx(want.exposed_s, rel=1e-12, abs=1e-15)
        link, same = sent.link_of(ranks, at), replace(one, N=at.micro_steps)
        assert answer["serial"] == pytest.approx(step_serial(same, link), rel=1e-12)
        assert answer["limit"] == pytest.approx(max(same.Tc, link.cost(same.total_bytes)), rel=1e-12)
        drawn = scene(want.timeline)
        assert answer["share"] == pytest.approx(drawn.share, abs=1e-6)
        check_rows(answer["rows"], [sent.row_dict(row) for row in drawn.rows])


def check_rows(javascript_rows: list[dict], python_rows: list[dict]) -> None:
    """The same lanes with the same bars; times within the nanosecond that rounding takes."""
    for ours, want in zip(javascript_rows, python_rows, strict=True):
        assert (ours["role"], ours["tracks"]) == (want["role"], want["tracks"])
        assert [ours["stop"], ours["backward"]] == pytest.approx([want["stop"], want["backward"]], abs=1)
        assert [b["name"] for b in ours["bars"]] == [b["name"] for b in want["bars"]]
        for bar, other in zip(ours["bars"], want["bars"], strict=True):
            assert (bar["bytes"], bar["bucket"]) == (other["bytes"], other["bucket"])
            looks = [p for p in bar["pieces"] if p[2] - p[1] > 2], [p for p in other["pieces"] if p[2] - p[1] > 2]
            assert [p[0] for p in looks[0]] == [p[0] for p in looks[1]]
            for piece, known in zip(*looks, strict=True):
                assert piece[1:] == pytest.approx(known[1:], abs=1)


def test_known_vectors(tmp_path):
    """By hand: gradients of 1 MB ready every 10 ms, c(S) = 4 ms + 3 ms/MB."""
    one = {"bytes": [MB] * 4, "ready": [0.01, 0.02, 0.03, 0.04], "Tf": 0.02, "Tb": 0.04, "To": 0.005}
    answer = javascript(tmp_path, """return d.caps.map((caps) => {
        const ends = w.cappedEnds(d.one.bytes, caps);
        return [ends, w.predict(d.one, { a: 0.004, beta: 0.003 / 2 ** 20 }, ends, 2).step];
    });""", {"one": one, "caps": [[MB], [2 * MB], [2.5 * MB], [MB, 3 * MB]]})
    assert [ends for ends, _ in answer] == [[1, 2, 3, 4], [2, 4], [3, 4], [1, 4]]
    # 60 + 20 ms before this backward and 5 ms after it; in it the last bucket is ready at 40 ms, but in the third
    # case the wire is busy with 3 MB until 43 ms.
    assert [step for _, step in answer] == pytest.approx([0.132, 0.135, 0.135, 0.138])


def test_fair_score_is_none_where_nothing_can_be_hidden(tmp_path):
    one = {"bytes": [4], "ready": [1.0], "Tf": 1.0, "Tb": 1.0, "To": 0.0}
    assert javascript(tmp_path, "return w.predict(d, { a: 0, beta: 1e-9 }, [1], 1).fair;", one) is None


def test_words_agree(tmp_path):
    times = [0, 999, 123_456, 1_234_567, 12_345_678, 123_456_789, 12_345_678_901]
    sizes = [-1, 0, 4, 2048, MB - 1, MB, 123 * MB]
    assert javascript(tmp_path, "return [d[0].map(w.ms), d[1].map(w.size)];", [times, sizes]) == [
        [words.ms(t) for t in times], [words.size(s) for s in sizes]]


def test_sliders_start_where_the_run_was_measured():
    for ranks in (2, 4):
        one = TimelineWidget(profile(), LINK, ranks=ranks, bucket_mb=3)
        data = one.data
        for name, stops in data["stops"].items():
            assert data["start"][name] in stops and stops == sorted(stops)
        link = sent.link_of(ranks, one.setting)
        assert link.a_s == pytest.approx(LINK.a_s) and link.beta_s_per_byte == pytest.approx(LINK.beta_s_per_byte)
        assert sent.predicted(profile(), ranks, one.setting).step_s == pytest.approx(
            predict(profile(), LINK, uniform_plan(profile(), 3 * MB)).step_s)


def test_best_plan_setting():
    at = replace(TimelineWidget(profile(), LINK).setting, plan="best")
    assert sent.predicted(profile(), 2, at).plan == best_plan(profile(), LINK)


def test_payload_is_plain_json_and_small():
    spans = [Span(0, "compute", "gpu", "kernel", 10_000 * i, 10_000 * i + 9_000) for i in range(20_000)]
    spans.append(Span(0, "comm", "nccl", "all_reduce", 0, 150 * MS, 3 * MB, 0))
    one = TimelineWidget(profile(), LINK, {3: Timeline.of(spans), 6: update()}, [(3, 140, 139, 142)])
    text = json.dumps(one.data, allow_nan=False)
    assert len(text) < 1_000_000, "twenty thousand kernels must be joined to what a screen can show"
    assert json.loads(text)["measured"][0]["rows"]


def test_slivers_between_kernels_do_not_hide_what_is_hidden():
    """Nine tenths of the transfer are hidden: no pixel of it is mostly exposed."""
    spans = [Span(0, "compute", "gpu", "kernel", 10_000 * i, 10_000 * i + 9_000) for i in range(2_000)]
    spans.append(Span(0, "comm", "nccl", "all_reduce", 0, 30 * MS, 3 * MB, 0))
    wire = sent.row_dict(scene(Timeline.of(spans)).rows[1], 30 * MS // sent.PIXELS)
    bar, = wire["bars"]
    assert [p[0] for p in bar["pieces"]] == ["hidden", "exposed"]
    assert bar["pieces"][1][1] == pytest.approx(20 * MS, rel=0.01)


def test_mimebundle_has_a_picture_and_words():
    data, metadata = TimelineWidget(profile(), LINK, update(), title="T")._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"} <= set(data)
    assert data["text/plain"].startswith("Timeline of 2 ranks: step ") and "measured (real wires" in data["text/plain"]
    assert metadata["image/png"]["width"] == 700


def test_export_is_one_file_that_fetches_nothing(tmp_path):
    title = "</script><b>&\u2028"
    page = TimelineWidget(profile(), LINK, update(), title=title).export_html(tmp_path / "t.html").read_text("utf-8")
    assert "default-src 'none'" in page and not re.search(r"https?://|src=\"(?!data:)|href=|@import|url\(", page)
    assert page.count("</script>") == 2 and "<b>" not in page
    state = json.loads(re.search(r'id="state">(.*?)</script>', page, re.DOTALL)[1])
    assert state["data"]["title"] == title and state["plan"] == "equal"


def test_timeline_alone_and_prediction_alone():
    alone = explore(measured=update(ranks=3), limit_ns=100 * MS)
    assert alone.data["profile"] is None and alone.setting is None and alone.picture().words
    only = explore(profile(), LINK)
    assert only.data["measured"] == [] and "simulated" in only.picture().words


@pytest.mark.parametrize(("arguments", "says"), [
    ({}, "nothing to show"),
    ({"profile": profile()}, "both a profile and a link"),
    ({"profile": profile(), "link": LINK, "bucket_mb": 0}, "above 0"),
    ({"profile": profile(), "link": LINK, "ranks": 1}, "at least 2"),
])
def test_bad_arguments_are_named(arguments, says):
    with pytest.raises(ValueError, match=says):
        explore(**arguments)


def without(monkeypatch, *modules):
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("widget", "fallback"):
        monkeypatch.delitem(sys.modules, f"course_lib.show.{name}", raising=False)


def test_without_anywidget_sliders_redraw_an_inline_svg(monkeypatch):
    without(monkeypatch, "anywidget")
    shown = explore(profile(), LINK, update(), bucket_mb=4)
    before = shown.picture.value
    assert "data:image/svg+xml" in before and "Timeline of 2 ranks" in before
    shown.controls["bucket_mb"].value = shown.controls["bucket_mb"].options[0][1]
    assert shown.picture.value != before


def test_without_any_widgets_a_figure_is_shown(monkeypatch):
    without(monkeypatch, "anywidget", "ipywidgets")
    assert explore(profile(), LINK, update()).words.startswith("Timeline of 2 ranks")


def test_works_without_torch():
    code = ("import sys; sys.modules['torch'] = None\n"
            "from show_samples import profile; from course_lib.show import explore\n"
            "from course_lib.simulate.buckets import LinkCost\n"
            "assert explore(profile(), LinkCost(1e-3, 1e-9))._repr_mimebundle_()")
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
