"""The static figures: every part of the picture language is really there."""

from __future__ import annotations

import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from show_samples import MS, update

from course_lib.overlap import report
from course_lib.show import Point, curve, figure
from course_lib.show.scene import scene
from course_lib.show.style import LOOKS
from course_lib.timeline import Span, Timeline


def artists(picture, label):
    return [c for axes in picture.axes for c in (*axes.collections, *axes.lines, *axes.containers)
            if c.get_label() == label]


def texts(picture):
    return [t.get_text() for t in (*picture.texts, *(t for axes in picture.axes for t in axes.texts))]


def rgb(colour):
    return matplotlib.colors.to_rgb(colour)


def test_looks_of_measured_bars():
    picture = figure(update(late_ms=14))
    for name in ("compute", "hidden", "exposed"):
        drawn = artists(picture, name)
        assert drawn
        for bars in drawn:
            assert tuple(bars.get_facecolor()[0][:3]) == pytest.approx(rgb(LOOKS[name].fill))
            assert bool(bars.get_hatch()) == (name == "exposed")
    waits = artists(picture, "wait")
    assert waits and all(not len(w.get_facecolor()) or w.get_facecolor()[0][3] == 0 for w in waits)
    assert all(tuple(w.get_edgecolor()[0][:3]) == pytest.approx(rgb(LOOKS["wait"].fill)) for w in waits)


def test_prediction_is_an_outline_above_the_measurement():
    picture = figure(update(), predicted=update(seed=3, provenance="simulated"))
    drawn = artists(picture, "predicted compute")
    assert drawn and not any(len(d.get_facecolor()) and d.get_facecolor()[0][3] for d in drawn)
    assert artists(picture, "predicted exposed")[0].get_hatch()
    top = min(p.vertices[:, 1].min() for p in drawn[0].get_paths())
    below = min(p.vertices[:, 1].min() for p in artists(picture, "compute")[0].get_paths())
    assert top < below, "pixels grow downwards: the outline must come first"


def test_symmetric_prediction_is_drawn_once():
    one = update(ranks=1, provenance="simulated")
    both = Timeline.of((s._replace(rank=r) for s in one for r in (0, 1)), "simulated")
    assert texts(figure(update(), predicted=both)).count("predicted") == 1
    assert texts(figure(update(), predicted=one)).count("predicted") == 1


def test_header_says_the_numbers_of_the_report():
    timeline = update(seed=4)
    pooled = report(timeline).pooled
    picture = figure(timeline, fair=0.49)
    assert f"{pooled.exposed / 2 / MS:.1f} ms" in texts(picture)
    assert f"{100 * pooled.share:.0f} %" in texts(picture)
    assert f"{report(timeline).step_time / MS:.1f} ms" in texts(picture)
    assert "0.49" in texts(picture)


def test_lines_and_provenance():
    picture = figure(update(), limit_ns=118 * MS)
    assert len(artists(picture, "end of backward")) == 2, "one thin line a rank"
    limit, = artists(picture, "physical limit")
    assert limit.is_dashed() and limit.get_xdata()[0] == 118
    assert any("measured (real wires, emulated device)" in t for t in texts(picture))


def test_bucket_numbers_are_in_the_bars():
    assert set(texts(figure(update(buckets=4)))) >= {"0", "1", "2", "3"}


@pytest.mark.parametrize(("ms", "hidden", "numbers"), [(4, False, False), (4, True, True), (6, False, True)])
def test_a_number_on_stripes_needs_room_for_its_plate_and_stripes_beside_it(ms, hidden, numbers):
    """Bars of 22 and of 33 pixels."""
    spans = [Span(0, "compute", "device", "backward", 0, (100 if hidden else 1) * MS)]
    spans += [Span(0, "comm", "wire", "all_reduce", k * ms * MS, (k + 1) * ms * MS, bucket=10 + k) for k in range(1, 4)]
    spans += [Span(0, "comm", "wire", "send", 99 * MS, 100 * MS)]
    assert ({"11", "12", "13"} <= set(texts(figure(Timeline.of(spans, "measured (cpu)"))))) is numbers


def test_a_transfer_that_took_no_time_has_no_number():
    spans = [Span(0, "compute", "device", "backward", 0, 9 * MS),
             Span(0, "comm", "wire", "all_reduce", 4 * MS, 4 * MS, bucket=17)]
    assert "17" not in texts(figure(Timeline.of(spans, "measured (cpu)")))


def test_nothing_sent_is_not_zero_and_not_unknown():
    silent = Timeline.of([Span(0, "compute", "device", "forward", 0, 5 * MS)], "measured (cpu)")
    assert "nothing sent" in texts(figure(silent))
    blind = Timeline.of([Span(0, "comm", "wire", "all_reduce", 0, 5 * MS)], "measured (cpu)")
    assert "unknown" in texts(figure(blind))


def test_the_step_of_median_time_is_drawn():
    spans = []
    for step, took in enumerate((30, 10, 20)):
        spans += [Span(0, "compute", "device", "backward", 100 * step * MS, (100 * step + took) * MS, step=step),
                  Span(0, "step", "step", f"step {step}", 100 * step * MS, (100 * step + took) * MS, step=step)]
    timeline = Timeline.of(spans)
    assert scene(timeline).step == 2 and scene(timeline).step_ns == 20 * MS
    assert scene(timeline, 0).step_ns == 30 * MS
    with pytest.raises(ValueError, match="step 7 is not in this timeline"):
        figure(timeline, step=7)


