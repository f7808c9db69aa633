"""The widget in a real browser: offline as an exported page, and in JupyterLab with and without a kernel."""

from __future__ import annotations

import hashlib
import statistics
import subprocess
import sys

import nbformat
import pytest
from show_samples import profile, update

from course_lib.show import TimelineWidget
from course_lib.simulate.buckets import MB, LinkCost

pytestmark = pytest.mark.browser
LINK = LinkCost(4e-3, 3.2e-3 / MB)
ROOT = "document.querySelector('.course-timeline')"


def widget(**options) -> TimelineWidget:
    points = [(mb, 140 - mb, 139 - mb, 142 - mb) for mb in (1, 2, 4, 8)]
    return TimelineWidget(profile(), LINK, {3: update(), 8: update(buckets=2)}, points, bucket_mb=3, **options)


def data(browser) -> dict:
    return browser.execute_script(f"return {{...{ROOT}.dataset}}")


def pixels(browser, index: int = 0) -> str:
    """A fingerprint of what is on a canvas (0: the lanes, 1: the curve)."""
    url = browser.execute_script(f"return {ROOT}.querySelectorAll('canvas')[{index}].toDataURL()")
    return hashlib.sha256(url.encode()).hexdigest()


def colours(browser) -> set[tuple[int, int, int]]:
    """All colours on the canvas of the lanes."""
    flat = browser.execute_script(f"""
        const c = {ROOT}.querySelector('canvas'), seen = new Set();
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 250) seen.add((d[i] << 16) | (d[i + 1] << 8) | d[i + 2]);
        return [...seen];""")
    return {(v >> 16, v >> 8 & 255, v & 255) for v in flat}


def slider(browser, key: str):
    return browser.find_element("css selector", f".course-timeline input[data-key={key}]")


def said(browser) -> str:
    return browser.execute_script(f"return {ROOT}.querySelector('.strip').innerText")


def step_ms(browser) -> float:
    """The predicted step time in the header strip."""
    return float(browser.find_element("css selector", ".course-timeline .strip .big").text.removesuffix(" ms"))


def open_export(browser, page, wait_for) -> None:
    """Load the file with the network cut off, and wait for the first picture."""
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.emulateNetworkConditions",
                            {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0})
    browser.get(page.as_uri())
    wait_for(lambda: browser.execute_script(f"return {ROOT}?.dataset.drawMs"), 20, "the first picture")


@pytest.fixture
def exported(browser, tmp_path, wait_for):
    open_export(browser, widget(title="Exported").export_html(tmp_path / "timeline.html"), wait_for)
    yield browser
    assert [m for m in browser.get_log("browser") if m["level"] == "SEVERE"] == []


def test_export_draws_every_look(exported):
    drawn = colours(exported)
    for colour in ((0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73), (0xD5, 0x5E, 0x00)):
        assert colour in drawn
    assert step_ms(exported) == pytest.approx(129.7, abs=0.1) and "measured" in said(exported)
    assert int(data(exported)["spans"]) > 50


def test_keys_move_every_slider_offline(exported):
    from selenium.webdriver.common.keys import Keys
    for key in ("bucket_mb", "gbit", "latency_ms", "micro_steps"):
        lanes, curve, words = pixels(exported), pixels(exported, 1), said(exported)
        control = slider(exported, key)
        label = exported.execute_script("return arguments[0].labels[0].textContent", control)
        value = control.get_attribute("aria-valuetext")
        control.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        assert label and control.get_attribute("aria-valuetext") != value
        assert (pixels(exported) != lanes and pixels(exported, 1) != curve and said(exported) != words), key


def test_dragging_the_slider_offline(exported):
    from selenium.webdriver import ActionChains
    control, lanes = slider(exported, "bucket_mb"), pixels(exported)
    value = control.get_property("value")
    across = control.size["width"] * (int(value) / int(control.get_attribute("max")) - 0.5)
    ActionChains(exported).move_to_element_with_offset(control, round(across), 0).click_and_hold().move_by_offset(
        60, 0).release().perform()
    assert int(control.get_property("value")) > int(value) and pixels(exported) != lanes


