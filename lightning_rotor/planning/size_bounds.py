"""Bounds on the costs of input sizes that were never measured, from those that were.

Bytes and seconds of layers grow with the sizes of their input as polynomials whose coefficients are not negative: they
rise, and their curve bends upwards. So a line from a smaller to a larger measurement stays above the truth in between::

    bytes │                ● measured
          │          x ·     the line, an upper bound
          │      ·   o       what the size in between takes
          │  ●     measured
          └──────────┴───── length

A smaller measurement alone is a bound as well, times the cube of the growth: no layer grows faster than batch times
length squared. A size that is half as large again as all that was measured has no bound that is worth having.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from lightning_rotor.chain import Chain
from lightning_rotor.planning.combined_chain import UnlikeChainsError, combined

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""Shapes of the tensors that a chain takes."""

_DEGREE = 3
_MOST_GROWTH = 1.5
# Bounds from measurements this near are not much too high: at most 1.1 ** 3 = 1.33 times the truth from one, and 1.04
# times from two that are at most 1.5 times apart.
_NEAR_GROWTH = 1.1
_NEAR_SPAN = 1.5
# Products of fractions are a hair above whole numbers of bytes, which must not round up.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class SizeBound:
    """Costs at least as high as those of some shapes would be measured to be.

    Attributes:
        chain: The costs.
        measurement: Number of the smaller measurement that they follow from.
        is_near: True if they are not much too high.
    """

    chain: Chain
    measurement: int
    is_near: bool


def bound_at(wanted: Shapes, measured: Sequence[tuple[Shapes, Chain]]) -> SizeBound | None:
    """The lowest bound for some shapes; None if all that was measured is much smaller."""

    def by_bytes(candidate: _Candidate) -> tuple[float, bool]:
        return candidate.total_bytes, not candidate.is_near

    # Many bounds are possible, and only the best is put together.
    for candidate in sorted(_candidates(wanted, measured), key=by_bytes):
        # Two measurements that differ in more than sizes have no line between them, and others may.
        with suppress(UnlikeChainsError):
            return SizeBound(candidate.chain(), candidate.measurement, candidate.is_near)
    return None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A bound that may be put together by calling ``chain``."""

    total_bytes: float
    is_near: bool
    measurement: int
    chain: Callable[[], Chain]


def _candidates(wanted: Shapes, measured: Sequence[tuple[Shapes, Chain]]) -> Iterator[_Candidate]:
    totals = [_total_bytes(chain) for _, chain in measured]
    for number, (shapes, chain) in enumerate(measured):
        growth = _growth(shapes, wanted)
        if growth <= _MOST_GROWTH:
            factor = growth**_DEGREE
            is_near = growth <= _NEAR_GROWTH and _growth(wanted, shapes) <= _NEAR_GROWTH
            yield _Candidate(totals[number] * factor, is_near, number, partial(_scaled, chain, factor))
        if growth <= 1:
            # As large as wanted, so a line to an even larger one is higher.
            continue
        for larger_number, (larger_shapes, larger_chain) in enumerate(measured):
            share = _share(shapes, wanted, larger_shapes)
            if share is None:
                continue
            span_bytes = max(0, totals[larger_number] - totals[number])
            is_near = _growth(shapes, larger_shapes) <= _NEAR_SPAN
            chain_between = partial(_between, chain, larger_chain, share)
            yield _Candidate(totals[number] + share * span_bytes, is_near, number, chain_between)


def _total_bytes(chain: Chain) -> int:
    """A measure of how much a chain takes, to compare bounds by."""
    total_bytes = 0
    for stage in chain:
        total_bytes += stage.output_bytes
        total_bytes += stage.keep.saved_bytes
        total_bytes += stage.keep.backward_peak_bytes
    return total_bytes


def most_growth(shapes: Shapes, wanted: Shapes) -> float:
    """The most by which any cost may grow from some shapes to others; 1 if no dimension is larger."""
    return _growth(shapes, wanted) ** _DEGREE


def _growth(shapes: Shapes, wanted: Shapes) -> float:
    """Factor by which some dimension is larger; 1 if none is. No row costs no more than one row."""
    growth = 1.0
    for size, wanted_size in zip(flat(shapes), flat(wanted), strict=True):
        growth = max(growth, wanted_size / max(size, 1))
    return growth


def is_within(shapes: Shapes, larger: Shapes) -> bool:
    """True if no dimension is larger than that of the other shapes, which have as many."""
    return all(size <= most for size, most in zip(flat(shapes), flat(larger), strict=True))


def _share(smaller: Shapes, wanted: Shapes, larger: Shapes) -> float | None:
    """Position of the wanted shapes between two others, from 0 to 1; None if they do not lie in between."""
    share = 0.0
    for least, size, most in zip(flat(smaller), flat(wanted), flat(larger), strict=True):
        if not least <= size <= most:
            return None
        if most > least:
            share = max(share, (size - least) / (most - least))
    return share


def flat(shapes: Shapes) -> list[int]:
    """All sizes of some shapes, in order."""
    return [size for shape in shapes for size in shape]


def _scaled(chain: Chain, factor: float) -> Chain:
    # As for every size below all measured ones: the chain itself is no copy, and has no size that was rounded.
    if factor == 1.0:
        return chain
    return _rounded_up([chain], lambda values: values[0] * factor)


def _between(smaller: Chain, larger: Chain, share: float) -> Chain:
    def on_the_line(values: Sequence[float]) -> float:
        least, most = values
        # Seconds have their noise, and a line that falls would be no bound.
        return least + share * max(0, most - least)

    return _rounded_up([smaller, larger], on_the_line)


def _rounded_up(chains: Sequence[Chain], cost: Callable[[Sequence[float]], float]) -> Chain:
    """A chain whose costs follow from those of others, bytes rounded up to whole ones."""

    def whole_bytes(values: Sequence[float]) -> int:
        return math.ceil(cost(values) - _ROUNDING)

    return combined(chains, of_bytes=whole_bytes, of_seconds=cost)
