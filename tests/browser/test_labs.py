"""The labs in a real JupyterLab: the solution runs from top to bottom, the learner's notebook stops at its exercise."""

from __future__ import annotations

import pytest

from tests.test_labs import REPOSITORY, SOLUTIONS, only_shown, quick_copy

KERNEL = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status"
CELLS = "window.jupyterapp.shell.currentWidget.content.widgets"


def open_and_run(browser, lab, wait_for, name: str, limit_s: float) -> None:
    """Run all cells of a notebook and wait until the kernel has been idle for two looks."""
    browser.get(lab.url(name))
    wait_for(lambda: browser.execute_script(f"return {KERNEL} === 'idle'"), 90, "the kernel")
    browser.execute_async_script("window.jupyterapp.commands.execute('notebook:run-all-cells')"
                                 ".then(() => arguments[0](1), () => arguments[0](0))")
    wait_for(lambda: browser.execute_script(f"return {KERNEL} === 'idle'"), limit_s, "the end of the run")


def outputs(browser) -> list[dict]:
    """All outputs of all cells as JupyterLab holds them, each with its cell's id."""
    return browser.execute_script(
        f"return {CELLS}.flatMap(c => c.model.type !== 'code' ? [] : "
        "c.model.outputs.toJSON().map(o => ({...o, cell: c.model.id})))")


@pytest.mark.browser
@pytest.mark.parametrize("solution", only_shown(SOLUTIONS, {"04_gradient_buckets"}))
def test_solution_runs_in_jupyterlab_and_its_sliders_are_alive(browser, lab, wait_for, solution):
    from selenium.webdriver.common.keys import Keys
    notebook = quick_copy(solution, lab.folder / "lab.ipynb")
    browser.set_script_timeout(240)
    open_and_run(browser, lab, wait_for, "lab.ipynb", 240)
    found = outputs(browser)
    assert [o for o in found if o["output_type"] == "error"] == []
    ran = browser.execute_script(f"return {CELLS}.filter(c => c.model.type === 'code' && "
                                 "c.model.sharedModel.getSource().trim()).map(c => c.model.executionCount)")
    assert all(ran)
    if any("explore_" in c.source for c in notebook.cells):
        moves_by_key(browser, wait_for)
    if not any("show.explore(" in c.source for c in notebook.cells):
        return
    slider = "document.querySelector('.course-timeline input[type=range]')"
    browser.execute_script(f"{CELLS}.forEach(c => c.node.scrollIntoView && 0); {slider}?.scrollIntoView()")
    wait_for(lambda: browser.execute_script(f"return {slider} != null"), 30, "the sliders")
    said = "return document.querySelector('.course-timeline [aria-live]').textContent"
    before = browser.execute_script(said)
    browser.find_element("css selector", ".course-timeline input[type=range]").send_keys(Keys.ARROW_RIGHT)
    wait_for(lambda: browser.execute_script(said) != before, 10, "another picture")


def moves_by_key(browser, wait_for) -> None:
    """Every kind of slider that lives in the browser alone answers to the keyboard."""
    from selenium.webdriver.common.keys import Keys
    slider = ".jp-OutputArea input[type=range][data-key]"
    browser.execute_script(f"document.querySelector('{slider}')?.scrollIntoView()")
    wait_for(lambda: browser.execute_script(f"return document.querySelector('{slider}') != null"), 30, "the sliders")
    control = browser.find_element("css selector", slider)
    before = control.get_property("value")
    control.send_keys(Keys.ARROW_LEFT if before == control.get_attribute("max") else Keys.ARROW_RIGHT)
    wait_for(lambda: control.get_property("value") != before, 10, "a slider that moves by key")


@pytest.mark.slow
@pytest.mark.browser
def test_learners_notebook_stops_at_the_first_exercise(browser, lab, wait_for):
    source = REPOSITORY / "labs" / "04_gradient_buckets.ipynb"
    text = source.read_text().replace("quick = False", "quick = True")
    (lab.folder / "lab.ipynb").write_text(text)
    browser.set_script_timeout(120)
    open_and_run(browser, lab, wait_for, "lab.ipynb", 120)
    errors = [o for o in outputs(browser) if o["output_type"] == "error"]
    assert len(errors) == 1
    assert "4.1" in errors[0]["evalue"] + "".join(errors[0]["traceback"])
