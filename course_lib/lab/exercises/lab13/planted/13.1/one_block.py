def reduce_early(words):
    return list(words)
