def accumulation_steps(B, b, D):
    if min(B, b, D) < 1:
        raise ValueError(f"B, b and D are 1 at least, not {B}, {b}, {D}")
    return max(1, B // (b * D))
