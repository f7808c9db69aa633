"""Other answers to labs 10 to 13: right ones of another shape, and wrong ones that look right.

Wrong answers come with the hint that fits them; "" is the general one, where no hint that is written names the mistake.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from itertools import chain, islice, product

import pytest
import torch
import torch.nn.functional as F

from course_lib.lab import evaluate
from course_lib.lab.exercises.lab13.layout import MOST_CASES, _drawn

RIGHT, WRONG = [], []


def right(number: str):
    return lambda answer: RIGHT.append(pytest.param(number, answer, id=f"{number}-{answer.__name__}")) or answer


def wrong(number: str, hint: str = ""):
    return lambda answer: WRONG.append(pytest.param(number, answer, hint, id=f"{number}-{answer.__name__}")) or answer


# 10.1


@right("10.1")
def by_chain(p, m, rank):
    forward, backward = map("F{}".format, range(m)), map("B{}".format, range(m))
    warm = islice(forward, min(m, p - 1 - rank))
    return chain(warm, chain.from_iterable(zip(forward, backward)), backward, ("reduce0",))


@wrong("10.1")
def reduced_on_rank_0_alone(p, m, rank):
    words = list(by_chain(p, m, rank))
    return words if rank == 0 else words[:-1]


@wrong("10.1")
def counted_from_1(p, m, rank):
    return [w if w == "reduce0" else f"{w[0]}{int(w[1:]) + 1}" for w in by_chain(p, m, rank)]


@wrong("10.1", "one_too_few")
def one_too_few_and_m_ignored(p, m, rank):
    warm = max(0, p - 2 - rank)
    steady = [word for i in range(warm, m) for word in (f"F{i}", f"B{i - warm}")]
    return [*(f"F{i}" for i in range(warm)), *steady, *(f"B{i}" for i in range(max(0, m - warm), m)), "reduce0"]


# 10.2


@right("10.2")
def by_a_worklist(lists, receive_of, needs):
    rest, out, have, waiting = [deque(words) for words in lists], [[] for _ in lists], set(), {}
    todo = deque(range(len(lists)))
    while todo:
        rank = todo.popleft()
        while rest[rank]:
            need = needs(rest[rank][0])
            if need is not None and need not in have:
                waiting[need] = rank
                break
            word = rest[rank].popleft()
            if word.startswith("send"):
                peer, receive = receive_of(send=word)
                out[peer].append(receive)
                have.add(receive)
                todo.extend([waiting.pop(receive)] if receive in waiting else [])
            out[rank].append(word)
    return (words for words in out)


@wrong("10.2", "all_first")
def eight_ahead(lists, receive_of, needs):
    out = []
    for words in by_a_worklist(lists, receive_of, needs):
        receives, mine = deque(w for w in words if w.startswith("recv")), []
        mine += [receives.popleft() for _ in range(min(8, len(receives)))]
        for word in words:
            if not word.startswith("recv"):
                mine.append(word)
                mine += [receives.popleft()] if needs(word) and receives else []
        out.append(mine)
    return out


# 10.3


@right("10.3")
def as_a_generator(words, delay):
    waiting = deque()
    for k, word in enumerate(words):
        if word.startswith("B"):
            waiting.append(word[1:])
            yield "I" + word[1:]
        else:
            while word.startswith("reduce") and waiting:
                yield "W" + waiting.popleft()
            yield word
        while len(waiting) > delay and not (k + 1 < len(words) and words[k + 1].startswith("send_B")):
            yield "W" + waiting.popleft()
    while waiting:
        yield "W" + waiting.popleft()


@wrong("10.3")
def numbers_of_one_digit(words, delay):
    return [w[:2] if w[0] == "W" else w for w in as_a_generator(words, delay)]


@wrong("10.3", "moves_words")
def always_reduces(words, delay):
    return [*(w for w in as_a_generator(words, delay) if w != "reduce0"), "reduce0"]


@wrong("10.3", "moves_words")
def reduces_twice(words, delay):
    out = list(as_a_generator(words, delay))
    last = max(k for k, w in enumerate(out) if w[0] == "I" or w.startswith("send_B"))
    return [*out[:last + 1], *(["reduce0"] if "reduce0" in out else []), *out[last + 1:]]


@wrong("10.3", "moves_words")
def never_reduces(words, delay):
    return [w for w in as_a_generator(words, delay) if w != "reduce0"]


@wrong("10.3")
def the_delay_in_words(words, delay):
    waiting, out = deque(), []
    for k, word in enumerate(words):
        if waiting and k - waiting[0][0] > delay and not word.startswith("send_B"):
            out.append(waiting.popleft()[1])
        if word.startswith("B"):
            waiting.append((k, "W" + word[1:]))
        elif word.startswith("reduce"):
            out += [w for _, w in waiting]
            waiting.clear()
        out.append("I" + word[1:] if word.startswith("B") else word)
    return out + [w for _, w in waiting]


# 11.1


@right("11.1")
def unit_by_unit(x, p, wire):
    x, y = wire.cross(x=x, backward="all_reduce"), 0
    for row, bias, column in zip(p.up, p.up_bias, p.down.t()):
        y = y + F.gelu((x * row).sum(-1, keepdim=True) + bias) * column
    return p.down_bias.expand_as(x) + wire.cross(y, forward="all_reduce")


@wrong("11.1")
def sums_at_x_twice(x, p, wire):
    return unit_by_unit(wire.cross(x, backward="all_reduce"), p, wire)


@wrong("11.1")
def half_the_gradient_of_x(x, p, wire):
    return unit_by_unit(x / 2 + (x / 2).detach(), p, wire)


# 11.2


class Block:
    def __init__(self, p, wire):
        self.p, self.wire = p, wire

    def forward(self, x):
        p = self.p
        h = self.wire.cross(F.layer_norm(x, x.shape[-1:], p.norm_weight, p.norm_bias), "all_gather", "reduce_scatter")
        y = F.linear(F.gelu(F.linear(h, p.up, p.up_bias)), p.down)
        return x + self.wire.cross(y, "reduce_scatter", "all_gather") + p.down_bias

    def finish(self):
        for param in (self.p.norm_weight, self.p.norm_bias, self.p.down_bias):
            self.wire.all_reduce(tensor=param.grad)


@right("11.2")
class NewGradients(Block):
    def finish(self):
        for name, param in vars(self.p).items():
            if name.startswith("norm") or name == "down_bias":
                grad = param.grad.clone()
                self.wire.all_reduce(grad)
                param.grad = grad


@right("11.2")
class DealtBias(Block):
    """A part of the bias in each summand: `finish` sums the parts of its gradient all the same."""

    def forward(self, x):
        p = self.p
        h = self.wire.cross(F.layer_norm(x, x.shape[-1:], p.norm_weight, p.norm_bias), "all_gather", "reduce_scatter")
        y = F.linear(F.gelu(F.linear(h, p.up, p.up_bias)), p.down, p.down_bias / self.wire.ranks)
        return x + self.wire.cross(y, "reduce_scatter", "all_gather")


@wrong("11.2")
class HalvesForTwoRanks(Block):
    def finish(self):
        super().finish()
        for param in (self.p.norm_weight, self.p.norm_bias, self.p.down_bias):
            param.grad /= 2


# 11.3


@right("11.3")
def own_rows_first(x, multiply, chunks, wire):
    """What a rank has itself it can multiply while nothing has arrived."""
    handles = [wire.start_gather(part=part) for part in x.split(-(-len(x) // chunks))]
    out = [[] for _ in range(wire.ranks)]
    out[wire.rank].append(multiply(x))
    for arrived in (handle.wait() for handle in handles):
        for rank in range(wire.ranks):
            if rank != wire.rank:
                out[rank].append(multiply(arrived[rank]))
    return torch.cat([product for products in out for product in products])


def in_chunks(x, multiply, chunks, wire):
    handles = [wire.start_gather(part) for part in x.tensor_split(chunks)]
    return torch.cat([multiply(handle.wait()) for handle in handles], dim=1).flatten(0, 1)


@wrong("11.3", "other_chunks")
def four_chunks(x, multiply, chunks, wire):
    return in_chunks(x, multiply, min(4, len(x)), wire)


@wrong("11.3")
def first_chunk_dropped(x, multiply, chunks, wire):
    handles = [wire.start_gather(part) for part in x.tensor_split(chunks)]
    products = [multiply(handle.wait()) for handle in handles]
    return torch.cat(products[1:] or products, dim=1).flatten(0, 1)


@wrong("11.3")
def own_rows_twice(x, multiply, chunks, wire):
    out = in_chunks(x, multiply, chunks, wire)
    multiply(x)
    return out


@wrong("11.3")
def the_matrix_through_multiply(x, multiply, chunks, wire):
    """Less device time: the matrix is fetched through `multiply`, and the products are made beside it."""
    handles = [wire.start_gather(part) for part in x.tensor_split(chunks)]
    matrix = multiply(torch.eye(x.shape[1], dtype=x.dtype))
    return torch.cat([handle.wait() @ matrix for handle in handles], dim=1).flatten(0, 1)


# 12.1


class Sharded:
    def __init__(self, flat, wire, make_optimizer):
        self.flat, self.wire = flat, wire
        self.mine = self.part(flat)
        self.optimizer = make_optimizer([self.mine])

    def part(self, whole):
        return whole.tensor_split(self.wire.ranks)[self.wire.rank]

    def scaled(self, part, max_norm):
        squares = part.square().sum()
        self.wire.all_reduce(squares)
        return part * torch.clamp(max_norm / (squares.sqrt() + 1e-6), max=1.0)

    def step(self, gradient, max_norm):
        self.mine.grad = self.scaled(self.part(gradient), max_norm)
        self.optimizer.step()
        self.wire.all_gather(self.flat)


@right("12.1")
class MadeInTheFirstStep(Sharded):
    def __init__(self, flat, wire, make_optimizer):
        self.flat, self.wire, self.make, self.optimizer = flat, wire, make_optimizer, None
        self.mine = self.part(flat)

    def step(self, gradient, max_norm):
        self.optimizer = self.optimizer or self.make([self.mine])
        super().step(gradient, max_norm)


@right("12.1")
class ElementByElement(Sharded):
    def __init__(self, flat, wire, make_optimizer):
        self.flat, self.wire = flat, wire
        self.mine = list(self.part(flat).split(1))
        self.optimizers = [make_optimizer([one]) for one in self.mine]

    def step(self, gradient, max_norm):
        grads = self.scaled(self.part(gradient), max_norm).split(1)
        for one, grad, optimizer in zip(self.mine, grads, self.optimizers):
            one.grad = grad
            optimizer.step()
        self.wire.all_gather(self.flat)


@wrong("12.1", "loses_the_state")
class ANewOneEachStep(MadeInTheFirstStep):
    def step(self, gradient, max_norm):
        self.optimizer = None
        super().step(gradient, max_norm)


@wrong("12.1", "steps_everything")
class OneForAllBesideIt(Sharded):
    def __init__(self, flat, wire, make_optimizer):
        super().__init__(flat, wire, make_optimizer)
        self.other = make_optimizer([flat])


@wrong("12.1")
class AveragesTheParameters(Sharded):
    def step(self, gradient, max_norm):
        self.mine.grad = self.scaled(self.part(gradient), max_norm)
        self.optimizer.step()
        self.wire.all_reduce(self.flat)
        self.flat /= self.wire.ranks


@wrong("12.1")
class GathersOnce(Sharded):
    def step(self, gradient, max_norm):
        self.mine.grad = self.scaled(self.part(gradient), max_norm)
        self.optimizer.step()
        if not hasattr(self, "gathered"):
            self.wire.all_gather(self.flat)
            self.gathered = True


@wrong("12.1", "reads_foreign")
class TheLastTakesTheRest(Sharded):
    def part(self, whole):
        each, rank = len(whole) // self.wire.ranks, self.wire.rank
        return whole[rank * each:(rank + 1) * each if rank < self.wire.ranks - 1 else len(whole)]


# 12.2


class Scatter:
    def __init__(self, sizes, wire):
        self.sizes, self.wire, self.flying, self.parts = sizes, wire, [], defaultdict(list)

    def bucket_full(self, b, gradient):
        each = -(-len(gradient) // self.wire.ranks)
        part = torch.empty(each)
        whole = F.pad(gradient, (0, each * self.wire.ranks - len(gradient)))
        self.flying.append((b, part, self.wire.reduce_scatter(part=part, whole=whole)))

    def end_of_backward(self):
        while self.flying:
            b, part, handle = self.flying.pop()
            handle.wait()
            self.parts[b].append(part)

    def finish(self):
        """All parts of all micro-steps, summed at the end."""
        n, r = self.wire.ranks, self.wire.rank
        length = [min(-(-size // n), max(0, size - r * -(-size // n))) for size in self.sizes]
        return tuple(torch.stack(self.parts.pop(b)).sum(0)[:length[b]] / n for b in range(len(self.sizes)))


right("12.2")(Scatter)


@wrong("12.2", "by_place")
class InTheOrderOfTheCalls(Scatter):
    def bucket_full(self, b, gradient):
        super().bucket_full(len(self.flying), gradient)


# 13.1


@right("13.1")
def by_sorting(words):
    def stage(word):
        return word.split("@")[1]

    last = {stage(word): k for k, word in enumerate(words) if word[0] in "WB"}
    return sorted(words, key=lambda w: (last[stage(w)], 1) if w.startswith("reduce") else (words.index(w), 0))


@wrong("13.1")
def stages_of_one_digit(words):
    last = {word[-1]: k for k, word in enumerate(words) if word[0] in "WB"}
    return sorted(words, key=lambda w: (last[w[-1]], 1) if w.startswith("reduce") else (words.index(w), 0))


@wrong("13.1")
def one_stage_left_behind(words):
    stays = next(w.split("@")[1] for w in words if w.startswith("reduce"))
    late = [w for w in words if w.startswith("reduce") and w.endswith(f"@{stays}")]
    out = [w for w in by_sorting(words) if w not in late]
    at = next(k for k, w in enumerate(out) if w.startswith("step"))
    return out[:at] + late + out[at:]


@wrong("13.1")
def one_word_late(words):
    out = list(by_sorting(words))
    for k in reversed(range(len(out) - 1)):
        if out[k].startswith("reduce") and out[k + 1][0] in "FBIW":
            out[k], out[k + 1] = out[k + 1], out[k]
    return out


# 13.2


def into_the_next_pass(words, ahead, kinds=("step", "gather")):
    """The moves of the hint."""
    def stage(word):
        return word.split("@")[1]

    words = list(words)
    for s in list(dict.fromkeys(stage(w) for w in words if w[0] == "F"))[1:]:
        taken = [w for w in words if w.startswith(kinds) and stage(w) == s]
        words = [w for w in words if w not in taken]
        at = max(0, next(k for k, w in enumerate(words) if w[0] == "F" and stage(w) == s) - ahead)
        words[at:at] = taken
    return tuple(words)


@right("13.2")
def frees_there_too(lists, seconds):
    return min(([into_the_next_pass(words, ahead, ("free", "step", "gather")) for words in lists]
                for ahead in range(3)), key=seconds)


@right("13.2")
def climbs_until_refused(lists, seconds):
    """The moves of the hint, then random ones until `seconds` says that it is enough."""
    best = min((tuple(into_the_next_pass(words, ahead) for words in lists) for ahead in range(3)), key=seconds)
    least, draw = seconds(best), random.Random(0)
    try:
        while True:
            other = [list(words) for words in best]
            words = draw.choice(other)
            words.insert(draw.randrange(len(words)), words.pop(draw.randrange(len(words))))
            if (took := seconds(other)) < least:
                best, least = other, took
    except RuntimeError:
        return best


# 13.3


def layouts(gpus, B, b, memory, limit, keep=lambda t, p, D: True, fits=lambda held, limit: held <= limit):
    """Memory is asked first, also for layouts of more GPUs than there are."""
    for t, p in product((1, 2, 4, 8), range(1, gpus + 1)):
        D = gpus // (t * p)
        if fits(memory(t=t, p=p, D=D), limit) and t * p * D == gpus and B % (b * D) == 0 and keep(t, p, D):
            yield t, p, D, B // b // D


def fastest(found, micro_s, data_s, turns=lambda N, p: N + p - 1):
    return min(found, key=lambda x: turns(x[3], x[1]) * micro_s(*x[:2]) + data_s(*x[:3]), default=None)


@right("13.3")
def asks_memory_first(gpus, B, b, micro_s, data_s, memory, limit):
    return fastest(layouts(gpus, B, b, memory, limit), micro_s, data_s)


@wrong("13.3", "powers_of_two")
def p_doubles(gpus, B, b, micro_s, data_s, memory, limit):
    return fastest(layouts(gpus, B, b, memory, limit, lambda t, p, D: p in (1, 2, 4, 8, 16, 32, 64)), micro_s, data_s)


@wrong("13.3", "below_the_limit")
def below_the_limit(gpus, B, b, micro_s, data_s, memory, limit):
    return fastest(layouts(gpus, B, b, memory, limit, fits=lambda held, limit: held < limit), micro_s, data_s)


@wrong("13.3")
def p_up_to_8(gpus, B, b, micro_s, data_s, memory, limit):
    return fastest(layouts(gpus, B, b, memory, limit, lambda t, p, D: p <= 8), micro_s, data_s)


@wrong("13.3")
def always_cut(gpus, B, b, micro_s, data_s, memory, limit):
    return fastest(layouts(gpus, B, b, memory, limit, lambda t, p, D: t * p > 1), micro_s, data_s)


@wrong("13.3")
def a_turn_too_many(gpus, B, b, micro_s, data_s, memory, limit):
    return fastest(layouts(gpus, B, b, memory, limit), micro_s, data_s, lambda N, p: N + p)


@wrong("13.3")
def no_traffic(gpus, B, b, micro_s, data_s, memory, limit):
    return fastest(layouts(gpus, B, b, memory, limit), micro_s, lambda *layout: 0.0)


@pytest.mark.parametrize(("number", "answer"), RIGHT)
def test_a_right_answer_of_another_shape_passes(number: str, answer) -> None:
    for seed in range(4):
        result = evaluate(number, answer, seed=seed)
        assert result.ok, [row for row in result.rows if not row.ok]


@pytest.mark.parametrize(("number", "answer", "hint"), WRONG)
def test_a_wrong_answer_fails_whatever_is_drawn_and_is_not_told_of_another_mistake(number: str, answer,
                                                                                  hint: str) -> None:
    for seed in range(8):
        result = evaluate(number, answer, seed=seed)
        assert not result.ok and result.mistake == hint, f"seed {seed}"


def test_the_runs_to_plan_are_few() -> None:
    sizes = Counter(len(_drawn(random.Random(seed))) for seed in range(20))
    assert min(sizes) >= 6 and max(sizes) < MOST_CASES / 2
