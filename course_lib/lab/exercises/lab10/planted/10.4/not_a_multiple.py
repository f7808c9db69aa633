import math


def micro_batches(p, percent, v):
    return max(1, math.ceil((p - 1) * (100 - percent) / percent / v))
