"""Which intervals have the same table, because their stages are the same one by one.

A transformer repeats a block, and a residual network repeats it within a stage of its resolution. Two intervals are *twins* if every number
that their recurrences read is the same: the costs of their stages in slots, what is alive when their recomputation starts, what
segments in them hold and hand on. One of them is planned and the others copy it::

    stages    a b c a b c a b c d        (0, 4) = a b c a b = (3, 7)
              └───────┘                  (1, 3) = b c a     = (4, 6)
                    └───────┘

An interval is known by its two longest parts, ``(i, l - 1)`` and ``(i + 1, l)``, and by what only the whole of it has. So numbers for all
intervals of one length follow from those of the length before, and none is compared stage by stage.

What keeps twins apart is what is alive at their backward. Gradients of parameters grow towards the front, unless they exist before the
step. And slots are rounded from where the interval stands, unless a period fills whole slots, see :func:`aligned_unit`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lightning_rotor.chain import Chain
from lightning_rotor.planning.decisions import Decisions

# A period is worth fitting slots to if it holds for this part of the chain at least.
_PERIODIC = 0.5
# Looking for twins costs something everywhere, and pays if so many of all intervals have one.
_WORTHWHILE = 0.05


def first_twins(decisions: Decisions) -> npt.NDArray[np.int64] | None:
    """``(n, n)``, by length less one and first stage: where the first interval like this one starts; None if hardly any two are alike.

    Takes O(n² log n).
    """
    n = len(decisions.stages)
    numbers = _numbered([_stage_key(decisions, index) for index in range(n)])
    if len(set(numbers.tolist())) == n:
        return None
    needs = decisions.thresholds
    twins = np.tile(np.arange(n), (n, 1))
    for length in range(n):
        first = np.arange(n - length)
        own = [sizes[first, first + length] for sizes in (needs.discard, needs.remembered, needs.held, needs.handed_on)]
        parts = [numbers[:-1], numbers[1:]] if length else [numbers]
        _, begins, numbers = np.unique(np.stack([*parts, *own], axis=1), axis=0, return_index=True, return_inverse=True)
        numbers = numbers.reshape(-1)
        twins[length, first] = begins[numbers]
        if len(begins) == len(first):
            break  # what is longer holds something that is unique
    copied = np.count_nonzero(twins != np.arange(n))
    return twins if copied >= _WORTHWHILE * n * n / 2 else None


def aligned_unit(chain: Chain, unit: float) -> float:
    """The largest unit up to ``unit`` of which a period of the chain retains a whole number; ``unit`` if the chain has no period."""
    keys = _numbered([replace(stage, name="") for stage in chain])
    n = len(keys)
    for period in range(1, n // 3 + 1):
        alike = keys[period:] == keys[:-period]
        if alike.mean() < _PERIODIC:
            continue
        begin = int(np.argmax(alike))
        retained = sum(stage.output_bytes + stage.keep.saved_bytes for stage in chain.stages[begin : begin + period])
        return retained / math.ceil(retained / unit) if retained else unit
    return unit


def _numbered(keys: list[object]) -> npt.NDArray[np.int64]:
    """Equal keys get equal numbers."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _stage_key(decisions: Decisions, index: int) -> object:
    stage = decisions.stages[index]
    endings = tuple((ending.base, ending.trigger, ending.leaves) for ending in decisions.endings[index])
    return (
        stage.input_slots,
        stage.saved_before,
        stage.needs_as_segment,
        stage.discard_seconds,
        stage.recomputable,
        stage.leaves,
        endings,
        decisions.contexts[index],
        index == decisions.top,
    )
