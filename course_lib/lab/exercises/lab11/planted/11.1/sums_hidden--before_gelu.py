import torch.nn.functional as F


def parallel_mlp(x, p, wire):
    x = wire.cross(x, backward="all_reduce")
    h = wire.cross(F.linear(x, p.up), forward="all_reduce") + p.up_bias
    h = F.gelu(h)
    return wire.cross(F.linear(h, p.down), forward="all_reduce") + p.down_bias
