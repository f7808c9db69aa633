import torch.nn.functional as F


class SequenceParallelMLP:
    def __init__(self, p, wire):
        self.p, self.wire = p, wire

    def forward(self, x):
        p, wire = self.p, self.wire
        h = F.layer_norm(x, x.shape[-1:], p.norm_weight, p.norm_bias)
        h = wire.cross(h, "all_gather", "reduce_scatter")
        y = F.linear(F.gelu(F.linear(h, p.up, p.up_bias)), p.down)
        y = x + wire.cross(y, "reduce_scatter", "all_gather") + p.down_bias

    def finish(self):
        for param in (self.p.norm_weight, self.p.norm_bias, self.p.down_bias):
            self.wire.all_reduce(param.grad)
