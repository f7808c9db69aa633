import torch


class Checkpoint:
    def save(self, residuals, buckets, sizes, rank, gather):
        return gather(residuals)

    def load(self, saved, buckets, sizes, rank):
        return saved[rank]
