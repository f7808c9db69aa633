"""Memory and traffic of a training run on a cluster, as formulas. No torch."""

from course_lib.plan.memory import FP32, MIXED, MIXED_FP32_GRADIENT, Memory, ModelShape, Precision, per_rank
from course_lib.plan.volumes import Impossible, accumulation_steps, data_degree

__all__ = ["FP32", "MIXED", "MIXED_FP32_GRADIENT", "Impossible", "Memory", "ModelShape", "Precision",
           "accumulation_steps", "data_degree", "per_rank"]
