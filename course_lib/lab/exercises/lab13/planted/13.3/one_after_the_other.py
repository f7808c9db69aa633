def best_layout(gpus, B, b, micro_s, data_s, memory, limit):
    best = None
    for t in (1, 2, 4, 8):
        for p in range(1, gpus // t + 1):
            D = gpus // (t * p)
            if gpus % (t * p) or B % (b * D) or memory(t, p, D) > limit:
                continue
            N = B // (b * D)
            took = N * p * micro_s(t, p) + data_s(t, p, D)
            if best is None or took < best[0]:
                best = took, (t, p, D, N)
    return best and best[1]
