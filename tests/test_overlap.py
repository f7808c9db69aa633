"""Every formula of the report against numbers computed by hand."""

import statistics

import pytest

from course_lib.overlap import report
from course_lib.timeline import Span, Timeline


def step(start: int, stop: int, *, rank: int = 0, number: int = 0) -> Span:
    return Span(rank, "step", "step", f"step {number}", start, stop, step=number)


def work(kind: str, start: int, stop: int, *, rank: int = 0, number: int = 0, bucket: int = -1, lane: str = "",
         name: str = "", bytes: int = -1) -> Span:
    lane = lane or ("wire" if kind in ("comm", "queue") else "device")
    return Span(rank, kind, lane, name or kind, start, stop, bytes, bucket, number)


def measure(*spans: Span, warmup: int = 0):
    return report(Timeline.of(spans, "simulated"), warmup=warmup)


def test_one_step_by_hand():
    # C = [10,40) ∪ [50,60) (two spans overlap), M = [30,80), P = [55,70) ∪ [81,83), memset [80,85).
    got = measure(step(0, 200), work("compute", 10, 30), work("compute", 20, 40), work("compute", 50, 60),
                  work("comm", 30, 65), work("comm", 60, 80, name="other"), work("copy", 55, 70),
                  work("copy", 81, 83), work("memset", 80, 85), work("host", 90, 190))
    row = got.pooled
    assert (row.span, row.compute, row.comm, row.copy, row.memset) == (85, 40, 50, 17, 5)
    assert row.hidden == 20  # [30,40) and [50,60)
    assert row.exposed == 30  # [40,50) and [60,80)
    assert row.exposed_beyond_copies == 20  # [60,70) is under the copy
    assert row.active == 72  # [10,80) and [81,83)
    assert row.overlap == 20 / 50 and row.share == 50 / 85
    assert row.busy == 72 / 85 and row.compute_busy == 40 / 85
    assert row.sentence == "40% of 0.00005 ms of communication were hidden under compute, 0.00003 ms exposed."
    assert got.provenance == "simulated"


def test_no_communication_is_not_zero_exposed():
    row = measure(step(0, 10), work("compute", 0, 10)).pooled
    assert (row.comm, row.share) == (0, 0.0)
    assert row.exposed is row.exposed_beyond_copies is row.hidden is row.overlap is None
    assert row.sentence == "No communication happened, so there was nothing to hide."


def test_without_device_work_nothing_can_be_known():
    row = measure(step(0, 10), work("host", 2, 5)).pooled
    assert row.span == 10  # the host's own step; there is nothing better
    assert row.comm is row.compute is row.exposed is row.hidden is row.share is row.busy is row.compute_busy is None
    assert row.sentence.startswith("Cannot know what communication cost")


def test_a_launch_without_a_transfer_is_unknown_not_absent():
    row = measure(step(0, 10), work("compute", 0, 5), work("queue", 3, 4, bucket=0)).pooled
    assert row.comm is None and row.exposed is None and row.compute == 5
    assert row.sentence.startswith("Cannot know")


def test_communication_without_recorded_compute_cannot_be_called_exposed():
    row = measure(step(0, 10), work("comm", 1, 5)).pooled
    assert row.comm == 4 and row.span == 10 and row.share == .4
    assert row.compute is row.exposed is row.hidden is row.overlap is row.busy is None
    assert "Cannot know how much of 0.000004 ms" in row.sentence


def test_zero_hidden_is_a_measurement():
    row = measure(step(0, 3_000_000), work("compute", 0, 1_000_000), work("comm", 1_000_000, 3_000_000)).pooled
    assert (row.hidden, row.overlap, row.exposed) == (0, 0.0, 2_000_000)
    assert row.sentence == "0 % hidden: all 2 ms of communication were exposed."


def test_all_hidden_is_a_measurement():
    row = measure(step(0, 10), work("compute", 0, 10), work("comm", 2, 6)).pooled
    assert (row.hidden, row.overlap, row.exposed, row.exposed_beyond_copies) == (4, 1.0, 0, 0)


