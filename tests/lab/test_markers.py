"""Cutting: what is marked is gone, what is not marked stays, and nothing that looks like a marker slips through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.lab.markers import MarkerError, cut

PLAIN = st.lists(st.sampled_from(["x = 1", "    y = 2", "", "# note", "print('a')"]), max_size=4)
SECRET = st.lists(st.integers(0, 999).map(lambda n: f"secret_{n} = {n}"), min_size=1, max_size=4)
REGION = st.tuples(st.sampled_from(["SOLUTION", "HIDDEN TESTS"]), st.integers(0, 2), SECRET)


@given(st.lists(st.tuples(PLAIN, REGION), max_size=4), PLAIN)
def test_everything_marked_goes_and_everything_else_stays(parts: list, tail: list[str]) -> None:
    source, wanted = [], []
    for before, (kind, depth, body) in parts:
        pad = "    " * depth
        source += [*before, f"{pad}### BEGIN {kind}", *(pad + line for line in body), f"{pad}### END {kind}"]
        wanted += before + ([f'{pad}raise NotImplementedError("exercise 4.1")'] if kind == "SOLUTION" else [])
    got = cut("\n".join(source + tail), "4.1")
    assert got.source == "\n".join(wanted + tail).strip("\n")
    assert "secret" not in got.source and "BEGIN" not in got.source
    kinds = [kind for _, (kind, _, _) in parts]
    assert (got.solutions, got.hidden_tests) == (kinds.count("SOLUTION"), kinds.count("HIDDEN TESTS"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("### BEGIN SOLUTION\nx", "begun on line 1 is never ended"),
        ("x\n### END SOLUTION", "line 2 ends SOLUTION, but nothing is open"),
        ("### BEGIN SOLUTION\nx\n### END HIDDEN TESTS", "line 3 ends HIDDEN TESTS, but SOLUTION is open"),
        ("### BEGIN SOLUTION\n### BEGIN HIDDEN TESTS", "begins HIDDEN TESTS inside the SOLUTION begun on line 1"),
        ("### BEGIN SOLUTION\n# only words\n### END SOLUTION", "begun on line 1 is empty"),
        ("###BEGIN SOLUTION\nx\n###END SOLUTION", "line 1 resembles a marker"),
        ("### begin solution\nx\n### end solution", "line 1 resembles a marker"),
        ("## BEGIN HIDDEN TEST", "line 1 resembles a marker"),
        ("x = 1  ### BEGIN SOLUTION", "line 1 resembles a marker"),
    ],
)
def test_each_fault_says_where(source: str, says: str) -> None:
    with pytest.raises(MarkerError, match=says):
        cut(source, "4.1")


def test_a_solution_needs_an_exercise() -> None:
    with pytest.raises(MarkerError, match="no exercise="):
        cut("### BEGIN SOLUTION\nx\n### END SOLUTION", None)
