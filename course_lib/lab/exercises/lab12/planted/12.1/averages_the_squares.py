class ShardedOptimizer:
    def __init__(self, flat, wire, make_optimizer):
        self.flat = flat
        self.wire = wire
        self.mine = flat.tensor_split(wire.ranks)[wire.rank]
        self.optimizer = make_optimizer([self.mine])

    def step(self, gradient, max_norm):
        g = gradient.tensor_split(self.wire.ranks)[self.wire.rank]
        total = g.square().sum()
        self.wire.all_reduce(total)
        norm = (total / self.wire.ranks).sqrt()
        self.mine.grad = g * min(1, max_norm / norm)
        self.optimizer.step()
        self.wire.all_gather(self.flat)
