"""`course tune`: which bucket size a user's own model should have on a wire, predicted, then measured."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from course_lib.launch import RankFailed, RunError, RunTimeout
from course_lib.launch.fabric import as_fabric
from course_lib.plan.volumes import accumulation_steps
from course_lib.simulate.buckets import MB, predict, uniform_plan
from course_lib.tune.choice import Choice, cap_mb
from course_lib.tune.choose import choose
from course_lib.tune.factory import Factory
from course_lib.tune.profile import ModelError
from course_lib.tune.sweep import label


class RunFailure(RuntimeError):
    """The ranks did not deliver, and why, in one sentence."""


def tune_command(model: str, *, ranks: int, fabric: str, micro_steps: int, caps: str, candidates: int, repeats: int,
                 timeout_s: float, as_json: bool, figure: Path | None, write: Callable[[str], object] = print) -> None:
    """Tune and say what was found. Raises `ValueError` for input that cannot be (a `ModelError` where the ranks found
    it) and `RunFailure` where a run failed; each is one sentence."""
    factory, caps_mb = Factory(model), parse_caps(caps)
    if figure is not None and (figure.suffix.lower() != ".png" or not figure.resolve().parent.is_dir()):
        raise ValueError(f"--figure {figure}: give a .png file in a folder that is there")
    # What the ranks print must not get between a program and the JSON that it reads.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        found = _choose(factory, ranks=ranks, fabric=fabric, micro_steps=micro_steps, caps_mb=caps_mb,
                        candidates=candidates, repeats=repeats, timeout_s=timeout_s)
    if figure is not None:
        figure.write_bytes(picture(found, f"{model}, {ranks} ranks, {fabric}").png())
    scale = as_fabric(fabric).scale
    write(json.dumps(summary(found, scale), indent=1) if as_json else text(found, scale, fabric))


def accumulation(micro_steps: int | None, B: int | None, b: int | None, ranks: int) -> int:
    """N, as given or as B/(b·ranks); 1 where nothing is given. Raises `ValueError`, in words, where both or half of the
    batches are given, and where they do not divide."""
    if B is None and b is None:
        return 1 if micro_steps is None else micro_steps
    if micro_steps is not None:
        raise ValueError("--micro-steps is N itself, and --global-batch with --micro-batch says what N follows from: "
                         "give one or the other")
    if B is None or b is None:
        raise ValueError("--global-batch and --micro-batch go together: N = B / (b·ranks)")
    return accumulation_steps(B, b, ranks)


def parse_caps(caps: str) -> list[float]:
    """Bucket sizes from `1,2.5,4`. Raises `ValueError`."""
    try:
        sizes = [float(part) for part in caps.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size < float("inf") for size in sizes):
        raise ValueError(f"--target-caps {caps!r}: give sizes in MB above 0 with commas between them, as in 1,2,4,8")
    return sizes


def _choose(factory: Factory, **options: Any) -> Choice:
    try:
        return choose(factory, **options)
    except RankFailed as error:
        if isinstance(error.cause, ModelError):
            raise error.cause from None
        last = error.traceback_text.strip().splitlines()[-1]
        raise RunFailure(f"rank {error.rank} failed: {last}") from error
    except RunTimeout as error:
        stood = _where_it_stood(str(error))
        raise RunFailure(f"{stood}. Give a longer --timeout, or less work a micro-step") from error
    except RunError as error:
        raise RunFailure(str(error)) from error


def _where_it_stood(said: str) -> str:
    """Who waited for whom, and the innermost line of each silent rank, out of the words of a `RunTimeout`."""
    lines = said.splitlines()
    parts = list(takewhile(lambda line: not line.endswith("stands at:"), lines))
    for i, line in enumerate(lines):
        frame = next((at.strip() for at in lines[i + 1:] if at.strip().startswith("File")), "")
        if line.endswith("stands at:") and frame:
            parts.append(f"{line.removesuffix(':')} {frame.removeprefix('File ')}")
    return "; ".join(part.rstrip(".") for part in parts)


def text(found: Choice, scale: float, fabric: str) -> str:
    """What a person reads."""
    lines = [f"{found.profile.total_bytes / MB:.1f} MB of gradient, {found.measured['serial'].timeline.provenance}",
             f"Fitted wire: {found.link.a_s * 1e3:.2f} ms a collective and {found.link.beta_s_per_byte * MB * 1e3:.2f} "
             f"ms a MB; r = Tm/Tc = {found.r:.2f}", "", found.table(), "", found.verdict]
    if found.settled:
        arguments = ", ".join(f"{k}={v}" for k, v in found.ddp_arguments.items())
        lines.append(f"DistributedDataParallel(module{', ' if arguments else ''}{arguments})")
    if scale > 1:
        lines += ["", f"{fabric} is carried at 1/{scale:g} of its rate here while the compute runs at full speed: with "
                  f"the same compute, r would be about {found.r / scale:.2g} on the real wire."]
    return "\n".join(lines)


def summary(found: Choice, scale: float) -> dict[str, Any]:
    """The same for programs: seconds, bytes and MB of 2**20 bytes; null where a layout was not measured."""
    def row(name: str) -> dict[str, Any]:
        one, guess = found.measured.get(name), found.predicted.get(name)
        return {"name": name, "bucket_bytes": guess and list(guess.plan.bytes), "predicted_s": found.predicted_s(name),
                "measured_s": one and one.median_s, "spread_s": one and one.spread_s,
                "exposed_s": one and one.exposed_s, "repetitions_s": one and list(one.seconds)}

    names = dict.fromkeys((*found.measured, *found.predicted))
    return {"best": found.best, "recommended": found.settled, "verdict": found.verdict,
            "ddp_arguments": found.ddp_arguments, "r": found.r, "Tc_s": found.Tc, "Tm_s": found.Tm,
            "T_floor_s": found.floor_s, "gradient_bytes": found.profile.total_bytes, "micro_steps": found.profile.N,
            "a_s": found.link.a_s, "beta_s_per_byte": found.link.beta_s_per_byte, "scale": scale,
            "provenance": found.measured["serial"].timeline.provenance, "layouts": [row(n) for n in names]}


def picture(found: Choice, title: str):
    """The predicted curve with the measured caps on it; the recommended layout is a level, as is T_floor."""
    from course_lib.show import curve

    caps = sorted(cap_mb(n) for n in found.predicted if n.endswith(" MB"))
    ratio = max(2.0, caps[-1] / caps[0])
    grid = sorted({*caps, *(caps[0] * ratio ** (i / 48) for i in range(49))})
    line = [(cap, predict(found.profile, found.link, uniform_plan(found.profile, cap * MB)).step_s * 1e3)
            for cap in grid]
    points = [(cap, m.median_s * 1e3, (m.median_s - m.spread_s) * 1e3, (m.median_s + m.spread_s) * 1e3)
              for cap in caps if (m := found.measured.get(label(cap)))]
    best = found.measured[found.best]
    return curve(line, points, best_ms=best.median_s * 1e3, best_label=found.best, limit_ms=found.floor_s * 1e3,
                 serial_ms=found.measured["serial"].median_s * 1e3, title=title,
                 provenance=best.timeline.provenance)
