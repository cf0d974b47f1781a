"""Loops of the dynamic program: as plain Python with NumPy, or compiled by Numba, from the same text.

Each function is marked with :func:`kernel`, which is Numba's ``njit`` or nothing. Both versions exist in one process:

* plain, as ``lightning_rotor.planning.kernels``. Short chains use it: Numba takes 0.4 s to load once a process, in
  which plain Python fills the table of a chain of 50 stages twice.
* compiled, as ``lightning_rotor.planning.compiled_kernels``: :mod:`.compilation` runs this file a second time under
  that name. A table of 100 stages is 26 times as fast then, one of 200 stages 38 times
  (benchmarks/results/planner.md). One module cannot be both: compiled functions call one another by global names.

All that the loops use stands in this file. Numba keeps compiled code as long as the file of the function that Python
calls is unchanged, and knows nothing of other files: a constant from elsewhere would stay as it was when compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

IS_COMPILED = __name__.endswith(".compiled_kernels")
"""True in the module that Numba compiles."""

Integers: TypeAlias = npt.NDArray[np.int64]
Seconds: TypeAlias = npt.NDArray[np.float64]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(*, is_entry: bool = False) -> Callable[[_Function], _Function]:
    """Decorator: the function in machine code, in the module that Numba compiles; else as it is.

    ``is_entry`` marks those that Python calls. The compiled code of all others is kept on disk with them.
    """

    def unchanged(function: _Function) -> _Function:
        return function

    if not IS_COMPILED:
        return unchanged
    # Here, since it is slow to import, and not a dependency.
    import numba

    options: dict[str, Any] = {"cache": True} if is_entry else {"no_cpython_wrapper": True}
    # Without Python's lock, so that threads fill blocks of a table at once.
    njit: Callable[[_Function], _Function] = numba.njit(nogil=True, **options)
    return njit


NEVER = 1 << 60
"""Slot that no table has: the decision is not allowed."""

# Rows of ``kept`` and ``ended``: ways to keep a stage.
FORWARD, LEAST, TAKEN, CLASS, RECORDED = range(5)
# Columns of ``Rows.spans``.
START, FIRST, LAST = range(3)

_FINITE = float(np.finfo(np.float64).max)


class Requirements(NamedTuple):
    """Slots and seconds that the decisions for a chain of ``n`` stages need and take. See :mod:`.requirements`.

    Arrays are indexed by stages (``n``), by ``endings`` of a recomputation, and by *sources* of a stage's input: first
    *variants*, in which somebody else holds it, then *classes*, by what the stage before saved of it, which pay for it.

    Attributes:
        kept: ``(n, sources, 5, ways)``: peak of the forward without ``base``, least memory, memory taken, class of the
            output, addition to the least memory of recording all that follows. Ways are the options, and perhaps once
            more all of them with the input free.
        bare: ``(n, 1 + variants, options)``, least memory of a backward that needs no recomputation: behind others, or
            alone by variant.
    """

    # (n,), how many ways a stage has to end a recomputation
    endings: Integers
    # (n,), how many variants count
    variants: Integers
    # (n + 1,), classes of all stages before
    class_before: Integers
    # (n,), first stage of the longest segment that may end there
    outermost: Integers
    # (endings, n, n), alive whenever i..l runs forward
    base: Integers
    # (n, endings), taken by the backward before it starts the recomputation
    trigger: Integers
    kept: Integers
    # (n, ways)
    kept_seconds: Seconds
    # (n, endings, sources, 5, ways), as kept, of a stage that ends a recomputation or the forward
    ended: Integers
    # (n, ways)
    ended_seconds: Seconds
    # (endings, n + 1, n), least memory to run i..l and keep everything; no endings if unused
    recording: Integers
    bare: Integers
    # (n, options)
    bare_seconds: Seconds
    # (n,)
    input_slots: Integers
    # (2, n, classes), of a segment that pays for its input; 1 in the step's forward
    segment_variant: Integers
    # (2, n, classes), its least memory, its input included
    segment_least: Integers
    # (2, n, n), of the discarded pass over i..k
    peak: Integers
    # (n, n), held by a segment i..k besides its input
    held: Integers
    # (n, n), additional memory that the stages behind i..k must do without
    handed_on: Integers
    # (n + 1,), of the discarded passes over all stages before
    discard_before: Seconds
    # host time of one run of a segment
    segment_seconds: float


class Rows(NamedTuple):
    """The table: one row of seconds by memory for each interval and source."""

    # numbers in a full row
    size: int
    # (n,), row of the first interval that starts at a stage
    body_rows: Integers
    # (n,), row of the first interval that ends at a stage
    rest_rows: Integers
    # (rows, 3), where slot 0 would be in values, first and last stored slot; row 0 is zero everywhere
    spans: Integers
    values: Seconds
    # (areas,), how far each area of values is filled. Bodies with one first stage are an area, rests with one last
    # stage another: threads fill blocks at once and never append to the same area.
    used: Integers


class Choices(NamedTuple):
    """Ways to begin an interval: each takes ``seconds + row(m - shift) + other(m - other_shift)`` for ``m >= low``."""

    low: Integers
    seconds: Seconds
    row: Integers
    shift: Integers
    other: Integers
    other_shift: Integers


class Decision(NamedTuple):
    """The best beginning of an interval: a leaf, or a segment up to ``end`` of ``body_memory`` slots."""

    seconds: float
    # of the leaf; -1 for a segment
    option: int
    end: int
    body_memory: int
    variant: int
    # slots for what follows
    left: int
    # of the input of what follows
    source: int


@kernel()
def kept(needs: Requirements, table: Rows, first: int, last: int, ending: int, source: int) -> Choices:
    """Choices that keep ``first``, by way."""
    # Row 0, which is zero everywhere: no second row, and no shift.
    none = np.zeros(needs.kept.shape[3], np.int64)
    if first == last:
        ways = needs.ended[last, ending, source]
        low = np.maximum(ways[FORWARD] + needs.base[ending, first, last], ways[LEAST])
        return Choices(low, needs.ended_seconds[last], none, ways[TAKEN], none, none)
    ways = needs.kept[first, source]
    low = np.maximum(ways[FORWARD] + needs.base[ending, first, last], ways[LEAST])
    if len(needs.recording) > 0:
        # Some way counts its input as free. That is sure only where the whole recomputation could keep everything.
        low = np.maximum(low, ways[RECORDED] + needs.recording[ending, first + 1, last])
    # Classes of a boundary are neighbours in the table, so a way's class is an offset.
    rest = rest_row(needs, table, first + 1, last, ending, 0)
    return Choices(low, needs.kept_seconds[first], rest + ways[CLASS], ways[TAKEN], none, none)


@kernel()
def segments(needs: Requirements, table: Rows, first: int, last: int, ending: int, variant: int) -> Choices:
    """Choices that begin with a segment, by its last stage: a body, and what follows it."""
    n = len(needs.endings)
    is_top = last == n - 1
    # The peaks of the step's own forward contain what is alive there: see ``requirements_of``.
    base = 0 if is_top else needs.base[ending, first, last]
    held = needs.held[first, first:last]
    behind = held + needs.handed_on[first, first:last]
    low = np.maximum(held + needs.peak[int(is_top), first, first:last] + base, behind)
    body = body_row(needs, table, first, first, variant)
    rest = rest_row(needs, table, 0, last, ending, 0)
    # A nested segment's first pass runs inside its parent's, too.
    seconds = np.full(last - first, 0.0 if is_top else needs.segment_seconds)
    bodies = np.arange(body, body + last - first)
    return Choices(low, seconds, bodies, held, rest + needs.class_before[first + 1 : last + 1], behind)


@kernel()
def bare(needs: Requirements, table: Rows, first: int, last: int, variant: int) -> Choices:
    """Choices of options under which ``last`` saves nothing: its backward runs first, without a recomputation."""
    none = np.zeros(needs.bare.shape[2], np.int64)
    if first == last:
        # Nothing is left to recompute, but the segment has run once, to be discarded.
        seconds = needs.bare_seconds[last] + needs.segment_seconds
        return Choices(needs.bare[last, 1 + variant], seconds, none, none, none, none)
    # The segment goes on as if it ended one stage before.
    body = body_row(needs, table, first, last - 1, variant)
    return Choices(needs.bare[last, 0], needs.bare_seconds[last], none + body, none, none, none)


@kernel()
def body_row(needs: Requirements, table: Rows, first: int, last: int, variant: int) -> int:
    """Row number of a body."""
    row: int = table.body_rows[first] + variant * (len(needs.endings) - first) + last - first
    return row


@kernel()
def rest_row(needs: Requirements, table: Rows, first: int, last: int, ending: int, number: int) -> int:
    """Row number of a rest whose input has class ``number``."""
    row: int = table.rest_rows[last] + ending * needs.class_before[last + 1] + needs.class_before[first] + number
    return row


# These two run for every choice of every interval. Compiled loops need no memory for the sums; in Python, where a loop
# over slots takes far longer, NumPy adds whole rows.
if IS_COMPILED:

    @kernel()
    def lower_to_sums(target: Seconds, row: Seconds, other: Seconds, more: float) -> None:
        """Lower ``target`` to the sums of two rows and ``more``."""
        for m in range(len(target)):
            seconds = row[m] + other[m] + more
            if seconds < target[m]:
                target[m] = seconds

    @kernel()
    def lower_to_row(target: Seconds, row: Seconds, more: float) -> None:
        """Lower ``target`` to a row and ``more``."""
        for m in range(len(target)):
            seconds = row[m] + more
            if seconds < target[m]:
                target[m] = seconds

else:

    def lower_to_sums(target: Seconds, row: Seconds, other: Seconds, more: float) -> None:
        """Lower ``target`` to the sums of two rows and ``more``."""
        np.minimum(target, row + other + more, out=target)

    def lower_to_row(target: Seconds, row: Seconds, more: float) -> None:
        """Lower ``target`` to a row and ``more``."""
        np.minimum(target, row + more, out=target)


@kernel()
def seconds_at(table: Rows, row: int, slot: int) -> float:
    """A number of the table."""
    if slot < table.spans[row, FIRST]:
        return np.inf
    seconds: float = table.values[table.spans[row, START] + min(slot, table.spans[row, LAST])]
    return seconds


# Both take the first of equal choices, so compiled and plain code read the same schedule from a table.
if IS_COMPILED:

    @kernel()
    def best_of(table: Rows, choices: Choices, memory: int) -> tuple[int, float]:
        """The fastest of some choices, the first of equal ones, and its seconds: infinite if no memory is enough."""
        best, best_seconds = 0, np.inf
        for number in range(len(choices.low)):
            if choices.low[number] <= memory:
                seconds = seconds_at(table, choices.row[number], memory - choices.shift[number])
                seconds = seconds + seconds_at(table, choices.other[number], memory - choices.other_shift[number])
                seconds = seconds + choices.seconds[number]
                if seconds < best_seconds:
                    best, best_seconds = number, seconds
        return best, best_seconds

else:

    def best_of(table: Rows, choices: Choices, memory: int) -> tuple[int, float]:
        """The fastest of some choices, the first of equal ones, and its seconds: infinite if no memory is enough."""
        seconds = _numbers(table, choices.row, memory - choices.shift)
        seconds = seconds + _numbers(table, choices.other, memory - choices.other_shift) + choices.seconds
        seconds = np.where(choices.low <= memory, seconds, np.inf)
        best = int(np.argmin(seconds))
        return best, float(seconds[best])

    def _numbers(table: Rows, rows: Integers, slots: Integers) -> Seconds:
        """Numbers of the table by row and slot."""
        start, first, last = table.spans[rows].T
        there = slots >= first
        return np.where(there, table.values[np.where(there, start + np.minimum(slots, last), 0)], np.inf)


@kernel()
def solve_interval(
    needs: Requirements, table: Rows, first: int, last: int, splits: Seconds, bodies: Seconds, target: Seconds
) -> None:
    """Fill the rests and bodies of one interval, by ending; the last three arguments are scratch memory."""
    variants = needs.bare.shape[1] - 1
    is_top = last == len(needs.endings) - 1
    bodies[:] = np.inf
    for ending in range(needs.endings[last]):
        splits[:] = np.inf
        for variant in range(needs.variants[first]):
            lower_to_least(splits[variant], table, segments(needs, table, first, last, ending, variant))
        # Rests first: below, ``splits`` is lowered by kept stages, which a rest must pay for by itself.
        for number in range(needs.class_before[first + 1] - needs.class_before[first]):
            # A segment or a stage that pays for its input.
            target[:] = np.inf
            least = min(needs.segment_least[int(is_top), first, number], table.size)
            paid = needs.input_slots[first]
            split = splits[needs.segment_variant[int(is_top), first, number]]
            lower_to_row(target[least:], split[least - paid : table.size - paid], 0.0)
            ways = kept(needs, table, first, last, ending, variants + number)
            lower_to_least(target, table, ways)
            row = rest_row(needs, table, first, last, ending, number)
            put_row(table, len(needs.endings) + last, row, target)
        # Adding up once per chain makes a sum over any interval a difference.
        discarded = needs.discard_before[last + 1] - needs.discard_before[first] + needs.segment_seconds
        trigger = min(needs.trigger[last, ending], table.size)
        # Of the step's own forward only the whole chain is wanted: nothing of it is recomputed later.
        for variant in range(needs.variants[first] if first == 0 or not is_top else 0):
            lower_to_least(splits[variant], table, kept(needs, table, first, last, ending, variant))
            lower_to_row(bodies[variant, trigger:], splits[variant, trigger:], discarded)
    for variant in range(0 if is_top else needs.variants[first]):
        lower_to_least(bodies[variant], table, bare(needs, table, first, last, variant))
        put_row(table, first, body_row(needs, table, first, last, variant), bodies[variant])


@kernel()
def put_row(table: Rows, area: int, row: int, seconds: Seconds) -> None:
    """Store a row without its infinite and constant ends."""
    first = first_at_most(seconds, 0, _FINITE)
    if first == table.size:
        table.spans[row, FIRST] = NEVER
        return
    last = first_at_most(seconds, first, seconds[-1])
    start = table.used[area]
    table.used[area] = start + last - first + 1
    stored = table.values[start : start + last - first + 1]
    stored[:] = np.inf
    lower_to_row(stored, seconds[first : last + 1], 0.0)
    # Where slot 0 would be, so that readers add a slot to it and no more.
    table.spans[row, START] = start - first
    table.spans[row, FIRST] = first
    table.spans[row, LAST] = last


@kernel()
def lower_to_least(target: Seconds, table: Rows, choices: Choices) -> None:
    """Lower ``target``, which never increases, to the least of some choices."""
    for number in range(len(choices.low)):
        row = choices.row[number]
        shift = choices.shift[number]
        other = choices.other[number]
        other_shift = choices.other_shift[number]
        # Below, one of the rows is infinite, and there is nothing to add up.
        first = table.spans[row, FIRST] + shift
        other_first = table.spans[other, FIRST] + other_shift
        low = max(choices.low[number], first, other_first, 0)
        if low < table.size:
            lower_from(target, table, low, choices.seconds[number], row, shift, other, other_shift)


@kernel()
def lower_from(
    target: Seconds, table: Rows, low: int, seconds: float, row: int, shift: int, other: int, other_shift: int
) -> None:
    """Lower ``target`` from ``low`` on to the sum of two shifted rows and ``seconds``."""
    start = table.spans[row, START] - shift
    last = table.spans[row, LAST] + shift
    other_start = table.spans[other, START] - other_shift
    other_last = table.spans[other, LAST] + other_shift
    if last > other_last:
        # From here on the other one is the one that changes for longer.
        start, last, other_start, other_last = other_start, other_last, start, last
    # Up to ``both`` the two rows change, up to ``change`` one of them, and behind that neither.
    both = min(max(low, last), table.size)
    change = min(max(low, other_last), table.size)
    lower_to_sums(
        target[low:both],
        table.values[start + low : start + both],
        table.values[other_start + low : other_start + both],
        seconds,
    )
    seconds += table.values[start + last]
    lower_to_row(target[both:change], table.values[other_start + both : other_start + change], seconds)
    if change < table.size:
        seconds += table.values[other_start + other_last]
        # The sum is constant and the target never increases, so it is lowered up to one slot and no further.
        if target[change] > seconds:
            target[change : first_at_most(target, change, seconds)] = seconds


@kernel()
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


@kernel(is_entry=True)
def solve(needs: Requirements, table: Rows, columns: tuple[int, int], lengths: tuple[int, int], whole: Seconds) -> None:
    """Fill intervals by last stage and by length less one, shorter ones first; ``whole`` gets the step's seconds."""
    splits = np.empty((needs.bare.shape[1] - 1, table.size))
    bodies = np.empty((needs.bare.shape[1] - 1, table.size))
    target = np.empty(table.size)
    for last in range(columns[0], columns[1]):
        for length in range(lengths[0], min(lengths[1], last - needs.outermost[last] + 1)):
            solve_interval(needs, table, last - length, last, splits, bodies, target)
            if last == len(needs.endings) - 1 and length == last:
                whole[:] = np.inf
                lower_to_row(whole, splits[0], 0.0)


