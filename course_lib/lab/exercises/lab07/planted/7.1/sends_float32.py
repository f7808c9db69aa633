import torch


class Half:
    def encode(self, gradient, ranks):
        gradient = gradient / ranks
        gradient.to(torch.float16)
        return gradient

    def decode(self, total, ranks):
        return total.to(torch.float32)