def test_spans_of_no_length_count_for_nothing_but_happened():
    row = measure(step(0, 10), work("compute", 0, 8), work("compute", 9, 9), work("comm", 5, 5)).pooled
    assert (row.span, row.compute, row.comm, row.hidden, row.exposed) == (9, 8, 0, 0, 0)
    assert row.overlap is None
    assert row.sentence == "Communication took no measurable time, so there was nothing to hide."


def test_a_step_of_no_length_has_no_shares():
    row = measure(step(5, 5), work("compute", 5, 5)).pooled
    assert row.span == 0 and row.share is row.busy is row.compute_busy is None


def test_work_dated_back_before_the_step_is_cut_at_its_start():
    row = measure(step(10, 50), work("compute", 7, 30), work("compute", 2, 6), work("comm", 20, 40)).pooled
    assert (row.span, row.compute, row.active, row.busy) == (30, 20, 30, 1.0)


def test_communication_in_the_compute_lane_cannot_overlap():
    got = measure(step(0, 10), work("compute", 0, 5, lane="stream 7"), work("comm", 5, 9, lane="stream 7"))
    assert got.pooled.cannot_overlap == "stream 7"
    assert got.sentence.endswith("It runs in the compute lane 'stream 7', where it cannot overlap.")
    mixed = measure(step(0, 10), work("compute", 0, 5, lane="stream 7"), work("comm", 5, 9, lane="stream 7"),
                    work("comm", 5, 9, lane="stream 20"))
    assert mixed.pooled.cannot_overlap is None


def test_steps_and_ranks_are_kept_and_pooled():
    got = measure(
        step(0, 100), work("compute", 0, 60), work("comm", 50, 80),
        step(100, 200, number=1), work("compute", 100, 195, number=1),  # no communication in this step
        step(0, 100, rank=1), work("compute", 0, 70, rank=1), work("comm", 60, 90, rank=1),
        step(100, 200, rank=1, number=1), work("compute", 100, 190, rank=1, number=1))
    assert [(r.rank, r.step, r.span, r.exposed) for r in got.rows] == [
        (0, 0, 80, 20), (0, 1, 95, None), (1, 0, 90, 20), (1, 1, 90, None)]
    assert [(r.rank, r.step, r.steps, r.span, r.comm, r.exposed) for r in got.ranks] == [
        (0, None, 2, 175, 30, 20), (1, None, 2, 180, 30, 20)]
    pooled = got.pooled
    assert (pooled.rank, pooled.steps, pooled.span, pooled.compute, pooled.comm) == (None, 4, 355, 315, 60)
    assert (pooled.hidden, pooled.exposed, pooled.share) == (20, 40, 60 / 355)
    assert got.step_times == (90, 95)  # the slowest rank: 1, then 0
    assert got.step_time == 92.5


def test_coefficient_of_variation():
    spans = []
    for k, ns in enumerate((90, 100, 110)):
        spans += [step(1000 * k, 1000 * k + ns, number=k), work("compute", 1000 * k, 1000 * k + ns, number=k)]
    got = measure(*spans)
    assert got.step_times == (90, 100, 110)
    assert got.variation == pytest.approx(.1) == statistics.stdev((90, 100, 110)) / 100
    assert measure(*spans, warmup=2).variation is None
    assert measure(*spans, warmup=1).step_times == (100, 110)


def test_rows_that_cannot_know_do_not_dilute_the_pool():
    got = measure(step(0, 100), work("compute", 0, 60), work("comm", 50, 100), step(100, 200, number=1))
    assert got.rows[1].comm is None
    assert (got.pooled.steps, got.pooled.span, got.pooled.share) == (1, 100, .5)


def test_compute_of_the_next_step_hides_too():
    # A reduction delayed by one update: step 0's communication runs under step 1's compute.
    got = measure(step(0, 10), work("compute", 0, 10), work("comm", 10, 18), step(10, 20, number=1),
                  work("compute", 10, 16, number=1))
    row = got.rows[0]
    assert (row.hidden, row.exposed, row.compute, row.span) == (6, 2, 10, 18)


def test_spans_without_a_number_belong_to_the_step_they_start_in():
    got = measure(step(0, 10), step(10, 20, number=1), work("compute", 2, 12, number=-1),
                  work("compute", 10, 14, number=-1), work("compute", 25, 30, number=-1))
    assert [r.compute for r in got.rows] == [10, 4]


