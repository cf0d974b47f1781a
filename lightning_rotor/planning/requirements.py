"""What each decision of the dynamic program needs and takes, in slots of memory and seconds.

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

A skip (:class:`lightning_rotor.chain.Skip`) is retained under one of two rules. If several stages read it, or its maker
saves it: from the item that makes it on, until that item's own backward. Else by the item that holds its only reader: a
segment, or a leaf that saves it; before, the running forward holds it. Gradients of skips depend on the place in the
step alone, so they count like those of parameters.

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
from lightning_rotor.live_memory import Skips
from lightning_rotor.planning.kernels import FORWARD, LEAST, NEVER, RECORDED, Integers, Requirements

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
    n = len(chain)
    skips = _Skips(chain, readers_pay=readers_pay)
    options = _Options(chain, skips, unit, gradients_exist=gradients_exist)
    states = _state_bytes(chain)
    held = _in_slots(states + skips.held, unit)
    variants = [options.variants(index, refined=refined, holding=bool(held[index, index:].any())) for index in range(n)]
    pinned = np.cumsum([0, *(stage.pinned_bytes for stage in chain)])[:n]
    in_forward = lingering_bytes + pinned + skips.in_forward
    base = options.bases(_in_slots(states, unit), _in_slots(in_forward, unit))
    kept, ended = options.ways(variants)
    repeats = kept.shape[-1] // options.seconds.shape[-1]
    segment_variant, segment_least = options.segments(variants)
    behind_kept = [0 if stage.recomputable else index + 1 for index, stage in enumerate(chain)]
    return Requirements(
        endings=np.array([len(endings) for endings in options.endings]),
        variants=np.array([len(each.columns) for each in variants]),
        class_before=np.cumsum([0, 0, *(len(classes) for classes in options.classes[1:n])]),
        outermost=np.array([*np.maximum.accumulate(behind_kept)[:-1], 0]),
        base=base,
        trigger=options.triggers(),
        kept=kept,
        kept_seconds=np.tile(options.seconds, repeats),
        ended=ended,
        ended_seconds=np.tile(options.last_seconds, repeats),
        recording=options.recording(base) if repeats > 1 else np.zeros((0, n + 1, n), np.int64),
        bare=options.bare(variants),
        bare_seconds=options.bare_seconds,
        input_slots=options.input_slots,
        segment_variant=segment_variant,
        segment_least=segment_least,
        peak=np.stack([_discard_peaks(chain, before, skips, unit) for before in (0 * in_forward, in_forward)]),
        held=held,
        handed_on=_in_slots(skips.handed_on, unit),
        discard_before=np.cumsum([0.0, *(stage.discard_seconds for stage in chain)]),
        segment_seconds=chain.segment_seconds,
    )


def retains_from_birth(chain: Chain) -> bool:
    """True if any skip falls under the first of the two rules; else ``readers_pay`` changes nothing."""
    return bool(_Skips(chain, readers_pay=False).from_birth)


# -------------------------------------------------------------------- from bytes to slots


@dataclass(frozen=True, slots=True)
class _Variants:
    """For whom the bodies that start at a stage are told apart."""

    columns: list[int]  # by variant, who holds the input
    of: list[int]  # by holder, the variant
    need: list[int]  # by holder, the least memory that the bodies do not know of
    are_apart: bool = False  # it matters who holds the input


class _Options:
    """Needs of the options of all stages, ``(n, options)``; options that a stage lacks are never allowed."""

    def __init__(self, chain: Chain, skips: _Skips, unit: float, *, gradients_exist: bool) -> None:
        n, most = shape = len(chain), max(len(stage.options) for stage in chain)
        self._chain, self._skips, self._unit = chain, skips, unit
        # What a keep-all forward has retained before each stage, its input not included.
        self._before = [0, *accumulate(_input_bytes(chain, n) + each.keep.saved_bytes for n, each in enumerate(chain))]
        self.classes = [_classes(chain, boundary) for boundary in range(n + 1)]
        # By stage: what recomputations that end there find alive, and what the backward takes before them.
        self.endings: list[list[tuple[int, int]]] = [[] for _ in chain]
        self.input_slots = np.array([self._input_slots(index, _input_bytes(chain, index)) for index in range(n)])
        self._gives_up_input = [
            stage.keep.input_gradient_bytes > 0 or skips.learn_in(index, index) for index, stage in enumerate(chain)
        ]
        self._forward, self._replay, self._bare = (np.full(shape, NEVER) for _ in range(3))
        self._retained, self._output_class, self._freed = (np.zeros(shape, np.int64) for _ in range(3))
        self._ending = np.full(shape, -1)
        self._paid = np.zeros((n, max(map(len, self.classes)), most), np.int64)  # of the input, by its class
        self._backward, self._last_backward = (np.full((n, 5, most), NEVER) for _ in range(2))  # by who holds the input
        # Of kept stages; of those that end a recomputation; of those that save nothing and end a segment.
        self.seconds, self.last_seconds, self.bare_seconds = (np.zeros(shape) for _ in range(3))
        for index, base in enumerate(_backward_bases(chain, gradients_exist)):
            for number, option in enumerate(chain.stages[index].options):
                self._read(index, number, option)
                self._read_backward(index, number, option, base, gradients_exist)
        # The last stage ends the step's forward, under any of its options, so endings do not matter.
        self.endings[-1], self._ending[-1] = [(0, 0)], 0
        self._replay[-1], self._last_backward[-1] = self._forward[-1], self._backward[-1]
        self.last_seconds[-1] = self.seconds[-1]

    def _slots(self, size_bytes: int, start_bytes: int = 0) -> int:
        """Slots of bytes; of retained ones by the place in the chain where they start."""
        first, last = start_bytes / self._unit, (start_bytes + size_bytes) / self._unit
        return math.floor(last + 0.5) - math.floor(first + 0.5)

    def _input_slots(self, index: int, size_bytes: int) -> int:
        """Slots of (a part of) the input of a stage."""
        return self._slots(size_bytes, self._before[index])

    def _read(self, index: int, number: int, option: Option) -> None:
        """Read sizes and durations of an option except those of its backward."""
        at, slots, size = (index, number), self._slots, _input_bytes(self._chain, index)
        self._forward[at], self._replay[at] = slots(option.forward_peak_bytes), slots(option.replay_peak_bytes)
        skip_bytes = self._skips.retained(index, option, self._chain)
        start_bytes = self._before[index + 1] - option.saved_bytes
        self._retained[at] = slots(option.saved_bytes, start_bytes) + slots(skip_bytes)
        exact = option.saved_output_bytes, option.needs_exact_output
        classes = self.classes[index + 1]
        self._output_class[at] = classes.index(exact if exact in classes else (option.saved_output_bytes, False))
        for number_before, (saved, is_exact) in enumerate(self.classes[index]):
            kept = self._input_slots(index, min(size, saved + option.saved_input_bytes))
            self._paid[index, number_before, number] = (NEVER if is_exact else 0) if option.inverts else kept
        if not option.inverts:  # what an inverted stage frees is never paid for
            self._freed[at] = self.input_slots[index] - self._paid[index, 0, number]
        self.seconds[at] = option.seconds
        self.last_seconds[at] = option.replay_seconds + option.backward_seconds
        self.bare_seconds[at] = option.backward_seconds + self._chain.stages[index].discard_seconds

    def _read_backward(self, index: int, number: int, option: Option, base: int, gradients_exist: bool) -> None:
        """Read the needs of an option's backward; ``base`` is alive whatever the schedule."""
        slots, peaks = self._slots, option.backward_peaks(gradients_exist=gradients_exist)
        own = base + option.saved_bytes + self._skips.retained(index, option, self._chain)
        if index < len(self._chain) - 1:  # else the output is the caller's, and part of the base already
            own += option.saved_output_bytes
        size = _input_bytes(self._chain, index)
        freed = size - min(size, option.saved_input_bytes)
        for backward, least, more in (
            (self._backward, option.unpack_peak_bytes, 0),
            (self._last_backward, 0, option.saved_state_bytes),
        ):
            plain, segment, held = (
                slots(own + more + max(peak, least))
                for peak in (peaks.plain_bytes, peaks.segment_bytes, peaks.held_bytes)
            )
            nested = slots(max(own + more + max(peaks.plain_bytes, least) - freed, 0))
            backward[index, :, number] = plain, nested, segment, held, held
            if option.inverts:  # the input must be its own
                backward[index, NESTED : HELD + 1, number] = NEVER
        if not option.saved_tensors:
            self._bare[index, number] = slots(base + max(peaks.plain_bytes, option.unpack_peak_bytes))
            return
        ending = slots(base + option.unpack_bytes), slots(base + option.unpack_peak_bytes)
        if ending not in self.endings[index]:
            self.endings[index].append(ending)
        self._ending[index, number] = self.endings[index].index(ending)

    def variants(self, index: int, *, refined: bool, holding: bool) -> _Variants:
        """Variants of the bodies that start at a stage.

        With one option, the input's holder matters only for a least memory, the same for every decision. So one body
        serves all, unless segments differ in the states that they take from that memory.
        """
        if index == 0:
            return _Variants([HELD], [0] * 4, [0] * 4)
        frees = bool(self._freed[index].any())
        choosing = sum(not option.inverts for option in self._chain.stages[index].options) > 1
        if not choosing and not (refined and (holding or frees)):
            return _Variants([NESTED], [0] * 4, self._last_backward[index, :4].min(axis=1).tolist())
        columns: list[int] = []
        of = [0] * 4
        for who in (NESTED, HELD) if self._gives_up_input[index] else (NESTED, SEGMENT, HELD):
            # A nested segment has given up what its first stage does not save: that is more than a least memory.
            comparable = [each for each in columns if each != NESTED or not frees]
            # It makes no difference to the stage's backward which of them holds the input.
            backwards = self._backward[index], self._last_backward[index]
            alike = [each for each in comparable if all((needs[who] == needs[each]).all() for needs in backwards)]
            if not alike:
                columns.append(who)
            of[who] = columns.index(alike[0]) if alike else len(columns) - 1
        return _Variants(columns, of, [0] * 4, are_apart=True)

    # Arrays of Requirements.

    def segments(self, variants: list[_Variants]) -> tuple[Integers, Integers]:
        """Variant of a segment that pays for its input, and its least memory."""
        shape = 2, len(variants), self._paid.shape[1]
        variant, least = np.zeros(shape, np.int64), np.full(shape, NEVER)
        for index, each in enumerate(variants[1:], start=1):
            for number, (saved, _) in enumerate(self.classes[index]):
                for is_top in (0, 1):
                    who = SEGMENT if is_top and not self._gives_up_input[index] else NESTED
                    who = HELD if saved else who
                    variant[is_top, index, number] = each.of[who]
                    least[is_top, index, number] = self.input_slots[index] + each.need[who]
        return variant, least

    def ways(self, variants: list[_Variants]) -> tuple[Integers, Integers]:
        """Needs of stages that are kept, and of those that end recomputations."""
        n, options = self._forward.shape
        bodies = max(len(each.columns) for each in variants)
        # By stage, True if a segment that starts there may count its input as free.
        frees = self._freed.any(axis=1) & np.array([each.are_apart for each in variants])
        kept = np.zeros((n, bodies + self._paid.shape[1], 5, options * (1 + bool(frees.any()))), np.int64)
        kept[:, :, [FORWARD, LEAST]], kept[:, :, RECORDED] = NEVER, -NEVER
        ended = np.stack([kept] * max(map(len, self.endings)), axis=1)
        for index, each in enumerate(variants):
            sources = [(source, 0 * self._forward[index], 0, who) for source, who in enumerate(each.columns)]
            for number, (saved, _) in enumerate(self.classes[index] if index else ()):
                paid = self._paid[index, number]
                sources.append((bodies + number, paid, self.input_slots[index], SAVED if saved else PLAIN))
            for source, paid, input_slots, who in sources:
                taken, output = paid + self._retained[index], self._output_class[index]
                least, last_least = paid + self._backward[index, who], paid + self._last_backward[index, who]
                kept[index, source, :RECORDED, :options] = input_slots + self._forward[index], least, taken, output
                for ending in range(len(self.endings[index])):
                    replay = np.where(self._ending[index] == ending, self._replay[index], NEVER)
                    ended[index, ending, source, :RECORDED, :options] = input_slots + replay, last_least, taken, output
        for index in np.flatnonzero(frees).tolist():
            # A recomputed nested segment gives up its input; what the first stage does not save serves the backwards.
            # The recomputation must do without it, which surely works if it could keep everything.
            retained, freed = self._retained[index], self._freed[index]
            least = np.where(freed > 0, self._backward[index, NESTED], NEVER)
            free = self._forward[index], least, retained - freed, self._output_class[index], retained
            kept[index, 0, :, options:] = free
        return kept, ended

    def bare(self, variants: list[_Variants]) -> Integers:
        """Least memory for backwards that need no recomputation. Without one, segments hold their input to the end."""
        bare = np.full((len(variants), 1 + max(len(each.columns) for each in variants), self._bare.shape[1]), NEVER)
        bare[:, 0] = self._bare
        for index, each in enumerate(variants):
            for variant, who in enumerate(each.columns):
                alone = self._backward[index, max(who, SEGMENT)]
                bare[index, 1 + variant] = np.where(self._bare[index] < NEVER, alone, NEVER)
        return bare

    def bases(self, remembered: Integers, forward: Integers) -> Integers:
        """Memory alive whenever stages run forward: by the ending of their recomputation, or in the step's forward."""
        n = len(self.endings)
        found = [np.full((n, n), NEVER) for _ in range(max(map(len, self.endings)))]
        for last, endings in enumerate(self.endings):
            for number, (base, _) in enumerate(endings):
                found[number][:, last] = base + remembered[:, last]
        found[0][:, -1] = forward
        return np.stack(found)

    def triggers(self) -> Integers:
        """Memory that backwards take before they start a recomputation."""
        triggers = np.full((len(self.endings), max(map(len, self.endings))), NEVER)
        for last, endings in enumerate(self.endings):
            triggers[last, : len(endings)] = [trigger for _, trigger in endings]
        return triggers

    def recording(self, bases: Integers) -> Integers:
        """Least memory to run stages in a recomputation that keeps everything."""
        n = len(self.endings)
        taken = self._paid[:, 0, 0] + self._retained[:, 0]
        found = np.full((len(bases), n + 1, n), NEVER)
        for ending, (base, needs) in enumerate(zip(bases, found, strict=True)):
            for first in reversed(range(n)):
                forward = self.input_slots[first] + self._forward[first, 0] + base[first, first:]
                needs[first, first:] = np.maximum(forward, taken[first] + needs[first + 1, first:])
                if ending < len(self.endings[first]):
                    option = int(np.argmax(self._ending[first] == ending))
                    needs[first, first] = self.input_slots[first] + self._replay[first, option] + base[first, first]
        return found


