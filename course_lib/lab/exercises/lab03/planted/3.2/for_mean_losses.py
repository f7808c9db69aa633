def window_factors(my_counts, ranks, all_reduce_sum):
    total = all_reduce_sum(sum(my_counts))
    return [ranks * count / total for count in my_counts]
