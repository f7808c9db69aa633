"""Memory, time and traffic of a training run on a cluster, as formulas. No torch."""

from course_lib.plan.hardware import GPUS, Cluster, cluster
from course_lib.plan.layout import Layout
from course_lib.plan.memory import FP32, MIXED, MIXED_FP32_GRADIENT, Memory, Precision, per_rank
from course_lib.plan.shape import MODELS, ModelShape, model
from course_lib.plan.timing import Step, step
from course_lib.plan.volumes import Impossible, accumulation_steps, data_degree

__all__ = ["FP32", "GPUS", "MIXED", "MIXED_FP32_GRADIENT", "MODELS", "Cluster", "Impossible", "Layout", "Memory",
           "ModelShape", "Precision", "Step", "accumulation_steps", "cluster", "data_degree", "model", "per_rank",
           "step"]
