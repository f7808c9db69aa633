import torch


def average_gradients(params, ranks, all_reduce):
    for param in params:
        grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        all_reduce(grad)
        grad /= ranks
