"""Time limits on a learner's code, one inside another."""

from __future__ import annotations

import signal
import time

import pytest

from course_lib.lab.guard import TookTooLong, time_limit


def test_an_inner_limit_leaves_the_outer_one_running() -> None:
    began = time.monotonic()
    with pytest.raises(TookTooLong), time_limit(0.3):
        with time_limit(5):
            pass
        time.sleep(5)
    assert time.monotonic() - began < 2


def test_an_outer_limit_that_ran_out_inside_rings_afterwards() -> None:
    with pytest.raises(TookTooLong), time_limit(0.2):
        with pytest.raises(TookTooLong), time_limit(0.4):
            time.sleep(5)
        time.sleep(5)


def test_nothing_rings_after_the_block() -> None:
    before = signal.getsignal(signal.SIGALRM)
    outer, _ = signal.getitimer(signal.ITIMER_REAL)
    with time_limit(0.05):
        pass
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) is before
    assert bool(signal.getitimer(signal.ITIMER_REAL)[0]) == bool(outer)
