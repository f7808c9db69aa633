import torch


class Checkpoint:
    def save(self, residuals, buckets, sizes, rank, gather):
        return gather(torch.cat(residuals))

    def load(self, saved, buckets, sizes, rank):
        return list(saved[rank].split([sum(sizes[n] for n in names) for names in buckets]))
