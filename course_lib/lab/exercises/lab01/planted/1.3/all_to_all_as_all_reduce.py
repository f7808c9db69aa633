def bytes_per_update(kind, n, N, G, A, layers):
    ring = 2 * (n - 1) / n
    if kind == "DP":
        return ring * G
    if kind == "TP":
        return 4 * layers * N * ring * A
    if kind == "PP":
        return 2 * N * A
    return 4 * layers * N * ring * A
