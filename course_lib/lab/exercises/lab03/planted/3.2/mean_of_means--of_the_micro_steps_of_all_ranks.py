def window_factors(my_counts, ranks, all_reduce_sum):
    N = len(my_counts)
    return [ranks / (all_reduce_sum(count) * N) for count in my_counts]
