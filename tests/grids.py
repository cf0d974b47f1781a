"""How much is tested. Of a grid, ``make test`` runs as much as lets every two values meet, ``make test-all`` all of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from lightning_rotor.planning import effort

is_whole = False
"""True under ``make test-all``; set before any test is imported."""


def examples(few: int, many: int) -> int:
    """How many examples hypothesis draws."""
    return many if is_whole else few


def make_tables_coarse(patch: pytest.MonkeyPatch) -> None:
    """A tenth of the planner's work, where bits and peaks are compared, and not how good plans are.

    Tables of short chains are coarser, schedules that exceed a budget are not edited until they fit, and few edits look
    for the least memory.
    """
    usual = effort.current
    coarse = replace(
        usual,
        cheap_sums=usual.cheap_sums / 10,
        cheap_numbers=usual.cheap_numbers / 10,
        edited_options=0,
        descents=1,
        judged_stages=usual.judged_stages // 10,
    )
    patch.setattr(effort, "current", coarse)


def few(every: Iterable[Any], *names: Any) -> list[Any]:
    """All values, for ``parametrize``; those that are not named are wide."""
    return [pytest.param(each, marks=[] if each in names else pytest.mark.wide) for each in every]


def grid(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of one value of each axis, for ``parametrize``. Those that are not needed for every two values to meet are wide."""
    axes = tuple(map(tuple, axes))
    every = list(product(*(range(len(axis)) for axis in axes)))
    missing: set[Any] = set().union(*map(_pairs, every))
    chosen: set[tuple[int, ...]] = set()
    while missing:
        best = max(every, key=lambda places: len(_pairs(places) & missing))
        chosen.add(best)
        missing -= _pairs(best)
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, places, strict=True)),
            marks=[] if places in chosen else pytest.mark.wide,
        )
        for places in every
    ]


def _pairs(places: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """Places of values on two axes each."""
    return set(combinations(enumerate(places), 2))
