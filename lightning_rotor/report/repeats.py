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
        if skip.born >= 0:  # others are the caller's
            skips[skip.born].append((skip.size_bytes, *(use - skip.born for use in skip.uses)))
    size_fields = [field.name for field in fields(Option) if "_bytes" in field.name]
    keys: list[Hashable] = []
    for stage, detail, own_skips in zip(chain, details, skips, strict=True):
        sizes = tuple(getattr(option, field) for option in stage.options for field in size_fields)
        keys.append((stage.output_bytes, stage.recomputable, detail, sizes, tuple(own_skips)))
    return keys


def folded(keys: Sequence[Hashable], *, longest: int = 64) -> list[Run]:
    """Repetitions, greedily from the left: the one that leaves out most, the shortest of those, up to ``longest``."""
    runs: list[Run] = []
    start = 0
    while start < len(keys):
        best = Run(start, 1, 1)
        for length in range(1, min(longest, (len(keys) - start) // 2) + 1):
            repeats = 1
            while keys[start + repeats * length : start + (repeats + 1) * length] == keys[start : start + length]:
                repeats += 1
            if length * (repeats - 1) > best.length * (best.repeats - 1):
                best = Run(start, length, repeats)
        runs.append(best)
        start += best.length * best.repeats
    return runs