def test_without_step_marks_all_is_one_step():
    got = measure(work("compute", 100, 160, number=-1), work("comm", 150, 190, number=-1))
    assert [(r.step, r.span, r.exposed) for r in got.rows] == [(-1, 90, 30)]


def test_buckets_by_hand():
    got = measure(
        step(0, 200), work("compute", 0, 100),
        work("fill", 10, 30, bucket=0, bytes=64), work("queue", 31, 33, bucket=0),
        work("comm", 33, 70, bucket=0, bytes=64),
        # launched (by a host that runs ahead) before its last gradient was ready: queueing counts from the gradient
        work("fill", 40, 90, bucket=1), work("queue", 50, 95, bucket=1), work("comm", 95, 130, bucket=1, bytes=128))
    first, second = got.buckets
    assert (first.rank, first.step, first.bucket, first.use) == (0, 0, 0, 0)
    assert (first.first_ready, first.full, first.launched, first.started, first.finished) == (10, 30, 31, 33, 70)
    assert (first.bytes, first.exposed, first.queueing) == (64, 0, 2)
    assert (second.first_ready, second.full, second.launched, second.started, second.finished) == (40, 90, 50, 95, 130)
    assert (second.bytes, second.exposed, second.queueing) == (128, 30, 5)


def test_a_bucket_that_travels_twice_has_two_rows():
    got = measure(
        step(0, 100), work("compute", 0, 20),
        work("fill", 0, 5, bucket=0), work("fill", 10, 15, bucket=0),
        work("comm", 5, 9, bucket=0, bytes=8), work("comm", 9, 12, bucket=0, bytes=8),  # two collectives a use
        work("comm", 15, 20, bucket=0, bytes=8), work("comm", 20, 24, bucket=0, bytes=8))
    assert [(b.use, b.full, b.started, b.finished, b.bytes, b.exposed, b.queueing) for b in got.buckets] == [
        (0, 5, 5, 12, 16, 0, 0), (1, 15, 15, 24, 16, 4, 0)]


def test_a_transfer_that_started_at_once_was_launched_then():
    got = measure(step(0, 100), work("compute", 0, 90),
                  work("fill", 0, 5, bucket=0), work("comm", 6, 10, bucket=0),  # the wire was idle: no queue
                  work("fill", 5, 7, bucket=0), work("queue", 8, 10, bucket=0), work("comm", 10, 20, bucket=0))
    assert [(b.use, b.launched, b.started, b.queueing) for b in got.buckets] == [(0, 6, 6, 0), (1, 8, 10, 2)]
    stuck = measure(step(0, 100), work("compute", 0, 90), work("fill", 0, 5, bucket=0), work("queue", 6, 9, bucket=0))
    assert (stuck.buckets[0].launched, stuck.buckets[0].started, stuck.buckets[0].queueing) == (6, None, None)


def test_bucket_rows_without_all_of_their_spans():
    only_comm, only_fill, uneven = measure(
        step(0, 100), work("compute", 0, 20), work("comm", 10, 30, bucket=0), work("fill", 1, 2, bucket=1),
        work("fill", 3, 4, bucket=2), work("fill", 5, 6, bucket=2), work("comm", 7, 9, bucket=2)).buckets
    assert (only_comm.first_ready, only_comm.launched, only_comm.queueing, only_comm.bytes) == (None, None, None, None)
    assert (only_comm.started, only_comm.exposed) == (10, 10)
    assert (only_fill.full, only_fill.started, only_fill.finished, only_fill.exposed) == (2, None, None, None)
    assert (uneven.first_ready, uneven.full, uneven.started, uneven.queueing) == (3, 6, 7, 1)


def test_wait_and_transfer_apart():
    # Rank 2 comes 50 late to the first all-reduce; all end together. In the second everyone is there at once.
    spans = []
    for rank, start in enumerate((10, 14, 60)):
        spans += [step(0, 100, rank=rank), work("comm", start, 80, rank=rank, bucket=0),
                  work("comm", 81, 91 + rank, rank=rank, bucket=1)]
    first, second = measure(*spans).collectives
    assert first.wait == ((0, 50), (1, 46), (2, 0)) and first.transfer == 20 and first.late == (2,)
    assert second.wait == ((0, 0), (1, 0), (2, 0)) and second.transfer == 10 and second.late == ()
    got = measure(*spans)
    assert got.wait == 96 and got.late == (2,) and got.sentence.endswith("Late: rank 2.")


