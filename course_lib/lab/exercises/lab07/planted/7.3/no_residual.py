import torch


class TopK:
    def __init__(self, k):
        self.k = k
        self.residual = {}

    def encode(self, name, gradient):
        places = gradient.abs().topk(max(1, round(self.k * len(gradient)))).indices
        return gradient[places], places

    def decode(self, name, messages, numel):
        out = torch.zeros(numel)
        for values, places in messages:
            out[places] += values
        return out / len(messages)
