r"""The dynamic program: one table that holds a near-optimal schedule for every budget.

``m`` is the memory that a schedule may retain, in slots. An *interval* ``i..l`` is a run of stages whose backward is
due, with the gradient of boundary ``l + 1`` alive. ``a_i`` is the size of boundary ``i``, the input of stage ``i``.
Either stage ``i`` is kept, or stages ``i..j-1`` become a segment, of which only ``a_i`` is retained until its turn::

                i         j             l
    keep i      ■ ───────────────────── │   forward i, rest (i+1..l) with m less what i retains, backward i
    segment     ╌╌╌╌╌╌╌╌╌ ───────────── │   discarded forward i..j-1, rest (j..l), recomputed body (i..j-1)

    ======================  ====================================================================================
    body(m, i, l)           least time of ``i..l``; somebody outside ``m`` holds boundary ``i``
                            = min( split(m, i, l),  min over options: t_i + rest_c(m - s_i, i+1, l) )
    split(m, i, l)          the same if a segment comes first
                            = min over j: discard(i..j-1) + rest_0(m, j, l) + body(m, i, j-1)
    rest_c(m, i, l)         the same if boundary ``i`` must be paid from ``m``; ``c`` says which part of it the stage
                            before saved (a segment before saves nothing)
                            = min( split(m - a_i, i, l),  min over options: t_i + rest_c'(m - h_i - s_i, i+1, l) )
                            where h_i is what stages ``i - 1`` and ``i`` save of the boundary, counted once
    ======================  ====================================================================================

Each decision needs a least ``m``, see :mod:`lightning_rotor.planning.requirements`. Intervals that end at ``l = n - 1``
exist only in the step's own forward. The others exist only in a recomputation: the backward of ``l`` starts it while
holding its gradient, and it stops at the last saved tensor of ``l``. A stage ``l`` that saves nothing at the end of a
segment is not recomputed at all: body(m, i, l) = backward of ``l`` + body(m, i, l - 1).

The table is filled column by column, each from below::

            l   0  1  2  3
    i   0       1  3  6 10      Row (i, l) needs the rows to its left (bodies that start at i)
        1          2  5  9      and those below it (rests that end at l).
        2             4  8
        3                7

A row has the seconds by memory. It is infinite before its first slot, never increases, and is constant from its last
slot on. Only the slots between are stored: about a quarter of all numbers, and of all work::

    slots        first       last
    row      ∞ ∞ ∞ ▔▔▔╲_____▁ ▁ ▁ ▁

A sum of two rows is infinite before the later first slot and constant from the later last slot on.

The functions are plain loops over intervals and decisions, and NumPy over memory. They run as they stand, or compiled
by Numba where it is installed, for long chains. Each decision is said once, as :class:`Choices`: the loops fill the
table from it and :func:`schedule_at` reads schedules from it.

Time O(n³ S) for ``n`` stages and ``S`` slots, memory O(n² S) for ``body`` and each ``rest_c``. Decisions are not
stored: :func:`schedule_at` finds them again.

Optimal among all schedule trees when the unit divides every size, up to approximations that the simulator judges:

* States that nested segments remember (of generators, of buffers) count only from when their parent is recomputed.
* Copies of buffers that a recomputation saves count only in the backward that started it.
* The inputs of nested segments that a discarded pass holds do not count; they matter only where gradients grow.
* Segments nested more than twice cost more host time than counted.
* Unless refined, a table counts a segment's input until its first stage is done, even parts which that stage frees.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains",
hal-02352969, refined: gradients and temporaries count only while they are alive, shared boundaries count once.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.schedule import Item, Leaf, Schedule, Segment, make_room_for

_log = logging.getLogger(__name__)

# Columns and lengths of a block.
_BLOCK = 16
# Most threads: more wait for one another.
_MOST_THREADS = 4
# Least stages for compiled code: below, plain Python is faster than loading it.
_COMPILED_STAGES = 60

Integers: TypeAlias = npt.NDArray[np.int64]
Seconds: TypeAlias = npt.NDArray[np.float64]

NEVER = 1 << 60
"""Slot that no table has: the decision is not allowed."""

# Rows of ``kept`` and ``ended``: ways to keep a stage.
FORWARD, LEAST, TAKEN, CLASS, RECORDED = range(5)
# Columns of ``Rows.spans``.
START, FIRST, LAST = range(3)

_FINITE = float(np.finfo(np.float64).max)


class Requirements(NamedTuple):
    """What the decisions for a chain of ``n`` stages need and take: slots, and seconds. See :mod:`.requirements`.

    Arrays are indexed by stages (``n``), by ``endings`` of a recomputation, and by *sources* of a stage's input: first
    *variants*, in which somebody else holds it, then *classes*, by what the stage before saved of it, which pay for it.

    Attributes:
        kept: ``(n, sources, 5, ways)``: peak of the forward without ``base``, least memory, memory taken, class of the
            output, addition to the least memory of recording all that follows. Ways are the options, and perhaps once
            more all of them with the input free.
        bare: ``(n, 1 + variants, options)``, least memory of a backward that needs no recomputation: behind others, or
            alone by variant.
    """

    endings: Integers  # (n,), how many ways a stage has to end a recomputation
    variants: Integers  # (n,), how many variants count
    class_before: Integers  # (n + 1,), classes of all stages before
    outermost: Integers  # (n,), first stage of the longest segment that may end there
    base: Integers  # (endings, n, n), alive whenever i..l runs forward
    trigger: Integers  # (n, endings), taken by the backward before it starts the recomputation
    kept: Integers
    kept_seconds: Seconds  # (n, ways)
    ended: Integers  # (n, endings, sources, 5, ways), as kept, of a stage that ends a recomputation or the forward
    ended_seconds: Seconds  # (n, ways)
    recording: Integers  # (endings, n + 1, n), least memory to run i..l and keep everything; no endings if unused
    bare: Integers
    bare_seconds: Seconds  # (n, options)
    input_slots: Integers  # (n,)
    segment_variant: Integers  # (2, n, classes), of a segment that pays for its input; 1 in the step's forward
    segment_least: Integers  # (2, n, classes), its least memory, its input included
    peak: Integers  # (2, n, n), of the discarded pass over i..k
    held: Integers  # (n, n), held by a segment i..k besides its input
    handed_on: Integers  # (n, n), additional memory that the stages behind i..k must do without
    discard_before: Seconds  # (n + 1,), of the discarded passes over all stages before
    segment_seconds: float  # host time of one run of a segment


class Rows(NamedTuple):
    """The table: one row of seconds by memory for each interval and source."""

    size: int  # numbers in a full row
    body_rows: Integers  # (n,), row of the first interval that starts at a stage
    rest_rows: Integers  # (n,), row of the first interval that ends at a stage
    spans: Integers  # (rows, 3), where slot 0 would be in values, first and last stored slot; row 0 is zero everywhere
    values: Seconds
    used: Integers  # (areas,), how far each area of values is filled; threads fill areas of their own


class Choices(NamedTuple):
    """Ways to begin an interval: each takes ``seconds + row(m - shift) + other(m - other_shift)`` for ``m >= low``."""

    low: Integers
    seconds: Seconds
    row: Integers
    shift: Integers
    other: Integers
    other_shift: Integers


# -------------------------------------------------------------------- decisions


def kept(a: Requirements, t: Rows, first: int, last: int, ending: int, source: int) -> Choices:
    """Choices that keep ``first``, by way."""
    none = np.zeros(a.kept.shape[3], np.int64)
    if first == last:
        ways = a.ended[last, ending, source]
        low = np.maximum(ways[FORWARD] + a.base[ending, first, last], ways[LEAST])
        return Choices(low, a.ended_seconds[last], none, ways[TAKEN], none, none)
    ways = a.kept[first, source]
    low = np.maximum(ways[FORWARD] + a.base[ending, first, last], ways[LEAST])
    if len(a.recording) > 0:
        low = np.maximum(low, ways[RECORDED] + a.recording[ending, first + 1, last])
    rest = rest_row(a, t, first + 1, last, ending, 0)
    return Choices(low, a.kept_seconds[first], rest + ways[CLASS], ways[TAKEN], none, none)


def segments(a: Requirements, t: Rows, first: int, last: int, ending: int, variant: int) -> Choices:
    """Choices that begin with a segment, by its last stage: a body, and what follows it."""
    n = len(a.endings)
    is_top = last == n - 1
    base = 0 if is_top else a.base[ending, first, last]
    held = a.held[first, first:last]
    behind = held + a.handed_on[first, first:last]
    low = np.maximum(held + a.peak[int(is_top), first, first:last] + base, behind)
    body = body_row(a, t, first, first, variant)
    rest = rest_row(a, t, 0, last, ending, 0)
    # A nested segment's first pass runs inside its parent's, too.
    seconds = np.full(last - first, 0.0 if is_top else a.segment_seconds)
    bodies = np.arange(body, body + last - first)
    return Choices(low, seconds, bodies, held, rest + a.class_before[first + 1 : last + 1], behind)


def bare(a: Requirements, t: Rows, first: int, last: int, variant: int) -> Choices:
    """Choices of options under which ``last`` saves nothing: its backward runs first, without a recomputation."""
    none = np.zeros(a.bare.shape[2], np.int64)
    if first == last:
        return Choices(a.bare[last, 1 + variant], a.bare_seconds[last] + a.segment_seconds, none, none, none, none)
    body = body_row(a, t, first, last - 1, variant)
    return Choices(a.bare[last, 0], a.bare_seconds[last], none + body, none, none, none)


def body_row(a: Requirements, t: Rows, first: int, last: int, variant: int) -> int:
    """Row number of a body."""
    row: int = t.body_rows[first] + variant * (len(a.endings) - first) + last - first
    return row


def rest_row(a: Requirements, t: Rows, first: int, last: int, ending: int, number: int) -> int:
    """Row number of a rest whose input has class ``number``."""
    row: int = t.rest_rows[last] + ending * a.class_before[last + 1] + a.class_before[first] + number
    return row


# -------------------------------------------------------------------- the table


def solve(a: Requirements, t: Rows, columns: tuple[int, int], lengths: tuple[int, int], whole: Seconds) -> None:
    """Fill intervals by last stage and by length less one, shorter ones first; ``whole`` gets the step's seconds."""
    splits = np.empty((a.bare.shape[1] - 1, t.size))
    bodies = np.empty((a.bare.shape[1] - 1, t.size))
    target = np.empty(t.size)
    for last in range(columns[0], columns[1]):
        for length in range(lengths[0], min(lengths[1], last - a.outermost[last] + 1)):
            solve_interval(a, t, last - length, last, splits, bodies, target)
            if last == len(a.endings) - 1 and length == last:
                whole[:] = np.inf
                lower_to_row(whole, splits[0], 0.0)


