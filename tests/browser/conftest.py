"""A headless Chromium for every test and one real JupyterLab for all. Both are ended, whatever happened."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

REPOSITORY = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--disable-dev-shm-usage")

sys.path.insert(0, str(REPOSITORY / "tests" / "show"))


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[object]:
    """A selenium driver of a fresh Chromium, 1000 by 1100 pixels."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or shutil.which("chromedriver") is None:
        pytest.skip("no Chromium with chromedriver on this machine")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'chromium'}", "--window-size=1000,1100"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_window_size(1000, 1100)
        yield driver
    finally:
        driver.quit()


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab: `url(name)` opens a notebook of `folder`, which lies in the folder that it serves."""

    folder: Path
    base: str
    token: str
    env: dict[str, str]

    def url(self, name: str) -> str:
        return f"{self.base}lab/tree/{self.folder.name}/{name}?token={self.token}&reset"

    def end_kernels(self) -> None:
        for kernel in self._ask("kernels"):
            self._ask(f"kernels/{kernel['id']}", "DELETE")

    def _ask(self, what: str, method: str = "GET") -> list:
        request = Request(f"{self.base}api/{what}", method=method, headers={"Authorization": f"token {self.token}"})
        with urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or "[]")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a free port, with a token, settings and runtime files in a folder of its own."""
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
    top, token = tmp_path_factory.mktemp("jupyterlab"), secrets.token_hex(16)
    folder, home = top / "work", top / "jupyter"
    folder.mkdir()
    places = {f"JUPYTER_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    python_path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests" / "show")))
    env = os.environ | places | {"PYTHONPATH": python_path, "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
                                 "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--port=0", "--allow-root",
               f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}", "--expose-app-in-browser",
               "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.news_url=None"]
    with (top / "lab.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=folder,
                                   start_new_session=True)
    try:
        found = wait_for(lambda: next((home / "runtime").glob("jpserver-*.json"), None), 60, "JupyterLab's address",
                         alive=lambda: process.poll() is None)
        base = wait_for(lambda: _address(found), 30, "JupyterLab's address")
        yield Lab(folder, base, token, env)
    finally:
        _end(process)


@pytest.fixture
def lab(server: Lab) -> Iterator[Lab]:
    """The session's JupyterLab with a fresh folder, and no kernel left running after the test."""
    folder = Path(tempfile.mkdtemp(dir=server.folder))
    try:
        yield replace(server, folder=folder)
    finally:
        server.end_kernels()


def _address(found: Path) -> str | None:
    try:
        return json.loads(found.read_text())["url"]
    except ValueError:
        return None


def _end(server: subprocess.Popen) -> None:
    """Ask nicely first: a server that gets SIGTERM ends its kernels too."""
    server.terminate()
    try:
        server.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(15)


def wait_for(look: Callable[[], object], seconds: float, what: str, alive: Callable[[], bool] = lambda: True):
    """What `look` returns as soon as it is true. `AssertionError` names what did not come."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if value := look():
            return value
        assert alive(), f"the process ended while waiting for {what}"
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come within {seconds:g} s")


@pytest.fixture(name="wait_for")
def _wait_for() -> Callable:
    return wait_for
