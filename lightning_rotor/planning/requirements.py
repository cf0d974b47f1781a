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

A skip (:class:`lightning_rotor.chain.Skip`) is retained under one of two rules. If several stages read it, or the stage that makes it saves it,
then from the item of the schedule that makes it on, until that item's own backward. Else, a single reader far away, by the item that
holds the reader: a segment, or a leaf that saves it; before, the running forward holds it. Gradients of skips depend on the place in the
step alone, so they count like those of parameters.

Sizes become slots by rounding cumulative sums, not each size: the errors of neighbours cancel, and a run of kept stages is
off by one slot at most. Thresholds are rounded to the nearest slot. Neither is safe, and neither needs to be: the simulator
judges every schedule in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.chain import BackwardPeaks, Chain, Option, StageCost
from lightning_rotor.simulator import Skips

NEVER = 1 << 60
"""Slot that no table has: the decision is not allowed."""


@dataclass(frozen=True, slots=True)
class BackwardNeed:
    """Slots that the backward of a stage needs, by who holds its input meanwhile.

    Attributes:
        plain: Nobody but the stage itself.
        nested: It is first in a segment, which has given the input up. The input is paid for, so what the stage itself does
            not save of it is free again.
        segment: It is first in a segment that holds the input: one that is not recomputed, or cannot tell that nobody else asks for it.
        held: The stage before saved it, or the caller holds it, and it is paid for.
        saved: The stage before saved it, which is counted here.
    """

    plain: int
    nested: int
    segment: int
    held: int
    saved: int


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
        inverts: It drops its input, so it can do so where that is nobody else's: not as the first of a chain or a segment.
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
    inverts: bool


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
        saved_before: Classes of the input boundary: the parts of it that the stage before may save, in bytes, 0 first. The same part is
            twice among them if only one of two options can do without it.
        endings: How it ends a recomputation; none if it saves nothing under any option.
        needs_as_segment: Least memory for the backward of the stage when it starts a segment, by who holds its input.
        discard_seconds: Forward whose saved tensors are dropped.
        recomputable: May be part of a segment.
        gives_up_input: A segment that starts here needs its input for one recomputation only, even in the step's own forward. Without a
            gradient for the input it cannot tell whether another backward follows.
        leaves: One entry per option.
    """

    input_slots: int
    saved_before: tuple[int, ...]
    needs_as_segment: BackwardNeed
    discard_seconds: float
    recomputable: bool
    gives_up_input: bool
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
        held: The same and the skips that the segment holds because it reads them.
        handed_on: ``(n, n)`` slots: entry ``(i, k)`` is what skips that a segment ``i..k`` makes take while what follows it runs.
        segment_seconds: Host time of one run of a segment.
    """

    unit: float
    stages: tuple[StageNeeds, ...]
    forward_base: tuple[int, ...]
    discard: npt.NDArray[np.int64]
    first_discard: npt.NDArray[np.int64]
    remembered: npt.NDArray[np.int64]
    held: npt.NDArray[np.int64]
    handed_on: npt.NDArray[np.int64]
    segment_seconds: float


def thresholds_of(
    chain: Chain,
    *,
    unit: float,
    gradients_exist: bool = False,
    lingering_bytes: int = 0,
    readers_pay: bool = False,
) -> Thresholds:
    """Translate a chain into slots of ``unit`` bytes. Takes O(n²) for ``n`` stages.

    ``readers_pay`` retains every skip by its first reader: less than some schedules take, where the other rule is more than some do.
    """
    n = len(chain)
    ruler = _Ruler(chain, unit)
    backward_base = _backward_bases(chain, gradients_exist)
    pinned = [sum(stage.pinned_bytes for stage in chain.stages[:index]) for index in range(n)]
    skips = _Skips(chain, readers_pay=readers_pay)
    in_forward = lingering_bytes + np.array(pinned, np.int64) + skips.in_forward
    own_discards = np.zeros(n, np.int64)
    states = _state_bytes(chain)
    return Thresholds(
        unit=unit,
        stages=tuple(
            _stage_needs(chain, index, ruler, backward_base[index], skips, gradients_exist=gradients_exist)
            for index in range(n)
        ),
        forward_base=tuple(ruler.slots(int(size)) for size in in_forward),
        discard=_discard_peaks(chain, own_discards, skips, unit),
        first_discard=_discard_peaks(chain, in_forward, skips, unit),
        remembered=_in_slots(states, unit),
        held=_in_slots(states + skips.held, unit),
        handed_on=_in_slots(skips.handed_on, unit),
        segment_seconds=chain.segment_seconds,
    )


