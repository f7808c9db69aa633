def best_plan(sizes_bytes, ready_s, a_s, beta_s_per_byte):
    n = len(sizes_bytes)

    def best(start, finish):
        if start == n:
            return finish, []
        found = []
        for stop in range(start + 1, n + 1):
            f = max(finish, ready_s[stop - 1]) + a_s + beta_s_per_byte * sum(sizes_bytes[start:stop])
            end, rest = best(stop, f)
            found.append((end, [stop - start, *rest]))
        return min(found)

    return best(0, 0.0)[1]