def test_best_plan_is_named_and_never_slower(exported):
    from selenium.webdriver.support.ui import Select
    before = step_ms(exported)
    Select(exported.find_element("css selector", ".course-timeline select")).select_by_value("best")
    assert step_ms(exported) <= before
    assert not slider(exported, "bucket_mb").is_enabled()


def test_zoom_pan_and_walk_by_keyboard(exported, wait_for):
    from selenium.webdriver.common.keys import Keys
    canvas = exported.find_element("css selector", ".course-timeline canvas")
    views = [pixels(exported)]
    for key in ("+", "+", Keys.ARROW_RIGHT, "-", "0"):
        canvas.send_keys(key)
        views.append(pixels(exported))
    assert len(set(views[:5])) == 5 and views[5] == views[0], "0 shows everything again"
    canvas.send_keys("]", "]")
    tip = exported.find_element("css selector", ".course-timeline .tip")
    assert tip.is_displayed() and "duration" in tip.text
    wait_for(lambda: "duration" in exported.execute_script(f"return {ROOT}.querySelector('[aria-live]').textContent"),
             5, "the spoken line")
    assert exported.execute_script("return getComputedStyle(arguments[0]).outlineStyle", canvas) != "none"


def test_hover_wheel_and_drag(exported):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
    canvas = exported.find_element("css selector", ".course-timeline canvas")
    # The first transfer of rank 0: right of the middle, in the second lane below the prediction.
    where = exported.execute_script(f"""
        const c = {ROOT}.querySelector('canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        for (let i = 0; i < d.length; i += 4) if (d[i] === 0 && d[i + 1] === 0x9E && d[i + 2] === 0x73 &&
            d[i + 4] === 0 && d[i + 40 * 4] === 0 && d[i + 4 * c.width * 10 + 41] === 0x9E)
          return [i / 4 % c.width + 4, Math.floor(i / 4 / c.width) + 6].map((v) => v / devicePixelRatio);""")
    offset = round(where[0] - canvas.size["width"] / 2), round(where[1] - canvas.size["height"] / 2)
    ActionChains(exported).move_to_element_with_offset(canvas, *offset).perform()
    tip = exported.find_element("css selector", ".course-timeline .tip").text
    assert "all_reduce" in tip and "bucket 0, 3.00 MB" in tip and "hidden" in tip
    full = pixels(exported)
    ActionChains(exported).scroll_from_origin(ScrollOrigin.from_element(canvas), 0, -120).perform()
    assert pixels(exported) == full, "a wheel that only passes by scrolls the page"
    canvas.click()
    ActionChains(exported).scroll_from_origin(ScrollOrigin.from_element(canvas), 0, -120).perform()
    near = pixels(exported)
    assert near != full
    ActionChains(exported).move_to_element(canvas).click_and_hold().move_by_offset(-50, 0).release().perform()
    assert pixels(exported) not in (near, full)


