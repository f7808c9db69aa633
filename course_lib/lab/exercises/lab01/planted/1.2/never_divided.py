def bytes_per_rank(parameters, D, stage):
    return 2 * parameters, 2 * parameters, 12 * parameters
