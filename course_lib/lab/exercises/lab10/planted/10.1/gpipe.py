def one_f_one_b(p, m, rank):
    return [f"F{i}" for i in range(m)] + [f"B{i}" for i in range(m)] + ["reduce0"]
