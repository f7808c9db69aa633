"""On a fast wire with some latency, DDP's 25 MB are too little for a large gradient: larger ones are tried unasked."""

from __future__ import annotations

import inspect

from course_lib import cli
from course_lib.simulate.reconstruct import even_profile, reconstruct
from course_lib.tune.choice import DEFAULT, cap_mb
from course_lib.tune.choose import CAPS_MB, predictions, shortlist
from course_lib.tune.command import parse_caps


def test_on_the_published_cluster_a_larger_bucket_is_measured_first() -> None:
    """1400 MB on 64 ranks: buckets of 25 MB expose 37 % of the step, buckets of 100 MB 4 %."""
    case = reconstruct(even_profile(1400, layers=56, Tb=0.3, parameters=5))
    predicted = predictions(case.profile, case.link, CAPS_MB)
    first = shortlist(predicted, 2, with_plan=False)[1]  # a torch that knows one cap for all buckets cannot do the plan
    assert cap_mb(first) > 25
    default, better = predicted[DEFAULT], predicted[first]
    assert default.exposed_s > 0.3 * default.step_s and better.exposed_s < 0.15 * better.step_s


def test_the_command_tries_the_same_sizes() -> None:
    assert tuple(parse_caps(inspect.signature(cli.tune).parameters["target_caps"].default)) == CAPS_MB
