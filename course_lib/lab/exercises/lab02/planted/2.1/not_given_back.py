import torch


def average_gradients(params, ranks, all_reduce):
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params])
    all_reduce(flat)
    flat /= ranks
