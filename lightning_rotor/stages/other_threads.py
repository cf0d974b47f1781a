"""Threads that draw from the same random generators: a loader that prefetches. Setting one back would repeat draws.

::

    the measured stage        S ──────────── T ──────────── U      it does not draw, so there is nothing to set back
    a thread that prefetches       draws: T         draws: U       and the generator stays at U

So only generators that the code itself draws from are set back. Which these are is told by running it once more from
the same numbers, while other threads rest: code that skips layers by chance then takes the same way, and draws from
the same generators. If they do not rest, a generator that has not moved in one of several runs is none of them
(:func:`lightning_rotor.stages.draws.drawn_since`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_rotor.private import torch_names as private


class _LeftAlone(threading.local):
    """The kinds of generators that this thread leaves alone for now."""

    kinds: frozenset[str] = frozenset()


_left_alone = _LeftAlone()


def left_alone() -> frozenset[str]:
    """The kinds of generators that :func:`leaving_alone` was given, in this thread."""
    return _left_alone.kinds


@contextmanager
def leaving_alone(kinds: Collection[str]) -> Iterator[None]:
    """Context in which ``GeneratorStates`` has no state of these kinds, nor of those left alone around it."""
    before = _left_alone.kinds
    _left_alone.kinds = before | frozenset(kinds)
    try:
        yield
    finally:
        _left_alone.kinds = before


def others_may_draw() -> bool:
    """True if there is another thread of Python's that may draw random numbers.

    Not among several processes: they run the same code as often as each other, and each has threads of its own.
    """
    if private.threads() == 1:
        return False
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
