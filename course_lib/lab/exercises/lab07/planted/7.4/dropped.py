import torch


class Checkpoint:
    def save(self, residuals, buckets, sizes, rank, gather):
        return gather({"buckets": buckets})

    def load(self, saved, buckets, sizes, rank):
        return [torch.zeros(sum(sizes[n] for n in names)) for names in buckets]