# What :func:`traced` returns a row for, and what it still has to look at.
OPEN, CLOSE, LEAF, INTERVAL = range(4)


@kernel(is_entry=True)
def traced(needs: Requirements, table: Rows, memory: int) -> Integers:
    """The schedule behind the step's seconds for some memory, from left to right: no table stores it.

    Returns rows of ``OPEN`` or ``CLOSE`` of a segment, or ``LEAF``, its stage and its option. Segments are nested as
    deeply as the chain is long, so a stack holds what is still to come.
    """
    n = len(needs.endings)
    # A stage is in one leaf. Segments contain one another or are apart, so there are less than twice as many of them.
    items = np.empty((5 * n, 3), np.int64)
    count = 0
    pending = np.empty((7 * n, 6), np.int64)
    depth = put(pending, 0, INTERVAL, memory, 0, n - 1, 0, 0)
    while depth:
        depth -= 1
        kind = pending[depth, 0]
        memory = pending[depth, 1]
        first = pending[depth, 2]
        last = pending[depth, 3]
        ending = pending[depth, 4]
        source = pending[depth, 5]
        if kind != INTERVAL:
            # A leaf or a bracket is complete: its stage and option lie where an interval has memory and first stage.
            items[count, 0] = kind
            items[count, 1] = memory
            items[count, 2] = first
            count += 1
            continue
        decision = decide(needs, table, memory, first, last, ending, source)
        assert decision.seconds < np.inf, "the table holds no schedule here"
        # What is put first is taken last: the rest comes behind all that is put for the beginning.
        if decision.end < last:
            depth = put(pending, depth, INTERVAL, decision.left, decision.end + 1, last, ending, decision.source)
        if decision.option >= 0:
            items[count, 0] = LEAF
            items[count, 1] = first
            items[count, 2] = decision.option
            count += 1
            continue
        items[count, 0] = OPEN
        items[count, 1] = 0
        items[count, 2] = 0
        count += 1
        depth = put(pending, depth, CLOSE, 0, 0, 0, 0, 0)
        memory = decision.body_memory
        variant = decision.variant
        # From behind: stages that save nothing at the end of a segment are not recomputed.
        for end in range(decision.end, first - 1, -1):
            option, seconds = best_of(table, bare(needs, table, first, end, variant), memory)
            if seconds > seconds_at(table, body_row(needs, table, first, end, variant), memory):
                best = best_ending(needs, table, memory, first, end, variant)
                depth = put(pending, depth, INTERVAL, memory, first, end, best, variant)
                break
            depth = put(pending, depth, LEAF, end, option, 0, 0, 0)
    return items[:count]


