import torch


def average_gradients(params, ranks, all_reduce):
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad /= ranks
        all_reduce(param.grad)
        param.grad /= ranks
