import torch


class Rounds:
    def __init__(self, params, optimizer, mean, H, outer_lr, outer_momentum):
        self.params = list(params)
        self.optimizer = optimizer
        self.mean = mean
        self.H = H
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.old = [p.detach().clone() for p in self.params]
        self.velocity = [torch.zeros_like(p) for p in self.old]
        self.steps = 0

    def step(self):
        self.optimizer.step()
        self.steps += 1
        means = [self.mean(p) for p in self.params]
        if self.steps % self.H:
            return
        with torch.no_grad():
            for p, old, v, mean in zip(self.params, self.old, self.velocity, means):
                delta = old - mean
                v.mul_(self.outer_momentum).add_(delta)
                old.sub_(self.outer_lr * (delta + self.outer_momentum * v))
                p.copy_(old)
