"""The learner's pieces on real ranks: right ones equal DDP, wrong ones give a sentence or a difference, none hangs."""

from __future__ import annotations

import os
import time

import pytest

from course_lib import overlap
from course_lib.lab import LabError
from course_lib.lab.registry import find
from course_lib.lab.workbench.buckets import OwnRunFailed, ddp_layout, own_run
from course_lib.launch import Fabric
from course_lib.link_cost import LinkCost
from course_lib.tune import Load

LINK = LinkCost(0.001, 4e-9)
SMALL = Load("equal", layers=6, gradient_mb=0.375, forward_ms=3.0, backward_ms=6.0, r=1.0, link=LINK)
CAP_MB = 0.125
"""Two layers a bucket, three buckets."""


def source(number: str, name: str) -> str:
    return next(planted.source for planted in find(number).planted if planted.name == name)


def assign_buckets(sizes_bytes, cap_bytes):
    buckets, held = [[]], 0
    for index, size in reversed(sizes_bytes):
        buckets[-1].append(index)
        held += size
        if held >= cap_bytes:
            buckets.append([])
            held = 0
    return [bucket for bucket in buckets if bucket]


def pieces() -> tuple[type, type]:
    """The classes of 4.2 and 4.3: the given parts of a planted cell, with a right `finish`."""
    space: dict = {"__name__": "planted"}
    exec(source("4.3", "not_reset") + FINISH, space)
    return space["Reducer"], space["CompleteReducer"]


FINISH = """

    def finish(self):
        while self.next_bucket < len(self.buckets):
            self.handles.append(self.wire.launch(self.next_bucket))
            self.next_bucket += 1
        for handle in self.handles:
            handle.wait()
        for index, view in self.wire.views.items():
            self.params[index].grad = view / self.wire.ranks
        for flat in self.wire.flat:
            flat.zero_()
        self.__init__(self.buckets, self.uses, self.wire, self.params)
"""
Reducer, CompleteReducer = pieces()


def small_run(reducer: type = CompleteReducer, assign=assign_buckets, load: Load = SMALL, **options):
    options = {"fabric": "loopback", "steps": 2, "ranks": 2} | options
    return own_run(load, assign, reducer, CAP_MB, **options)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_right_pieces_have_the_gradients_of_ddp(ranks: int) -> None:
    own = small_run(ranks=ranks, micro_steps=2)
    assert own.from_reference < 1e-6 and own.from_ddp < 1e-6
    assert own.buckets == ((5, 4), (3, 2), (1, 0)) and own.bucket_mb == (0.125, 0.125, 0.125)
    assert len(own.seconds) == 2 and min(own.seconds) >= 0.015
    assert not own.waits_in_backward and "3 buckets" in own.sentence


def test_the_class_of_4_2_is_finished_for_the_learner() -> None:
    own = small_run(Reducer, finish=False)
    assert own.from_reference == own.from_ddp == 0


def test_the_timeline_has_every_bucket_of_every_rank_and_step() -> None:
    line = small_run().timeline
    assert line.ranks == [0, 1] and line.steps == [0, 1]
    for kind in ("comm", "fill"):
        seen = [(s.rank, s.step, s.bucket) for s in line.select(kind=kind)]
        assert sorted(seen) == [(r, step, b) for r in (0, 1) for step in (0, 1) for b in (0, 1, 2)]
    assert "emulated device" in line.provenance


def paced(**options):
    """Slow enough a wire that what is hidden can be seen: 128 KB take 9 ms, two layers of backward 20 ms."""
    slow = Load("equal", 6, 0.375, 30.0, 60.0, 0.3, LinkCost(0.001, 8e-9))
    return small_run(load=slow, fabric=Fabric("paced", gbit=0.125, latency_us=500), steps=3, **options)


def hidden(own) -> float:
    rows = overlap.report(own.timeline).rows
    return sum(row.hidden for row in rows) / sum(row.comm for row in rows)


@pytest.mark.timing
def test_the_order_of_the_buckets_decides_what_is_hidden() -> None:
    reverse, forward = paced(), paced(order="forward")
    assert forward.buckets == ((0, 1), (2, 3), (4, 5)) and forward.bucket_mb == reverse.bucket_mb
    assert forward.from_reference == forward.from_ddp == 0
    assert hidden(reverse) > 0.5 and hidden(forward) < 0.1
    assert reverse.exposed_s < forward.exposed_s / 2


@pytest.mark.timing
@pytest.mark.parametrize("name", ["waits_at_once", "waits_at_once--for_the_one_before", "launches_late"])
def test_planted_hooks_that_cost_time_show_it(name: str) -> None:
    own = paced(reducer=planted("4.2", name), finish=False)
    assert own.from_reference == 0
    if name == "launches_late":
        assert hidden(own) < 0.1
    else:
        assert own.waits_in_backward == (3 if name == "waits_at_once" else 2) and "stood still" in own.sentence


