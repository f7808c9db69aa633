def accumulation_steps(B, b, D):
    return B // (b * D)