def test_readable_at_700_and_in_the_dark(exported, wait_for):
    light = colours(exported)
    exported.set_window_size(700, 1100)
    wait_for(lambda: exported.execute_script(f"return {ROOT}.clientWidth <= 700"), 5, "the narrow layout")
    assert exported.execute_script("return document.documentElement.scrollWidth <= innerWidth"), "no sideways scrolling"
    exported.execute_cdp_cmd("Emulation.setEmulatedMedia",
                             {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    wait_for(lambda: data(exported)["theme"] == "dark", 5, "the dark theme")
    ink = exported.execute_script(f"return getComputedStyle({ROOT}).color")
    assert min(int(v) for v in ink[4:-1].split(",")) > 200 and colours(exported) != light


def test_under_16_ms_from_input_to_picture_with_500_spans(browser, tmp_path, wait_for):
    from selenium.webdriver.common.keys import Keys
    many = TimelineWidget(profile(64, MB // 4), LINK, update(ranks=4, layers=56, buckets=14), [(4, 140)])
    open_export(browser, many.export_html(tmp_path / "many.html"), wait_for)
    assert int(data(browser)["spans"]) >= 500
    control, times, draws = slider(browser, "bucket_mb"), [], []
    for i in range(24):
        control.send_keys(Keys.ARROW_LEFT if i % 2 else Keys.ARROW_RIGHT)
        times.append(float(data(browser)["frameMs"]))
        draws.append(float(data(browser)["drawMs"]))
    print(f"input to picture {statistics.median(times):.2f} ms (worst {max(times):.2f}), "
          f"drawing {statistics.median(draws):.2f} ms")
    assert statistics.median(times) < 16


CELL = """
from show_samples import profile, update
from course_lib.show import explore
from course_lib.simulate.buckets import LinkCost, MB
shown = explore(profile(), LinkCost(4e-3, 3.2e-3 / MB), update(), bucket_mb=3)
shown
"""


def notebook(path) -> None:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, path)


def test_in_jupyterlab(browser, lab, wait_for):
    from selenium.webdriver.common.keys import Keys
    notebook(lab.folder / "one.ipynb")
    browser.get(lab.url("one.ipynb"))
    cell = "return document.querySelector('.jp-Notebook .jp-Cell') != null"
    wait_for(lambda: browser.execute_script(cell), 60, "the notebook")
    # Cells that are run before the kernel has connected wait for ever.
    ready = "return window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
    wait_for(lambda: browser.execute_script(ready), 60, "the kernel")
    browser.execute_script("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    wait_for(lambda: browser.execute_script(f"return {ROOT}?.dataset.drawMs"), 60, "the widget")
    lanes, words = pixels(browser), said(browser)
    slider(browser, "bucket_mb").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert pixels(browser) != lanes and said(browser) != words
    canvas = browser.find_element("css selector", ".course-timeline canvas")
    canvas.send_keys("0", "0", "-", "+")
    dialog = browser.execute_script("return document.querySelector('.jp-Dialog') != null")
    assert not dialog, "0 0 must not reach JupyterLab, where it restarts the kernel"
    assert float(data(browser)["frameMs"]) < 100
    before = data(browser)["theme"]
    other = "JupyterLab Dark" if before == "light" else "JupyterLab Light"
    browser.execute_async_script("window.jupyterapp.commands.execute('apputils:change-theme', {theme: arguments[0]})"
                                 ".then(() => arguments[1](true))", other)
    wait_for(lambda: data(browser)["theme"] != before, 20, "the other theme")


@pytest.mark.parametrize("trusted", [False, True])
def test_made_by_papermill_and_reopened(browser, lab, wait_for, monkeypatch, trusted):
    """No cell is run in JupyterLab: a notebook it trusts is alive from its saved state, another shows the image."""
    papermill = pytest.importorskip("papermill")
    monkeypatch.setenv("PYTHONPATH", lab.env["PYTHONPATH"])
    notebook(lab.folder / "in.ipynb")
    papermill.execute_notebook(lab.folder / "in.ipynb", lab.folder / "out.ipynb", progress_bar=False)
    output = nbformat.read(lab.folder / "out.ipynb", 4).cells[-1].outputs[-1].data
    assert output["image/png"] and output["text/plain"].startswith("Timeline of 2 ranks")
    if trusted:
        subprocess.run([sys.executable, "-m", "jupyter", "trust", "out.ipynb"], cwd=lab.folder, env=lab.env, check=True)
    browser.get(lab.url("out.ipynb"))
    shown = f"{ROOT}?.dataset.drawMs" if trusted else "document.querySelector('.jp-OutputArea img')?.naturalWidth"
    assert wait_for(lambda: browser.execute_script(f"return {shown}"), 60, "a picture")
