import torch


class OneBit:
    def __init__(self):
        self.residual = {}

    def encode(self, name, gradients):
        total = sum(gradients) + self.residual.get(name, 0)
        scale, positive = total.abs().mean(), total > 0
        self.residual[name] = torch.where(positive, scale, -scale) - total
        return scale, positive

    def decode(self, name, messages):
        return sum(torch.where(positive, scale, -scale) for scale, positive in messages) / len(messages)
