import torch


def clipped_update(params, N, micro_step, synchronise, step, max_norm):
    for i in range(N):
        micro_step(i)
    synchronise()
    torch.nn.utils.clip_grad_value_(params, max_norm)
    step()
