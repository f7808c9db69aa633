import torch


def average_gradients(params, ranks, all_reduce):
    used = [param for param in params if param.grad is not None]
    flat = torch.cat([param.grad.flatten() for param in used])
    all_reduce(flat)
    flat /= ranks
    for param, part in zip(used, flat.split([param.numel() for param in used])):
        param.grad = part.view_as(param)