def retains_from_birth(chain: Chain) -> bool:
    """Whether any skip falls under the first of the two rules; else ``readers_pay`` changes nothing."""
    return bool(_Skips(chain, readers_pay=False).from_birth)


class _Skips:
    """Skips by the rule under which they are retained, see above."""

    def __init__(self, chain: Chain, *, readers_pay: bool) -> None:
        n = len(chain)
        self.learn_in = Skips(chain).learn_in
        self.in_forward = np.zeros(n, np.int64)  # by stage: what the running forward holds
        self.held = np.zeros((n, n), np.int64)
        self.handed_on = np.zeros((n, n), np.int64)
        self.from_birth: set[int] = set()
        self._births = np.zeros(n, np.int64)
        self._spans: list[tuple[int, int, int]] = []
        for number, skip in enumerate(chain.skips):
            born, last, size = skip.born, skip.last_use, skip.size_bytes
            if skip.in_output:
                self.in_forward[born + 1 :] += size
            elif (
                born >= 0 and not readers_pay and (len(skip.uses) > 1 or number in chain.stages[born].keep.saved_skips)
            ):
                self.from_birth.add(number)
                self._births[born] += size
                self.handed_on[: born + 1, born:last] += size
                self._spans.append((born, last, size))
            elif born >= 0:
                first = skip.uses[0]
                self.in_forward[born + 1 : first + 1] += size
                self.held[born + 1 : first + 1, first:] += size

    def retained(self, index: int, option: Option, chain: Chain) -> int:
        """What a kept stage takes: the skips that it makes, and those that it alone reads and saves."""
        saved = [
            number
            for number in option.saved_skips
            if number not in self.from_birth
            and not chain.skips[number].in_output
            and chain.skips[number].uses[0] == index
        ]
        return int(self._births[index]) + sum(chain.skips[number].size_bytes for number in saved)

    def carried(self, first: int) -> npt.NDArray[np.int64]:
        """By stage from ``first`` on: what a discarded pass that starts there has made before and holds on to."""
        carried = np.zeros(len(self.in_forward), np.int64)
        for born, last, size in self._spans:
            if born >= first:
                carried[born + 1 : last + 1] += size
        return carried[first:]


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


