"""The dynamic program in machine code, for long chains: the recurrences of :mod:`.dynamic_program`, one interval after the other.

The loops add up whole blocks, write the sums and read them again. Here nothing is written but the result, so single sums can be left out,
and most are: rows never increase, so what two of them add up to within a few slots is at least what their last numbers there do::

    slots              c0       c1
    body  (i, k)    ▔▔▔╲________▁        lower bound = body[c1 - 1] + rest[c1 - 1]
    rest  (k+1, l)  ▔▔╲______╱▔▔▁        useless if the best so far is nowhere more

The best so far starts with what keeping the first stage takes, and the most promising segment comes first: one sum in seven is left.

The results are those of :mod:`.loops` to the last bit: each number is the least of the same sums of two numbers in single precision,
and additions round alike wherever they run. Numba (``pip install lightning-rotor[fast]``) compiles this once. It keeps the code beside
this file or, where that cannot be written, in the user's cache. All of it is in one file, for a change in another would not make Numba
compile again. It starts no thread, so forked processes may use it, and several processes may compile at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from lightning_rotor.planning.requirements import NEVER

Integers: TypeAlias = npt.NDArray[np.int64]
Reals: TypeAlias = npt.NDArray[np.float64]
Singles: TypeAlias = npt.NDArray[np.float32]

CHUNK = 32
"""Slots that one lower bound is for."""

# Columns of the packed arrays. Of ``stages``:
OUTERMOST, ENDINGS, VARIANTS, CLASSES, APART, GIVES_UP, INPUT, FORWARD_BASE, MOST_HELD = range(9)
# Of ``variants``:
ALIKE_FROM, ALIKE, COLUMN, BARE_COLUMN = range(4)
# Of ``contexts``:
VARIANT, NEED = range(2)
# Of ``endings``; behind them, by option, whether a stage ends so under it:
BASE, TRIGGER, ENDS = range(3)
# Of ``leaves``; behind them the needs of the backward, and of that at the end of a recomputation, by who holds the input:
RETAINED, FREED, OUTPUT_CLASS, FORWARD, REPLAY, BARE, BACKWARD, LAST_BACKWARD = 0, 1, 2, 3, 4, 5, 6, 11
# Of ``seconds``:
SECONDS, LAST_SECONDS, BARE_SECONDS = range(3)
# Of ``pairs``:
DISCARD, FIRST_DISCARD, REMEMBERED, HELD_SLOTS, HANDED_ON = range(5)

_PLAIN, _NESTED, _SEGMENT, _HELD, _SAVED = range(5)  # who holds an input: the fields of BackwardNeed
_INFINITE = np.float32(np.inf)
_NEVER = NEVER

_Function = TypeVar("_Function", bound=Callable[..., object])


def _compiled(function: _Function) -> _Function:
    """For calls from Python: other threads run meanwhile, and the code is kept."""
    return _jit(function, cache=True)


def _inner(function: _Function) -> _Function:
    """For calls from compiled code."""
    return _jit(function, no_cpython_wrapper=True)


def _comparing(function: _Function) -> _Function:
    """The same for functions that only compare, in any order: there is no NaN, and zeros of either sign are alike."""
    return _jit(function, no_cpython_wrapper=True, fastmath={"nnan", "nsz"})


def _jit(function: _Function, **options: Any) -> _Function:
    return cast(_Function, numba.njit(nogil=True, **options)(function))


class Arrays(NamedTuple):
    """:class:`.Decisions` and :class:`.Storage` in few arrays, for each of them takes time to compile.

    Attributes:
        size: Numbers per row.
        segment_seconds: Host time of one run of a segment.
        stages: ``(n, 9)``.
        variants: ``(n, variants, 4)``.
        contexts: ``(2, n, 4)``, by who holds the input.
        endings: ``(n, endings, 2 + options)``.
        class_held: ``(n, classes)``.
        input_retained: ``(n, classes, options)``.
        leaves: ``(n, options, 14)``.
        seconds: ``(n, options, 3)``.
        discard_before: ``(n + 1,)``.
        pairs: ``(5, n, n)``.
        recording: ``(endings, n + 1, n)``.
        twins: ``(n, n)``, by length less one and first stage: where the first interval like this one starts.
        body_base: As in the storage.
        rest_base: As in the storage.
        rest_rank: As in the storage.
        bodies: ``(rows, size)``.
        rests: ``(rows, size)``.
        body_least: ``(chunks, rows)``: the least number of each row up to the end of a chunk.
        rest_least: The same for class 0 of the rests.
        whole: ``(size,)``: where the step's own numbers go.
    """

    size: int
    segment_seconds: float
    stages: Integers
    variants: Integers
    contexts: Integers
    endings: Integers
    class_held: npt.NDArray[np.bool_]
    input_retained: Integers
    leaves: Integers
    seconds: Reals
    discard_before: Reals
    pairs: Integers
    recording: Integers
    twins: Integers
    body_base: Integers
    rest_base: Integers
    rest_rank: Integers
    bodies: Singles
    rests: Singles
    body_least: Singles
    rest_least: Singles
    whole: Singles


class _Interval(NamedTuple):
    """Stages whose backward is due, by how a recomputation of them ends.

    Attributes:
        first: First stage.
        last: Last stage.
        is_top: They are the step's own forward.
        ending: How it ends.
        base: Slots that are alive meanwhile.
    """

    first: int
    last: int
    is_top: bool
    ending: int
    base: int


class _Room(NamedTuple):
    """What is known of one interval: ``(variants, size)`` or ``(classes, size)`` seconds, and ``(n,)`` lower bounds."""

    starts: Singles
    splits: Singles
    bodies: Singles
    rests: Singles
    bounds: Singles


@_compiled
def solve_lengths(a: Arrays, columns: tuple[int, int], lengths: tuple[int, int]) -> None:
    """All intervals of these lengths (less one) that end in these columns; both ranges exclude their ends.

    What starts and ends elsewhere must be there: shorter ones that end before, and twins of the same lengths.
    """
    top = len(a.stages) - 1
    variants, classes = len(a.body_base), a.class_held.shape[1]
    room = _Room(
        np.empty((variants, a.size), np.float32),
        np.empty((variants, a.size), np.float32),
        np.empty((variants, a.size), np.float32),
        np.empty((classes, a.size), np.float32),
        np.empty(top + 1, np.float32),
    )
    # Column by column, for what two neighbours in a column need is in the caches: longer ones come after shorter ones all the same.
    for last in range(columns[0], columns[1]):
        for length in range(lengths[0], min(lengths[1], last + 1)):
            first = last - length
            if last < top and first < a.stages[last, OUTERMOST]:
                room.bodies[:] = _INFINITE
                _put_bodies(a, first, last, room.bodies)
            elif last < top and a.twins[length, first] != first:
                _copy(a, a.twins[length, first], first, length, room)
            else:
                _solve(a, first, last, room)


@_inner
def _solve(a: Arrays, first: int, last: int, room: _Room) -> None:
    """One interval: bodies and rests."""
    is_top, variants = last == len(a.stages) - 1, a.stages[first, VARIANTS]
    room.bodies[:] = _INFINITE
    for ending in range(a.stages[last, ENDINGS]):
        base = 0
        if not is_top:
            base = a.endings[last, ending, BASE] + a.pairs[REMEMBERED, first, last]
        interval = _Interval(first, last, is_top, ending, base)
        room.starts[:] = _INFINITE
        room.rests[:] = _INFINITE
        if not is_top or first == 0:
            for variant in range(variants):
                _keep_first(a, interval, variant, room.starts[variant])
        if first > 0:
            for number in range(a.stages[first, CLASSES]):
                _keep_paid(a, interval, number, room.rests[number])
        if first < last:
            _split(a, interval, room)
        if first > 0:
            for number in range(a.stages[first, CLASSES]):
                _put_rest(a, first, last, ending, number, room.rests[number])
        if is_top:
            if first == 0:
                a.whole[:] = room.starts[0]
            return
        discarded = np.float32(a.discard_before[last + 1] - a.discard_before[first] + a.segment_seconds)
        low = min(a.endings[last, ending, TRIGGER], a.size)
        for variant in range(variants):
            _lower_by_row(room.bodies[variant, low:], room.starts[variant, low:], discarded)
    for variant in range(variants):
        _end_bare(a, first, last, variant, room.bodies[variant])
    _put_bodies(a, first, last, room.bodies)


# -------------------------------------------------------------------- the first stage is kept


@_inner
def _keep_first(a: Arrays, at: _Interval, variant: int, start: Singles) -> None:
    """Its input is paid for."""
    column = a.variants[at.first, variant, COLUMN]
    for option in range(a.leaves.shape[1]):
        low = max(_forward_need(a, at, option), _backward_need(a, at, option, column))
        retained = a.leaves[at.first, option, RETAINED]
        _keep(a, at, option, retained, low, start)
        freed = a.leaves[at.first, option, FREED]
        if variant == 0 and at.first < at.last and a.stages[at.first, APART] and freed > 0:
            low = max(low, retained + a.recording[at.ending, at.first + 1, at.last])
            _keep(a, at, option, retained - freed, low, start)


@_inner
def _keep_paid(a: Arrays, at: _Interval, number: int, rest: Singles) -> None:
    """Its input must be paid for, after class ``number`` of it."""
    column = _SAVED if a.class_held[at.first, number] else _PLAIN
    for option in range(a.leaves.shape[1]):
        paid = a.input_retained[at.first, number, option]
        forward = a.stages[at.first, INPUT] + _forward_need(a, at, option)
        low = max(forward, paid + _backward_need(a, at, option, column))
        _keep(a, at, option, paid + a.leaves[at.first, option, RETAINED], low, rest)


@_inner
def _forward_need(a: Arrays, at: _Interval, option: int) -> int:
    if at.is_top:
        return a.leaves[at.first, option, FORWARD] + a.stages[at.first, FORWARD_BASE]  # type: ignore[no-any-return]
    if at.first < at.last:
        return a.leaves[at.first, option, FORWARD] + at.base  # type: ignore[no-any-return]
    ends = a.endings[at.last, at.ending, ENDS + option]
    return a.leaves[at.first, option, REPLAY] + at.base if ends else _NEVER


@_inner
def _backward_need(a: Arrays, at: _Interval, option: int, column: int) -> int:
    kind = LAST_BACKWARD if at.first == at.last and not at.is_top else BACKWARD
    return a.leaves[at.first, option, kind + column]  # type: ignore[no-any-return]


@_inner
def _keep(a: Arrays, at: _Interval, option: int, taken: int, low: int, target: Singles) -> None:
    """Where ``low`` slots are left, of which ``taken`` go to the stage."""
    if at.first == at.last:
        _lower_to_number(target[min(max(low, 0), a.size) :], np.float32(a.seconds[at.first, option, LAST_SECONDS]))
        return
    # Where `taken` is negative the input becomes free, beyond what the table holds.
    low, stop = max(low, taken, 0), min(a.size, a.size + taken)
    if low < stop:
        number = a.leaves[at.first, option, OUTPUT_CLASS]
        row = a.rest_base[at.ending, number, at.last] + a.rest_rank[number, at.first + 1]
        seconds = np.float32(a.seconds[at.first, option, SECONDS])
        _lower_by_row(target[low:stop], a.rests[row, low - taken : stop - taken], seconds)


@_inner
def _end_bare(a: Arrays, first: int, last: int, variant: int, body: Singles) -> None:
    """Options under which ``last`` saves nothing."""
    for option in range(a.leaves.shape[1]):
        low = a.leaves[last, option, BARE]
        if low >= _NEVER:
            continue
        if first == last:
            low = min(a.leaves[last, option, BACKWARD + a.variants[first, variant, BARE_COLUMN]], a.size)
            _lower_to_number(body[low:], np.float32(a.seconds[last, option, BARE_SECONDS] + a.segment_seconds))
        elif low < a.size:
            shorter = a.bodies[a.body_base[variant, first] + last - 1 - first, low:]
            _lower_by_row(body[low:], shorter, np.float32(a.seconds[last, option, BARE_SECONDS]))


# -------------------------------------------------------------------- a segment comes first


@_inner
def _split(a: Arrays, at: _Interval, room: _Room) -> None:
    """Lower the starts and rests of an interval by what begins with a segment."""
    first, variants = at.first, a.stages[at.first, VARIANTS]
    _begin_splits(a, at, room)
    again = np.float32(0.0 if at.is_top else a.segment_seconds)
    for variant in range(variants):
        split = room.splits[variant]
        alike_from = min(a.variants[first, variant, ALIKE_FROM] + a.stages[first, MOST_HELD], a.size)
        _least_sums(a, at, variant, split[:alike_from], room.bounds)
        for m in range(alike_from):
            split[m] += again
        split[alike_from:] = room.splits[a.variants[first, variant, ALIKE], alike_from:]
        if not at.is_top or first == 0:
            _lower_to(room.starts[variant], split)
    if first > 0:
        for number in range(a.stages[first, CLASSES]):
            variant, low, paid = _payment(a, at, number)
            if low < a.size:
                _lower_to(room.rests[number, low:], room.splits[variant, low - paid : a.size - paid])


@_inner
def _begin_splits(a: Arrays, at: _Interval, room: _Room) -> None:
    """A split matters only where it is less than what it would replace, so that is the best so far."""
    first, variants = at.first, a.stages[at.first, VARIANTS]
    if at.is_top and first > 0:
        room.splits[:] = -_INFINITE
    else:
        room.splits[:] = room.starts
    if first > 0:
        for number in range(a.stages[first, CLASSES]):
            variant, low, paid = _payment(a, at, number)
            if low < a.size:
                _raise_to(room.splits[variant, low - paid : a.size - paid], room.rests[number, low:])
    for variant in range(variants - 1, 0, -1):
        alike_from = a.variants[first, variant, ALIKE_FROM] + a.stages[first, MOST_HELD]
        if alike_from < a.size:
            alike = a.variants[first, variant, ALIKE]
            _raise_to(room.splits[alike, alike_from:], room.splits[variant, alike_from:])


@_inner
def _payment(a: Arrays, at: _Interval, number: int) -> tuple[int, int, int]:
    """Of a segment after class ``number`` of the boundary: the variant of its body, the least memory, and what goes to its input."""
    column = _NESTED if a.stages[at.first, GIVES_UP] or not at.is_top else _SEGMENT
    if a.class_held[at.first, number]:
        column = _HELD
    paid = a.stages[at.first, INPUT]
    need = 0 if a.stages[at.first, APART] else a.contexts[NEED, at.first, column]
    return a.contexts[VARIANT, at.first, column], paid + max(need, 0), paid


@_inner
def _least_sums(a: Arrays, at: _Interval, variant: int, split: Singles, bounds: Singles) -> None:
    """Lower ``split`` by the body of each segment and what follows it."""
    first, last, count = at.first, at.last, at.last - at.first
    body, rest = a.body_base[variant, first], a.rest_base[at.ending, 0, last] + first + 1
    kind = FIRST_DISCARD if at.is_top else DISCARD
    _least_sums_of(
        a.bodies[body : body + count],
        a.rests[rest : rest + count],
        a.body_least[:, body : body + count],
        a.rest_least[:, rest : rest + count],
        a.pairs[kind, first, first:last],
        at.base,
        a.pairs[HELD_SLOTS, first, first:last],
        a.pairs[HANDED_ON, first, first:last],
        split,
        bounds,
    )


@_inner
def _least_sums_of(
    bodies: Singles,
    rests: Singles,
    body_least: Singles,
    rest_least: Singles,
    peaks: Integers,
    base: int,
    held: Integers,
    handed_on: Integers,
    split: Singles,
    bounds: Singles,
) -> None:
    """By end of the segment: rows, lower bounds, and what shifts them and forbids their first slots."""
    has_skips = False
    for end in range(len(bodies)):
        has_skips = has_skips or held[end] > 0 or handed_on[end] > 0
    for begin in range(0, len(split), CHUNK):
        stop = min(begin + CHUNK, len(split))
        chunk = split[begin:stop]
        worst = _greatest(chunk)
        if has_skips:
            _shifted_bounds(body_least, rest_least, held, handed_on, stop - 1, bounds)
        else:
            _bounds(body_least[begin // CHUNK], rest_least[begin // CHUNK], bounds)
        best, least = -1, worst
        for end in range(len(bodies)):
            if bounds[end] < least and stop > held[end] + peaks[end] + base:
                best, least = end, bounds[end]
        if best < 0:
            continue
        for number in range(-1, len(bodies)):
            end = best if number < 0 else number
            if number == best or bounds[end] >= worst:
                continue
            low = max(begin, held[end] + max(peaks[end] + base, handed_on[end]))
            if low < stop:
                left = low - held[end]
                right = left - handed_on[end]
                _lower_by_sums(split[low:stop], bodies[end, left:], rests[end, right:])
                worst = _greatest(chunk)


@_inner
def _bounds(body_least: Singles, rest_least: Singles, bounds: Singles) -> None:
    for end in range(len(body_least)):
        bounds[end] = body_least[end] + rest_least[end]


@_inner
def _shifted_bounds(
    body_least: Singles, rest_least: Singles, held: Integers, handed_on: Integers, slot: int, bounds: Singles
) -> None:
    for end in range(len(held)):
        left = slot - held[end]
        right = left - handed_on[end]
        bounds[end] = _INFINITE
        if right >= 0:
            bounds[end] = body_least[left // CHUNK, end] + rest_least[right // CHUNK, end]


@_inner
def _lower_by_sums(target: Singles, one: Singles, other: Singles) -> None:
    for m in range(len(target)):
        seconds = one[m] + other[m]
        if seconds < target[m]:
            target[m] = seconds


@_inner
def _lower_by_row(target: Singles, row: Singles, more: np.float32) -> None:
    for m in range(len(target)):
        seconds = row[m] + more
        if seconds < target[m]:
            target[m] = seconds


@_comparing
def _lower_to(target: Singles, row: Singles) -> None:
    for m in range(len(target)):
        target[m] = min(target[m], row[m])


@_comparing
def _lower_to_number(target: Singles, number: np.float32) -> None:
    for m in range(len(target)):
        target[m] = min(target[m], number)


@_comparing
def _raise_to(target: Singles, row: Singles) -> None:
    for m in range(len(target)):
        target[m] = max(target[m], row[m])


@_comparing
def _greatest(row: Singles) -> np.float32:
    greatest = -_INFINITE
    for m in range(len(row)):
        greatest = max(greatest, row[m])
    return greatest


# -------------------------------------------------------------------- rows


@_inner
def _put_bodies(a: Arrays, first: int, last: int, bodies: Singles) -> None:
    for variant in range(a.stages[first, VARIANTS]):
        row = a.body_base[variant, first] + last - first
        a.bodies[row] = bodies[variant]
        _put_least(a.body_least[:, row], bodies[variant])


@_inner
def _put_rest(a: Arrays, first: int, last: int, ending: int, number: int, rest: Singles) -> None:
    row = a.rest_base[ending, number, last] + a.rest_rank[number, first]
    a.rests[row] = rest
    if number == 0:
        _put_least(a.rest_least[:, row], rest)


@_inner
def _put_least(least: Singles, values: Singles) -> None:
    lowest = _INFINITE
    for chunk in range(len(least)):
        for m in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, len(values))):
            lowest = min(lowest, values[m])
        least[chunk] = lowest


@_inner
def _copy(a: Arrays, source: int, target: int, length: int, room: _Room) -> None:
    """An interval that is the same as another one of its length."""
    for variant in range(a.stages[source, VARIANTS]):
        room.bodies[variant] = a.bodies[a.body_base[variant, source] + length]
    _put_bodies(a, target, target + length, room.bodies)
    for ending in range(a.stages[source + length, ENDINGS]):
        for number in range(a.stages[source, CLASSES]):
            row = a.rest_base[ending, number, source + length] + a.rest_rank[number, source]
            room.rests[number] = a.rests[row]
            _put_rest(a, target, target + length, ending, number, room.rests[number])
