def best_plan(sizes_bytes, ready_s, a_s, beta_s_per_byte):
    n = len(sizes_bytes)
    total, finish, cut = [0.0] * (n + 1), [0.0] * (n + 1), [0] * (n + 1)
    for j in range(1, n + 1):
        total[j] = float("inf")
        for i in range(j):
            f = max(finish[i], ready_s[j - 1]) + a_s + beta_s_per_byte * sum(sizes_bytes[i:j])
            if total[i] + f < total[j]:
                total[j], finish[j], cut[j] = total[i] + f, f, i
    plan, j = [], n
    while j:
        plan.insert(0, j - cut[j])
        j = cut[j]
    return plan
