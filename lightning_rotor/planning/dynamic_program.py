r"""The dynamic program: one table that holds a near-optimal schedule for every budget.

Names: ``m`` is the memory that a schedule may retain, in slots; an *interval* ``i..l`` is a run of stages whose backward is due,
with the gradient of boundary ``l + 1`` alive; ``a_i`` is the size of boundary ``i``, the input of stage ``i``.

Either stage ``i`` is kept, or the stages ``i..j-1`` become a segment, of which only ``a_i`` is retained until its turn::

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

Each decision has thresholds on ``m``, see :mod:`lightning_rotor.planning.thresholds`. Intervals that end at ``l = n - 1`` exist only
in the step's own forward, the others only in a recomputation, which the backward of ``l`` starts while it holds its gradient and
which stops at the last saved tensor of ``l``. A stage ``l`` that saves nothing at the end of a segment is not recomputed at all:
body(m, i, l) = backward of ``l`` + body(m, i, l - 1).

For ``n`` stages and ``S`` slots: time O(n³ S), memory O(n² S) for ``body`` and each ``rest_c``. Decisions are not stored; extraction
finds them again, in O(n) per item of the schedule.

Optimal among all schedule trees when the unit divides every size, up to approximations which the simulator judges afterwards:

* States that nested segments remember (of generators, of buffers) count only from when their parent is recomputed.
* Copies of buffers that a recomputation saves count only in the backward that started it.
* A discarded pass over nested segments holds their inputs, which can matter only where a later gradient is larger than an
  earlier one.
* Segments nested more than twice cost more host time than counted.
* In a table that is not refined, the input of a nested segment counts until its first stage is done, although what that stage
  does not save of it is free once the segment is recomputed.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains", hal-02352969, whose
recurrence this refines: gradients and temporaries count only when they are alive, shared boundaries count once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.planning.thresholds import BackwardNeed, Ending, LeafCost, Thresholds
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment

# Columns that are filled together: from four on the time of a long chain is the same, a quarter less than with one.
_COLUMNS = 8

Seconds: TypeAlias = npt.NDArray[np.floating[Any]]
Context: TypeAlias = Literal["any", "nested", "segment", "held"]
"""Who holds the input of an interval during the backward of its first stage, see :class:`BackwardNeed`; "any" is the least of all."""


class Table:
    """Least seconds for every interval and every memory, and the schedules behind them.

    Args:
        thresholds: The chain, in slots.
        slots: The table holds memories ``0 .. slots``.
        refined: Count seconds in double precision, and tell apart who holds a segment's input even where that seldom matters.
            Takes up to six times as long.
    """

    def __init__(self, thresholds: Thresholds, *, slots: int, refined: bool) -> None:
        self._needs = thresholds
        self._refined = refined
        self._stages = thresholds.stages
        self._top = len(self._stages) - 1
        self._size = slots + 1
        dtype = np.float64 if refined else np.float32
        self._number: type[np.float32] | type[np.float64] = dtype
        n = len(self._stages)
        # The step's own forward ends at the last stage under any of its options; its thresholds are other ones.
        self._whole_chain = Ending(self._top, self._stages[-1].leaves, base=0, trigger=0)
        self._endings = [*(stage.endings for stage in self._stages[:-1]), (self._whole_chain,)]
        # _body[i][l - i]: body(i, l) plus the first, discarded pass over i..l: what a segment i..l costs in all.
        # _rest[e][c][i]: rest_c(i, l) under ending e of stage l. Both are contiguous in what split() varies, so it adds whole blocks.
        self._contexts = [self._contexts_of(first) for first in range(n)]
        self._outermost = [self._first_of_longest_segment(last) for last in range(n - 1)] + [0]
        body_keys = [(first, context) for first in range(n) for context in self._contexts[first]]
        body = dict(zip(body_keys, _blocks([n - first for first, _ in body_keys], self._size, dtype), strict=True))
        self._body = [{context: body[first, context] for context in self._contexts[first]} for first in range(n)]
        rest_keys = [
            (ending, number)
            for endings in self._endings
            for ending in endings
            for number in range(self._classes(ending.last))
        ]
        rest = dict(
            zip(rest_keys, _blocks([ending.last + 1 for ending, _ in rest_keys], self._size, dtype), strict=True)
        )
        self._rest = {
            ending: [rest[ending, number] for number in range(self._classes(ending.last))]
            for endings in self._endings
            for ending in endings
        }
        self._whole: Seconds = np.empty(self._size, dtype)
        self._discard_before = np.concatenate(([0.0], np.cumsum([stage.discard_seconds for stage in self._stages])))
        self._steps = [_steps(thresholds.discard[first], first) for first in range(n)]
        self._first_steps = [_steps(thresholds.first_discard[first], first) for first in range(n)]
        # Segments from each stage on that hold and hand on the same: where the next such run begins, and how much.
        self._holding = [_runs(thresholds.held[first], thresholds.handed_on[first], first) for first in range(n)]

    @property
    def seconds(self) -> Seconds:
        """Least seconds of the whole step by memory; infinite where nothing fits. Never increases."""
        return self._whole

    @property
    def accuracy(self) -> float:
        """Factor that makes ``seconds`` a lower bound: single precision rounds."""
        return 1 - 1e-12 if self._refined else 1 - 1e-6

    # ---------------------------------------------------------------- filling

    def solve(self) -> None:
        """Fill the table, a few columns at a time; a column is all intervals that end at the same stage.

        Row ``first`` of a column needs row ``first`` of the columns before it, and its own rows further down. Taking a few columns
        row by row reads the bodies of a row from memory once for all of them::

                       last   last + 1   last + 2
            first       4        5          6
            first + 1   1        2          3
        """
        workspace = np.empty((len(self._stages), self._size), self._number)
        spans = [_Span() for _ in self._stages]  # by first stage: where its bodies change
        rest_spans = {ending: _Span() for ending in self._rest}
        for begin in range(0, len(self._stages), _COLUMNS):
            columns = range(begin, min(begin + _COLUMNS, len(self._stages)))
            for first in range(columns[-1], -1, -1):
                for last in columns:
                    if first <= last:
                        self._solve_row(first, last, workspace, spans[first], rest_spans)

    def _contexts_of(self, first: int) -> tuple[Context, ...]:
        """Which bodies to store for intervals that start at ``first``.

        With one option the context only sets a least memory, the same for every decision, so one body serves all. Unless segments
        differ in the states that they take from that memory.
        """
        if first == 0:
            return ("held",)
        stage = self._stages[first]
        remembering = bool(self._needs.held[first, first:].any())
        freeing = any(leaf.input_retained[0] < stage.input_slots for leaf in stage.leaves)
        apart = len(stage.leaves) > 1 or (self._refined and (remembering or freeing))
        return ("nested", "segment", "held") if apart else ("any",)

    def _first_of_longest_segment(self, last: int) -> int:
        """First stage of the longest segment that may end at ``last``; ``last + 1`` if there is none."""
        first = last + 1
        while first > 0 and self._stages[first - 1].recomputable:
            first -= 1
        return first

    def _classes(self, last: int) -> int:
        """How many ways there are, at most, in which a stage inside an interval that ends at ``last`` leaves its output behind."""
        return max((len(stage.saved_before) for stage in self._stages[self._outermost[last] : last + 1]), default=0)

    def _solve_row(
        self, first: int, last: int, workspace: Seconds, span: _Span, rest_spans: dict[Ending, _Span]
    ) -> None:
        """All that concerns the interval ``first..last``."""
        outermost = self._outermost[last]
        if last < self._top and (first < outermost or not self._endings[last]):
            for bodies in self._body[first].values():
                bodies[last - first] = math.inf
        if first >= outermost:
            for ending in self._endings[last]:
                self._solve_interval(first, ending, workspace, span, rest_spans[ending], is_longest=first == outermost)
            self._end_row(first, last, span)

    def _solve_interval(
        self, first: int, ending: Ending, workspace: Seconds, span: _Span, rest_span: _Span, *, is_longest: bool
    ) -> None:
        spans = (span, rest_span)
        splits = {context: self._split(first, ending, context, workspace, spans) for context in self._contexts[first]}
        if not is_longest:
            self._fill_rest(first, ending, splits)
            rest_span.cover(self._rest[ending][0][first])
        if first == 0 or ending.last < self._top:
            for context, split in splits.items():
                self._fill_body(first, ending, context, split)

    def _end_row(self, first: int, last: int, span: _Span) -> None:
        if last < self._top:
            for context, bodies in self._body[first].items():
                self._end_bare(first, last, context)
                span.cover(bodies[last - first])

    def _split(
        self, first: int, ending: Ending, context: Context, workspace: Seconds, spans: tuple[_Span, _Span]
    ) -> Seconds:
        """split(first, last): the best segment that starts at ``first`` and ends before ``last``."""
        last = ending.last
        split = np.full(self._size, math.inf, self._number)
        bodies = self._body[first][context]
        groups = self._holding[first]
        for number, (begin, held, handed_on) in enumerate(groups):
            end = min(groups[number + 1][0] if number + 1 < len(groups) else last, last)
            if begin >= end or held + handed_on >= self._size:
                continue
            if held == handed_on == 0:
                self._reduce(bodies, first, begin, end, ending, workspace, spans, split)
            else:
                found = np.full(self._size, math.inf, self._number)
                self._reduce(bodies, first, begin, end, ending, workspace, spans, found, handed_on)
                np.minimum(split[held:], found[: self._size - held], out=split[held:])
        if self._needs.segment_seconds and last < self._top:
            split += self._number(
                self._needs.segment_seconds
            )  # a nested segment's first pass runs inside its parent's, too
        return split

    def _reduce(
        self,
        bodies: Seconds,
        first: int,
        begin: int,
        end: int,
        ending: Ending,
        workspace: Seconds,
        spans: tuple[_Span, _Span],
        split: Seconds,
        handed_on: int = 0,
    ) -> None:
        """Minimum over the segments ``first..k`` with ``begin <= k < end``; ``handed_on`` is what they take from the rest alone.

        The threshold of the discarded pass rises with ``k``. Between two steps of it the same segments are allowed, and one sum
        and one minimum do each block::

            k = end - 1     ░░░░░░░░░░░░████████  ┐
            ...             ░░░░░░██████████████  │ before `span` nothing is finite, and behind it nothing changes,
            k = begin       ░░██████████████████  ┘ so what is beyond is copied
                            0 s0  s1    s2    stop
        """
        if begin >= end:
            return
        base = self._forward_base(first, ending)
        steps = self._first_steps[first] if ending.last == self._top else self._steps[first]
        rests = self._rest[ending][0]
        # A sum is finite where both parts are, and changes where one of them does.
        span, rest_span = spans
        finite, constant = max(span.low, rest_span.low + handed_on), max(span.high, rest_span.high + handed_on)
        low = max(steps[0][1] + base, finite)
        for number in range(len(steps)):
            row_end, slot_end = steps[number + 1] if number + 1 < len(steps) else (end, self._size)
            row_end, slot_end = (end, self._size) if row_end >= end else (row_end, slot_end + base)
            stop = min(slot_end, max(constant, low) + 1, self._size)
            if begin < row_end and low < stop:
                sums = workspace[: row_end - begin, : stop - low]
                np.add(
                    bodies[begin - first : row_end - first, low:stop],
                    rests[begin + 1 : row_end + 1, low - handed_on : stop - handed_on],
                    out=sums,
                )
                np.minimum.reduce(sums, axis=0, out=split[low:stop])
                split[stop:slot_end] = split[stop - 1]
            if row_end == end:
                return
            low = max(low, slot_end)

    def _fill_rest(self, first: int, ending: Ending, splits: dict[Context, Seconds]) -> None:
        """rest_c(first, last) for every class c of the boundary."""
        stage, paid = self._stages[first], self._stages[first].input_slots
        for number in range(len(stage.saved_before)):
            context, need = self._segment_context(first, ending.last, number)
            rest = self._rest[ending][number][first]
            low = min(paid + need, self._size)
            rest[:low] = math.inf
            rest[low:] = splits[context][low - paid : max(self._size - paid, 0)]
            for leaf in self._leaves(first, ending):
                self._keep(
                    rest, leaf, first, ending, leaf.input_retained[number], self._rest_need(leaf, first, ending, number)
                )

    def _fill_body(self, first: int, ending: Ending, context: Context, split: Seconds) -> None:
        for leaf in self._leaves(first, ending):
            for paid, low in self._body_ways(leaf, first, ending, context):
                self._keep(split, leaf, first, ending, paid, low)
        if ending.last == self._top:
            self._whole[:] = split
            return
        body = self._body[first][context][ending.last - first]
        allowed = split[ending.trigger :]
        allowed += self._discarded_seconds(first, ending.last)
        if ending is self._endings[ending.last][0]:
            body[: ending.trigger] = math.inf
            body[ending.trigger :] = allowed
        else:
            np.minimum(body[ending.trigger :], allowed, out=body[ending.trigger :])

    def _end_bare(self, first: int, last: int, context: Context) -> None:
        """Options under which ``last`` saves nothing: its backward runs first, and what is recomputed ends before it."""
        body = self._body[first][context][last - first]
        for leaf in self._stages[last].leaves:
            if not leaf.saves:
                low = self._bare_need(leaf, first, last, context)
                np.minimum(body[low:], self._bare_seconds(leaf, first, last, context, slice(low, None)), out=body[low:])

    def _bare_seconds(self, leaf: LeafCost, first: int, last: int, context: Context, where: slice | int) -> Any:
        seconds = self._number(leaf.backward_seconds + self._stages[last].discard_seconds)
        if first == last:
            return seconds + self._number(self._needs.segment_seconds)
        return self._body[first][context][last - 1 - first, where] + seconds

    def _keep(self, target: Seconds, leaf: LeafCost, first: int, ending: Ending, paid: int, low: int) -> None:
        """Keep stage ``first`` under an option where ``low`` slots are left; ``paid`` of them go to its input."""
        if first == ending.last:
            np.minimum(target[low:], self._number(self._last_seconds(leaf, first)), out=target[low:])
            return
        taken = paid + leaf.retained
        low = max(low, taken)
        high = min(self._size, self._size + taken)  # paid is negative where the input becomes free
        if low < high:
            rest = self._rest[ending][leaf.output_class][first + 1, low - taken : high - taken]
            np.minimum(target[low:high], rest + leaf.seconds, out=target[low:high])

    def _leaves(self, first: int, ending: Ending) -> tuple[LeafCost, ...]:
        """Options under which ``first`` can be kept."""
        return ending.leaves if first == ending.last else self._stages[first].leaves

    # ---------------------------------------------------------------- thresholds of one decision

    def _rest_need(self, leaf: LeafCost, first: int, ending: Ending, number: int) -> int:
        """Least memory to keep ``first`` when its input must be paid for and stage ``first - 1`` saved class ``number`` of it."""
        paid, held = leaf.input_retained[number], self._stages[first].saved_before[number] > 0
        backward = self._backward_need(leaf, first, ending.last)
        forward = self._stages[first].input_slots + self._forward_need(leaf, first, ending)
        return max(forward, paid + (backward.held if held else backward.plain))

    def _body_ways(self, leaf: LeafCost, first: int, ending: Ending, context: Context) -> list[tuple[int, int]]:
        """How ``first`` may be kept when its input is paid for: what more goes to the input, and the least memory."""
        backward = self._backward_need(leaf, first, ending.last)
        need = max(self._forward_need(leaf, first, ending), _by_context(backward, context))
        freed = self._stages[first].input_slots - leaf.input_retained[0]
        if context != "nested" or not freed or first == ending.last:
            return [(0, need)]
        # A nested segment gives its input up when it has been recomputed; what the first stage does not save of it serves the
        # backwards. The recomputation itself must do without it, which is known to work if it could keep everything.
        return [(0, need), (-freed, max(need, leaf.retained + self._recording_need(first + 1, ending)))]

    def _recording_need(self, first: int, ending: Ending) -> int:
        """Least memory to run ``first`` and what follows in a recomputation that keeps everything."""
        need, retained = 0, 0
        for index in range(first, ending.last + 1):
            stage, leaf = self._stages[index], self._leaves(index, ending)[0]
            need = max(need, retained + stage.input_slots + self._forward_need(leaf, index, ending))
            retained += leaf.input_retained[0] + leaf.retained
        return need

    def _bare_need(self, leaf: LeafCost, first: int, last: int, context: Context) -> int:
        if first < last:
            return leaf.bare
        # Without a recomputation nested segments hold their input to the end.
        return _by_context(leaf.backward, "segment" if context in ("nested", "any") else context)

    def _segment_context(self, first: int, last: int, number: int) -> tuple[Context, int]:
        """Where to find a segment that starts at ``first``, and the least memory for it beyond what is counted there."""
        if self._stages[first].saved_before[number]:
            context: Context = "held"
        else:
            context = "segment" if last == self._top else "nested"
        if context in self._contexts[first]:
            return context, 0
        return "any", _by_context(self._stages[first].needs_as_segment, context)

    def _forward_need(self, leaf: LeafCost, first: int, ending: Ending) -> int:
        replayed = first == ending.last < self._top
        return (leaf.replay if replayed else leaf.forward) + self._forward_base(first, ending, kept=True)

    def _backward_need(self, leaf: LeafCost, first: int, last: int) -> BackwardNeed:
        return leaf.last_backward if first == last < self._top else leaf.backward

    def _forward_base(self, first: int, ending: Ending, *, kept: bool = False) -> int:
        """What is alive while ``first`` and the stages after it run forward. Peaks of discarded passes hold what is pinned already."""
        if ending.last == self._top:
            return self._needs.forward_base[first] if kept else 0
        return ending.base + int(self._needs.remembered[first, ending.last])  # states are put aside meanwhile

    def _last_seconds(self, leaf: LeafCost, last: int) -> float:
        return leaf.seconds if last == self._top else leaf.last_seconds

    def _discarded_seconds(self, first: int, last: int) -> float:
        return float(self._discard_before[last + 1] - self._discard_before[first]) + self._needs.segment_seconds

    # ---------------------------------------------------------------- reading

    def schedule(self, memory: int) -> Schedule:
        """The schedule behind ``seconds[memory]``, which must be finite. O(n) per item of the schedule."""
        return Schedule(tuple(self._body_items(memory, 0, self._top, "held")))

    def _body_items(self, memory: int, first: int, last: int, context: Context) -> Iterator[Item]:
        """Items behind body(memory, first, last)."""
        bare: list[Leaf] = []
        while (
            last < self._top and first <= last and (leaf := self._bare_leaf(memory, first, last, context)) is not None
        ):
            bare.append(Leaf(last, leaf.option))
            last -= 1
        if first <= last:
            endings = [ending for ending in self._endings[last] if memory >= ending.trigger]
            best = min(endings, key=lambda ending: self._decide(memory, first, ending, context).seconds)
            yield from self._recorded_items(memory, first, best, context)
        yield from reversed(bare)

    def _recorded_items(self, memory: int, first: int, ending: Ending, context: Context) -> Iterator[Item]:
        paid: Context | int = (
            context  # who holds the input of `first`, or the class of the boundary if it must be paid for
        )
        while first <= ending.last:
            decision = self._decide(memory, first, ending, paid)
            assert decision.seconds < math.inf, "the table holds no schedule here"
            if decision.leaf is None:
                yield Segment(tuple(self._body_items(decision.left, first, decision.end, decision.context)))
                paid = 0
            else:
                yield Leaf(first, decision.leaf.option)
                paid = decision.leaf.output_class
            memory, first = decision.left if decision.rest_left is None else decision.rest_left, decision.end + 1

    def _decide(self, memory: int, first: int, ending: Ending, paid: Context | int) -> _Decision:
        """The best item that starts at ``first``."""
        leaves = [
            self._decide_leaf(memory, leaf, first, ending, taken, need)
            for leaf in self._leaves(first, ending)
            for taken, need in self._ways(leaf, first, ending, paid)
        ]
        return min(*leaves, self._decide_segment(memory, first, ending, paid), key=lambda decision: decision.seconds)

    def _ways(self, leaf: LeafCost, first: int, ending: Ending, paid: Context | int) -> list[tuple[int, int]]:
        if isinstance(paid, int):
            return [(leaf.input_retained[paid], self._rest_need(leaf, first, ending, paid))]
        return self._body_ways(leaf, first, ending, paid)

    def _decide_leaf(self, memory: int, leaf: LeafCost, first: int, ending: Ending, paid: int, need: int) -> _Decision:
        left = memory - leaf.retained - paid
        if memory < need or (first < ending.last and not 0 <= left < self._size):
            seconds = math.inf
        elif first == ending.last:
            seconds = self._last_seconds(leaf, first)
        else:
            seconds = leaf.seconds + float(self._rest[ending][leaf.output_class][first + 1, left])
        return _Decision(seconds, leaf, first, left, "any")

    def _decide_segment(self, memory: int, first: int, ending: Ending, paid: Context | int) -> _Decision:
        last, need = ending.last, 0
        if isinstance(paid, int):
            memory -= self._stages[first].input_slots
            context, need = self._segment_context(first, last, paid)
        else:
            context = paid
        if first == last or memory < need:
            return _Decision(math.inf, None, first, memory, context)
        ends = np.arange(first, last)
        left = memory - self._needs.held[first, first:last]
        rest_left = left - self._needs.handed_on[first, first:last]
        peaks = self._needs.first_discard if last == self._top else self._needs.discard
        needs = peaks[first, first:last] + self._forward_base(first, ending)
        seconds = (
            self._body[first][context][ends - first, np.maximum(left, 0)].astype(np.float64)
            + self._rest[ending][0][ends + 1, np.maximum(rest_left, 0)]
        )
        seconds[(left < needs) | (rest_left < 0)] = math.inf
        best = int(np.argmin(seconds))
        again = self._needs.segment_seconds if last < self._top else 0.0
        return _Decision(
            float(seconds[best]) + again, None, first + best, int(left[best]), context, int(rest_left[best])
        )

    def _bare_leaf(self, memory: int, first: int, last: int, context: Context) -> LeafCost | None:
        """The option under which ``last`` saves nothing, if the table's value comes from it."""
        value = self._body[first][context][last - first, memory]
        for leaf in self._stages[last].leaves:
            fits = not leaf.saves and memory >= self._bare_need(leaf, first, last, context)
            if fits and self._bare_seconds(leaf, first, last, context, memory) <= value:
                return leaf
        return None


