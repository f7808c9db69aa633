def accumulation_steps(B, b, D):
    if B % (b * D):
        raise ValueError(f"{B} is not a multiple of {b} times {D}")
    return B // (b * D)
