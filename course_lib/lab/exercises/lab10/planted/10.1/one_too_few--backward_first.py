def one_f_one_b(p, m, rank):
    warm = min(p - 1 - rank, m) or 1
    words = [f"F{i}" for i in range(warm)]
    for i in range(warm, m):
        words += [f"B{i - warm}", f"F{i}"]
    words += [f"B{i}" for i in range(m - warm, m)]
    return [*words, "reduce0"]
