def accumulation_steps(B, b, D):
    if min(B, b, D) >= 1 and B % (b * D) == 0:
        return B // (b * D)
