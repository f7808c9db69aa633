"""A verdict on every environment variable that steers NCCL, gloo, torch.distributed or CUDA's queues.

NCCL reads files as well (`/etc/nccl.conf`, and `~/.nccl.conf` or what NCCL_CONF_FILE names): their lines count as set.
"""

from __future__ import annotations

import difflib
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from course_lib.doctor.finding import Finding, Level
from course_lib.doctor.interplay import contradictions, max_connections
from course_lib.doctor.remarks import REMARKS
from course_lib.doctor.rules import Whole, as_number
from course_lib.doctor.variables import ELSEWHERE, KNOWN, PLUGINS, WRONG_NAMES, Verdict

PREFIXES = ("NCCL_", "TORCH_", "GLOO_")
SINGLE = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES")
OURS_TO_KNOW = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_GLOO_", "TORCH_FR_", "GLOO_")
"""Of these families the table claims to know every name; of other TORCH_ names it does not."""
SECRET = ("NCCL_PSK",)

_LEVELS: dict[Verdict, Level] = {
    "fine": "ok", "plugin": "ok", "tuning": "note", "deprecated": "note", "depends": "note", "unchecked": "note",
    "unknown": "warn", "ignored": "warn", "refused": "warn", "debug_only": "warn", "harms_overlap": "warn",
    "removed": "warn", "contradiction": "warn",
}


def relevant(name: str) -> bool:
    """Whether somebody who set `name` meant one of the libraries; small letters are a common slip."""
    return name.upper().startswith(PREFIXES) or name.upper() in SINGLE


def judge(environ: Mapping[str, str], *, strategy: str = "", interfaces: Iterable[str] | None = None,
          files: Iterable[Path] | None = None) -> tuple[Finding, ...]:
    """One finding per variable set, and one per pair that contradicts itself.

    `strategy` ("ddp", "fsdp2" or "megatron-tp") decides what CUDA_DEVICE_MAX_CONNECTIONS should be. `interfaces`
    are the network interfaces of this machine and `files` NCCL's configuration files; both are looked up if not given.
    """
    names = tuple(interfaces) if interfaces is not None else _interfaces()
    written = from_files(conf_files(environ) if files is None else files)
    origin = {name: (value, "set in a file that NCCL reads") for name, value in written.items()}
    origin |= {name: (value, "") for name, value in environ.items()}
    settings = {name: value for name, (value, _) in origin.items() if relevant(name)}
    found = [_one(name, value, names, origin[name][1]) for name, value in sorted(settings.items())
             if name != "CUDA_DEVICE_MAX_CONNECTIONS"]
    found += [_finding(*verdict) for verdict in max_connections(settings, strategy)]
    found += [_finding(*verdict) for verdict in contradictions(settings)]
    return tuple(found)


def _one(name: str, value: str, interfaces: tuple[str, ...], origin: str) -> Finding:
    known = KNOWN.get(name)
    if known is None:
        return _stranger(name, value, origin)
    if wrong := known.rule.problem(value):
        return _bad_value(name, value, wrong, origin)
    if name == "NCCL_CONF_FILE" and not Path(value).is_file():
        return _finding(name, value, "ignored", "there is no such file, and nobody says so", "correct or unset it",
                        known.source, origin)
    if wrong := _missing_interface(name, value, interfaces):
        return _finding(name, value, "refused", wrong, "name one of them", known.source, origin)
    renamed = f"TORCH_{name}" if known.verdict == "deprecated" else ""
    remark = REMARKS.get(renamed or name)
    if remark is not None and remark.applies(value):
        return _finding(name, value, remark.verdict, remark.sentence, remark.remedy, remark.source, origin)
    if renamed:
        return _finding(name, value, "deprecated", "the name of old; where both are set, the TORCH_ one wins",
                        f"use {renamed}", known.source, origin)
    if known.verdict == "tuning":
        return _finding(name, value, "tuning", "known; meant for experiments, not to be kept", "", known.source, origin)
    return _finding(name, value, "fine", "known", "", known.source, origin)


def _bad_value(name: str, value: str, wrong: str, origin: str) -> Finding:
    known = KNOWN[name]
    if known.on_bad_value == "refused":
        return _finding(name, value, "refused", f"{wrong}; with this value the process group does not start",
                        "correct or unset it", known.source, origin)
    return _finding(name, value, "ignored", f"{wrong}; {_instead(name, value)}", "correct or unset it", known.source,
                    origin)


