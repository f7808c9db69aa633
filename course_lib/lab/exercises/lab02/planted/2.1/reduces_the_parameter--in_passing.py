import torch


def average_gradients(params, ranks, all_reduce):
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        with torch.no_grad():
            all_reduce(param)
            param /= ranks
            param.grad /= 1
