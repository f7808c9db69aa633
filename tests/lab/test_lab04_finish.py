"""Exercise 4.3: right answers of several kinds pass, and odd ones are told what is odd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.lab import CheckFailed, evaluate


class Reducer:
    """What 4.2 asks for, as the hints have it."""

    def __init__(self, buckets, uses, wire):
        self.buckets, self.uses_left, self.wire = buckets, dict(uses), wire
        self.grads_left = [len(bucket) for bucket in buckets]
        self.bucket_of = {index: b for b, bucket in enumerate(buckets) for index in bucket}
        self.next_bucket, self.handles = 0, []

    def on_gradient_ready(self, index):
        self.uses_left[index] -= 1
        if self.uses_left[index]:
            return
        self.grads_left[self.bucket_of[index]] -= 1
        while self.next_bucket < len(self.buckets) and self.grads_left[self.next_bucket] == 0:
            self.launch_next()

    def launch_next(self):
        self.handles.append(self.wire.launch(self.next_bucket))
        self.next_bucket += 1


class Given(Reducer):
    """What the notebook gives above 4.3."""

    def __init__(self, buckets, uses, wire, params):
        super().__init__(buckets, uses, wire)
        self.uses, self.params = dict(uses), params

    def complete(self):
        while self.next_bucket < len(self.buckets):
            self.launch_next()
        for handle in self.handles:
            handle.wait()


class StepByStep(Given):
    def finish(self):
        self.complete()
        for flat in self.wire.flat:
            flat /= self.wire.ranks
        for index, view in self.wire.views.items():
            self.params[index].grad = view.clone()
        for flat in self.wire.flat:
            flat.zero_()
        self.uses_left = dict(self.uses)
        self.grads_left = [len(bucket) for bucket in self.buckets]
        self.next_bucket, self.handles = 0, []


class Short(Given):
    """Divides as it copies, and lets `__init__` do the rest."""

    def finish(self):
        self.complete()
        for index, param in self.params.items():
            param.grad = self.wire.views[index] / self.wire.ranks
            self.wire.views[index].zero_()
        self.__init__(self.buckets, self.uses, self.wire, self.params)


class DividesInTheHook(Given):
    """As DDP does: 1/ranks on the way into the bucket. Copies into a gradient where there is one."""

    def on_gradient_ready(self, index):
        self.wire.views[index].div_(self.wire.ranks)
        super().on_gradient_ready(index)

    def finish(self):
        self.complete()
        for index, param in self.params.items():
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(self.wire.views[index])
        torch._foreach_zero_(self.wire.flat)
        Reducer.__init__(self, self.buckets, self.uses, self.wire)


class OneAfterTheOther:
    """Another design: counts per bucket, no base class, one bucket at a time, polling, slices of the flat tensor."""

    def __init__(self, buckets, uses, wire, params):
        self.start = (buckets, dict(uses), wire, params)
        self.missing = [sum(uses[index] for index in bucket) for bucket in buckets]
        self.works = {}

    def on_gradient_ready(self, index):
        buckets, _, wire, _ = self.start
        self.missing[next(b for b, bucket in enumerate(buckets) if index in bucket)] -= 1
        while len(self.works) < len(buckets) and not self.missing[len(self.works)]:
            self.works[len(self.works)] = wire.launch(len(self.works))

    def finish(self):
        buckets, _, wire, params = self.start
        for b, bucket in enumerate(buckets):
            work = self.works.get(b) or wire.launch(b)
            while not work.is_completed():
                pass
            at = 0
            for index in bucket:
                part = wire.flat[b][at : at + params[index].numel()]
                params[index].grad = part.reshape(params[index].shape).mul(1 / wire.ranks)
                at += params[index].numel()
            wire.flat[b].fill_(0)
        self.__init__(*self.start)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
@pytest.mark.parametrize("answer", [StepByStep, Short, DividesInTheHook, OneAfterTheOther])
def test_the_right_answers_pass_whatever_is_drawn(answer: type, seed: int) -> None:
    result = evaluate("4.3", answer, seed=seed)
    assert result.ok, [row for row in result.rows if not row.ok]


def finishing(body) -> type:
    return type("CompleteReducer", (Given,), {"finish": body})


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (Reducer, "has no method `finish`"),
        (type("CompleteReducer", (), {"finish": lambda self: None}), "has no method `on_gradient_ready`"),
        (type("CompleteReducer", (Reducer,), {"finish": lambda self: None}), "TypeError"),
        (finishing(lambda self: 1 / 0), "finish() after the"),
        (finishing(lambda self: None.wait()), "'NoneType' object has no attribute 'wait'"),
        (finishing(lambda self: self.wire.launch(9)), "launch takes the number of a bucket"),
    ],
)
def test_odd_answers(answer: type, seen: str) -> None:
    result = evaluate("4.3", answer, seed=0)
    assert not result.ok and seen in result.rows[0].seen
    assert not result.mistake and 'hint("4.3")' in result.diagnosis


def test_a_stub_says_which_exercise_is_missing() -> None:
    def stub(self, *_):
        raise NotImplementedError("exercise 4.3")

    with pytest.raises(CheckFailed, match=r"^exercise 4\.3 is not written yet"):
        evaluate("4.3", finishing(stub), seed=0)
    with pytest.raises(CheckFailed, match=r"^exercise 4\.3 is not written yet"):
        evaluate("4.3", type("CompleteReducer", (Given,), {"finish": stub, "on_gradient_ready": stub}), seed=0)
    with pytest.raises(CheckFailed, match=r"`on_gradient_ready` is not written yet: solve 4\.2"):
        evaluate("4.3", type("CompleteReducer", (StepByStep,), {"on_gradient_ready": stub}), seed=0)


def test_a_hook_that_is_wrong_is_told_to_go_back_to_4_2() -> None:
    late = type("CompleteReducer", (StepByStep,), {"on_gradient_ready": lambda self, index: None})
    result = evaluate("4.3", late, seed=0)
    assert next(row.name for row in result.rows if not row.ok) == "full buckets leave during backward"
    assert 'check("4.2", Reducer)' in result.rows[0].expected and not result.mistake


def test_launches_in_the_wrong_order_fail_their_row() -> None:
    def backwards(self):
        for b in reversed(range(self.next_bucket, len(self.buckets))):
            self.handles.append(self.wire.launch(b))
        self.next_bucket = len(self.buckets)
        StepByStep.finish(self)

    failed = [row.name for row in evaluate("4.3", finishing(backwards), seed=0).rows if not row.ok]
    assert failed[0] == "every bucket leaves once, in order"


def test_a_list_that_is_counted_down_itself_shows_in_the_third_window() -> None:
    def __init__(self, *args):
        Given.__init__(self, *args)
        self.full = [len(bucket) for bucket in self.buckets]

    def finish(self):
        StepByStep.finish(self)
        self.grads_left = self.full

    answer = type("CompleteReducer", (Given,), {"__init__": __init__, "finish": finish})
    assert evaluate("4.3", answer, seed=0).mistake == "not_reset"


def test_looking_at_the_exercise_does_not_load_torch() -> None:
    import subprocess
    import sys

    code = "import sys; from course_lib.lab.registry import everything; everything(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], text=True, capture_output=True).stdout.strip() == "False"
