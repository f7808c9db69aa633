"""The notebook stack: does the kernel run this very Python, and do the widgets' two halves fit each other?

A widget is Python in the kernel and JavaScript in the browser, shipped apart. Where JupyterLab runs from another
environment than the kernel, the halves can differ, and a widget then shows nothing but its text.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from course_lib.doctor.finding import Finding
from course_lib.doctor.versions import installed

KERNEL = "python3"
OWN = ("python", "python3", f"python3.{sys.version_info.minor}")
"""Names by which a kernelspec means the Python that Jupyter itself runs on (jupyter_client replaces them)."""


def examine() -> tuple[Finding, ...]:
    """The kernelspec that the labs ask for, and each widget package against its JavaScript."""
    if not installed("jupyterlab"):
        return (Finding("jupyterlab", "fail", "JupyterLab", "not installed", "", "pip install -e '.[test]'"),)
    return (kernelspec(), *widgets())


def kernelspec() -> Finding:
    """Whether the kernel `python3` exists and sees this course_lib."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        spec = KernelSpecManager().get_kernel_spec(KERNEL)
    except NoSuchKernel:
        return Finding("kernelspec", "fail", f"kernel {KERNEL}", "not found", "the labs ask for it",
                       f"{Path(sys.executable).name} -m ipykernel install --sys-prefix")
    return kernel_command(spec.argv[0] if spec.argv else "", spec.resource_dir)


def kernel_command(command: str, folder: str) -> Finding:
    """A verdict on the program that a kernelspec in `folder` starts."""
    title, data = f"kernel {KERNEL}", {"command": command, "folder": folder}
    remedy = f"{Path(sys.executable).name} -m ipykernel install --sys-prefix"
    if command in OWN:
        return Finding("kernelspec", "ok", title, "this environment", folder, data=data)
    found = shutil.which(command)
    if found is None:
        return Finding("kernelspec", "fail", title, "cannot start", f"{folder} starts {command!r}, which is not there",
                       remedy, data=data)
    if Path(found).absolute() == Path(sys.executable).absolute():
        return Finding("kernelspec", "ok", title, "this environment", folder, data=data)
    try:
        sees = subprocess.run([found, "-c", "import course_lib, ipykernel"], capture_output=True, timeout=20).returncode
    except (OSError, subprocess.TimeoutExpired):
        sees = 1
    if sees:
        return Finding("kernelspec", "fail", title, "another Python", f"{found} does not have course_lib and ipykernel",
                       remedy, data=data)
    return Finding("kernelspec", "note", title, "another Python", f"{found} is not the one that runs this command",
                   remedy, data=data)


def widgets() -> tuple[Finding, ...]:
    """ipywidgets 8 needs its JavaScript of version 5; anywidget needs its JavaScript in its own version."""
    ipywidgets, anywidget = installed("ipywidgets"), installed("anywidget")
    manager = "@jupyter-widgets/jupyterlab-manager"
    return (_pair("ipywidgets", ipywidgets, manager, "5" if ipywidgets.startswith("8.") else "", "jupyterlab_widgets"),
            _pair("anywidget", anywidget, "anywidget", anywidget, "anywidget"))


def _pair(name: str, have: str, extension: str, wants: str, package: str) -> Finding:
    script = extension_version(extension)
    data = {"python": have, "javascript": script, "extension": extension}
    remedy = f"pip install --force-reinstall {package}, then restart JupyterLab"
    if not have:
        return Finding(name, "fail", name, "not installed", "", f"pip install {name}", data=data)
    if not script:
        return Finding(name, "fail", name, have, f"JupyterLab has no extension {extension}", remedy, data=data)
    if extension in disabled_extensions():
        return Finding(name, "fail", name, have, f"the extension {extension} is disabled",
                       f"jupyter labextension enable {extension}", data=data)
    if script != wants and script.split(".")[0] != wants:
        wanted = f"version {wants}" if wants else "another version"
        return Finding(name, "warn", name, have, f"its JavaScript is {script}, and {wanted} would fit", remedy,
                       data=data)
    return Finding(name, "ok", name, have, f"its JavaScript is {script}", data=data)


def extension_version(extension: str) -> str:
    """The version of a prebuilt JupyterLab extension; empty if it is nowhere on Jupyter's path."""
    from jupyter_core.paths import jupyter_path

    for folder in jupyter_path("labextensions"):
        try:
            return str(json.loads((Path(folder) / extension / "package.json").read_text(encoding="utf-8"))["version"])
        except (OSError, ValueError, KeyError):
            continue
    return ""


def disabled_extensions() -> set[str]:
    """Extensions that a page_config.json on Jupyter's configuration path disables."""
    from jupyter_core.paths import jupyter_config_path

    found: set[str] = set()
    for folder in jupyter_config_path():
        try:
            page = json.loads((Path(folder) / "labconfig" / "page_config.json").read_text(encoding="utf-8"))
            names = page.get("disabledExtensions", {})
        except (OSError, ValueError, AttributeError):
            continue
        found |= {name for name in names if not isinstance(names, dict) or names[name]}
    return found
