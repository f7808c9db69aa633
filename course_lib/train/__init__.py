"""Training on several ranks: data, models, and one wrapper a strategy.

Wrap a module on a rank, with the class or by name; the training loop is the same for all:

    model = wrap("bucketed", GPT(), bucket_mb=4)
    accumulate(model, window, next_byte_loss, normalise="micro")
    optimizer.step()

Models and data are in `gpt`, `emulated` and `data`, the single-process result in `reference`.
"""

from course_lib.train.bucketed import Bucketed
from course_lib.train.control import SynchronizationError
from course_lib.train.ddp import STRATEGIES, StockDDP, wrap
from course_lib.train.delayed import Delayed
from course_lib.train.diloco import DiLoCo
from course_lib.train.everystep import EveryStep
from course_lib.train.local_sgd import LocalSGD
from course_lib.train.nosync import NoSync
from course_lib.train.serial import SerialAllReduce
from course_lib.train.sharded import Sharded
from course_lib.train.stepping import StepPerBucket
from course_lib.train.window import accumulate

__all__ = ["STRATEGIES", "Bucketed", "Delayed", "DiLoCo", "EveryStep", "LocalSGD", "NoSync", "SerialAllReduce",
           "Sharded", "StepPerBucket", "StockDDP", "SynchronizationError", "accumulate", "wrap"]
