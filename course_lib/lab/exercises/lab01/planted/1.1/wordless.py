def accumulation_steps(B, b, D):
    if min(B, b, D) < 1 or B % (b * D):
        raise ValueError
    return B // (b * D)
