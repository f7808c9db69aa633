"""The blocking baselines, against their formulas and by what the overlap report makes of their spans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.link_cost import LinkCost
from course_lib.overlap import report
from course_lib.simulate.serial import predict_serial

sizes = st.lists(st.integers(1, 10**7), min_size=1, max_size=20)


@given(sizes, st.integers(1, 8), st.booleans(), st.booleans(), st.floats(0, 0.01), st.floats(0, 1e-8))
def test_time_is_compute_plus_communication(sizes, N, flat, every, a, beta) -> None:
    found = predict_serial(sizes, LinkCost(a, beta), 0.01, 0.02, N, flat=flat, every=every)
    rounds = N if every else 1
    assert found.collectives == rounds * (1 if flat else len(sizes))
    assert found.bytes == rounds * sum(sizes)
    assert found.exposed_s == pytest.approx(found.collectives * a + found.bytes * beta)
    assert found.step_s == pytest.approx(N * 0.03 + found.exposed_s)


def test_all_communication_is_exposed() -> None:
    found = predict_serial([1000, 2000], LinkCost(1e-3, 1e-6), 0.01, 0.02, 4, flat=False)
    row = report(found.timeline).pooled
    assert row.hidden == 0 and row.exposed == round(found.exposed_s * 1e9)
    assert row.span == round(found.step_s * 1e9)


def test_exposed_time_of_one_reduction_does_not_depend_on_N() -> None:
    ones = [predict_serial([4000], LinkCost(1e-3, 1e-6), 0.01, 0.02, N, every=False) for N in (1, 2, 4, 8)]
    assert len({one.exposed_s for one in ones}) == 1


@pytest.mark.parametrize("wrong", [{"sizes_bytes": []}, {"sizes_bytes": [0]}, {"N": 0}, {"Tf": -1.0}])
def test_refusals(wrong) -> None:
    with pytest.raises(ValueError, match=r"give the bytes|at least one"):
        predict_serial(**{"sizes_bytes": [4], "link": LinkCost(0, 0), "Tf": 0.0, "Tb": 0.0} | wrong)
