"""Classes of sizes: calls whose sizes differ a little share costs and a plan, those of the largest sizes of the class.

Only sizes that have differed from call to call are rounded up, so that a batch or a width which is always the same
stays what it is. No class reaches beyond the largest size that has come so far, where costs would be guesses::

    tokens   ──┬───┬───┬────┬────┬─────┤
               64  70  77   84   91    97 = the largest one so far       a call of 80 tokens is one of 84
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_rotor.planned.signature import Signature
from lightning_rotor.planning.size_bounds import flat

# Classes an octave. Costs of a class are at most 9 % above those of its smallest sizes where they grow linearly.
_AN_OCTAVE = 8
# Logarithms of the classes' own sizes are a hair off, and must not round up.
_ROUNDING = 1e-9
# Code that branches on sizes has a family for each branch. One that was forgotten begins again with its own
# sizes.
_MOST_FAMILIES = 64


@dataclass(slots=True)
class _Seen:
    """The sizes of one family of calls: those of the first, which of them differed later, and the largest."""

    first: list[int]
    varies: list[bool]
    largest: list[int]


class SizeClasses:
    """The classes of one module's calls."""

    def __init__(self) -> None:
        # By the family of signatures.
        self._seen: dict[Any, _Seen] = {}

    def note(self, signature: Signature) -> None:
        """A call has come."""
        sizes = flat(signature.shapes)
        family = signature.family
        seen = self._seen.get(family)
        if seen is None:
            self._seen[family] = _Seen(sizes, [False] * len(sizes), list(sizes))
            for oldest in list(self._seen)[:-_MOST_FAMILIES]:
                del self._seen[oldest]
            return
        for place, size in enumerate(sizes):
            # A size that has differed once is rounded for good: a batch that is smaller at the end of an epoch, too.
            if size != seen.first[place]:
                seen.varies[place] = True
                seen.largest[place] = max(size, seen.largest[place])

    def of(self, signature: Signature) -> Signature:
        """The signature of the largest sizes in the class of a call."""
        seen = self._seen.get(signature.family)
        if seen is None or not any(seen.varies):
            return signature
        sizes = []
        for size, varies, largest in zip(flat(signature.shapes), seen.varies, seen.largest, strict=True):
            if varies:
                rounded = _rounded_up(size)
                # Not beyond the largest, where costs would be guesses. A size that is beyond it itself is expected
                # for a later call, and has no other bound.
                size = min(rounded, largest) if size <= largest else rounded
            sizes.append(size)
        return with_sizes(signature, sizes)


def with_sizes(signature: Signature, sizes: Sequence[int]) -> Signature:
    """The signature with other sizes, in the order of its dimensions."""
    shapes = []
    start = 0
    for shape in signature.shapes:
        end = start + len(shape)
        shapes.append(tuple(sizes[start:end]))
        start = end
    # The same object where nothing changes: dicts find that by identity, without comparing all it has.
    if tuple(shapes) == signature.shapes:
        return signature
    return replace(signature, shapes=tuple(shapes))


def moved(signature: Signature, before: Signature, now: Signature) -> Signature:
    """The signature of a later call, where an earlier one of the step has these sizes ``now`` instead of ``before``.

    Sizes that both calls have in common change alike: the nodes and edges of one graph, the batch.
    """
    changed = {}
    if list(map(len, before.shapes)) == list(map(len, now.shapes)):
        for old, new in zip(flat(before.shapes), flat(now.shapes), strict=True):
            if old != new:
                changed[old] = new
    return with_sizes(signature, [changed.get(size, size) for size in flat(signature.shapes)])


def _rounded_up(size: int) -> int:
    """The largest size of a class."""
    # 0 has no logarithm, and 1 is a class of its own.
    if size <= 1:
        return size
    number = math.ceil(_AN_OCTAVE * math.log2(size) - _ROUNDING)
    return max(size, int(2 ** (number / _AN_OCTAVE) + _ROUNDING))
