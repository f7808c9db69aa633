import torch


class TopK:
    def __init__(self, k):
        self.k = k
        self.residual = {}

    def encode(self, name, gradient):
        x = gradient + self.residual.get(name, 0)
        places = x.abs().topk(max(1, int(self.k * len(x)))).indices
        self.residual[name] = x.index_fill(0, places, 0)
        return x[places], places

    def decode(self, name, messages, numel):
        out = torch.zeros(numel)
        for values, places in messages:
            out[places] += values
        return out / len(messages)
