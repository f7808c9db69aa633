"""`compare(every=…)`: those named synchronise after every micro-step, the others once."""

from __future__ import annotations

from course_lib.tune import compare


def tiny():
    from course_lib.train import emulated

    return emulated.equal(layers=2, mb=0.01, forward_ms=0.5, backward_ms=1)


def test_only_the_variants_named_send_in_every_micro_step() -> None:
    layout = {"bucket_mb": 0.005, "first_bucket_mb": None}
    flat = {"flat": True}
    variants = {"once": ("every_step", layout), "every": ("every_step", layout), "serial once": ("serial", flat),
                "serial every": ("serial", flat), "ddp every": ("ddp", layout)}
    found = compare(tiny, variants, every=["every", "serial every", "ddp every"], fabric="paced", micro_steps=3,
                    repeats=2)
    calls = {name: len(one.timeline.select(rank=0, kind="comm", step=0)) for name, one in found.items()}
    assert calls == {"once": 2, "every": 6, "serial once": 1, "serial every": 3, "ddp every": 6}
