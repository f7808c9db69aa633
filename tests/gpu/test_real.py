"""What labs 04 and 12 run with device="cuda"."""

from __future__ import annotations

import pytest

from course_lib import overlap
from course_lib.lab.workbench.real import real_runs
from tests.gpu.given import DEVICE, on

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", on(1, 2, 8))
def test_every_strategy_makes_the_same_updates_on_gpus(ranks: int) -> None:
    ways = {name: (name, {}) for name in ("no_sync", "serial", "bucketed", "ddp", "zero1", "zero2", "zero3")}
    for name, one in real_runs(ways, device=DEVICE, ranks=ranks).items():
        assert one.apart < 1e-3, name
        report = overlap.report(one.trace.timeline)
        assert report.pooled.compute, name
        if ranks > 1:
            assert report.pooled.comm and 0 <= one.exposed_ms <= max(row.span for row in report.rows) / 1e6, name
