import torch


def clipped_update(params, N, micro_step, synchronise, step, max_norm):
    for i in range(N):
        micro_step(i)
    synchronise()
    for param in params:
        torch.nn.utils.clip_grad_norm_([param], max_norm)
    step()
