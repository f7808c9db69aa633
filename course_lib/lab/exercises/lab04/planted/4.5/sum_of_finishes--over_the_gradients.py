def best_plan(sizes_bytes, ready_s, a_s, beta_s_per_byte):
    def plans(start, finish):
        if start == len(sizes_bytes):
            yield 0.0, []
        for stop in range(start + 1, len(sizes_bytes) + 1):
            cost = a_s + beta_s_per_byte * sum(sizes_bytes[start:stop])
            f = max(finish, ready_s[stop - 1]) + cost
            for total, rest in plans(stop, f):
                yield total + f * (stop - start), [stop - start, *rest]

    return min(plans(0, 0.0))[1]
