import torch


class ScatterBuckets:
    def __init__(self, sizes, wire):
        self.sizes = list(sizes)
        self.wire = wire
        self.flying = []
        self.sums = {}

    def bucket_full(self, b, gradient):
        n = self.wire.ranks
        k = -(-self.sizes[b] // n)
        whole = torch.cat([gradient, torch.zeros(n * k - self.sizes[b])])
        part = whole.chunk(n)[self.wire.rank] if k else whole
        self.flying.append((b, part, self.wire.reduce_scatter(part, whole)))

    def end_of_backward(self):
        for b, part, handle in self.flying:
            handle.wait()
            self.sums[b] = part if b not in self.sums else self.sums[b].add_(part)
        self.flying = []

    def finish(self):
        means = []
        for b, size in enumerate(self.sizes):
            k = -(-size // self.wire.ranks)
            mine = max(0, min(k, size - self.wire.rank * k))
            means.append(self.sums[b][:mine] / self.wire.ranks)
        self.sums = {}
        return means
