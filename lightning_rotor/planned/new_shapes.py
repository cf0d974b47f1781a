"""Costs for sizes that were never measured, from those that were.

Bytes and seconds of layers grow with the sizes of their input as polynomials whose coefficients are not negative: they
rise, and their curve bends upwards. So a line from a smaller to a larger measurement stays above the truth between::

    bytes │                ● measured
          │          x ·     the line, an upper bound
          │      ·   o       what the size in between takes
          │  ●     measured
          └──────────┴───── length

A smaller measurement alone is a bound as well, times the cube of the growth: nothing grows faster than batch times
length squared. What is half as large again as all that was measured is measured itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TypeAlias

from lightning_rotor.chain import Chain, UnlikeChainsError, combined
from lightning_rotor.planned.cuts import Signature
from lightning_rotor.private.values import spelled
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.chain import profile_over
from lightning_rotor.stages.sequential import Stage, wiring_of

Shapes: TypeAlias = tuple[tuple[int, ...], ...]

_MOST = 32
_TOLERANCE = 1e-9
_DEGREE = 3
_MOST_GROWTH = 1.5
# Bounds from measurements this near are not much too high: at most 1.33 times the truth, 1.04 times between two.
_NEAR_GROWTH = 1.1
_NEAR_SPAN = 1.5


class Measurements:
    """The measured signatures of one module, those measured last."""

    def __init__(self) -> None:
        self._known: dict[Signature, Profile] = {}

    def add(self, signature: Signature, profile: Profile) -> None:
        """Remember what was measured."""
        self._known.pop(signature, None)
        # For other shapes, and as it is for the next smaller ones: equal stages are then the same objects.
        bare = tuple(replace(stage, takes=()) for stage in profile.chain)
        self._known[signature] = replace(profile, chain=replace(profile.chain, stages=bare))
        for oldest in list(self._known)[:-_MOST]:
            del self._known[oldest]

    def drop(self, keep: Callable[[Signature], bool]) -> None:
        """Forget signatures of layers that are gone."""
        self._known = {signature: profile for signature, profile in self._known.items() if keep(signature)}

    def estimate(self, signature: Signature) -> tuple[Profile, bool] | None:
        """Costs at least as high as would be measured, and True if they are not much higher; None if it must be."""
        wanted = signature.family
        family = [known for known in self._known if known.family == wanted]
        found = chain_at(signature.shapes, [(known.shapes, self._known[known].chain) for known in family])
        if found is None:
            return None
        chain, number, is_close = found
        known = family[number]
        profile = self._known[known]
        try:
            first = replace(chain.stages[0], takes=_taken_by_first(profile.stages, signature))
            chain = replace(chain, stages=(first, *chain.stages[1:]))
            if known.cut is signature.cut:
                return replace(profile, chain=chain), is_close
            sizes, remembered = profile.group_sizes, profile.remembered
            return profile_over(signature.cut.stages, chain, group_sizes=sizes, remembered=remembered), is_close
        except (ValueError, IndexError):
            return None


def chain_at(wanted: Shapes, known: Sequence[tuple[Shapes, Chain]]) -> tuple[Chain, int, bool] | None:
    """The least bound for shapes, the number of its measurement, and True if near; None if all are much smaller."""
    # Many are possible, and only the best is put together.
    for _, is_far, number, chain in sorted(_bounds(wanted, known), key=itemgetter(0, 1)):
        with suppress(UnlikeChainsError):  # two that differ in more than sizes
            return chain(), number, not is_far
    return None


def _bounds(
    wanted: Shapes, known: Sequence[tuple[Shapes, Chain]]
) -> Iterator[tuple[float, bool, int, Callable[[], Chain]]]:
    """Bytes of each bound, True if it may be much too high, the number of its smaller measurement, and its costs."""
    totals = [_total_bytes(chain) for _, chain in known]
    for number, (shapes, chain) in enumerate(known):
        growth = _growth(shapes, wanted)
        if growth <= _MOST_GROWTH:
            factor = growth**_DEGREE
            is_near = growth <= _NEAR_GROWTH and _growth(wanted, shapes) <= _NEAR_GROWTH
            yield totals[number] * factor, not is_near, number, partial(_scaled, chain, factor)
        for larger, (above, costs) in enumerate(known) if growth > 1 else ():
            share = _share(shapes, wanted, above)
            if share is not None:
                total_bytes = totals[number] + share * max(0, totals[larger] - totals[number])
                is_far = _growth(shapes, above) > _NEAR_SPAN
                yield total_bytes, is_far, number, partial(_between, chain, costs, share)


def _growth(shapes: Shapes, wanted: Shapes) -> float:
    """Factor by which some dimension is larger; 1 if none is. No row costs no more than one row."""
    return max([1.0, *(size / max(least, 1) for least, size in zip(_flat(shapes), _flat(wanted), strict=True))])


def _share(smaller: Shapes, wanted: Shapes, larger: Shapes) -> float | None:
    """Position of the wanted shapes between two others, from 0 to 1; None if they do not lie in between."""
    share = 0.0
    for least, size, most in zip(_flat(smaller), _flat(wanted), _flat(larger), strict=True):
        if not least <= size <= most:
            return None
        if most > least:
            share = max(share, (size - least) / (most - least))
    return share


def _flat(shapes: Shapes) -> list[int]:
    return [size for shape in shapes for size in shape]


def _scaled(chain: Chain, factor: float) -> Chain:
    if factor == 1.0:  # as for every size below all measured ones
        return chain
    return combined(
        [chain],
        of_bytes=lambda values: math.ceil(values[0] * factor - _TOLERANCE),
        of_seconds=lambda values: values[0] * factor,
    )


def _between(smaller: Chain, larger: Chain, share: float) -> Chain:
    def line(values: Sequence[float]) -> float:
        return values[0] + share * max(0, values[1] - values[0])

    return combined([smaller, larger], of_bytes=lambda values: math.ceil(line(values) - _TOLERANCE), of_seconds=line)


def _total_bytes(chain: Chain) -> int:
    return sum(stage.output_bytes + stage.keep.saved_bytes + stage.keep.backward_peak_bytes for stage in chain)


def _taken_by_first(stages: Sequence[Stage], signature: Signature) -> tuple[str, ...]:
    """Tensors that the first stage reads, for which a plan is made."""
    names = tuple(spelled(kind[0], shape) for kind, shape in zip(signature.kinds, signature.shapes, strict=False))
    reads = wiring_of(stages).wire.reads
    if len(reads) != len(names):  # one value that holds several
        return names
    return tuple(name for read, name in zip(reads, names, strict=True) if read in stages[0].reads)
