import torch


class Half:
    def encode(self, gradient, ranks):
        return gradient.half()

    def decode(self, total, ranks):
        return (total / ranks).float()
