"""Stages that are equal, and where runs of them repeat, so that a drawing shows them once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields
from typing import NamedTuple

from lightning_rotor.chain import Chain, Option


class Run(NamedTuple):
    """Stages that are drawn once: ``length`` of them from ``first`` on stand for ``repeats`` times as many."""

    first: int
    length: int
    repeats: int


def stage_keys(chain: Chain, details: Sequence[Hashable]) -> list[Hashable]:
    """By stage, a value that is equal for stages of the same operators, sizes, skips and ``details``."""
    skips: list[list[Hashable]] = [[] for _ in chain]
    for skip in chain.skips:
        for use in skip.uses:
            skips[use].append(skip.size_bytes)
        if skip.born >= 0:
            # Others come with the chain's input. Distances and not numbers: equal blocks hand on equally far.
            distances = [use - skip.born for use in skip.uses]
            skips[skip.born].append((skip.size_bytes, *distances))
    # Bytes alone: seconds of equal stages differ by chance.
    size_fields = [field.name for field in fields(Option) if "_bytes" in field.name]
    keys: list[Hashable] = []
    for stage, detail, own_skips in zip(chain, details, skips, strict=True):
        sizes = []
        for option in stage.options:
            sizes += [getattr(option, field) for field in size_fields]
        key = stage.output_bytes, stage.recomputable, detail, tuple(sizes), tuple(own_skips)
        keys.append(key)
    return keys


def folded(keys: Sequence[Hashable], *, longest: int = 64) -> list[Run]:
    """Repetitions, greedily from the left: the one that leaves out most, the shortest of those, up to ``longest``."""
    # Each start tries each length, so without a bound the time would grow with the cube of the chain's length. Models
    # repeat blocks of few stages.
    runs: list[Run] = []
    start = 0
    while start < len(keys):
        best = Run(start, 1, 1)
        # No run is longer than half of what is left: it must come twice.
        most = min(longest, (len(keys) - start) // 2)
        for length in range(1, most + 1):
            run = Run(start, length, _repeats(keys, start, length))
            # Only if it leaves out more: of equal ones the shortest, which is looked at first, stays.
            if _left_out(run) > _left_out(best):
                best = run
        runs.append(best)
        start += best.length * best.repeats
    return runs


def _repeats(keys: Sequence[Hashable], start: int, length: int) -> int:
    """Number of times that the keys from a place on come in a row."""
    pattern = keys[start : start + length]
    repeats = 1
    while True:
        following = start + repeats * length
        if keys[following : following + length] != pattern:
            return repeats
        repeats += 1


def _left_out(run: Run) -> int:
    """Stages that a drawing need not show."""
    return run.length * (run.repeats - 1)
