def window_factors(my_counts, ranks, all_reduce_sum):
    if sum(my_counts) == 0:
        return [0.0] * len(my_counts)
    return [ranks / all_reduce_sum(sum(my_counts))] * len(my_counts)
