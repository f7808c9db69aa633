def best_plan(sizes_bytes, ready_s, a_s, beta_s_per_byte):
    cap = 3 * 2**18
    plan, length, held = [], 0, 0
    for size in sizes_bytes:
        length, held = length + 1, held + size
        if held >= cap:
            plan.append(length)
            length, held = 0, 0
    return [*plan, length] if length else plan
