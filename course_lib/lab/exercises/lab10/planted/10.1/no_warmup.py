def one_f_one_b(p, m, rank):
    words = []
    for i in range(m):
        words += [f"F{i}", f"B{i}"]
    return [*words, "reduce0"]