class _Skips:
    """Skips by the rule under which they are retained (see the module's docstring)."""

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
        """Bytes of skips retained by a kept stage: those it makes, and those that it alone reads and saves."""
        saved = [
            number
            for number in option.saved_skips
            if number not in self.from_birth
            and not chain.skips[number].in_output
            and chain.skips[number].uses[0] == index
        ]
        return int(self._births[index]) + sum(chain.skips[number].size_bytes for number in saved)

    def carried(self, first: int) -> Integers:
        """By stage from ``first`` on, bytes that a discarded pass which starts there has made and still holds."""
        carried = np.zeros(len(self.in_forward), np.int64)
        for born, last, size in self._spans:
            if born >= first:
                carried[born + 1 : last + 1] += size
        return carried[first:]


def _input_bytes(chain: Chain, index: int) -> int:
    return chain.stages[index - 1].output_bytes if index else 0


_Class: TypeAlias = tuple[int, bool]
"""A part of a boundary that the stage before it saves, and whether the stage behind it must not drop that."""


def _classes(chain: Chain, boundary: int) -> tuple[_Class, ...]:
    """Parts of a boundary that the stage before may save; always among them is nothing, for it may be in a segment."""
    if boundary == 0:
        return ((0, False),)
    inverted = boundary < len(chain) and any(option.inverts for option in chain.stages[boundary].options)
    saved = {
        (option.saved_output_bytes, inverted and option.needs_exact_output)
        for option in chain.stages[boundary - 1].options
    }
    return tuple(sorted({(0, False), *saved}))


