import torch


def average_gradients(params, ranks, all_reduce):
    for param in params:
        if param.grad is None:
            continue
        all_reduce(param.grad)
        param.grad /= ranks