def _instead(name: str, value: str) -> str:
    """What becomes of a value that is not refused."""
    if not value.strip():
        return "as good as not set"
    if not name.startswith("NCCL_"):
        return "it is passed over, and the library takes a value of its own"
    if not isinstance(KNOWN[name].rule, Whole):
        return "it is passed over without a word, and NCCL takes a value of its own"
    try:
        int(value, 0)
    except ValueError:
        return f"NCCL complains of nothing and reads this as {as_number(value)}"
    return "NCCL does not refuse it, and does what its guide does not say"


def _stranger(name: str, value: str, origin: str) -> Finding:
    """A name outside the table: a slip, a plugin's, or of a part of torch that is not about communication."""
    for prefix, owner in PLUGINS.items():
        if name.startswith(prefix):
            return _finding(name, value, "plugin", f"read by {owner}, not by NCCL itself", "", owner, origin)
    near = "" if name in ELSEWHERE else nearest(name)
    if not name.startswith(OURS_TO_KNOW) and not near:
        return _finding(name, value, "unchecked", "not about communication as far as this table knows", "", "", origin)
    remedy = ELSEWHERE.get(name) or (f"{near} exists: did you mean that?" if near else "unset it")
    return _finding(name, value, "unknown", "neither NCCL nor torch has this name, and neither complains", remedy,
                    KNOWN[near].source if near else "", origin)


def nearest(name: str) -> str:
    """The known name that `name` was probably meant to be; empty if none is near."""
    if name in WRONG_NAMES:
        return WRONG_NAMES[name]
    upper = name.upper()
    for exact in (upper, f"TORCH_{upper}"):
        if exact in KNOWN:
            return exact
    # The NCCL variables of torch are often written without their TORCH_, so both families are looked through.
    family = next((prefix for prefix in ("TORCH_NCCL_", *PREFIXES, "CUDA_") if upper.startswith(prefix)), "")
    families = ("TORCH_NCCL_", "NCCL_") if family.endswith("NCCL_") else (family,)
    ends = {known.removeprefix(each): known for each in families for known, row in KNOWN.items()
            if known.startswith(each) and row.verdict != "deprecated"}
    cutoff = 0.7 if upper.startswith(OURS_TO_KNOW) else 0.88
    near = difflib.get_close_matches(upper.removeprefix(family), ends, n=1, cutoff=cutoff)
    return ends[near[0]] if near else ""


def _missing_interface(name: str, value: str, interfaces: tuple[str, ...]) -> str:
    """NCCL takes prefixes, `=exact` names and `^` exclusions; gloo takes exact names."""
    if name not in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") or not interfaces or value.startswith("^"):
        return ""
    exact = name.startswith("GLOO_") or value.startswith("=")
    asked = [part.strip() for part in value.removeprefix("=").split(",") if part.strip()]
    there = [any(have == part or (not exact and have.startswith(part)) for have in interfaces) for part in asked]
    # NCCL takes those that it finds; gloo makes a device of each, or fails.
    if there and (all(there) if name.startswith("GLOO_") else any(there)):
        return ""
    return f"no interface {value!r} here (there are {', '.join(interfaces)})"


def _finding(name: str, value: str, verdict: Verdict, sentence: str, remedy: str, source: str,
             origin: str = "") -> Finding:
    stops_labs = name == "TORCH_DISTRIBUTED_DEBUG" and verdict == "refused"  # raised by importing torch.distributed
    shown = "(hidden)" if name in SECRET else value
    detail = f"{sentence} ({origin})" if origin else sentence
    return Finding(name, "fail" if stops_labs else _LEVELS[verdict], name, shown, detail, remedy, source,
                   {"verdict": verdict})


def conf_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The files NCCL reads before the environment, in that order."""
    everybody = Path("/etc/nccl.conf")
    if named := environ.get("NCCL_CONF_FILE"):
        return everybody, Path(named)
    return (everybody, Path(home, ".nccl.conf")) if (home := environ.get("HOME")) else (everybody,)


def from_files(files: Iterable[Path]) -> dict[str, str]:
    """NAME=VALUE lines of the files that can be read; later files win."""
    found: dict[str, str] = {}
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        pairs = (line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith("#"))
        found |= {name.strip(): value.strip() for name, _, value in pairs}
    return found


def _interfaces() -> tuple[str, ...]:
    try:
        return tuple(name for _, name in socket.if_nameindex())
    except (AttributeError, OSError):
        return ()