def _stage_needs(
    chain: Chain, index: int, ruler: _Ruler, base: int, skips: _Skips, *, gradients_exist: bool
) -> StageNeeds:
    stage = chain.stages[index]
    size = _input_bytes(chain, index)
    classes_before, classes_after = _classes(chain, index), _classes(chain, index + 1)
    leaves = tuple(
        _leaf_cost(
            number,
            option,
            option.backward_peaks(gradients_exist=gradients_exist),
            index,
            size,
            classes_before,
            classes_after,
            ruler,
            base,
            skip_bytes=skips.retained(index, option, chain),
            is_last=index == len(chain) - 1,
        )
        for number, option in enumerate(stage.options)
    )
    return StageNeeds(
        input_slots=ruler.boundary(index, size),
        saved_before=tuple(saved for saved, _ in classes_before),
        needs_as_segment=BackwardNeed(
            *(min(getattr(leaf.last_backward, field.name) for leaf in leaves) for field in fields(BackwardNeed))
        ),
        endings=_endings(stage, index, leaves, ruler, base),
        discard_seconds=stage.discard_seconds,
        recomputable=stage.recomputable,
        gives_up_input=stage.keep.input_gradient_bytes > 0 or skips.learn_in(index, index),
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
    peaks: BackwardPeaks,
    index: int,
    size: int,
    classes_before: tuple[_Class, ...],
    classes_after: tuple[_Class, ...],
    ruler: _Ruler,
    base: int,
    *,
    skip_bytes: int,
    is_last: bool,
) -> LeafCost:
    # The output of the last stage is the caller's and part of the base already.
    own = base + option.saved_bytes + skip_bytes + (0 if is_last else option.saved_output_bytes)
    freed = size - min(size, option.saved_input_bytes)

    def backward_need(least_peak: int, state_bytes: int = 0) -> BackwardNeed:
        plain, segment, held = (
            own + state_bytes + max(peak, least_peak)
            for peak in (peaks.plain_bytes, peaks.segment_bytes, peaks.held_bytes)
        )
        if option.inverts:
            return BackwardNeed(ruler.slots(plain), NEVER, NEVER, NEVER, ruler.slots(held))
        return BackwardNeed(*(ruler.slots(need) for need in (plain, max(plain - freed, 0), segment, held, held)))

    def retained_input(before: _Class) -> int:
        saved, is_exact = before
        if option.inverts:
            return NEVER if is_exact else 0
        return ruler.boundary(index, min(size, saved + option.saved_input_bytes))

    return LeafCost(
        option=number,
        seconds=option.forward_seconds + option.backward_seconds,
        last_seconds=option.replay_seconds + option.backward_seconds,
        backward_seconds=option.backward_seconds,
        saves=option.saved_tensors > 0,
        retained=ruler.retained(index, option) + ruler.slots(skip_bytes),
        output_class=classes_after.index(_class_of(option, classes_after)),
        input_retained=tuple(map(retained_input, classes_before)),
        forward=ruler.slots(option.forward_peak_bytes),
        replay=ruler.slots(option.replay_peak_bytes),
        backward=backward_need(option.unpack_peak_bytes),
        last_backward=backward_need(0, option.saved_state_bytes),
        bare=ruler.slots(base + max(peaks.plain_bytes, option.unpack_peak_bytes)),
        inverts=option.inverts,
    )


def _input_bytes(chain: Chain, index: int) -> int:
    return chain.stages[index - 1].output_bytes if index else 0


_Class: TypeAlias = tuple[int, bool]
"""A part of a boundary that the stage before it saves, and whether the stage behind it must not drop that."""


def _classes(chain: Chain, boundary: int) -> tuple[_Class, ...]:
    """Parts of a boundary that the stage before it may save. Nothing is always among them: it may be in a segment."""
    if boundary == 0:
        return ((0, False),)
    inverted = boundary < len(chain) and any(option.inverts for option in chain.stages[boundary].options)
    saved = {
        (option.saved_output_bytes, inverted and option.needs_exact_output)
        for option in chain.stages[boundary - 1].options
    }
    return tuple(sorted({(0, False), *saved}))


def _class_of(option: Option, classes: tuple[_Class, ...]) -> _Class:
    exact = option.saved_output_bytes, option.needs_exact_output
    return exact if exact in classes else (option.saved_output_bytes, False)


def _backward_bases(chain: Chain, gradients_exist: bool) -> list[int]:
    """By stage, what is alive at its backward whatever the schedule."""
    always = chain.stages[-1].output_bytes + sum(stage.pinned_bytes for stage in chain)
    always += sum(skip.size_bytes for skip in chain.skips if skip.in_output)
    gradients = 0
    bases = []
    for index, stage in reversed([*enumerate(chain.stages)]):
        bases.append(always + gradients + _bypassing_gradients(chain, index) + _excess_gradient(chain, index))
        if gradients_exist:
            gradients = stage.waiting_gradient_bytes
        else:
            gradients += stage.keep.parameter_gradient_bytes
    return bases[::-1]


def _excess_gradient(chain: Chain, index: int) -> int:
    """What the stage behind leaves at most beyond what the stage's own peaks count."""
    expected = chain.stages[index].output_gradient_bytes
    if expected is None or index + 1 == len(chain):
        return 0
    return max(0, max(option.input_gradient_bytes for option in chain.stages[index + 1].options) - expected)


