"""Send less: gradients in half precision, in one bit, their largest entries, or their low-rank part.

Every scheme is the state of one comm hook, for stock DDP and for `Bucketed`:

    state = OneBit(model)
    model = wrap("bucketed", model, comm_hook=hook, hook_state=state)

The arithmetic of a scheme is in the functions `compress` and `decompress` of its module, without any exchange;
`volumes` has the bytes in closed form, and `convergence` trains simulated ranks in one process.
"""

from course_lib.compress.cast import BF16, FP16
from course_lib.compress.compressor import Compressor, NonFiniteGradient, hook
from course_lib.compress.onebit import OneBit
from course_lib.compress.powersgd import PowerSGD
from course_lib.compress.topk import TopK

SCHEMES = {scheme.scheme: scheme for scheme in (FP16, BF16, OneBit, TopK, PowerSGD)}

__all__ = ["BF16", "FP16", "SCHEMES", "Compressor", "NonFiniteGradient", "OneBit", "PowerSGD", "TopK", "hook"]
