def micro_batches(p, percent, v):
    needed = (p - 1) * (100 - percent) / percent / v
    unit = p if v > 1 else 1
    return max(unit, unit * int(needed / unit))
