def micro_batches(p, bubble, v):
    needed = (p - 1) * (1 - bubble) / bubble / v
    unit = p if v > 1 else 1
    return unit * (int(needed / unit) + 1)