@dataclass(frozen=True, slots=True)
class _Decision:
    """An item of a schedule: the leaf, or a segment if there is none; its last stage; the memory left for its body and what follows.

    ``rest_left`` is what is left for what follows if that is less.
    """

    seconds: float
    leaf: LeafCost | None
    end: int
    left: int
    context: Context
    rest_left: int | None = None


def _blocks(rows: list[int], size: int, dtype: type[np.float32] | type[np.float64]) -> Iterator[Seconds]:
    """Blocks of ``rows × size`` numbers, all of them in one piece: the system gives large pieces large pages, far fewer of them."""
    whole = np.empty((sum(rows), size), dtype)
    return iter(np.split(whole, np.cumsum(rows)[:-1]))


def _by_context(need: BackwardNeed, context: Context) -> int:
    match context:
        case "any" | "nested":
            return need.nested
        case "segment":
            return need.segment
        case "held":
            return need.held


def _steps(sizes: npt.NDArray[np.int64], first: int) -> list[tuple[int, int]]:
    """Where something that grows with the last stage of a segment from ``first`` on rises: the stage, and the slots from there on."""
    rises = np.flatnonzero(np.diff(sizes[first:], prepend=-1))
    return [(first + int(rise), int(sizes[first + rise])) for rise in rises]


def _runs(held: npt.NDArray[np.int64], handed_on: npt.NDArray[np.int64], first: int) -> list[tuple[int, int, int]]:
    """Where one of two sizes changes with the last stage of a segment from ``first`` on: the stage, and both from there on."""
    changes = (np.diff(held[first:], prepend=-1) != 0) | (np.diff(handed_on[first:], prepend=-1) != 0)
    return [(first + int(at), int(held[first + at]), int(handed_on[first + at])) for at in np.flatnonzero(changes)]


class _Span:
    """The slots between which any of some rows changes: infinite before ``low``, constant from ``high`` on."""

    __slots__ = ("high", "low")

    def __init__(self) -> None:
        self.low, self.high = 1 << 60, 0

    def cover(self, seconds: Seconds) -> None:
        """Take in one more row; rows never increase."""
        rising = seconds[::-1]
        self.low = min(self.low, len(seconds) - int(rising.searchsorted(math.inf, "left")))
        self.high = max(self.high, len(seconds) - int(rising.searchsorted(seconds[-1], "right")))
