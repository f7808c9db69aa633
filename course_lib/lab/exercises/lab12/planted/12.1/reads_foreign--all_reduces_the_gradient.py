class ShardedOptimizer:
    def __init__(self, flat, wire, make_optimizer):
        self.flat = flat
        self.wire = wire
        self.mine = flat.tensor_split(wire.ranks)[wire.rank]
        self.optimizer = make_optimizer([self.mine])

    def step(self, gradient, max_norm):
        self.wire.all_reduce(gradient)
        norm = gradient.norm()
        g = gradient.tensor_split(self.wire.ranks)[self.wire.rank]
        self.mine.grad = g * (max_norm / norm).clamp(max=1)
        self.optimizer.step()
        self.wire.all_gather(self.flat)
