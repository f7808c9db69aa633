"""Ranks come from a server of their own: nothing that a notebook has initialised, as CUDA, is forked into them."""

from __future__ import annotations

import threading

import torch

from course_lib.launch import run


def test_a_rank_is_no_fork_of_its_client(monkeypatch) -> None:
    """A process that is forked after CUDA was initialised cannot use it, and inherits locks that nobody opens."""
    monkeypatch.setattr(torch.cuda, "_initialized", True)  # as after the first CUDA call
    held = threading.Lock()
    monkeypatch.setattr(torch, "held_by_the_client", held, raising=False)

    def cell():
        return torch.cuda._initialized, hasattr(torch, "held_by_the_client"), torch.cuda._is_in_bad_fork()

    cell.__module__ = "__main__"  # as in a cell: it cannot be imported
    with held:
        assert run(cell, ranks=2, fabric="loopback") == [(False, False, False)] * 2