@kernel()
def put(pending: Integers, depth: int, kind: int, second: int, third: int, fourth: int, fifth: int, sixth: int) -> int:
    """Lay a row on a stack; returns its new depth."""
    row = pending[depth]
    row[0] = kind
    row[1] = second
    row[2] = third
    row[3] = fourth
    row[4] = fifth
    row[5] = sixth
    return depth + 1


@kernel()
def best_ending(needs: Requirements, table: Rows, memory: int, first: int, last: int, variant: int) -> int:
    """The ending of a body that needs a recomputation."""
    best, best_seconds = 0, np.inf
    for ending in range(needs.endings[last]):
        if needs.trigger[last, ending] <= memory:
            seconds = decide(needs, table, memory, first, last, ending, variant).seconds
            if seconds < best_seconds:
                best, best_seconds = ending, seconds
    return best


@kernel()
def decide(needs: Requirements, table: Rows, memory: int, first: int, last: int, ending: int, source: int) -> Decision:
    """The best beginning of an interval."""
    variants = needs.bare.shape[1] - 1
    options = needs.bare.shape[2]
    is_top = int(last == len(needs.endings) - 1)
    way, seconds = best_of(table, kept(needs, table, first, last, ending, source), memory)
    ways = needs.ended[last, ending, source] if first == last else needs.kept[first, source]
    left = memory - ways[TAKEN, way]
    following = variants + ways[CLASS, way]
    # Ways are the options, and perhaps once more all of them with the input free.
    keeping = Decision(seconds, way % options, first, 0, 0, left, following)
    variant = source
    if source >= variants:
        # A source behind the variants is a class of the input, which the segment pays for itself.
        number = source - variants
        if memory < needs.segment_least[is_top, first, number]:
            return keeping
        memory = memory - needs.input_slots[first]
        variant = needs.segment_variant[is_top, first, number]
    if first == last:
        return keeping
    choices = segments(needs, table, first, last, ending, variant)
    best, segment_seconds = best_of(table, choices, memory)
    if seconds <= segment_seconds:
        return keeping
    body_memory = memory - choices.shift[best]
    left = memory - choices.other_shift[best]
    # Behind a segment the input is of class 0: a segment saves nothing of its output.
    return Decision(segment_seconds, -1, first + best, body_memory, variant, left, variants)


