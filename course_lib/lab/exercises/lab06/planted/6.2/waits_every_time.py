def step_time(N, Tf_s, Tb_s, ready_s, cost_s, every):
    now = 0.0
    for k in range(N):
        begin = free = now + Tf_s
        now = begin + Tb_s
        if every or k == N - 1:
            for ready, cost in zip(ready_s, cost_s):
                free = max(free, begin + ready) + cost
            now = max(now, free)
    return now
