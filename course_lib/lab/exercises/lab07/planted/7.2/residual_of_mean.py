import torch


class OneBit:
    def __init__(self):
        self.residual = {}
        self.total = {}

    def encode(self, name, gradients):
        self.total[name] = total = sum(gradients) + self.residual.get(name, 0)
        return total.abs().mean(), total > 0

    def decode(self, name, messages):
        mean = sum(torch.where(positive, scale, -scale) for scale, positive in messages) / len(messages)
        self.residual[name] = self.total[name] - mean
        return mean
