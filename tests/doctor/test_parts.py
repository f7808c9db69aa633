"""The parts of the examination that depend on the machine, each with a made-up machine."""

from __future__ import annotations

import json
import socket
import types
from pathlib import Path

import pytest

from course_lib.doctor import devices, fabrics, machine, noise, notebooks, versions
from course_lib.launch.request import RankFailed, RunNotStarted

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("requirement", "level", "value"), [
    ("rich>=1", "ok", versions.installed("rich")),
    ("rich<1", "fail", versions.installed("rich")),
    ("no-such-package>=2", "fail", "not installed"),
])  # fmt: skip
def test_a_package_against_its_requirement(requirement: str, level: str, value: str) -> None:
    found = versions.package(requirement)
    assert (found.level, found.value) == (level, value)
    assert bool(found.remedy) == (level == "fail")


def test_every_dependency_is_looked_at() -> None:
    names = {finding.key for finding in versions.examine()}
    assert {"python", "torch", "numpy", "jupyterlab", "ipywidgets", "anywidget", "papermill", "nbclient"} <= names
    assert set(versions.NEEDED) <= names


def test_a_quiet_and_a_loud_machine() -> None:
    quiet = noise.spread([4.0 + 0.01 * (i % 3) for i in range(40)])
    loud = noise.spread([4.0 + 2.0 * (i % 3) for i in range(40)])
    shared = noise.spread([4.0] * 2 + [12.0] * 38)  # a neighbour that takes every other turn
    assert [noise.loop_finding(seen).level for seen in (quiet, loud, shared)] == ["ok", "warn", "warn"]
    assert noise.sleep_finding(noise.spread([2.1] * 40)).level == "ok"
    late = noise.sleep_finding(noise.spread([2.1] * 30 + [12.0] * 10))
    assert late.level == "warn" and late.data["p95_ms"] > 10


def test_the_loop_and_the_sleeps_are_measured() -> None:
    loop, sleep = noise.examine()
    assert 0 < loop.data["median_ms"] < 500 and sleep.data["median_ms"] >= noise.SLEEP_MS * 0.99


def test_a_temporary_folder_that_cannot_be_written(tmp_path: Path) -> None:
    assert machine.space(tmp_path).level in ("ok", "warn")
    assert machine.space(tmp_path / "missing").level == "fail"


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        monkeypatch.setattr(machine, "PORTS", {port: "somebody's"})
        found = machine.ports()
    assert found.level == "note" and str(port) in found.detail and found.data["taken"] == [port]


def test_the_kernelspec_of_this_environment() -> None:
    assert notebooks.kernel_command("python3", "/specs").level == "ok"
    gone = notebooks.kernel_command("/no/such/python", "/specs")
    assert gone.level == "fail" and "ipykernel install" in gone.remedy


def test_a_kernel_of_a_python_without_the_course(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    assert notebooks.kernel_command(str(other), "/specs").value == "another Python"


def extension(folder: Path, name: str, version: str) -> None:
    (folder / "labextensions" / name).mkdir(parents=True)
    (folder / "labextensions" / name / "package.json").write_text(json.dumps({"version": version}))


@pytest.mark.parametrize(("script", "level"), [("0.0.1", "warn"), ("", "fail"), (None, "ok")])
def test_the_two_halves_of_a_widget(script: str | None, level: str, tmp_path: Path, monkeypatch) -> None:
    have = versions.installed("anywidget")
    if script != "":
        extension(tmp_path, "anywidget", script or have)
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *parts: [str(tmp_path.joinpath(*parts))])
    monkeypatch.setattr("jupyter_core.paths.jupyter_config_path", lambda: [])
    assert notebooks.widgets()[1].level == level


def test_a_disabled_extension(tmp_path: Path, monkeypatch) -> None:
    extension(tmp_path, "anywidget", versions.installed("anywidget"))
    (tmp_path / "labconfig").mkdir()
    (tmp_path / "labconfig" / "page_config.json").write_text('{"disabledExtensions": {"anywidget": true}}')
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *parts: [str(tmp_path.joinpath(*parts))])
    monkeypatch.setattr("jupyter_core.paths.jupyter_config_path", lambda: [str(tmp_path)])
    found = notebooks.widgets()[1]
    assert found.level == "fail" and "disabled" in found.detail


class NoDriver(Exception):
    pass


def fake_nvml(count: int, nvlink: bool = True) -> types.SimpleNamespace:
    """NVML as far as the doctor asks it; bytes for names, as older bindings answer."""
    def link_state(handle: int, link: int) -> int:
        if link >= 4 or not nvlink:
            raise NoDriver
        return 1

    return types.SimpleNamespace(
        NVMLError=NoDriver, NVML_NVLINK_MAX_LINKS=18, NVML_P2P_CAPS_INDEX_NVLINK=2, NVML_P2P_STATUS_OK=0,
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: count,
        nvmlSystemGetCudaDriverVersion=lambda: 12080, nvmlSystemGetDriverVersion=lambda: b"570.1",
        nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetName=lambda handle: b"NVIDIA Made Up",
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=80 * 2**30),
        nvmlDeviceGetNvLinkState=link_state, nvmlDeviceGetP2PStatus=lambda a, b, index: 0 if nvlink else 5,
        nvmlDeviceGetTopologyCommonAncestor=lambda a, b: 30)


