class ShardedOptimizer:
    def __init__(self, flat, wire, make_optimizer):
        self.flat, self.wire, self.make_optimizer = flat, wire, make_optimizer

    def step(self, gradient, max_norm):
        wire = self.wire
        mine = self.flat.tensor_split(wire.ranks)[wire.rank]
        part = gradient.tensor_split(wire.ranks)[wire.rank]
        squares = part.square().sum()
        wire.all_reduce(squares)
        mine.grad = part * min(1, max_norm / squares.sqrt())
        self.make_optimizer([mine]).step()
        wire.all_gather(self.flat)
