def window_factors(my_counts, ranks, all_reduce_sum):
    return ranks / all_reduce_sum(sum(my_counts))
