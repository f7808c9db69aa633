import torch


class Half:
    def encode(self, gradient, ranks):
        return gradient.to(torch.float16).div_(ranks)

    def decode(self, total, ranks):
        return total.to(torch.float32)
