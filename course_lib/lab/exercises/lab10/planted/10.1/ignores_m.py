def one_f_one_b(p, m, rank):
    warm = p - 1 - rank
    words = [f"F{i}" for i in range(warm)]
    for i in range(warm, m):
        words += [f"F{i}", f"B{i - warm}"]
    words += [f"B{i}" for i in range(m - warm, m)]
    return [*words, "reduce0"]