def solve_interval(
    a: Requirements, t: Rows, first: int, last: int, splits: Seconds, bodies: Seconds, target: Seconds
) -> None:
    """Fill the rests and bodies of one interval, by ending; the last three arguments are scratch memory."""
    variants, is_top = a.bare.shape[1] - 1, last == len(a.endings) - 1
    bodies[:] = np.inf
    for ending in range(a.endings[last]):
        splits[:] = np.inf
        for variant in range(a.variants[first]):
            lower_to_least(splits[variant], t, segments(a, t, first, last, ending, variant))
        for number in range(a.class_before[first + 1] - a.class_before[first]):
            # A segment or a stage that pays for its input.
            target[:] = np.inf
            least, paid = min(a.segment_least[int(is_top), first, number], t.size), a.input_slots[first]
            split = splits[a.segment_variant[int(is_top), first, number]]
            lower_to_row(target[least:], split[least - paid : t.size - paid], 0.0)
            lower_to_least(target, t, kept(a, t, first, last, ending, variants + number))
            put_row(t, len(a.endings) + last, rest_row(a, t, first, last, ending, number), target)
        discarded = a.discard_before[last + 1] - a.discard_before[first] + a.segment_seconds
        trigger = min(a.trigger[last, ending], t.size)
        for variant in range(a.variants[first] if first == 0 or not is_top else 0):
            lower_to_least(splits[variant], t, kept(a, t, first, last, ending, variant))
            lower_to_row(bodies[variant, trigger:], splits[variant, trigger:], discarded)
    for variant in range(0 if is_top else a.variants[first]):
        lower_to_least(bodies[variant], t, bare(a, t, first, last, variant))
        put_row(t, first, body_row(a, t, first, last, variant), bodies[variant])


