def step_time(N, Tf_s, Tb_s, ready_s, cost_s, every):
    sends = N if every else 1
    return N * (Tf_s + Tb_s) + sends * sum(cost_s)
