"""Slots and seconds that each decision of the dynamic program needs and takes.

The program must know what is alive at each moment without following a schedule. Only three kinds of moments exist, and
at each most of what is alive depends on one number alone:

    ==========================  ==============================================================================
    moment                      alive besides what the schedule itself retains
    ==========================  ==============================================================================
    first forward of stage i    what stages before i pinned, what lingers from the step before
    backward of stage i         output of the chain, everything pinned, parameter gradients of stages after i
    recomputation started by    the same for stage l, and what the backward of l holds when it reads its first saved
    the backward of stage l     tensor (``Option.unpack_bytes``)
    ==========================  ==============================================================================

These amounts are added to the requirements here; the program's ``m`` counts only what the schedule retains.

Cumulative sums are rounded to slots, not each size: errors of neighbours cancel, and a run of kept stages is off by one
slot at most. Least memories are rounded to the nearest slot. Neither needs to be safe: the simulator judges in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from lightning_rotor.chain import Chain, Option
from lightning_rotor.planning.kernels import FORWARD, LEAST, NEVER, RECORDED, Integers, Requirements
from lightning_rotor.planning.retained_skips import RetainedSkips

# Who holds the input of a stage during its backward.
#   PLAIN    nobody but the stage itself
#   NESTED   the segment that starts with it gave it up: it is paid for, and free but for what the stage saves of it
#   SEGMENT  that segment holds it: it is not recomputed, or cannot tell that nobody else asks for it
#   HELD     the stage before saved it, or the caller holds it, and it is paid for
#   SAVED    the stage before saved it, which is counted here
PLAIN, NESTED, SEGMENT, HELD, SAVED = range(5)


def requirements_of(
    chain: Chain,
    *,
    unit: float,
    refined: bool = False,
    gradients_exist: bool = False,
    lingering_bytes: int = 0,
    readers_pay: bool = False,
) -> Requirements:
    """Translate a chain of ``n`` stages into slots of ``unit`` bytes, in O(n²).

    ``refined`` tells apart who holds a segment's input even where that seldom matters: up to three times as slow.
    ``readers_pay`` charges every skip to its first reader: less than some schedules take, where the other rule charges
    more than some do.
    """
    stages = len(chain)
    skips = RetainedSkips(chain, readers_pay=readers_pay)
    options = _Options(chain, skips, unit, gradients_exist=gradients_exist)
    states = _state_bytes(chain)
    held = _in_slots(states + skips.held, unit)
    variants = []
    for index in range(stages):
        holds_anything = bool(held[index, index:].any())
        of_stage = options.variants(index, refined=refined, holding=holds_anything)
        variants.append(of_stage)
    # What a stage pins lives until the graph dies, so it is there when later stages run, and not when its own does.
    pinned_before = np.cumsum([0, *(stage.pinned_bytes for stage in chain)])[:stages]
    in_forward = lingering_bytes + pinned_before + skips.in_forward
    base = options.bases(_in_slots(states, unit), _in_slots(in_forward, unit))
    kept, ended = options.ways(variants)
    # Ways are the options, and perhaps once more all of them with the input free.
    repeats = kept.shape[-1] // options.seconds.shape[-1]
    # Only ways with a free input ask what recording everything takes.
    recording = np.zeros((0, stages + 1, stages), np.int64)
    if repeats > 1:
        recording = options.recording(base)
    segment_variant, segment_least = options.segments(variants)
    # A recomputation's base is added by the loops, since it depends on the ending. The forward has only one.
    peak_in_recomputation = _discard_peaks(chain, 0 * in_forward, skips, unit)
    peak_in_forward = _discard_peaks(chain, in_forward, skips, unit)
    # The caller pays for the chain's input, so boundary 0 has no class.
    class_counts = [0, *map(len, options.classes[1:stages])]
    return Requirements(
        endings=np.array(list(map(len, options.endings))),
        variants=np.array([len(variant.columns) for variant in variants]),
        class_before=np.cumsum([0, *class_counts]),
        outermost=_outermost(chain),
        base=base,
        trigger=options.triggers(),
        kept=kept,
        kept_seconds=np.tile(options.seconds, repeats),
        ended=ended,
        ended_seconds=np.tile(options.last_seconds, repeats),
        recording=recording,
        bare=options.bare(variants),
        bare_seconds=options.bare_seconds,
        input_slots=options.input_slots,
        segment_variant=segment_variant,
        segment_least=segment_least,
        peak=np.stack([peak_in_recomputation, peak_in_forward]),
        held=held,
        handed_on=_in_slots(skips.handed_on, unit),
        discard_before=np.cumsum([0.0, *(stage.discard_seconds for stage in chain)]),
        segment_seconds=chain.segment_seconds,
    )


@dataclass(frozen=True, slots=True)
class _Variants:
    """Holders of its input for whom the bodies that start at a stage are told apart.

    Attributes:
        columns: By variant, who holds the input.
        of: By holder, the variant.
        need: By holder, the least memory that the bodies do not know of.
        are_apart: It matters who holds the input.
    """

    columns: list[int]
    of: list[int]
    need: list[int]
    are_apart: bool = False


class _Options:
    """Needs of the options of all stages, ``(n, options)``; options that a stage lacks are never allowed."""

    def __init__(self, chain: Chain, skips: RetainedSkips, unit: float, *, gradients_exist: bool) -> None:
        stages = len(chain)
        most = max(len(stage.options) for stage in chain)
        shape = stages, most
        self._chain = chain
        self._skips = skips
        self._unit = unit
        # What a keep-all forward has retained before each stage, its input not included: the places in the chain at
        # which sizes are rounded, so that the errors of neighbours cancel.
        retained = []
        for index, stage in enumerate(chain):
            retained.append(_input_bytes(chain, index) + stage.keep.saved_bytes)
        self._before = [0, *accumulate(retained)]
        self.classes = [_classes(chain, boundary) for boundary in range(stages + 1)]
        # By stage: what recomputations that end there find alive, and what the backward takes before them.
        self.endings: list[list[tuple[int, int]]] = [[] for _ in chain]
        input_slots = []
        # An outermost segment can tell that its input is not needed again only if the backward goes on to where the
        # input comes from, as in the simulator.
        self._gives_up_input = []
        for index, stage in enumerate(chain):
            input_slots.append(self._input_slots(index, _input_bytes(chain, index)))
            gets_gradient = stage.keep.input_gradient_bytes > 0 or skips.learn_in(index, index)
            self._gives_up_input.append(gets_gradient)
        self.input_slots = np.array(input_slots)
        # Least memory of the recorded forward, of one that stops at the last saved tensor, and of a backward without.
        self._forward = np.full(shape, NEVER)
        self._replay = np.full(shape, NEVER)
        self._bare = np.full(shape, NEVER)
        self._retained = np.zeros(shape, np.int64)
        self._output_class = np.zeros(shape, np.int64)
        # Of the input, if nobody else holds it.
        self._freed = np.zeros(shape, np.int64)
        self._ending = np.full(shape, -1)
        # Of the input, by its class.
        most_classes = max(map(len, self.classes))
        self._paid = np.zeros((stages, most_classes, most), np.int64)
        # Least memory of the backward by who holds the input: of a kept stage, and of one that ends a recomputation.
        self._backward = np.full((stages, 5, most), NEVER)
        self._last_backward = np.full((stages, 5, most), NEVER)
        # Of kept stages; of those that end a recomputation; of those that save nothing and end a segment.
        self.seconds = np.zeros(shape)
        self.last_seconds = np.zeros(shape)
        self.bare_seconds = np.zeros(shape)
        for index, base in enumerate(_backward_bases(chain, gradients_exist)):
            for number, option in enumerate(chain.stages[index].options):
                self._read(index, number, option)
                self._read_backward(index, number, option, base, gradients_exist)
        # The last stage ends the step's forward, under any of its options, so endings do not matter.
        self.endings[-1] = [(0, 0)]
        self._ending[-1] = 0
        self._replay[-1] = self._forward[-1]
        self._last_backward[-1] = self._backward[-1]
        self.last_seconds[-1] = self.seconds[-1]

    def _slots(self, size_bytes: int, start_bytes: int = 0) -> int:
        """Slots of bytes; of retained ones by the place in the chain where they start."""
        first = start_bytes / self._unit
        last = (start_bytes + size_bytes) / self._unit
        # Both ends are rounded, not the size: errors of neighbours cancel.
        return math.floor(last + 0.5) - math.floor(first + 0.5)

    def _input_slots(self, index: int, size_bytes: int) -> int:
        """Slots of (a part of) the input of a stage."""
        return self._slots(size_bytes, self._before[index])

    def _read(self, index: int, number: int, option: Option) -> None:
        """Read sizes and durations of an option except those of its backward."""
        at = index, number
        input_bytes = _input_bytes(self._chain, index)
        self._forward[at] = self._slots(option.forward_peak_bytes)
        self._replay[at] = self._slots(option.replay_peak_bytes)
        skip_bytes = self._skips.retained(index, option, self._chain)
        start_bytes = self._before[index + 1] - option.saved_bytes
        self._retained[at] = self._slots(option.saved_bytes, start_bytes) + self._slots(skip_bytes)
        classes = self.classes[index + 1]
        output_class = option.saved_output_bytes, option.needs_exact_output
        if output_class not in classes:
            # Classes tell exact outputs apart only where the next stage might drop its input.
            output_class = option.saved_output_bytes, False
        self._output_class[at] = classes.index(output_class)
        for class_before, (saved_bytes, is_exact) in enumerate(self.classes[index]):
            if option.inverts:
                # It drops its input, so it pays nothing for it, and must not where the stage before needs every bit.
                paid = NEVER if is_exact else 0
            else:
                paid = self._input_slots(index, min(input_bytes, saved_bytes + option.saved_input_bytes))
            self._paid[index, class_before, number] = paid
        if not option.inverts:
            # What an inverted stage frees is never paid for.
            self._freed[at] = self.input_slots[index] - self._paid[index, 0, number]
        self.seconds[at] = option.seconds
        # A recomputation stops at the last saved tensor of the stage that ends it: a replay, which is shorter.
        self.last_seconds[at] = option.replay_seconds + option.backward_seconds
        self.bare_seconds[at] = option.backward_seconds + self._chain.stages[index].discard_seconds

    def _read_backward(self, index: int, number: int, option: Option, base: int, gradients_exist: bool) -> None:
        """Read the needs of an option's backward; ``base`` is alive whatever the schedule."""
        peaks = option.backward_peaks(gradients_exist=gradients_exist)
        own_bytes = base + option.saved_bytes + self._skips.retained(index, option, self._chain)
        if index < len(self._chain) - 1:
            # Else the output is the caller's, and part of the base already.
            own_bytes += option.saved_output_bytes
        input_bytes = _input_bytes(self._chain, index)
        freed_bytes = input_bytes - min(input_bytes, option.saved_input_bytes)
        # A kept stage's backward also runs what needs no saved tensor; one behind a recomputation has run it before,
        # and finds the copies of buffers that the recomputation has saved.
        for backward, least_bytes, copies_bytes in (
            (self._backward, option.unpack_peak_bytes, 0),
            (self._last_backward, 0, option.saved_state_bytes),
        ):
            alive_bytes = own_bytes + copies_bytes
            plain_bytes = alive_bytes + max(peaks.plain_bytes, least_bytes)
            plain = self._slots(plain_bytes)
            nested = self._slots(max(plain_bytes - freed_bytes, 0))
            segment = self._slots(alive_bytes + max(peaks.segment_bytes, least_bytes))
            held = self._slots(alive_bytes + max(peaks.held_bytes, least_bytes))
            # In the order PLAIN .. SAVED.
            backward[index, :, number] = plain, nested, segment, held, held
            if option.inverts:
                # It drops its input and rebuilds it, so the input must be its own.
                backward[index, NESTED : HELD + 1, number] = NEVER
        if not option.saved_tensors:
            peak_bytes = max(peaks.plain_bytes, option.unpack_peak_bytes)
            self._bare[index, number] = self._slots(base + peak_bytes)
            return
        trigger = self._slots(base + option.unpack_peak_bytes)
        # Options that find the same alive end a recomputation in the same way, and share a row of the table.
        ending = self._slots(base + option.unpack_bytes), trigger
        if ending not in self.endings[index]:
            self.endings[index].append(ending)
        self._ending[index, number] = self.endings[index].index(ending)

    def variants(self, index: int, *, refined: bool, holding: bool) -> _Variants:
        """Variants of the bodies that start at a stage.

        With one option, the input's holder matters only for a least memory, the same for every decision. So one body
        serves all, unless segments differ in the states that they take from that memory.
        """
        if index == 0:
            # The caller holds the chain's input, whatever the schedule.
            return _Variants([HELD], [0] * 4, [0] * 4)
        frees = bool(self._freed[index].any())
        # An inverted option is no choice here: with an input that anybody else holds it is never allowed.
        options = self._chain.stages[index].options
        has_a_choice = sum(not option.inverts for option in options) > 1
        if not has_a_choice and not (refined and (holding or frees)):
            need = self._last_backward[index, :4].min(axis=1)
            return _Variants([NESTED], [0] * 4, need.tolist())
        columns: list[int] = []
        of = [0] * 4
        holders = [NESTED, HELD]
        if not self._gives_up_input[index]:
            holders.insert(1, SEGMENT)
        for holder in holders:
            alike = self._first_alike(index, holder, columns, frees=frees)
            if alike is None:
                alike = len(columns)
                columns.append(holder)
            of[holder] = alike
        return _Variants(columns, of, [0] * 4, are_apart=True)

    def _first_alike(self, index: int, holder: int, columns: list[int], *, frees: bool) -> int | None:
        """The first variant whose holder makes no other difference than this one; None if each does."""
        for variant, other in enumerate(columns):
            # A nested segment has given up what its first stage does not save: that is more than a least memory.
            if frees and other == NESTED:
                continue
            if self._are_alike(index, holder, other):
                return variant
        return None

    def _are_alike(self, index: int, holder: int, other: int) -> bool:
        """True if it makes no difference to a stage's backward which of two holds the input."""
        kept = self._backward[index]
        last = self._last_backward[index]
        return bool((kept[holder] == kept[other]).all() and (last[holder] == last[other]).all())

    def segments(self, variants: list[_Variants]) -> tuple[Integers, Integers]:
        """Variant of a segment that pays for its input, and its least memory."""
        shape = 2, len(variants), self._paid.shape[1]
        variant = np.zeros(shape, np.int64)
        least = np.full(shape, NEVER)
        for index in range(1, len(variants)):
            of_stage = variants[index]
            for number, (saved_bytes, _) in enumerate(self.classes[index]):
                for is_top in (0, 1):
                    # Recomputations hand tensors out once, so a segment inside of one always gives its input up.
                    holder = NESTED
                    if is_top and not self._gives_up_input[index]:
                        holder = SEGMENT
                    # What the stage before has saved, nobody can give up.
                    if saved_bytes:
                        holder = HELD
                    variant[is_top, index, number] = of_stage.of[holder]
                    least[is_top, index, number] = self.input_slots[index] + of_stage.need[holder]
        return variant, least

    def ways(self, variants: list[_Variants]) -> tuple[Integers, Integers]:
        """Needs of stages that are kept, and of those that end recomputations."""
        stages, options = self._forward.shape
        bodies = max(len(variant.columns) for variant in variants)
        # By stage, True if a segment that starts there may count its input as free.
        are_apart = np.array([variant.are_apart for variant in variants])
        frees = self._freed.any(axis=1) & are_apart
        # Each way is one more sum of rows for every interval, so ways with a free input only where there are some.
        count = 2 * options if frees.any() else options
        sources = bodies + self._paid.shape[1]
        kept = np.zeros((stages, sources, 5, count), np.int64)
        # What is not filled in below, such as options that a stage lacks, is never allowed.
        kept[:, :, [FORWARD, LEAST]] = NEVER
        kept[:, :, RECORDED] = -NEVER
        ended = np.stack([kept] * max(map(len, self.endings)), axis=1)
        for index, variant in enumerate(variants):
            for source, holder in enumerate(variant.columns):
                self._put_ways(kept, ended, index, source, holder, paid=0 * self._forward[index], input_slots=0)
            if index == 0:
                # The caller pays for the chain's input.
                continue
            for number, (saved_bytes, _) in enumerate(self.classes[index]):
                holder = SAVED if saved_bytes else PLAIN
                paid = self._paid[index, number]
                input_slots = int(self.input_slots[index])
                self._put_ways(kept, ended, index, bodies + number, holder, paid=paid, input_slots=input_slots)
        for index in np.flatnonzero(frees).tolist():
            # A recomputed nested segment gives up its input; what the first stage does not save serves the backwards.
            # The recomputation must do without it, which surely works if it could keep everything.
            retained = self._retained[index]
            freed = self._freed[index]
            least = np.where(freed > 0, self._backward[index, NESTED], NEVER)
            # In the order FORWARD .. RECORDED.
            free = self._forward[index], least, retained - freed, self._output_class[index], retained
            kept[index, 0, :, options:] = free
        return kept, ended

    def _put_ways(
        self,
        kept: Integers,
        ended: Integers,
        index: int,
        source: int,
        holder: int,
        *,
        paid: Integers,
        input_slots: int,
    ) -> None:
        """Needs of one stage whose input comes from one source; ``paid`` is taken for the input, by option."""
        options = len(paid)
        taken = paid + self._retained[index]
        output = self._output_class[index]
        least = paid + self._backward[index, holder]
        # The forward runs beside the whole input, of which the stage may then keep a part.
        forward = input_slots + self._forward[index]
        # In the order FORWARD .. CLASS.
        kept[index, source, :RECORDED, :options] = forward, least, taken, output
        last_least = paid + self._last_backward[index, holder]
        for ending in range(len(self.endings[index])):
            is_own = self._ending[index] == ending
            replay = input_slots + np.where(is_own, self._replay[index], NEVER)
            ended[index, ending, source, :RECORDED, :options] = replay, last_least, taken, output

    def bare(self, variants: list[_Variants]) -> Integers:
        """Least memory for backwards that need no recomputation. Without one, segments hold their input to the end."""
        most_variants = max(len(variant.columns) for variant in variants)
        bare = np.full((len(variants), 1 + most_variants, self._bare.shape[1]), NEVER)
        bare[:, 0] = self._bare
        for index, variant in enumerate(variants):
            for number, holder in enumerate(variant.columns):
                alone = self._backward[index, max(holder, SEGMENT)]
                bare[index, 1 + number] = np.where(self._bare[index] < NEVER, alone, NEVER)
        return bare

    def bases(self, remembered: Integers, forward: Integers) -> Integers:
        """Memory alive whenever stages run forward: by the ending of their recomputation, or in the step's forward."""
        stages = len(self.endings)
        most_endings = max(map(len, self.endings))
        bases = np.full((most_endings, stages, stages), NEVER)
        for last, endings in enumerate(self.endings):
            for number, (base, _) in enumerate(endings):
                bases[number, :, last] = base + remembered[:, last]
        # Intervals up to the last stage exist in the step's own forward alone.
        bases[0, :, -1] = forward
        return bases

    def triggers(self) -> Integers:
        """Memory that backwards take before they start a recomputation."""
        most_endings = max(map(len, self.endings))
        triggers = np.full((len(self.endings), most_endings), NEVER)
        for last, endings in enumerate(self.endings):
            triggers[last, : len(endings)] = [trigger for _, trigger in endings]
        return triggers

    def recording(self, bases: Integers) -> Integers:
        """Least memory to run stages in a recomputation that keeps everything."""
        stages = len(self.endings)
        taken = self._paid[:, 0, 0] + self._retained[:, 0]
        recording = np.full((len(bases), stages + 1, stages), NEVER)
        for ending, (base, needs) in enumerate(zip(bases, recording, strict=True)):
            # From behind: running a stage must leave enough for all that follow.
            for first in reversed(range(stages)):
                input_slots = self.input_slots[first]
                forward = input_slots + self._forward[first, 0] + base[first, first:]
                following = taken[first] + needs[first + 1, first:]
                needs[first, first:] = np.maximum(forward, following)
                if ending < len(self.endings[first]):
                    option = int(np.argmax(self._ending[first] == ending))
                    replay = self._replay[first, option]
                    needs[first, first] = input_slots + replay + base[first, first]
        return recording


