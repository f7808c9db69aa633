import math


def micro_batches(p, percent, v):
    bubble = percent / 100
    needed = (p - 1) * (1 - bubble) / bubble / v
    unit = p if v > 1 else 1
    return max(unit, unit * math.ceil(needed / unit))