def test_pieces_add_up_to_the_report():
    timeline = update(ranks=3, late_ms=10, seed=8)
    drawn = scene(timeline)
    for row in report(timeline).rows:
        bars = next(r.bars for r in drawn.rows if r.rank == row.rank and r.role == "wire")
        for look, want in (("exposed", row.exposed), ("hidden", row.hidden)):
            assert sum(p.stop - p.start for b in bars for p in b.pieces if p.look == look) == want


def test_overlapping_spans_get_tracks_of_their_own():
    spans = [Span(0, "comm", f"thread {i}", "gloo:all_reduce", i * MS, (i + 3) * MS) for i in range(8)]
    row = next(r for r in scene(Timeline.of(spans)).rows if r.role == "wire")
    assert row.tracks == 3 and len(row.bars) == 8
    last: dict[int, int] = {}
    for bar in row.bars:
        assert bar.start >= last.get(bar.track, 0)
        last[bar.track] = bar.stop


def test_empty_timeline_is_refused():
    with pytest.raises(ValueError, match="nothing to draw"):
        figure(Timeline.of([]))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [700, 1400])
def test_text_stays_inside_and_apart(width, dark):
    picture = figure(update(late_ms=14), predicted=update(seed=3), limit_ns=118 * MS, title="Title", dark=dark,
                     fair=0.5, width_px=width)
    picture.canvas.draw()
    boxes = [(t, t.get_window_extent()) for t in (*picture.texts, *picture.legends[0].get_texts())]
    for text, box in boxes:
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0, text
    for i, (text, box) in enumerate(boxes):
        assert not any(box.shrunk(0.9, 0.9).overlaps(other.shrunk(0.9, 0.9)) for _, other in boxes[:i]), text


def test_png_is_crisp_and_carries_its_words():
    data, metadata = figure(update())._repr_mimebundle_()
    assert data["image/png"] and "exposed" in data["text/plain"] and "measured" in data["text/plain"]
    assert metadata["image/png"]["width"] == 700


def test_no_global_state(tmp_path):
    code = ("import sys, matplotlib; before = dict(matplotlib.rcParams)\n"
            "from show_samples import update; from course_lib.show import curve, figure\n"
            "figure(update(), dark=True).png(); curve([(1, 2.0), (2, 1.0)]).png()\n"
            f"figure(update()).savefig({str(tmp_path / 'f.svg')!r})\n"
            "assert dict(matplotlib.rcParams) == before \n"
            "from matplotlib import pyplot; assert not pyplot.get_fignums()\n"
            "assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_import_is_light():
    code = ("import sys, course_lib.show\n"
            "assert not {'torch', 'matplotlib', 'anywidget', 'ipywidgets'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_curve_has_line_points_and_levels():
    picture = curve([(1, 30.0), (2, 20.0), (4, 25.0)], [Point(2, 21, 20, 22), (4, 26)], best_ms=18, limit_ms=15,
                    serial_ms=33, provenance="measured (cpu)")
    axes, = picture.axes
    line, = artists(picture, "predicted")
    assert np.allclose(line.get_ydata(), [30, 20, 25])
    assert artists(picture, "measured")
    levels = {w.get_label(): w for w in axes.lines}
    assert levels["_best plan"].get_ydata()[0] == 18 and levels["_physical limit"].is_dashed()
    assert "best plan\n18.0 ms" in texts(picture) and "measured (cpu)" in texts(picture)


def test_curve_refuses_nonsense():
    with pytest.raises(ValueError, match="nothing to draw"):
        curve([])
    with pytest.raises(ValueError, match="above 0 MB"):
        curve([(0, 1.0)])


def test_a_trace_of_many_kernels_is_drawn_quickly():
    spans = [Span(0, "compute", "gpu", "kernel", 10_000 * i, 10_000 * i + 9_000) for i in range(20_000)]
    picture = figure(Timeline.of(spans, "measured (cuda)"))
    assert sum(len(c.get_paths()) for c in artists(picture, "compute")) < 2_000


def test_waiting_is_drawn_on_the_collective_that_waited():
    """Two names in one bucket: the first f16 was waited for, the f32 was not."""
    from course_lib.show.scene import scene
    spans = []
    for rank, late in ((0, 0), (1, 400)):
        spans += [Span(rank, "step", "step", "step 0", 0, 3000, step=0),
                  Span(rank, "compute", "device", "forward", 0, 100, step=0),
                  Span(rank, "comm", "wire", "all_reduce_f32", 200, 900, 8, -1, 0),
                  Span(rank, "comm", "wire", "all_reduce_f16", 1000 + late, 2000, 8, -1, 0)]
    shown = scene(Timeline.of(spans, "simulated"))
    (wire,) = (row for row in shown.rows if row.rank == 0 and row.role == "wire")
    waits = [(p.start, p.stop) for bar in wire.bars for p in bar.pieces if p.look == "wait"]
    assert waits == [(1000, 1400)]
