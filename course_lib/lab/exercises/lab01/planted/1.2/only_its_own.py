def bytes_per_rank(parameters, D, stage):
    weights = 2 * parameters / (D if stage == 3 else 1)
    gradients = 2 * parameters / (D if stage == 2 else 1)
    optimizer = 12 * parameters / (D if stage == 1 else 1)
    return weights, gradients, optimizer
