import torch


def average_gradients(params, ranks, all_reduce):
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        all_reduce(param.grad)
        param.grad /= ranks
        with torch.no_grad():
            param -= 0.01 * param.grad