# Dimensions of the arrays that tables hand to the entries, all of which lie in memory in C's order.
_REQUIREMENTS = (1, 1, 1, 1, 3, 2, 4, 2, 5, 2, 3, 3, 2, 1, 3, 3, 3, 2, 2, 1)
_FLOATING = ("kept_seconds", "ended_seconds", "bare_seconds", "discard_before")


def compile_all(compiled: Any) -> None:
    """Compile what Python calls in the other module, for the types that tables have, and keep the code in its cache.

    Tables are made of this module's types.
    """
    import numba

    arrays: list[Any] = []
    for name, dimensions in zip(Requirements._fields, _REQUIREMENTS, strict=False):
        arrays.append(np.zeros((1,) * dimensions, np.float64 if name in _FLOATING else np.int64))
    # ``segment_seconds``, the only one that is no array.
    arrays.append(0.0)
    integers = np.zeros(1, np.int64)
    spans = np.zeros((1, 3), np.int64)
    seconds = np.zeros(1)
    requirements = Requirements(*arrays)
    rows = Rows(0, integers, integers, spans, seconds, integers)
    # Numba tells signatures apart by types alone, so it does not matter what the arrays hold.
    of_solve = requirements, rows, (0, 1), (0, 1), seconds
    compiled.solve.compile(tuple(map(numba.typeof, of_solve)))
    of_traced = requirements, rows, 0
    compiled.traced.compile(tuple(map(numba.typeof, of_traced)))
