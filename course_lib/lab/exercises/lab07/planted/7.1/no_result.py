import torch


class Half:
    def encode(self, gradient, ranks):
        return (gradient / ranks).to(torch.float16)

    def decode(self, total, ranks):
        total.to(torch.float32)