def _bypassing_gradients(chain: Chain, index: int) -> int:
    """Gradients of skips that are alive during the backward of a stage which neither makes nor reads them."""
    return sum(
        next(size for use, size in zip(skip.uses, skip.gradient_bytes, strict=True) if use > index)
        for skip in chain.skips
        if skip.born < index < skip.last_use and index not in skip.uses
    )


def _discard_peaks(
    chain: Chain, pinned_before: npt.NDArray[np.int64], skips: _Skips, unit: float
) -> npt.NDArray[np.int64]:
    n = len(chain)
    own = np.array([stage.discard_peak_bytes for stage in chain], np.int64) + pinned_before
    inputs = np.array([_input_bytes(chain, index) for index in range(n)], np.int64)
    peaks = np.zeros((n, n), np.int64)
    for first in range(n):
        levels = own[first:] + inputs[first:] + skips.carried(first)
        levels[0] = own[first]
        peaks[first, first:] = np.floor(np.maximum.accumulate(levels) / unit + 0.5)
    return peaks


def _state_bytes(chain: Chain) -> npt.NDArray[np.int64]:
    n = len(chain)
    buffers = np.array([stage.state_bytes for stage in chain], np.int64)
    draws = np.array([stage.draws_random for stage in chain], bool)
    remembered = np.zeros((n, n), np.int64)
    for first in range(n):
        generators = chain.rng_state_bytes * np.logical_or.accumulate(draws[first:])
        remembered[first, first:] = np.cumsum(buffers[first:]) + generators
    return remembered


def _in_slots(sizes: npt.NDArray[np.int64], unit: float) -> npt.NDArray[np.int64]:
    return np.floor(sizes / unit + 0.5).astype(np.int64)


# ----------------------------------------------------------------------------------------------------
# What each decision of the dynamic program needs, for many intervals at once.


Context: TypeAlias = Literal["any", "nested", "segment", "held"]
"""Who holds the input of an interval during the backward of its first stage, see :class:`BackwardNeed`; "any" is the least of all."""
Integers: TypeAlias = npt.NDArray[np.int64]
Reals: TypeAlias = npt.NDArray[np.float64]

_APART: tuple[Context, ...] = ("nested", "segment", "held")
COLUMN_OF = {"plain": 0, "any": 1, "nested": 1, "segment": 2, "held": 3, "saved": 4}
"""Where the need of a context, or of nobody else holding the input, stands among five, in the order of :class:`BackwardNeed`."""


def by_context(need: BackwardNeed, context: Context) -> int:
    """The need that counts in a context."""
    return in_columns(need)[COLUMN_OF[context]]


def in_columns(need: BackwardNeed) -> tuple[int, int, int, int, int]:
    """In the order of :data:`COLUMN_OF`."""
    return need.plain, need.nested, need.segment, need.held, need.saved