@pytest.mark.parametrize(("nvlink", "path"), [(True, "NVLink"), (False, "one PCIe host bridge")])
def test_devices_and_their_links(nvlink: bool, path: str) -> None:
    found = {f.key: f for f in devices.examine({"nccl": "2.27.3", "cuda": "12.8"}, fake_nvml(2, nvlink))}
    assert found["gpu1"].value == "NVIDIA Made Up" and "driver 570.1, CUDA 12.8" in found["gpu1"].detail
    assert found["gpu0"].data["nvlinks"] == (4 if nvlink else 0)
    assert found["link0-1"].value == path
    assert found["nccl"].value == "2.27.3"
    assert found["never_run"].remedy == "make test-gpu runs it on yours"


def test_no_gpu_is_said_plainly() -> None:
    def refuse() -> None:
        raise NoDriver("NVML Shared Library Not Found")

    without = fake_nvml(0)
    without.nvmlInit = refuse
    for nvml in (without, fake_nvml(0)):
        gpu, *_, never = devices.examine({}, nvml)
        assert (gpu.level, gpu.value) == ("note", "none") and "Every lab works without" in gpu.detail
        assert never.value == "never run on a GPU"


def test_what_was_never_run_exists() -> None:
    for path in devices.NEVER_RUN:
        assert "cuda" in (ROOT / path).read_text(encoding="utf-8").lower(), path


@pytest.mark.parametrize(("reason", "remedy"), [
    ("ip and tc not found", fabrics.INSTALL),
    ("OSError: ip is not installed (Debian and Ubuntu: package iproute2)", fabrics.INSTALL),
    ("PermissionError: [Errno 1] Operation not permitted", fabrics.ALLOW),
    ("OSError: ip refused: Error: Unknown device type.", fabrics.MODULES),
    ("it needs Linux", ""),
])  # fmt: skip
def test_what_to_do_about_a_missing_shaped_fabric(reason: str, remedy: str) -> None:
    found = fabrics.unshaped(reason)
    assert (found.level, found.remedy) == ("note", remedy) and "paced wires instead" in found.detail


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabrics.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(fabrics.sys, "platform", "linux")
    assert fabrics.why_not_shaped() == "ip and tc not found"


@pytest.mark.parametrize(("error", "said"), [
    (RankFailed(1, "Traceback\n  ...\nRuntimeError: no gloo\n"), "RuntimeError: no gloo"),
    (RunNotStarted("the run could not start: no wires\nmore"), "the run could not start: no wires"),
    (ValueError("two ranks, one GPU"), "two ranks, one GPU"),
])  # fmt: skip
def test_a_fabric_that_does_not_work(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(fabrics, "run", fail)
    trial = fabrics.attempt("paced")
    assert fabrics.carried(trial, "fail").level == "fail" and trial.error == said
    assert fabrics.carried(trial, "note").remedy == 'use fabric="paced"'
    assert fabrics.chosen(trial, trial).level == "fail"


@pytest.mark.parametrize(("gbit", "level"), [(0.97, "ok"), (1.1, "ok"), (0.4, "warn")])
def test_a_rate_that_is_not_kept_is_a_warning(gbit: float, level: str) -> None:
    assert fabrics.carried(fabrics.Trial("shaped", gbit=gbit), "note").level == level


def test_under_torchrun_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    (finding,), facts = fabrics.examine()
    assert finding.value == "not tried" and facts == {}


@pytest.mark.parametrize(("gbit", "error", "level"), [(6.0, "", "ok"), (1.0, "", "warn"), (0.0, "no gloo", "fail")])
def test_the_wire_ceiling(gbit: float, error: str, level: str) -> None:
    found = fabrics.ceiling(fabrics.Trial("loopback", error, gbit))
    assert found.level == level and found.data == {"works": not error, "gbit": gbit or None, "ranks": 2}


@pytest.mark.parametrize(("visible", "broken", "value"), [(0, "", "not here"), (1, "", "not here"), (2, "no torch",
                                                                                                   "does not work")])
def test_nccl_needs_two_gpus(visible: int, broken: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabrics, "gpus", lambda: visible)
    assert fabrics.nccl(broken).value == value


def test_nccl_is_tried_where_two_gpus_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(fn, device, *, ranks, fabric, timeout_s):
        assert (device, ranks, fabric.kind) == ("cuda", 2, "nccl")
        return [(90.0, {}), (80.0, {})]

    monkeypatch.setattr(fabrics, "gpus", lambda: 2)
    monkeypatch.setattr(fabrics, "run", run)
    found = fabrics.nccl()
    assert (found.value, found.data["gbit"]) == ("works", 80.0)


def test_without_a_process_that_starts_ranks_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RunNotStarted("the fork server did not start")

    monkeypatch.setattr(fabrics, "warm_up", refuse)
    monkeypatch.setattr(fabrics.subprocess, "run", lambda *a, **k: types.SimpleNamespace(returncode=0, stderr=""))
    monkeypatch.setattr(fabrics, "run", lambda *a, **k: pytest.fail("a run was started"))
    monkeypatch.setattr(fabrics, "gpus", lambda: 0)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    found, facts = fabrics.examine()
    assert [f.key for f in found] == ["paced", "shaped", "nccl_fabric", "loopback", "auto"] and facts == {}
    assert {f.key for f in found if f.level == "fail"} == {"paced", "shaped", "loopback", "auto"}
