def step_time(N, Tf_s, Tb_s, ready_s, cost_s, every):
    free = 0.0
    for k in range(N):
        if every or k == N - 1:
            begin = k * (Tf_s + Tb_s) + Tf_s
            for ready, cost in zip(ready_s, cost_s):
                free = max(free, begin + ready) + cost
    return free
