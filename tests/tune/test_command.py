"""`course tune`: what a user's factory may be, and how everything that it cannot be is told."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from course_lib.cli import app

TRAIN = '''
import os
import time

import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self, width=64, layers=4):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x, labels=None):
        y = self.net(x)
        return y if labels is None else {"loss": (y - labels).square().mean()}


def loss_of(net):
    return net(torch.ones(4, 64) + dist.get_rank()).square().mean()


def good():
    print("built on", dist.get_rank())
    return Net(), loss_of


def with_mapping():
    return Net(), {"x": torch.ones(2, 64), "labels": torch.zeros(2, 64)}


def with_tuple():
    return Net(), (torch.ones(2, 64), torch.zeros(2, 64))


class Odd(nn.Module):
    """A tied parameter, a frozen one, odd sizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(13, 7), nn.Linear(7, 13, bias=False)
        self.inner, self.frozen = nn.Linear(7, 7), nn.Linear(7, 7).requires_grad_(False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.frozen(self.inner(self.embed(tokens))))


def odd():
    return Odd(), lambda net: net(torch.arange(13)).square().mean()


def lazy():
    return nn.LazyLinear(3), lambda net: net(torch.ones(2, 2)).mean()


def uncopied():
    net = Net()
    net.kept = net.net[0].weight * 2
    return net, loss_of


def alone():
    return Net()


def nothing():
    return None


def frozen():
    return Net().requires_grad_(False), loss_of


def unused():
    net = Net()
    net.extra = nn.Linear(2, 2)
    return net, loss_of


def captured():
    net = Net()
    return net, lambda given: loss_of(net)


def not_a_number():
    return Net(), lambda net: loss_of(net) * (float("nan") if dist.get_rank() == 1 else 1)


def scores():
    return Net(), lambda net: net(torch.ones(4, 64))


def different():
    return Net(layers=2 + dist.get_rank()), loss_of


def wrong_shape():
    return Net(), lambda net: net(torch.ones(4, 3)).mean()


def raises():
    return open_data()


def open_data():
    raise FileNotFoundError("no data here")


def exits():
    raise SystemExit("usage: train.py --data FILE")


def sleeps():
    if dist.get_rank() == 1:
        time.sleep(60)
    return Net(), loss_of


def dies():
    if dist.get_rank() == 1:
        os._exit(3)
    return Net(), loss_of