class Decisions:
    """Every threshold of a chain in arrays.

    Args:
        thresholds: The chain, in slots.
        refined: See :class:`lightning_rotor.planning.dynamic_program.Table`.

    Attributes:
        top: Number of the last stage.
        endings: By stage. The step's own forward ends at the last stage under any of its options, with thresholds of its own.
        outermost: By stage, first stage of the longest segment that may end there; one more than the stage if there is none.
        contexts: By stage and variant, the context whose thresholds the variant has.
        variant: ``(n, 4)``, in which variant the bodies of a context are, by :class:`BackwardNeed`'s order.
        alike_from: ``(n, variants)`` slots: from there on the bodies of a variant are those of variant ``alike``; never if there is none.
        alike: ``(n, variants)``.
    """

    def __init__(self, thresholds: Thresholds, *, refined: bool) -> None:
        self.thresholds = thresholds
        self._refined = refined
        stages = thresholds.stages
        self.stages = stages
        n = len(stages)
        self.top = n - 1
        # Ends nothing else, so its base and trigger are none; what its stages need is in `forward_base`.
        self.endings = [*(stage.endings for stage in stages[:-1]), (Ending(self.top, stages[-1].leaves, 0, 0),)]
        self.outermost = np.array([self._first_of_longest_segment(last) for last in range(n - 1)] + [0], np.int64)
        self._read_stages()
        self._read_endings()
        self.contexts = [self._contexts_of(first) for first in range(n)]
        self._find_variants()
        discard = np.array([stage.discard_seconds for stage in stages])
        self.discard_before = np.concatenate(([0.0], np.cumsum(discard)))
        self.peak = {False: thresholds.discard, True: thresholds.first_discard}
        self.recording = [self._recording_needs(ending) for ending in range(self.ending_base.shape[1])]

    def take_over(self, thresholds: Thresholds) -> None:
        """Take over thresholds in which needs of the last stage's backward are others: loops and extraction read them there."""
        self.thresholds, self.stages = thresholds, thresholds.stages
        self.endings[self.top] = (replace(self.endings[self.top][0], leaves=self.stages[-1].leaves),)

    # ---------------------------------------------------------------- arrays

    def _read_stages(self) -> None:
        stages = self.stages
        n, options = len(stages), max(len(stage.leaves) for stage in stages)
        classes = max(len(stage.saved_before) for stage in stages)
        self.input_slots = np.array([stage.input_slots for stage in stages], np.int64)
        self.gives_up_input = np.array([stage.gives_up_input for stage in stages])
        self.class_count = np.array([len(stage.saved_before) for stage in stages], np.int64)
        self.class_held = np.zeros((n, classes), bool)
        self.needs_as_segment = np.array([in_columns(stage.needs_as_segment)[:4] for stage in stages], np.int64)
        self.forward, self.replay, self.bare = (np.full((n, options), NEVER, np.int64) for _ in range(3))
        self.retained, self.output_class = (np.zeros((n, options), np.int64) for _ in range(2))
        self.backward, self.last_backward = (np.full((n, options, 5), NEVER, np.int64) for _ in range(2))
        self.input_retained = np.zeros((n, classes, options), np.int64)
        self.seconds, self.last_seconds = (np.zeros((n, options)) for _ in range(2))
        self.bare_seconds = np.zeros((n, options))
        for index, stage in enumerate(stages):
            self.class_held[index, : len(stage.saved_before)] = [saved > 0 for saved in stage.saved_before]
            for option, leaf in enumerate(stage.leaves):
                at = index, option
                self.forward[at], self.replay[at], self.retained[at] = leaf.forward, leaf.replay, leaf.retained
                self.output_class[at] = leaf.output_class
                self.backward[at], self.last_backward[at] = in_columns(leaf.backward), in_columns(leaf.last_backward)
                self.input_retained[index, : len(stage.saved_before), option] = leaf.input_retained
                self.seconds[at], self.last_seconds[at] = leaf.seconds, leaf.last_seconds
                if not leaf.saves:
                    self.bare[at], self.bare_seconds[at] = leaf.bare, leaf.backward_seconds + stage.discard_seconds
        self.last_seconds[-1] = self.seconds[-1]
        self.freed = self.input_slots[:, None] - self.input_retained[:, 0]
        for index, stage in enumerate(stages):  # what an inverted stage frees is never paid for
            self.freed[index, [option for option, leaf in enumerate(stage.leaves) if leaf.inverts]] = 0

    def _read_endings(self) -> None:
        n, most = len(self.endings), max(len(endings) for endings in self.endings)
        self.ending_count = np.array([len(endings) for endings in self.endings], np.int64)
        self.ending_base, self.ending_trigger = (np.full((n, most), NEVER, np.int64) for _ in range(2))
        self.ends = np.zeros((n, most, self.forward.shape[1]), bool)
        for last, endings in enumerate(self.endings):
            for number, ending in enumerate(endings):
                self.ending_base[last, number], self.ending_trigger[last, number] = ending.base, ending.trigger
                self.ends[last, number, [self.stages[last].leaves.index(leaf) for leaf in ending.leaves]] = True

    def _recording_needs(self, ending: int) -> Integers:
        """``(n, n)``: least memory to run ``i`` and what follows in a recomputation, up to ``l``, that keeps everything."""
        n = len(self.stages)
        needs = np.full((n + 1, n), NEVER, np.int64)
        if not self.freed.any():
            return needs
        taken = self.input_retained[:, 0, 0] + self.retained[:, 0]
        for first in reversed(range(n)):
            base = self.ending_base[first:, ending] + self.thresholds.remembered[first, first:]
            forward = self.input_slots[first] + self.forward[first, 0] + base
            needs[first, first:] = np.maximum(forward, taken[first] + needs[first + 1, first:])
            if ending < self.ending_count[first]:
                option = int(np.argmax(self.ends[first, ending]))
                needs[first, first] = self.input_slots[first] + self.replay[first, option] + base[0]
        return needs

    # ---------------------------------------------------------------- contexts

    def _first_of_longest_segment(self, last: int) -> int:
        first = last + 1
        while first > 0 and self.stages[first - 1].recomputable:
            first -= 1
        return first

    def _contexts_of(self, first: int) -> tuple[Context, ...]:
        """Contexts that may differ.

        With one option the context only sets a least memory, the same for every decision, so one body serves all. Unless segments
        differ in the states that they take from that memory.
        """
        if first == 0:
            return ("held",)
        stage = self.stages[first]
        remembering = bool(self.thresholds.held[first, first:].any())
        apart = sum(not leaf.inverts for leaf in stage.leaves) > 1 or (
            self._refined and (remembering or bool(self.freed[first].any()))
        )
        return _APART if apart else ("any",)

    def _find_variants(self) -> None:
        """Contexts with the same thresholds share a variant; others are alike where memory is no longer short for the first backward."""
        n = len(self.stages)
        self.variant = np.zeros((n, 4), np.int64)
        self.alike_from, self.alike = np.full((n, 3), NEVER, np.int64), np.zeros((n, 3), np.int64)
        for first, contexts in enumerate(self.contexts):
            if contexts != _APART:
                continue
            needs = np.stack([self.backward[first], self.last_backward[first]])[:, : len(self.stages[first].leaves)]
            kept: list[Context] = []
            for context in self._distinct(first):
                # A nested segment has given up what its first stage does not save: that is more than a threshold.
                comparable = [other for other in kept if other != "nested" or not self.freed[first].any()]
                column = COLUMN_OF[context]
                same = [each for each in comparable if (needs[..., COLUMN_OF[each]] == needs[..., column]).all()]
                if same:
                    self.variant[first, column] = kept.index(same[0])
                    continue
                self.variant[first, column] = len(kept)
                if comparable:
                    self.alike[first, len(kept)] = kept.index(comparable[0])
                    both = needs[..., [column, COLUMN_OF[comparable[0]]]]
                    self.alike_from[first, len(kept)] = both[both < NEVER].max()
                kept.append(context)
            self.contexts[first] = tuple(kept)
        self.variant_count = np.array([len(contexts) for contexts in self.contexts], np.int64)
        most = int(self.variant_count.max())
        # What a stage has too few variants for is computed with the others of its group, and not stored.
        padded = [(*contexts, *contexts[-1:] * (most - len(contexts))) for contexts in self.contexts]
        self.columns = np.array([[COLUMN_OF[context] for context in contexts] for contexts in padded])
        # Without a recomputation segments hold their input to the end.
        self.bare_columns = np.maximum(self.columns, COLUMN_OF["segment"])
        self.is_apart = np.array([contexts[0] == "nested" for contexts in self.contexts])

    def _distinct(self, first: int) -> tuple[Context, ...]:
        """What a segment that starts there may be in, once it matters."""
        return tuple(context for context in _APART if context != "segment" or not self.stages[first].gives_up_input)

    def segment_context(self, first: int, number: int, *, top: bool) -> Context:
        """The context of a segment that starts at ``first`` after class ``number`` of the boundary."""
        stage = self.stages[first]
        if stage.saved_before[number]:
            return "held"
        return "segment" if top and not stage.gives_up_input else "nested"

    def variant_of(self, first: int, context: Context) -> int:
        """Where the bodies of a context are."""
        return int(self.variant[first, COLUMN_OF[context]])

    def discarded_seconds(self, first: int, last: int) -> float:
        """The first pass over a segment."""
        seconds = self.discard_before[last + 1] - self.discard_before[first] + self.thresholds.segment_seconds
        return float(seconds)
