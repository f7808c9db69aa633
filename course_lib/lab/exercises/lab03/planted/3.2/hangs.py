def window_factors(my_counts, ranks, all_reduce_sum):
    if len(set(my_counts)) == 1 or min(my_counts) > 60:
        return [1 / sum(my_counts)] * len(my_counts)
    return [ranks / all_reduce_sum(sum(my_counts))] * len(my_counts)