def _backward_bases(chain: Chain, gradients_exist: bool) -> list[int]:
    """By stage, bytes alive at its backward whatever the schedule."""
    always, gradients = chain.always_bytes, 0
    bases: list[int] = []
    for index, stage in reversed([*enumerate(chain.stages)]):
        bases.append(always + gradients + chain.passing_gradient_bytes(index))
        if gradients_exist:
            gradients = stage.waiting_gradient_bytes
        else:
            gradients += stage.keep.parameter_gradient_bytes
    return bases[::-1]


def _discard_peaks(chain: Chain, pinned_before: Integers, skips: _Skips, unit: float) -> Integers:
    n = len(chain)
    own = np.array([stage.discard_peak_bytes for stage in chain], np.int64) + pinned_before
    inputs = np.array([_input_bytes(chain, index) for index in range(n)], np.int64)
    peaks = np.zeros((n, n), np.int64)
    for first in range(n):
        levels = own[first:] + inputs[first:] + skips.carried(first)
        levels[0] = own[first]
        peaks[first, first:] = np.floor(np.maximum.accumulate(levels) / unit + 0.5)
    return peaks


def _state_bytes(chain: Chain) -> Integers:
    n = len(chain)
    buffers = np.array([stage.state_bytes for stage in chain], np.int64)
    draws = np.array([stage.draws_random for stage in chain], bool)
    remembered = np.zeros((n, n), np.int64)
    for first in range(n):
        generators = chain.rng_state_bytes * np.logical_or.accumulate(draws[first:])
        remembered[first, first:] = np.cumsum(buffers[first:]) + generators
    return remembered


def _in_slots(sizes: Integers, unit: float) -> Integers:
    return np.floor(sizes / unit + 0.5).astype(np.int64)
