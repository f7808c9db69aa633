def window_factors(my_counts, ranks, all_reduce_sum):
    return [1 / count for count in my_counts]
