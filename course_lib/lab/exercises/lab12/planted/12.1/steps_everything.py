class ShardedOptimizer:
    def __init__(self, flat, wire, make_optimizer):
        self.flat = flat
        self.wire = wire
        self.optimizer = make_optimizer([flat])

    def step(self, gradient, max_norm):
        parts = gradient.tensor_split(self.wire.ranks)
        total = parts[self.wire.rank].square().sum()
        self.wire.all_reduce(total)
        self.wire.all_gather(gradient)
        self.flat.grad = gradient * min(1, max_norm / total.sqrt())
        self.optimizer.step()