def _input_bytes(chain: Chain, index: int) -> int:
    """Bytes of the input of a stage; 0 of the chain's, which the caller holds."""
    return chain.stages[index - 1].output_bytes if index else 0


_Class: TypeAlias = tuple[int, bool]
"""A part of a boundary that the stage before it saves, and whether the stage behind it must not drop that."""


def _classes(chain: Chain, boundary: int) -> tuple[_Class, ...]:
    """Parts of a boundary that the stage before may save; always among them is nothing, for it may be in a segment."""
    if boundary == 0:
        return ((0, False),)
    may_be_dropped = False
    if boundary < len(chain):
        may_be_dropped = any(option.inverts for option in chain.stages[boundary].options)
    saved = {(0, False)}
    for option in chain.stages[boundary - 1].options:
        # Each class makes rows of the table, so classes are told apart only where it matters.
        saved.add((option.saved_output_bytes, may_be_dropped and option.needs_exact_output))
    return tuple(sorted(saved))


def _backward_bases(chain: Chain, gradients_exist: bool) -> list[int]:
    """By stage, bytes alive at its backward whatever the schedule."""
    bases = [0] * len(chain)
    # Of parameters of the stages behind.
    gradient_bytes = 0
    for index in reversed(range(len(chain))):
        stage = chain.stages[index]
        bases[index] = chain.always_bytes + gradient_bytes + chain.passing_gradient_bytes(index)
        if gradients_exist:
            # New ones are added to those that exist, and live no longer: all but those that wait for another stage.
            gradient_bytes = stage.waiting_gradient_bytes
        else:
            gradient_bytes += stage.keep.parameter_gradient_bytes
    return bases


