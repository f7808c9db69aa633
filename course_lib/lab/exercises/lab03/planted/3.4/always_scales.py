import torch


def clipped_update(params, N, micro_step, synchronise, step, max_norm):
    for i in range(N):
        micro_step(i)
    synchronise()
    norm = torch.sqrt(sum(param.grad.square().sum() for param in params))
    for param in params:
        param.grad *= max_norm / norm
    step()
