def accumulation_steps(B, b, D):
    if min(B, b, D) < 1 or B % (b * D):
        return ValueError(f"B = {B} is not a multiple of b·D")
    return B // (b * D)