def put_row(t: Rows, area: int, row: int, seconds: Seconds) -> None:
    """Store a row without its infinite and constant ends."""
    first = first_at_most(seconds, 0, _FINITE)
    if first == t.size:
        t.spans[row, FIRST] = NEVER
        return
    last = first_at_most(seconds, first, seconds[-1])
    start = t.used[area]
    t.used[area] = start + last - first + 1
    stored = t.values[start : start + last - first + 1]
    stored[:] = np.inf
    lower_to_row(stored, seconds[first : last + 1], 0.0)
    t.spans[row, START], t.spans[row, FIRST], t.spans[row, LAST] = start - first, first, last


def lower_to_least(target: Seconds, t: Rows, choices: Choices) -> None:
    """Lower ``target``, which never increases, to the least of some choices."""
    for number in range(len(choices.low)):
        row, shift = choices.row[number], choices.shift[number]
        other, other_shift = choices.other[number], choices.other_shift[number]
        low = max(choices.low[number], t.spans[row, FIRST] + shift, t.spans[other, FIRST] + other_shift, 0)
        if low < t.size:
            lower_from(target, t, low, choices.seconds[number], row, shift, other, other_shift)


def lower_from(
    target: Seconds, t: Rows, low: int, seconds: float, row: int, shift: int, other: int, other_shift: int
) -> None:
    """Lower ``target`` from ``low`` on to the sum of two shifted rows and ``seconds``."""
    start, last = t.spans[row, START] - shift, t.spans[row, LAST] + shift
    other_start, other_last = t.spans[other, START] - other_shift, t.spans[other, LAST] + other_shift
    if last > other_last:  # the other one changes for longer
        start, last, other_start, other_last = other_start, other_last, start, last
    both, change = min(max(low, last), t.size), min(max(low, other_last), t.size)
    lower_to_sums(
        target[low:both],
        t.values[start + low : start + both],
        t.values[other_start + low : other_start + both],
        seconds,
    )
    seconds += t.values[start + last]
    lower_to_row(target[both:change], t.values[other_start + both : other_start + change], seconds)
    if change < t.size:
        seconds += t.values[other_start + other_last]
        if target[change] > seconds:
            target[change : first_at_most(target, change, seconds)] = seconds


