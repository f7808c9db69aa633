import torch


def average_gradients(params, ranks, all_reduce):
    for param in params:
        param.grad /= ranks
        all_reduce(param.grad)
