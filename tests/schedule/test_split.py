"""I and then W against one ordinary backward: same gradients, nothing twice, hooks fired."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.schedule.split import backward_input
from course_lib.train.gpt import GPT, Block, GPTConfig


class Tied(nn.Module):
    """One weight used three times with another between, and a bias used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        x = torch.tanh(self.a(x))
        x = torch.tanh(self.b(x)) + self.a.bias
        return self.a(x) + nn.functional.linear(x, self.a.weight)


class Aside(nn.Module):
    """Weights that meet before they join the input, one that never does, and one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v, self.unused = (nn.Parameter(torch.randn(5)) for _ in range(3))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x):
        return self.frozen(x) * (self.u * self.v).exp() + self.v


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return self.w.expand(3, 5) * 2


MODELS = {"linear": lambda: nn.Linear(5, 5), "mlp": lambda: nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)),
          "tied": Tied, "aside": Aside, "identity": nn.Identity, "norm": lambda: nn.LayerNorm(5),
          "block": lambda: Block(GPTConfig(width=5, heads=1))}


def halves(model: nn.Module, x: torch.Tensor, grad: torch.Tensor):
    x = x.clone().requires_grad_()
    out = model(x)
    of_x, weights = backward_input(out, grad, x, list(model.parameters()))
    assert all(p.grad is None for p in model.parameters()), "I must leave the weights alone"
    weights.run()
    return of_x, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_two_halves_make_one_backward(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    x, grad = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    if name == "aside":
        x, grad = x[0], grad[0]
    of_x, of_weights = halves(model, x, grad)
    model.zero_grad()
    x.requires_grad_()
    model(x).backward(grad)
    torch.testing.assert_close(of_x, x.grad)
    torch.testing.assert_close(of_weights, [p.grad for p in model.parameters()])


def test_a_weight_that_meets_the_input_in_one_node_with_two_inputs() -> None:
    model, x = nn.Bilinear(5, 5, 2), torch.randn(3, 5, requires_grad=True)
    of_x, weights = backward_input(model(x, x).sum(), None, x, list(model.parameters()))
    weights.run()
    found = [of_x, *(p.grad for p in model.parameters())]
    model.zero_grad()
    model(x, x).sum().backward()
    torch.testing.assert_close(found, [x.grad, *(p.grad for p in model.parameters())])


def test_tokens_have_no_gradient_so_all_is_left_for_the_weights() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=11, length=4, layers=1, heads=1, width=8))
    tokens = torch.randint(0, 11, (2, 4))
    of_x, weights = backward_input(model(tokens).sum(), None, tokens, list(model.parameters()))
    assert of_x is None and all(p.grad is None for p in model.parameters())
    weights.run()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(tokens).sum().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])


def test_an_output_that_forgets_its_input() -> None:
    model, grad = Forgetful(), torch.ones(3, 5)
    of_x, of_weights = halves(model, torch.randn(3, 5), grad)
    assert of_x is None
    torch.testing.assert_close(of_weights, [torch.full((5,), 6.0)])


def test_the_halves_add_up_over_micro_batches_and_fire_the_hooks() -> None:
    model, fired = nn.Linear(3, 3, bias=False), []
    model.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.clone()))
    xs = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]
    rest = [backward_input(model(x).sum(), None, x, [model.weight])[1] for x in xs]
    assert not fired
    for half in rest:
        half.run()
        half.run()  # once and no more
    assert len(fired) == 3
    torch.testing.assert_close(model.weight.grad, torch.cat(xs).sum(0).expand(3, 3))


def test_I_does_not_compute_weight_gradients_nor_W_input_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)

    def products(work) -> tuple:
        with torch.profiler.profile() as prof:
            out = work()
        return sum(e.count for e in prof.key_averages() if e.key == "aten::mm"), out

    y = model(x).sum()
    of_input, (_, rest) = products(lambda: backward_input(y, None, x, list(model.parameters())))
    of_weights, _ = products(rest.run)
    assert (of_input, of_weights) == (2, 2)


def random_graph(seed: int, weights, biases):
    """A function of x in which weights meet x and each other any number of times."""
    def function(x):
        rng, pool = random.Random(seed), [x]
        for _ in range(rng.randrange(1, 9)):
            a, w, b = rng.choice(pool[-3:]), rng.choice(weights), rng.choice(biases)
            pool.append(rng.choice([
                lambda a=a, w=w: torch.tanh(a @ w), lambda a=a, w=w, b=b: nn.functional.linear(a, w, b),
                lambda a=a: a * rng.choice(pool) * 0.3, lambda a=a, b=b: a * b.exp() + b,
                lambda a=a, w=w: a @ (w @ rng.choice(weights)).T,
                lambda a=a, w=w: sum(torch.split(torch.cat([a @ w, a.sin()], 1), 4, dim=1))])())
        return pool[-1]
    return function


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs(seed: int) -> None:
    torch.manual_seed(seed)
    weights, biases = ([nn.Parameter(torch.randn(*shape) / 2) for _ in range(2)] for shape in ((4, 4), (4,)))
    function, x, grad = random_graph(seed, weights, biases), torch.randn(3, 4), torch.randn(3, 4)
    params = [*weights, *biases]
    x.requires_grad_()
    expected = torch.autograd.grad(function(x), [x, *params], grad, allow_unused=True)
    of_x, half = backward_input(function(x), grad, x, params)
    half.run()
    torch.testing.assert_close([of_x, *(p.grad for p in params)], list(expected), rtol=1e-4, atol=1e-5)


def test_recomputed_activations() -> None:
    model, x = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), torch.randn(3, 5, requires_grad=True)
    of_x, half = backward_input(checkpoint(model, x, use_reentrant=False).sum(), None, x, list(model.parameters()))
    half.run()
    found = [of_x, *(p.grad for p in model.parameters())]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(found, [x.grad, *(p.grad for p in model.parameters())])
