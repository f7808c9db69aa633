def bytes_per_update(kind, n, N, G, A, layers):
    if kind == "DP":
        return 2 * G
    if kind == "TP":
        return 4 * layers * N * 2 * A
    if kind == "PP":
        return 2 * N * A
    return 4 * layers * N * (n - 1) / n * A
