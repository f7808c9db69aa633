def accumulation_steps(B, b, D):
    if not (B and b and D):
        raise ValueError("B, b and D must not be 0")
    if B % (b * D):
        raise ValueError(f"{B} is not a multiple of {b} times {D}")
    return B // (b * D)
