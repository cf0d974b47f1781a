"""What each decision of the dynamic program needs and takes, in slots of memory and seconds.

A simulator follows one schedule; the dynamic program must know, without following any, what is alive at each moment. Only
three kinds of moments exist, and at each of them most of what is alive depends on one number alone:

    ==========================  ==============================================================================
    moment                      alive besides what the schedule itself retains
    ==========================  ==============================================================================
    first forward of stage i    what stages before i pinned, what lingers from the step before
    backward of stage i         output of the chain, everything pinned, parameter gradients of stages after i
    recomputation started by    the same for stage l, and what the backward of l holds when it reads its first saved
    the backward of stage l     tensor (``Option.unpack_bytes``)
    ==========================  ==============================================================================

So these amounts are added to the thresholds here, and the program's ``m`` counts only what the schedule retains.

Sizes become slots by rounding cumulative sums, not each size: the errors of neighbours cancel, and a run of kept stages is
off by one slot at most. Thresholds are rounded to the nearest slot. Neither is safe, and neither needs to be: the simulator
judges every schedule in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from lightning_rotor.chain import Chain, Option, StageCost

NEVER = 1 << 60
"""Slot that no table has: the decision is not allowed."""


@dataclass(frozen=True, slots=True)
class BackwardNeed:
    """Slots that the backward of a stage needs, by who holds its input meanwhile.

    Attributes:
        plain: Nobody but the stage itself.
        nested: It is first in a nested segment, which has given the input up. The input is paid for, so what the stage itself does
            not save of it is free again.
        segment: It is first in a segment of the step's own forward, which holds the input.
        held: The stage before saved it, or the caller holds it.
    """

    plain: int
    nested: int
    segment: int
    held: int


@dataclass(frozen=True, slots=True)
class LeafCost:
    """One option of one stage. Everything but the seconds counts slots.

    Attributes:
        option: Number of the option.
        seconds: Recorded forward and backward.
        last_seconds: The same when it ends a recomputation: replay and backward.
        backward_seconds: The backward alone.
        saves: The backward needs a saved tensor.
        retained: Saved bytes, without input and output.
        output_class: Which class of the next boundary the stage leaves behind, see :attr:`StageNeeds.saved_before`.
        input_retained: By class of the own input boundary, the part of it that stays alive.
        forward: Peak of the recorded forward, without the input.
        replay: Peak of the replay, without the input.
        backward: Own retained tensors and peak of the backward, by who holds the input.
        last_backward: The same when the stage ends a recomputation.
        bare: Peak of the backward when nothing is recomputed for it (a stage that saves nothing and ends a segment).
    """

    option: int
    seconds: float
    last_seconds: float
    backward_seconds: float
    saves: bool
    retained: int
    output_class: int
    input_retained: tuple[int, ...]
    forward: int
    replay: int
    backward: BackwardNeed
    last_backward: BackwardNeed
    bare: int


@dataclass(frozen=True, slots=True, eq=False)
class Ending:
    """Options under which a stage may end a recomputation, and which are alike in what the recomputation finds alive.

    Attributes:
        last: Number of the stage.
        leaves: The options.
        base: Slots alive whenever the recomputation runs.
        trigger: What the backward takes before it starts the recomputation.
    """

    last: int
    leaves: tuple[LeafCost, ...]
    base: int
    trigger: int


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """One stage.

    Attributes:
        input_slots: Size of the input boundary, 0 for the first stage: the caller holds it.
        saved_before: Classes of the input boundary: the distinct parts of it that the stage before may save, in bytes, 0 first.
        endings: How it ends a recomputation; none if it saves nothing under any option.
        needs_as_segment: Least memory for the backward of the stage when it starts a segment, by who holds its input.
        discard_seconds: Forward whose saved tensors are dropped.
        recomputable: May be part of a segment.
        leaves: One entry per option.
    """

    input_slots: int
    saved_before: tuple[int, ...]
    needs_as_segment: BackwardNeed
    discard_seconds: float
    recomputable: bool
    leaves: tuple[LeafCost, ...]
    endings: tuple[Ending, ...]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """A chain as the dynamic program sees it.

    Attributes:
        unit: Bytes per slot.
        stages: One entry per stage.
        forward_base: By stage ``i``, slots alive during the first forward of ``i``.
        discard: ``(n, n)`` slots: entry ``(i, k)`` is the peak of the discarded pass over ``i..k``, without the input of ``i``.
        first_discard: The same with what is pinned on the way, for the first forward.
        remembered: ``(n, n)`` slots: entry ``(i, k)`` is what a segment ``i..k`` remembers of generators and buffers.
        segment_seconds: Host time of one run of a segment.
    """

    unit: float
    stages: tuple[StageNeeds, ...]
    forward_base: tuple[int, ...]
    discard: npt.NDArray[np.int64]
    first_discard: npt.NDArray[np.int64]
    remembered: npt.NDArray[np.int64]
    segment_seconds: float


def thresholds_of(chain: Chain, *, unit: float, gradients_exist: bool = False, lingering_bytes: int = 0) -> Thresholds:
    """Translate a chain into slots of ``unit`` bytes. Takes O(n²) for ``n`` stages."""
    n = len(chain)
    ruler = _Ruler(chain, unit)
    backward_base = _backward_bases(chain, gradients_exist)
    pinned = [sum(stage.pinned_bytes for stage in chain.stages[:index]) for index in range(n)]
    in_forward = lingering_bytes + np.array(pinned, np.int64)
    return Thresholds(
        unit=unit,
        stages=tuple(_stage_needs(chain, index, ruler, backward_base[index]) for index in range(n)),
        forward_base=tuple(ruler.slots(int(size)) for size in in_forward),
        discard=_discard_peaks(chain, np.zeros(n, np.int64), unit),
        first_discard=_discard_peaks(chain, in_forward, unit),
        remembered=_remembered(chain, unit),
        segment_seconds=chain.segment_seconds,
    )


class _Ruler:
    """Rounds bytes to slots; sizes that are retained by the place in the chain where they start."""

    def __init__(self, chain: Chain, unit: float) -> None:
        self._unit = unit
        self._before = [0]  # what a keep-all forward has retained before stage i, boundary i not included
        for index, stage in enumerate(chain):
            self._before.append(self._before[-1] + _input_bytes(chain, index) + stage.keep.saved_bytes)

    def slots(self, size_bytes: int) -> int:
        return math.floor(size_bytes / self._unit + 0.5)

    def boundary(self, index: int, size_bytes: int) -> int:
        """Slots of (a part of) the input boundary of stage ``index``."""
        return self.slots(self._before[index] + size_bytes) - self.slots(self._before[index])

    def retained(self, index: int, option: Option) -> int:
        """Slots of the tensors that stage ``index`` saves."""
        start = self._before[index + 1] - option.saved_bytes
        return self.slots(self._before[index + 1]) - self.slots(start)


def _stage_needs(chain: Chain, index: int, ruler: _Ruler, base: int) -> StageNeeds:
    stage = chain.stages[index]
    size = _input_bytes(chain, index)
    saved_before = _classes(chain, index)
    saved_after = _classes(chain, index + 1)
    leaves = tuple(
        _leaf_cost(number, option, index, size, saved_before, saved_after, ruler, base, is_last=index == len(chain) - 1)
        for number, option in enumerate(stage.options)
    )
    return StageNeeds(
        input_slots=ruler.boundary(index, size),
        saved_before=saved_before,
        needs_as_segment=BackwardNeed(
            *(min(getattr(leaf.last_backward, field.name) for leaf in leaves) for field in fields(BackwardNeed))
        ),
        endings=_endings(stage, index, leaves, ruler, base),
        discard_seconds=stage.discard_seconds,
        recomputable=stage.recomputable,
        leaves=leaves,
    )


def _endings(
    stage: StageCost, index: int, leaves: tuple[LeafCost, ...], ruler: _Ruler, base: int
) -> tuple[Ending, ...]:
    alike: dict[tuple[int, int], list[LeafCost]] = {}
    for leaf, option in zip(leaves, stage.options, strict=True):
        if leaf.saves:
            key = ruler.slots(base + option.unpack_bytes), ruler.slots(base + option.unpack_peak_bytes)
            alike.setdefault(key, []).append(leaf)
    return tuple(Ending(index, tuple(group), *key) for key, group in alike.items())


def _leaf_cost(
    number: int,
    option: Option,
    index: int,
    size: int,
    saved_before: tuple[int, ...],
    saved_after: tuple[int, ...],
    ruler: _Ruler,
    base: int,
    *,
    is_last: bool,
) -> LeafCost:
    # The output of the last stage is the caller's and part of the base already.
    own = base + option.saved_bytes + (0 if is_last else option.saved_output_bytes)
    freed = size - min(size, option.saved_input_bytes)

    def backward_need(least_peak: int) -> BackwardNeed:
        plain, segment, held = (
            own + max(peak, least_peak)
            for peak in (
                option.backward_peak_bytes,
                option.backward_segment_peak_bytes,
                option.backward_held_peak_bytes,
            )
        )
        return BackwardNeed(*(ruler.slots(need) for need in (plain, max(plain - freed, 0), segment, held)))

    return LeafCost(
        option=number,
        seconds=option.forward_seconds + option.backward_seconds,
        last_seconds=option.replay_seconds + option.backward_seconds,
        backward_seconds=option.backward_seconds,
        saves=option.saved_tensors > 0,
        retained=ruler.retained(index, option),
        output_class=saved_after.index(option.saved_output_bytes),
        input_retained=tuple(
            ruler.boundary(index, min(size, saved + option.saved_input_bytes)) for saved in saved_before
        ),
        forward=ruler.slots(option.forward_peak_bytes),
        replay=ruler.slots(option.replay_peak_bytes),
        backward=backward_need(option.unpack_peak_bytes),
        last_backward=backward_need(0),
        bare=ruler.slots(base + max(option.backward_peak_bytes, option.unpack_peak_bytes)),
    )


def _input_bytes(chain: Chain, index: int) -> int:
    return chain.stages[index - 1].output_bytes if index else 0


def _classes(chain: Chain, boundary: int) -> tuple[int, ...]:
    """Parts of a boundary that the stage before it may save. 0 is always among them: it may be in a segment."""
    if boundary == 0:
        return (0,)
    return tuple(sorted({0, *(option.saved_output_bytes for option in chain.stages[boundary - 1].options)}))


def _backward_bases(chain: Chain, gradients_exist: bool) -> list[int]:
    """By stage, what is alive at its backward whatever the schedule."""
    base = chain.stages[-1].output_bytes + sum(stage.pinned_bytes for stage in chain)
    bases = []
    for stage in reversed(chain.stages):
        bases.append(base)
        base += 0 if gradients_exist else stage.keep.parameter_gradient_bytes
    return bases[::-1]


def _discard_peaks(chain: Chain, pinned_before: npt.NDArray[np.int64], unit: float) -> npt.NDArray[np.int64]:
    n = len(chain)
    own = np.array([stage.discard_peak_bytes for stage in chain], np.int64) + pinned_before
    inputs = np.array([_input_bytes(chain, index) for index in range(n)], np.int64)
    peaks = np.zeros((n, n), np.int64)
    for first in range(n):
        levels = own[first:] + inputs[first:]
        levels[0] = own[first]
        peaks[first, first:] = np.floor(np.maximum.accumulate(levels) / unit + 0.5)
    return peaks


def _remembered(chain: Chain, unit: float) -> npt.NDArray[np.int64]:
    n = len(chain)
    buffers = np.array([stage.state_bytes for stage in chain], np.int64)
    draws = np.array([stage.draws_random for stage in chain], bool)
    remembered = np.zeros((n, n), np.int64)
    for first in range(n):
        generators = chain.rng_state_bytes * np.logical_or.accumulate(draws[first:])
        remembered[first, first:] = np.floor((np.cumsum(buffers[first:]) + generators) / unit + 0.5)
    return remembered
