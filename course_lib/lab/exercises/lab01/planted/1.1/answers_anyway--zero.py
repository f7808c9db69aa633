def accumulation_steps(B, b, D):
    if min(B, b, D) < 1 or B % (b * D):
        return 0
    return B // (b * D)