def test_two_late_ranks_of_eight_are_both_named():
    arrival = {3: 900, 6: 870}
    spans = [work("comm", arrival.get(rank, 10 * rank), 1000, rank=rank, number=-1) for rank in range(8)]
    assert measure(*spans).late == (3, 6)


def test_jitter_is_nobody_late():
    got = measure(work("comm", 0, 100), work("comm", 9, 100, rank=1))  # 9 waited, 91 transferred
    assert got.wait == 9 and got.collectives[0].late == () and got.late == ()
    assert measure(work("comm", 0, 100), work("comm", 10, 100, rank=1)).late == (1,)


def test_untagged_collectives_match_by_order_within_their_name():
    spans = [work("comm", 0, 10, name="all_gather"), work("comm", 20, 30, name="all_reduce"),
             work("comm", 40, 50, name="all_reduce"),
             work("comm", 3, 10, rank=1, name="all_gather"), work("comm", 20, 30, rank=1, name="all_reduce"),
             work("comm", 44, 50, rank=1, name="all_reduce")]
    got = measure(*spans).collectives
    assert [(c.name, c.sequence, c.wait, c.transfer) for c in got] == [
        ("all_gather", 0, ((0, 3), (1, 0)), 7), ("all_reduce", 0, ((0, 0), (1, 0)), 10),
        ("all_reduce", 1, ((0, 4), (1, 0)), 6)]


def test_what_cannot_be_matched_has_no_wait():
    alone = measure(work("comm", 0, 10)).collectives[0]
    assert alone.wait is None and alone.transfer is None and alone.late == ()
    uneven = measure(work("comm", 0, 10), work("comm", 20, 30), work("comm", 0, 10, rank=1))
    assert [c.wait for c in uneven.collectives] == [None, None] and uneven.wait is None
    pair = measure(work("comm", 0, 10, name="send"), work("comm", 0, 10, rank=1, name="send"))
    assert pair.collectives[0].transfer is None


@pytest.mark.parametrize("name, transfer", [
    ("broadcast", 80), ("nccl:reduce", 80), ("ncclDevKernel_Broadcast", 80),
    ("all_reduce", 4), ("ncclDevKernel_AllReduce_Sum", 4), ("reduce_scatter", 4)])
def test_rooted_transfers_end_at_the_last_receiver(name, transfer):
    # The sender hands over in 4 ns; the receiver, who came 6 later, has it at 86.
    got = measure(work("comm", 0, 4, name=name), work("comm", 6, 86, rank=1, name=name))
    assert got.collectives[0].transfer == transfer


def test_an_empty_timeline_cannot_know():
    got = measure()
    assert got.rows == got.buckets == got.collectives == ()
    assert got.pooled.comm is None and got.step_time is None and got.sentence.startswith("Cannot know")


def test_bad_input():
    spans = step(0, 10), work("compute", 0, 5)
    with pytest.raises(ValueError, match="warmup is -1"):
        measure(*spans, warmup=-1)
    with pytest.raises(ValueError, match="warmup=3 drops all 1 recorded steps"):
        measure(*spans, warmup=3)
    with pytest.raises(ValueError, match="rank 0 has two steps of the same number"):
        measure(*spans, step(20, 30))


def test_many_steps_stay_quick():
    spans = []
    for k in range(400):
        spans.append(step(1000 * k, 1000 * k + 900, number=k))
        for i in range(20):
            spans += [work("compute", 1000 * k + 30 * i, 1000 * k + 30 * i + 20, number=k),
                      work("comm", 1000 * k + 30 * i + 10, 1000 * k + 30 * i + 30, number=k, bucket=i)]
    got = measure(*spans)
    assert got.pooled.exposed == got.pooled.hidden == 400 * 20 * 10
    assert len(got.buckets) == 8000
