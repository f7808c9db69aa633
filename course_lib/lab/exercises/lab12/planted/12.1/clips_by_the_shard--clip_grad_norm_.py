class ShardedOptimizer:
    def __init__(self, flat, wire, make_optimizer):
        self.flat = flat
        self.wire = wire
        self.mine = flat.tensor_split(wire.ranks)[wire.rank]
        self.optimizer = make_optimizer([self.mine])

    def step(self, gradient, max_norm):
        from torch.nn.utils import clip_grad_norm_

        self.mine.grad = gradient.tensor_split(self.wire.ranks)[self.wire.rank].clone()
        clip_grad_norm_([self.mine], max_norm)
        self.optimizer.step()
        self.wire.all_gather(self.flat)
