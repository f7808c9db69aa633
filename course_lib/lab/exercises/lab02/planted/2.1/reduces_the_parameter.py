import torch


def average_gradients(params, ranks, all_reduce):
    for param in params:
        all_reduce(param.data)
        param.data /= ranks
