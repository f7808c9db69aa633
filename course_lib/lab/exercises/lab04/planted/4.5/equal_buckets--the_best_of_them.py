def best_plan(sizes_bytes, ready_s, a_s, beta_s_per_byte):
    n = len(sizes_bytes)

    def finish(plan):
        f, start = 0.0, 0
        for length in plan:
            stop = start + length
            f = max(f, ready_s[stop - 1]) + a_s + beta_s_per_byte * sum(sizes_bytes[start:stop])
            start = stop
        return f

    plans = [[length] * (n // length) + ([n % length] if n % length else []) for length in range(1, n + 1)]
    return min(plans, key=finish)