def first_at_most(seconds: Seconds, begin: int, most: float) -> int:
    """The first slot from ``begin`` on with at most ``most`` of the never increasing ``seconds``; else the length."""
    end = len(seconds)
    while begin < end:
        middle = (begin + end) // 2
        if seconds[middle] <= most:
            end = middle
        else:
            begin = middle + 1
    return begin


def lower_to_sums(target: Seconds, row: Seconds, other: Seconds, more: float) -> None:
    """Lower ``target`` to the sums of two rows and ``more``."""
    np.minimum(target, row + other + more, out=target)


def lower_to_row(target: Seconds, row: Seconds, more: float) -> None:
    """Lower ``target`` to a row and ``more``."""
    np.minimum(target, row + more, out=target)


def lower_to_sums_by_slot(target: Seconds, row: Seconds, other: Seconds, more: float) -> None:
    """:func:`lower_to_sums` as it is compiled: loops need no memory for the sums."""
    for m in range(len(target)):
        seconds = row[m] + other[m] + more
        if seconds < target[m]:
            target[m] = seconds


def lower_to_row_by_slot(target: Seconds, row: Seconds, more: float) -> None:
    """:func:`lower_to_row` as it is compiled."""
    for m in range(len(target)):
        seconds = row[m] + more
        if seconds < target[m]:
            target[m] = seconds