number = 3
'''
LINE = TRAIN[:TRAIN.index("raise FileNotFoundError")].count("\n") + 1


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Runs `course tune` in a folder with the training script above."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "needs.py").write_text("import something_not_there\n")
    (tmp_path / "broken.py").write_text("def make(:\n")

    def run(model: str, *options: str):
        return CliRunner().invoke(app, ["tune", "--model", model, "--fabric", "paced", "--repeats", "2",
                                        "--target-caps", "0.02,0.05", *options])
    return run


def test_it_says_what_it_predicted_measured_and_recommends(tune, tmp_path):
    done = tune("train:good", "--figure", "curve.png")
    assert done.exit_code == 0, done.output
    assert "built on 1" in done.stdout and "T_floor" in done.stdout and "r = Tm/Tc" in done.stdout
    assert "measured (cpu), paced, 1 Gbit/s" in done.stdout
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model", ["train.py:good", "train:with_mapping", "train:with_tuple"])
def test_json_is_all_that_a_program_reads(tune, model):
    done = tune(model, "--json", "--micro-steps", "2")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["gradient_bytes"] == 4 * (64 * 64 + 64) * 4 and found["micro_steps"] == 2
    rows = {row["name"]: row for row in found["layouts"]}
    assert {"compute", "comm", "serial", "plan", "ddp default", "0.02 MB", "0.05 MB"} == set(rows)
    assert sum(row["measured_s"] is not None for row in rows.values()) <= 3 + 4
    assert all(sum(row["bucket_bytes"]) == found["gradient_bytes"] for row in rows.values() if row["bucket_bytes"])


def test_the_number_of_micro_steps_follows_from_the_batches(tune):
    done = tune("train:good", "--json", "--global-batch", "24", "--micro-batch", "4")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["micro_steps"] == 24 // (4 * 2)


def test_tied_and_frozen_parameters_on_three_ranks(tune):
    done = tune("train:odd", "--json", "--ranks", "3")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["gradient_bytes"] == 4 * (13 * 7 + 7 * 7 + 7)


def test_a_preset_that_is_carried_slower_says_so(tune):
    done = tune("train:good", "--fabric", "10GbE")
    assert "10GbE is carried at 1/10 of its rate" in done.stdout, done.output


@pytest.mark.parametrize("model, says", [
    ("train", "give module:factory or file.py:factory"),
    ("absent.py:make", "there is no file absent.py"),
    ("absent:make", "there is no module 'absent'"),
    ("train:absent", "train has no 'absent'"),
    ("train:number", "of type int, not a function"),
    ("needs:make", "No module named 'something_not_there' (needs.py, line 1"),
    ("broken.py:make", "SyntaxError"),
    ("train:raises", f"no data here (train.py, line {LINE}, in open_data: raise FileNotFoundError"),
    ("train:exits", "raised SystemExit on rank"),
    ("train:alone", "nothing says how to feed it"),
    ("train:nothing", "of type NoneType"),
    ("train:frozen", "no parameter of the model requires a gradient"),
    ("train:unused", "no gradient reached extra.weight, extra.bias"),
    ("train:captured", "must call the module that it is given"),
    ("train:not_a_number", "the loss is nan on rank 1"),
    ("train:scores", "a tensor of shape (4, 64): return the loss"),
    ("train:different", "rank 1 built another model than rank 0"),
    ("train:lazy", "weight has no shape yet"),
    ("train:uncopied", "copying the model raised RuntimeError"),
    ("train:wrong_shape", "in forward: y = self.net(x)"),
])
def test_a_model_that_cannot_be_tuned_is_one_sentence(tune, model, says):
    refused(tune(model), 2, says)


@pytest.mark.parametrize("options, says", [
    (("--fabric", "string"), "unknown fabric 'string'"),
    (("--ranks", "0"), "ranks=0"),
    (("--target-caps", ""), "give sizes in MB above 0"),
    (("--target-caps", "1,-2"), "give sizes in MB above 0"),
    (("--target-caps", "1,nan"), "give sizes in MB above 0"),
    (("--micro-steps", "0"), "at least one micro-step"),
    (("--global-batch", "10", "--micro-batch", "3"), "B = 10 is not a multiple of b·D = 3·2 = 6"),
    (("--global-batch", "4", "--micro-batch", "3"), "more than B = 4"),
    (("--global-batch", "0", "--micro-batch", "1"), "B = 0: the global batch is 1 at least"),
    (("--global-batch", "8", "--micro-batch", "-2"), "b = -2: the micro-batch is 1 at least"),
    (("--global-batch", "8"), "go together"),
    (("--micro-batch", "8"), "go together"),
    (("--global-batch", "8", "--micro-batch", "2", "--micro-steps", "2"), "give one or the other"),
    (("--global-batch", "8", "--micro-batch", "2", "--ranks", "0"), "D = 0"),
    (("--candidates", "1"), "at least 2"),
    (("--timeout", "0"), "above 0"),
    (("--figure", "absent/curve.png"), "a folder that is there"),
    (("--figure", "curve.txt"), "give a .png file"),
])
def test_options_that_cannot_be_are_one_sentence(tune, options, says):
    refused(tune("train:good", *options), 2, says)


def test_a_rank_that_hangs_is_named_with_the_line_it_stands_at(tune):
    refused(tune("train:sleeps", "--timeout", "3"), 1, "rank 1 stands at", "train.py", "in sleeps")


def test_a_rank_that_dies_is_named(tune):
    refused(tune("train:dies"), 1, "rank 1 died without a result: exit code 3")


def refused(done, code: int, *says: str) -> None:
    assert done.exit_code == code, done.output
    assert done.stderr.startswith("course: ") and done.stderr.count("\n") == 1 and "Traceback" not in done.output
    for part in says:
        assert part in done.stderr
