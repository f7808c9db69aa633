def best_plan(sizes_bytes, ready_s, a_s, beta_s_per_byte):
    n = len(sizes_bytes)
    soonest, cut = [0.0] * (n + 1), [0] * (n + 1)
    for j in range(1, n + 1):
        finish = [max(soonest[i], ready_s[i]) + a_s + beta_s_per_byte * sum(sizes_bytes[i:j]) for i in range(j)]
        soonest[j] = min(finish)
        cut[j] = finish.index(soonest[j])
    plan, j = [], n
    while j:
        plan.insert(0, j - cut[j])
        j = cut[j]
    return plan