SENTENCES = {
    ("4.2", "arrival_order"): r"rank \d: on_gradient_ready launched bucket 2 before bucket 0",
    ("4.2", "never_launches"): r"rank \d: on_gradient_ready did not launch buckets 0, 1, 2",
    ("4.2", "once_per_use"): r"on_gradient_ready launched bucket 0 before the gradient of parameter 5 was complete",
    ("4.2", "one_per_call"): r"on_gradient_ready did not launch buckets 1, 2, though every gradient was there",
    ("4.2", "stays_at_the_first"): r"rank \d: on_gradient_ready did not launch buckets 1, 2",
    ("4.3", "forgets_incomplete"): r"rank 1: finish returned, but buckets 0, 1, 2 never left",
    ("4.3", "forgets_incomplete--launches_only_the_next"): r"rank 1: finish returned, but buckets 1, 2 never left",
    ("4.3", "launches_again"): r"rank \d: finish launched bucket 0 a second time",
    ("4.3", "waits_not_for_all"): r"rank \d: finish returned, but nobody waited for buckets 0, 1, 2",
    ("4.3", "waits_not_for_all--only_for_those_of_the_hook"): r"rank 1: finish returned, but nobody waited for buckets",
    ("4.3", "waits_for_the_last"): r"rank \d: finish returned, but nobody waited for buckets 0, 1;",
    ("4.3", "touches_in_flight"): r"rank \d: finish changed bucket 0 between its launch and its wait\(\)",
    ("4.3", "points_into_the_bucket"): r"\.grad of parameter 0 lies in bucket 2",
    ("4.3", "points_into_the_bucket--and_zeroes_it"): r"\.grad of parameter 0 lies in bucket 2",
    ("4.3", "unused_left_out"): r"rank 1: finish returned, but parameter 5 has no \.grad",
    ("4.3", "unused_left_out--trips_over_none"): r"rank 1: finish raised AttributeError: 'NoneType'",
    ("4.3", "not_reset"): r"on_gradient_ready did not launch buckets 0, 1, 2.* does finish put everything back\?",
    ("4.3", "not_reset--forgets_the_uses"): r"did not launch buckets 0, 1, 2.* does finish put",
    ("4.3", "not_reset--keeps_the_handles"): r"finish returned, but nobody waited for",
    ("4.3", "not_reset--hands_out_its_only_copy"): r"did not launch buckets 0, 1, 2.* does finish put",
}
DIFFERENCES = {
    ("4.3", "divides_twice"): 0.5,
    ("4.3", "divides_twice--in_the_loop_over_the_views"): 0.5,
    ("4.3", "never_divides"): 1.0,
    ("4.3", "never_divides--divides_a_copy"): 1.0,
    ("4.3", "not_given_back"): None,
    ("4.3", "keeps_old_gradients"): None,
    ("4.3", "keeps_old_gradients--in_new_tensors"): None,
}
SHOWN_BY_TIME = {("4.2", "waits_at_once"), ("4.2", "waits_at_once--for_the_one_before"), ("4.2", "launches_late")}
HARMLESS_YET = {("4.2", "drops_the_handles"), ("4.2", "drops_the_handles--keeps_the_last")}
"""The check alone sees these: a run of 4.2 waits for the handles itself, and only `finish` would miss them."""


def planted(number: str, name: str) -> type:
    return next(p for p in find(number).planted if p.name == name).answer(find(number).needs)


def options_that_show(number: str, name: str) -> dict:
    """How to run a planted answer so that its fault matters: the hook's need the other order, or two micro-steps."""
    if number == "4.3":
        return {}
    return {"finish": False} | ({"micro_steps": 2} if name == "once_per_use" else {"order": "forward"})


def test_every_planted_answer_is_tried_here() -> None:
    known = {(number, p.name) for number in ("4.2", "4.3") for p in find(number).planted}
    assert known == set(SENTENCES) | set(DIFFERENCES) | SHOWN_BY_TIME | HARMLESS_YET


@pytest.mark.parametrize(("number", "name"), sorted(HARMLESS_YET), ids=str)
def test_what_only_finish_would_miss_runs_right(number: str, name: str) -> None:
    assert small_run(planted(number, name), **options_that_show(number, name)).from_reference == 0