def _outermost(chain: Chain) -> Integers:
    """By last stage, the first of the longest segment that may end there: behind the last stage that must be kept."""
    behind_kept = [0] * len(chain)
    for index, stage in enumerate(chain):
        if not stage.recomputable:
            behind_kept[index] = index + 1
    outermost = np.maximum.accumulate(behind_kept)
    # The step's own forward, which starts at the first stage.
    outermost[-1] = 0
    return outermost


def _discard_peaks(chain: Chain, alive_before: Integers, skips: RetainedSkips, unit: float) -> Integers:
    """Slots of the highest level in a discarded pass, by its first and last stage."""
    stages = len(chain)
    own = np.array([stage.discard_peak_bytes for stage in chain], np.int64) + alive_before
    inputs = np.array([_input_bytes(chain, index) for index in range(stages)], np.int64)
    peaks = np.zeros((stages, stages), np.int64)
    for first in range(stages):
        levels = own[first:] + inputs[first:] + skips.carried(first)
        # Somebody else pays for the input of the first stage.
        levels[0] = own[first]
        peaks[first, first:] = np.floor(np.maximum.accumulate(levels) / unit + 0.5)
    return peaks


def _state_bytes(chain: Chain) -> Integers:
    """Bytes of generator states and buffers that one run of a segment remembers, by its first and last stage."""
    stages = len(chain)
    buffers = np.array([stage.state_bytes for stage in chain], np.int64)
    draws = np.array([stage.draws_random for stage in chain], bool)
    remembered = np.zeros((stages, stages), np.int64)
    for first in range(stages):
        # One state of the generators serves all stages of a segment that draw.
        generators = chain.rng_state_bytes * np.logical_or.accumulate(draws[first:])
        remembered[first, first:] = np.cumsum(buffers[first:]) + generators
    return remembered


def _in_slots(sizes: Integers, unit: float) -> Integers:
    """Sizes rounded to the nearest slot."""
    return np.floor(sizes / unit + 0.5).astype(np.int64)
