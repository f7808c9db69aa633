import torch


def average_gradients(params, ranks, all_reduce):
    for param in params:
        if param.grad is not None:
            param.grad /= ranks
