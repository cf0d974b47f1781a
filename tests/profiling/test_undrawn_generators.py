"""Generators that a forward does not draw from, where another thread may."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lightning_rotor.profiling.undrawn_generators import undrawn
from lightning_rotor.stages.generators import HOST, NUMPY, PYTHON

X = torch.ones(4, 4)


@contextmanager
def another_thread() -> Iterator[None]:
    """One that could draw, and rests."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_alone_nobody_asks() -> None:
    assert undrawn(nn.Dropout(), (X,), {}) == frozenset()


def test_a_forward_is_run_to_tell_and_leaves_no_trace() -> None:
    dropout, linear = nn.Dropout(), nn.Linear(4, 4)
    state = torch.get_rng_state()
    with another_thread():
        assert undrawn(dropout, (X,), {}) == {PYTHON, NUMPY}
        assert undrawn(linear, (X,), {}) == {PYTHON, NUMPY, HOST}
    assert torch.equal(torch.get_rng_state(), state)


def test_a_forward_that_fails_tells_nothing() -> None:
    with another_thread():
        assert undrawn(nn.Linear(5, 5), (X,), {}) == frozenset()
