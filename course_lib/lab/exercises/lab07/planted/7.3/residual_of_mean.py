import torch


class TopK:
    def __init__(self, k):
        self.k = k
        self.residual = {}

    def encode(self, name, gradient):
        self.residual[name] = x = gradient + self.residual.get(name, 0)
        places = x.abs().topk(max(1, round(self.k * len(x)))).indices
        return x[places], places

    def decode(self, name, messages, numel):
        out = torch.zeros(numel)
        for values, places in messages:
            out[places] += values
        mean = out / len(messages)
        self.residual[name] = self.residual[name] - mean
        return mean