@pytest.mark.parametrize(("number", "name"), SENTENCES, ids=str)
def test_a_planted_answer_fails_with_one_sentence(number: str, name: str) -> None:
    begin = time.monotonic()
    with pytest.raises(OwnRunFailed, match=SENTENCES[number, name]) as caught:
        small_run(planted(number, name), **options_that_show(number, name))
    assert "\n" not in str(caught.value) and time.monotonic() - begin < 20


@pytest.mark.parametrize(("number", "name"), DIFFERENCES, ids=str)
def test_a_planted_answer_shows_a_difference(number: str, name: str) -> None:
    own = small_run(planted(number, name))
    if (expected := DIFFERENCES[number, name]) is not None:
        assert own.from_reference == pytest.approx(expected, rel=1e-5)
        assert own.from_ddp == pytest.approx(expected, rel=1e-5)
    assert own.from_reference > 0.05


def with_finish(body) -> type:
    return type("CompleteReducer", (CompleteReducer,), {"finish": body})


def stub(self):
    raise NotImplementedError("exercise 4.3")


def forever(self):
    while True:
        pass


def only_on_rank_0(self):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(60)
    CompleteReducer.finish(self)


@pytest.mark.timing
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (stub, r"rank \d: finish is not written yet \(exercise 4\.3\)"),
        (forever, r"rank \d: finish was still running after 2 s"),
        (only_on_rank_0, r"rank 1: finish was still running after 2 s"),
        (lambda self: 1 / 0, r"rank \d: finish raised ZeroDivisionError: division by zero in line \d+"),
        (lambda self: exit(), r"rank \d: finish raised SystemExit"),
        (lambda self: os._exit(3), r"rank \d died without a result: exit code 3"),
        (lambda self: self.wire.launch("2"), r"rank \d: finish launched '2'; launch takes the number of a bucket"),
    ],
)
def test_odd_ends_are_sentences_too(body, sentence: str) -> None:
    with pytest.raises(OwnRunFailed, match=sentence):
        small_run(with_finish(body), timeout_s=4)


def test_an_endless_loop_that_no_alarm_ends_is_told_by_the_run() -> None:
    def deaf(self):
        import signal

        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(60)

    with pytest.raises(OwnRunFailed, match=r"The ranks did not come to an end: no result within 4 s") as caught:
        small_run(with_finish(deaf), timeout_s=4)
    assert "rank 1 has finished collective" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("assign", "sentence"),
    [
        (lambda sizes, cap: assign_buckets(sizes, cap)[:-1], r"assign_buckets returned \[\[5, 4\], \[3, 2\]\]"),
        (lambda sizes, cap: [i for i, _ in sizes], r"not a list of lists of ids"),
        (lambda sizes, cap: None, r"returned None, not a list of lists of ids"),
        (lambda sizes, cap: [*assign_buckets(sizes, cap), []], r"no bucket is empty"),
        (lambda sizes, cap: sizes[9], r"rank \d: assign_buckets raised IndexError"),
    ],
)
def test_wrong_buckets_are_refused(assign, sentence: str) -> None:
    with pytest.raises(OwnRunFailed, match=sentence):
        small_run(assign=assign)


def test_buckets_that_differ_between_ranks_are_refused() -> None:
    def by_rank(sizes, cap):
        import torch.distributed as dist

        return assign_buckets(sizes, cap * (1 + dist.get_rank()))

    with pytest.raises(OwnRunFailed, match=r"rank 1: assign_buckets returned .* all ranks need the same buckets"):
        small_run(assign=by_rank)


def test_what_cannot_be_run_is_refused_before_it_starts() -> None:
    with pytest.raises(LabError, match=r"Reducer has no method `finish`"):
        small_run(Reducer)
    with pytest.raises(LabError, match=r'choose "reverse" or "forward"'):
        small_run(order="sideways")
    with pytest.raises(LabError, match=r"takes no 'bucket_size'"):
        ddp_layout(SMALL, bucket_size=3)


def sixty_layers():
    from torch import nn

    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(60)))


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({}, [[60.12], [1.0, 25.05, 25.05, 9.02], [1.0, 25.05, 25.05, 9.02]]),
        ({"bucket_cap_mb": 25}, [[60.12], [25.05, 25.05, 10.02], [25.05, 25.05, 10.02]]),
        ({"static_graph": True}, [[60.12], [60.12], [1.0, 25.05, 25.05, 9.02]]),
    ],
)
def test_the_layout_of_stock_ddp(options: dict, layout: list) -> None:
    assert ddp_layout(sixty_layers, **options) == layout


def test_the_layout_of_a_load_takes_no_device_time() -> None:
    slow = Load("equal", 4, 4.0, 20_000.0, 40_000.0, 1.0, LINK)
    assert ddp_layout(slow, bucket_cap_mb=2, iterations=2) == [[4.0], [2.0, 2.0]]
