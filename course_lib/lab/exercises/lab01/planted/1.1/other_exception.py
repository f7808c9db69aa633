def accumulation_steps(B, b, D):
    assert min(B, b, D) >= 1, "B, b and D are 1 at least"
    assert B % (b * D) == 0, "B is not a multiple of b times D"
    return B // (b * D)
