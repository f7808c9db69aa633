import math


def micro_batches(p, bubble, v):
    return max(1, math.ceil((p - 1) * (1 - bubble) / bubble / v))
