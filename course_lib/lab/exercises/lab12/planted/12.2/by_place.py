import torch


class ScatterBuckets:
    def __init__(self, sizes, wire):
        self.sizes = list(sizes)
        self.wire = wire
        self.flying = []
        self.sums = {}

    def bucket_full(self, b, gradient):
        n = self.wire.ranks
        k = -(-len(gradient) // n)
        whole = torch.cat([gradient, gradient.new_zeros(n * k - len(gradient))])
        part = gradient.new_empty(k)
        self.flying.append((part, self.wire.reduce_scatter(part, whole)))

    def end_of_backward(self):
        for b, (part, handle) in enumerate(self.flying):
            handle.wait()
            self.sums[b] = self.sums.get(b, 0) + part
        self.flying = []

    def finish(self):
        n, r = self.wire.ranks, self.wire.rank
        means = []
        for b, size in enumerate(self.sizes):
            k = -(-size // n)
            means.append(self.sums[b][:max(0, size - r * k)] / n)
        self.sums = {}
        return means
