class ShardedOptimizer:
    def __init__(self, flat, wire, make_optimizer):
        self.flat = flat
        self.wire = wire
        self.mine = flat.tensor_split(wire.ranks)[wire.rank]
        self.optimizer = make_optimizer([self.mine])

    def step(self, gradient, max_norm):
        self.mine.grad = gradient.tensor_split(self.wire.ranks)[self.wire.rank]
        self.optimizer.step()
        total = self.mine.grad.square().sum()
        self.wire.all_reduce(total)
        self.mine.grad = self.mine.grad * min(1, max_norm / total.sqrt())
        self.wire.all_gather(self.flat)
