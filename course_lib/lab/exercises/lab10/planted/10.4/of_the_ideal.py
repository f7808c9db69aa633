import math


def micro_batches(p, percent, v):
    needed = (p - 1) * 100 / percent / v
    unit = p if v > 1 else 1
    return max(unit, unit * math.ceil(needed / unit))