class Table:
    """Least seconds for every interval and memory of ``0 .. slots``, in ``seconds`` those of the whole step.

    By default compiled code fills it for long chains where Numba is installed; the numbers are the same.
    """

    def __init__(self, requirements: Requirements, *, slots: int, compiled: bool | None = None) -> None:
        self._stages = len(requirements.endings)
        self.requirements, self._ended = requirements, requirements.ended
        self.rows = _room_for(requirements, slots + 1)
        self.seconds: Seconds = np.full(slots + 1, math.inf)
        compiled = self._stages >= _COMPILED_STAGES if compiled is None else compiled
        self._compiled = compiled_solve() if compiled else None
        self.is_compiled = self._compiled is not None
        self._last_column_begins, self._floor = int(self.rows.used[-1]), 0

    def solve(self) -> None:
        """Fill the table, in compiled code block by block: those of a wave do not need each other."""
        top = self._stages - 1
        if self._compiled is None:
            self._fill((0, top), (0, top))
        else:
            columns = [(begin, min(begin + _BLOCK, top)) for begin in range(0, top, _BLOCK)]
            with ThreadPoolExecutor(min(_MOST_THREADS, _cores())) as pool:
                for wave in range(2 * len(columns)):
                    blocks = range(-(-wave // 2), min(wave + 1, len(columns)))
                    lengths = [((wave - block) * _BLOCK, (wave - block + 1) * _BLOCK) for block in blocks]
                    list(pool.map(self._fill, columns[blocks.start :], lengths))
        self._fill((top, self._stages), (0, self._stages))

    def _fill(self, columns: tuple[int, int], lengths: tuple[int, int]) -> None:
        """Fill all intervals that end in some columns and have one of some lengths (less one)."""
        (self._compiled or solve)(self.requirements, self.rows, columns, lengths, self.seconds)

    def solve_last_column(self, *, floor: int) -> None:
        """Fill again what ends with the last stage, unless it is so: keeping that stage must leave ``floor`` slots."""
        if floor == self._floor:
            return
        self._floor, ended = floor, self._ended.copy()
        least, taken = ended[-1, ..., LEAST, :], ended[-1, ..., TAKEN, :]
        np.maximum(least, taken + floor, out=least)
        self.requirements = self.requirements._replace(ended=ended)
        self.rows.used[-1] = self._last_column_begins
        self._fill((self._stages - 1, self._stages), (0, self._stages))


def _room_for(a: Requirements, size: int) -> Rows:
    """Empty rows for a table. Memory that no row needs is never touched, and so never taken."""
    n = len(a.endings)
    counts = np.array([*(a.variants * (n - np.arange(n))), *(a.endings * a.class_before[1:])])
    rows, starts = np.cumsum([1, *counts]), np.cumsum([1, *(counts * size)])
    spans = np.zeros((int(rows[-1]), 3), np.int64)
    spans[1:, FIRST] = NEVER
    # Not from NumPy, whose huge pages would be taken as a whole.
    values = np.frombuffer(mmap(-1, 8 * int(starts[-1]), MAP_PRIVATE | MAP_ANONYMOUS))
    values[0] = 0.0
    return Rows(size, rows[:n], rows[n:-1], spans, values, starts[:-1].copy())


@cache
def compiled_solve() -> Callable[..., None] | None:
    """:func:`solve` in machine code; None where it cannot be compiled, and planning takes longer."""
    try:
        import numba
    except ImportError as error:  # Numba raises it, too, if it is too old for NumPy
        _log.debug("long chains are planned without compilation: %s", error)
        return None
    if getattr(numba.config, "DISABLE_JIT", False):  # it would run the same code as Python, without the shortcuts
        return None
    names = dict(globals())
    functions = {name: each for name, each in names.items() if isinstance(each, FunctionType)}
    functions |= {name: functions[f"{name}_by_slot"] for name in ("lower_to_sums", "lower_to_row")}
    try:
        for name, function in functions.items():
            # Copies find each other's compiled ones by name. Only the first is called from Python and kept on disk.
            options: dict[str, Any] = {"cache": True} if name == "solve" else {"no_cpython_wrapper": True}
            copy = FunctionType(function.__code__, names, name)
            names[name] = numba.njit(nogil=True, **options)(copy)
    except RuntimeError as error:  # no place to keep compiled code: compiling takes longer than it saves
        _log.info("long chains are planned without compilation, for Numba cannot keep compiled code: %s", error)
        return None
    solve: Callable[..., None] = names["solve"]
    if not any(Path(names["solve"].stats.cache_path).glob("dynamic_program.solve*.nbi")):
        _log.info("compiling the planner for long chains, which takes some seconds, once")
    return solve


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------- schedules: decisions found again, in O(n) per item

# Calls per level of nested segments, the construction of tuples included.
_CALLS = 4


def schedule_at(table: Table, memory: int) -> Schedule:
    """The schedule behind ``table.seconds[memory]``, which must be finite."""
    make_room_for(_CALLS * len(table.requirements.endings))  # the depth is not known before
    return Schedule(tuple(_Backtracking(table).recorded(memory, 0, len(table.requirements.endings) - 1, 0, 0)))


class _Decision(NamedTuple):
    """How an interval begins: with a leaf, or with a segment of ``body_memory`` slots; the rest gets ``left`` slots."""

    seconds: float
    leaf: Leaf | None
    end: int
    body_memory: int
    variant: int
    left: int
    source: int


class _Backtracking:
    def __init__(self, table: Table) -> None:
        self._a, self._t = table.requirements, table.rows
        self._top = len(self._a.endings) - 1
        self._variants, self._options = self._a.bare.shape[1] - 1, self._a.bare.shape[2]

    def recorded(self, memory: int, first: int, last: int, ending: int, source: int) -> Iterator[Item]:
        """Items of a rest, or of a body that needs a recomputation."""
        while first <= last:
            decision = self._decide(memory, first, last, ending, source)
            assert decision.seconds < np.inf, "the table holds no schedule here"
            yield decision.leaf or Segment(
                tuple(self._body(decision.body_memory, first, decision.end, decision.variant))
            )
            memory, first, source = decision.left, decision.end + 1, decision.source

    def _body(self, memory: int, first: int, last: int, variant: int) -> Iterator[Item]:
        """Items of a body."""
        alone: list[Leaf] = []
        while first <= last:
            seconds = self._seconds(bare(self._a, self._t, first, last, variant), memory)
            row = body_row(self._a, self._t, first, last, variant)
            if seconds.min() > self._numbers(np.array([row]), np.array([memory]))[0]:
                endings = np.flatnonzero(self._a.trigger[last, : self._a.endings[last]] <= memory).tolist()
                best = min(endings, key=lambda ending: self._decide(memory, first, last, ending, variant).seconds)
                yield from self.recorded(memory, first, last, best, variant)
                break
            alone.append(Leaf(last, int(np.argmin(seconds))))
            last -= 1
        yield from reversed(alone)

    def _decide(self, memory: int, first: int, last: int, ending: int, source: int) -> _Decision:
        """The best beginning of an interval."""
        a, t = self._a, self._t
        choices = kept(a, t, first, last, ending, source)
        seconds = self._seconds(choices, memory)
        way = int(np.argmin(seconds))
        ways = (a.ended[last, ending] if first == last else a.kept[first])[source, :, way]
        leaf = Leaf(first, way % self._options)
        left, following = memory - int(ways[TAKEN]), self._variants + int(ways[CLASS])
        keeping = _Decision(float(seconds[way]), leaf, first, 0, 0, left, following)
        variant = source
        if source >= self._variants:
            at = int(last == self._top), first, source - self._variants
            if memory < a.segment_least[at]:
                return keeping
            memory, variant = memory - int(a.input_slots[first]), int(a.segment_variant[at])
        if first == last:
            return keeping
        choices = segments(a, t, first, last, ending, variant)
        seconds = self._seconds(choices, memory)
        best = int(np.argmin(seconds))
        if keeping.seconds <= seconds[best]:
            return keeping
        body_memory, left = memory - int(choices.shift[best]), memory - int(choices.other_shift[best])
        return _Decision(float(seconds[best]), None, first + best, body_memory, variant, left, self._variants)

    def _seconds(self, choices: Choices, memory: int) -> Seconds:
        """Seconds of each choice; infinite where the memory is too little."""
        seconds = self._numbers(choices.row, memory - choices.shift)
        seconds = seconds + self._numbers(choices.other, memory - choices.other_shift) + choices.seconds
        return np.where(choices.low <= memory, seconds, np.inf)

    def _numbers(self, rows: Integers, slots: Integers) -> Seconds:
        """Numbers of the table by row and slot."""
        start, first, last = self._t.spans[rows].T
        there = slots >= first
        return np.where(there, self._t.values[np.where(there, start + np.minimum(slots, last), 0)], np.inf)
