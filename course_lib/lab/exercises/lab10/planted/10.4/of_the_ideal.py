import math


def micro_batches(p, bubble, v):
    needed = (p - 1) / bubble / v
    unit = p if v > 1 else 1
    return max(unit, unit * math.ceil(needed / unit))
