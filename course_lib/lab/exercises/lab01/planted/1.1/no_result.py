def accumulation_steps(B, b, D):
    if min(B, b, D) < 1 or B % (b * D):
        raise ValueError(f"{B} is not a multiple of {b} times {D}")
    print(B // (b * D))
