def window_factors(my_counts, ranks, all_reduce_sum):
    return [ranks / all_reduce_sum(count) for count in my_counts]
