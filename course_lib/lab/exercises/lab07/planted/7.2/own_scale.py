import torch


class OneBit:
    def __init__(self):
        self.residual = {}

    def encode(self, name, gradients):
        total = sum(gradients) + self.residual.get(name, 0)
        scale, positive = total.abs().mean(), total > 0
        self.residual[name] = total - torch.where(positive, scale, -scale)
        return scale, positive

    def decode(self, name, messages):
        scale = messages[0][0]
        return sum(torch.where(positive, scale, -scale) for _, positive in messages) / len(messages)
