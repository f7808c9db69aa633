"""The hidden checks, against solutions, mistakes, and code that tries to get points without being right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from course_lib.grade import referee, sandbox
from course_lib.grade.outcome import Part
from course_lib.grade.template import Submission, Template

Make = Callable[..., Submission]


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience of two seconds, and little room for output."""
    monkeypatch.setattr(referee, "CELL_SECONDS", 2.0)
    monkeypatch.setattr(referee, "CHECK_SECONDS", 4.0)


def _one(template: Template, submission: Submission, number: str) -> Part:
    try:
        return referee.judge_exercise(template, submission, template.exercises[number], seed=1)
    except referee.CellStopped as stopped:
        return stopped.part


@pytest.mark.parametrize("number", ["4.1", "4.2", "4.4", "4.5"])
def test_solutions_pass(template: Template, submission: Make, number: str) -> None:
    part = _one(template, submission(), number)
    assert (part.outcome, part.points) == ("ok", referee.POINTS), part


@pytest.mark.slow
def test_solution_of_the_exercise_with_tensors_passes(template: Template, submission: Make) -> None:
    assert _one(template, submission(), "4.3").outcome == "ok"


@pytest.mark.parametrize("number", ["4.1", "4.2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("4.4", "4.5"))])
def test_every_planted_answer_is_rejected_with_its_hint(template: Template, submission: Make, number: str) -> None:
    exercise = template.exercises[number]
    for planted in exercise.planted:
        part = _one(template, submission({number: planted.source}), number)
        assert part.outcome == "failed_checks", planted.name
        assert part.hint == exercise.mistakes[planted.mistake], planted.name


@pytest.mark.slow
def test_every_planted_answer_with_tensors_is_rejected_with_its_hint(template: Template, submission: Make) -> None:
    exercise = template.exercises["4.3"]
    for planted in exercise.planted:
        part = _one(template, submission({"4.3": planted.source}), "4.3")
        assert (part.outcome, part.hint) == ("failed_checks", exercise.mistakes[planted.mistake]), planted.name


def test_stubs_are_found_and_named(template: Template) -> None:
    stubs = {number: cell.source for number, cell in template.cells().items()}
    parts = referee.judge(template, Submission(stubs, ()), seed=1)
    assert {part.outcome for part in parts} == {"stub_left"}
    assert sum(part.points for part in parts) == 0


def test_a_stub_left_behind_a_right_answer_is_said(template: Template, submission: Make, sources: dict) -> None:
    part = _one(template, submission({"4.1": sources["4.1"] + "\nraise NotImplementedError('exercise 4.1')"}), "4.1")
    assert part.outcome == "stub_left"
    assert "was left in line" in part.sentence


CHEATS = {
    "an object that is always larger": """
class Yes(list):
    def __eq__(self, other): return True
    def __ge__(self, other): return True
    def __lt__(self, other): return True
    __hash__ = None
def assign_buckets(sizes_bytes, cap_bytes):
    return Yes([Yes([0])])
""",
    "a check that is replaced": """
import course_lib.lab.exercises.lab04.assign as checks, course_lib.lab.model as model
checks.assign_buckets.check.__code__ = (lambda answer, draw: model.Verdict((model.Row("x", True),))).__code__
def assign_buckets(sizes_bytes, cap_bytes):
    return []
""",
    "a transformer that drops assert, a replaced check and a replaced run_cell": """
import ast, sys, course_lib.lab as lab
lab.check = lambda *a, **k: None
ip = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
class Drop(ast.NodeTransformer):
    def visit_Assert(self, node): return ast.Pass()
if ip is not None:
    ip.ast_transformers.append(Drop())
    ip.run_cell_async = None
def assign_buckets(sizes_bytes, cap_bytes):
    return [[i for i, _ in sizes_bytes]]
""",
    "the outcome of a check written by hand": """
import os, json, struct
def assign_buckets(sizes_bytes, cap_bytes):
    for fd in range(3, 20):
        try: os.write(fd, struct.pack("<I", 2) + b"{}")
        except OSError: pass
    return [[]]
""",
    "hard-coded for the example of the text": """
def assign_buckets(sizes_bytes, cap_bytes):
    return [[3, 2], [1, 0]]
""",
    "a hard-coded metric": """
import course_lib.score as score, course_lib.overlap as overlap
score.fair_score = lambda *a, **k: score.Score("F", 1.0)
F = overlap_share = 1.0
def assign_buckets(sizes_bytes, cap_bytes):
    return [[i for i, _ in sizes_bytes]]
""",
    "a thread that writes answers of its own": """
import json, os, struct, threading
def spam():
    body = json.dumps({"to": 1, "value": [[3, 2], [1, 0]]}).encode()
    while True:
        for fd in range(3, 8):
            try: os.write(fd, struct.pack("<I", len(body)) + body)
            except OSError: pass
threading.Thread(target=spam, daemon=True).start()
def assign_buckets(sizes_bytes, cap_bytes):
    return [[3, 2], [1, 0]]
""",
    "a patched library": """
import json
dumps = json.dumps
json.dumps = lambda m, **k: dumps({"value": [[3, 2], [1, 0]], "to": m.get("to", 0)} if isinstance(m, dict) else m)
def assign_buckets(sizes_bytes, cap_bytes):
    return []
""",
    "the check's own objects": """
def assign_buckets(sizes_bytes, cap_bytes):
    import gc
    for thing in gc.get_objects():
        if type(thing).__name__ == "Case": thing.got = None
    return None
""",
}


@pytest.mark.parametrize("source", CHEATS.values(), ids=CHEATS.keys())
def test_no_trick_earns_points(template: Template, submission: Make, source: str, brief: None) -> None:
    part = _one(template, submission({"4.1": source}), "4.1")
    assert (part.outcome, part.points) == ("failed_checks", 0.0), part


def test_a_reducer_that_keeps_the_wires_book_itself_fails(template: Template, submission: Make, sources: dict) -> None:
    """The fake wire lives with the grader: its list of events is not there to be written to."""
    source = sources["4.2"].replace("self.wire.launch(self.next_bucket)", "self.wire.events.append(1)")
    assert source != sources["4.2"]
    part = _one(template, submission({"4.2": source}), "4.2")
    assert part.outcome == "failed_checks"
    assert "no attribute 'events'" in part.sentence


BREAKS = {
    "loops for ever": ("while True: pass", "timeout"),
    "ignores an interrupt": ("import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass", "timeout"),
    "leaves": ("import sys\nsys.exit(0)", "early_exit"),
    "leaves at once": ("import os\nos._exit(0)", "early_exit"),
    "is killed": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "kernel_died"),
    "prints for ever": ("while True: print('x' * 1000)", "output_flood"),
    "eats memory": ("x = [0] * (1 << 33)", "out_of_memory"),
    "asks": ("input('your name')", "failed_checks"),
}


@pytest.mark.parametrize(("line", "outcome"), BREAKS.values(), ids=BREAKS.keys())
def test_what_breaks_in_a_function_is_named(
    template: Template, submission: Make, line: str, outcome: str, brief: None
) -> None:
    body = "\n".join(f"    {part}" for part in line.splitlines())
    part = _one(template, submission({"4.1": f"def assign_buckets(sizes_bytes, cap_bytes):\n{body}\n"}), "4.1")
    assert (part.outcome, part.points) == (outcome, 0.0), part


@pytest.mark.parametrize("line, outcome", [BREAKS[k] for k in ("loops for ever", "leaves", "is killed")])
def test_a_cell_that_breaks_keeps_what_came_before_it(
    template: Template, submission: Make, sources: dict, line: str, outcome: str, brief: None
) -> None:
    parts = referee.judge(template, submission({"4.2": f"{sources['4.2']}\n{line}"}), seed=1)
    assert [part.outcome for part in parts] == ["ok", *[outcome] * (len(parts) - 1)]
    assert "4.2" in parts[2].sentence


def test_a_cell_that_only_raises_costs_its_own_exercise(template: Template, submission: Make) -> None:
    changed = submission({"4.1": "import nowhere"})
    assert "ModuleNotFoundError" in _one(template, changed, "4.1").sentence
    assert _one(template, changed, "4.2").outcome == "ok"


def test_the_learners_own_line_is_quoted(template: Template, submission: Make) -> None:
    source = "def assign_buckets(sizes_bytes, cap_bytes):\n    return sizes_bytes[0].upper()"
    sentence = _one(template, submission({"4.1": source}), "4.1").sentence
    assert "in line 2: return sizes_bytes[0].upper()" in sentence
    assert "AttributeError" in sentence


def test_helpers_and_imports_of_the_lab_are_there(template: Template, submission: Make, sources: dict) -> None:
    source = "from itertools import accumulate\nHELP = 1\n" + sources["4.1"]
    assert _one(template, submission({"4.1": source}), "4.1").outcome == "ok"


AS_IN_A_NOTEBOOK = {
    "a cell magic": "%%capture\n{}",
    "magics and a shell": "%matplotlib inline\n!true\n{}",
    "display": "display(3)\nget_ipython().user_ns\n{}",
    "await": "import asyncio\nawait asyncio.sleep(0)\n{}",
    "annotations": "def f(x: int): pass\nassert f.__annotations__['x'] is int\n{}",
    "an abstract class": "class Base:\n    def f(self):\n        raise NotImplementedError\n{}",
    "a stub's line that is never reached": "{}\n    raise NotImplementedError('exercise 4.1')",
    "a process that stays": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n{}",
    "no standard output": "import os\nos.close(1)\nos.close(2)\n{}",
}


@pytest.mark.parametrize("around", AS_IN_A_NOTEBOOK.values(), ids=AS_IN_A_NOTEBOOK.keys())
def test_what_works_in_a_notebook_works_here(template: Template, submission: Make, sources: dict, around: str) -> None:
    part = _one(template, submission({"4.1": around.format(sources["4.1"])}), "4.1")
    assert part.outcome == "ok", part


def test_a_stub_before_a_wrong_answer_is_said(template: Template, submission: Make) -> None:
    source = "def assign_buckets(sizes_bytes, cap_bytes):\n    raise NotImplementedError\n    return []"
    assert _one(template, submission({"4.1": source}), "4.1").outcome == "stub_left"


def test_a_long_answer_is_shown_in_part(template: Template, submission: Make) -> None:
    source = "def assign_buckets(sizes_bytes, cap_bytes):\n    return ['x' * 100_000]"
    part = _one(template, submission({"4.1": source}), "4.1")
    assert part.outcome == "failed_checks"
    assert max(len(row.seen) for row in part.rows) == referee.LONGEST_TEXT


@pytest.mark.skipif(sandbox.level() == sandbox.WEAK, reason="no namespaces here")
def test_the_sandbox_is_what_the_code_sees(template: Template, submission: Make) -> None:
    source = "import os\ndef assign_buckets(sizes_bytes, cap_bytes):\n    raise ValueError(os.listdir('/box'))"
    assert "ValueError: []" in _one(template, submission({"4.1": source}), "4.1").sentence
