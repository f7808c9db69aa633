def best_plan(sizes_bytes, ready_s, a_s, beta_s_per_byte):
    return [len(sizes_bytes)]
