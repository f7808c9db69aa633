def window_factors(my_counts, ranks, all_reduce_sum):
    return [1 / len(my_counts)] * len(my_counts)
