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
generator states of nested segments count only from when their parent is recomputed; a discarded pass over nested segments holds
their inputs (which can matter only where a later gradient is larger than an earlier one); segments nested more than twice cost
more host time than counted; and the choice between several options of a segment's first stage ignores who else holds its input.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains", hal-02352969, whose
recurrence this refines: gradients and temporaries count only when they are alive, shared boundaries count once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.planning.thresholds import BackwardNeed, LeafCost, Thresholds
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment

Seconds: TypeAlias = npt.NDArray[np.floating[Any]]


class Table:
    """Least seconds for every interval and every memory, and the schedules behind them.

    Args:
        thresholds: The chain, in slots.
        slots: The table holds memories ``0 .. slots``.
        dtype: ``float32`` halves the memory; ``float64`` tells schedules apart whose times differ by less than 1e-7.
    """

    def __init__(self, thresholds: Thresholds, *, slots: int, dtype: type[np.float32] | type[np.float64] = np.float32) -> None:
        self._needs = thresholds
        self._stages = thresholds.stages
        self._top = len(self._stages) - 1
        self._size = slots + 1
        self._number = dtype
        n = len(self._stages)
        classes = max(len(stage.saved_before) for stage in self._stages)
        # _body[i][l - i]: body(i, l) plus the first, discarded pass over i..l: what a segment i..l costs in all.
        # _rest[c][l][i]: rest_c(i, l). Both are contiguous in what split() varies, so that it adds whole blocks.
        # Classes that a boundary does not have are never touched, and the system gives no memory for them.
        self._body = [np.empty((n - first, self._size), dtype) for first in range(n)]
        self._rest = [[np.empty((last + 1, self._size), dtype) for last in range(n)] for _ in range(classes)]
        self._whole = np.empty(self._size, dtype)
        self._discard_before = np.concatenate(([0.0], np.cumsum([stage.discard_seconds for stage in self._stages])))
        self._steps = [_steps(thresholds.discard[first], first) for first in range(n)]
        self._first_steps = [_steps(thresholds.first_discard[first], first) for first in range(n)]

    @property
    def seconds(self) -> Seconds:
        """Least seconds of the whole step by memory; infinite where nothing fits. Never increases."""
        return self._whole

    # ---------------------------------------------------------------- filling

    def solve(self) -> None:
        """Fill the table."""
        workspace = np.empty((len(self._stages), self._size), self._number)
        settled = [0] * len(self._stages)  # by first stage: from this slot on, no body so far improves
        for last in range(len(self._stages)):
            self._solve_column(last, workspace, settled)

    def _solve_column(self, last: int, workspace: Seconds, settled: list[int]) -> None:
        """All intervals that end at ``last``, from the shortest to the longest."""
        replayed = last == self._top or any(leaf.saves for leaf in self._stages[last].leaves)
        rest_settled = 0
        for first in range(last, -1, -1):
            if last < self._top and not self._stages[first].recomputable:
                for outer in range(first + 1):
                    self._body[outer][last - outer] = math.inf
                return
            if not replayed:
                self._fill_bare_body(first, last)
            else:
                split = self._split(first, last, workspace, max(settled[first], rest_settled))
                if first:
                    self._fill_rest(first, last, split)
                    rest_settled = max(rest_settled, _settled(self._rest[0][last][first]))
                if first == 0 or last < self._top:
                    self._fill_body(first, last, split)
            if last < self._top:
                settled[first] = max(settled[first], _settled(self._body[first][last - first]))

    def _split(self, first: int, last: int, workspace: Seconds, settled: int) -> Seconds:
        """split(first, last): the best segment that starts at ``first`` and ends before ``last``."""
        split = np.full(self._size, math.inf, self._number)
        drawing = min(self._needs.first_draw[first], last) if self._needs.rng_slots else last
        self._reduce(first, first, drawing, last, workspace, settled, split)
        if drawing < last:
            remembered = self._needs.rng_slots
            with_states = np.full(self._size, math.inf, self._number)
            self._reduce(first, drawing, last, last, workspace, settled, with_states)
            if remembered < self._size:
                np.minimum(split[remembered:], with_states[: self._size - remembered], out=split[remembered:])
        if self._needs.segment_seconds and last < self._top:
            split += self._number(self._needs.segment_seconds)  # a nested segment's first pass runs inside its parent's, too
        return split

    def _reduce(self, first: int, begin: int, end: int, last: int, workspace: Seconds, settled: int, split: Seconds) -> None:
        """Minimum over the segments ``first..k`` with ``begin <= k < end``.

        The threshold of the discarded pass rises with ``k``. Between two steps of it the same segments are allowed, and one sum
        and one minimum do each block::

            k = end - 1     ░░░░░░░░░░░░████████  ┐
            ...             ░░░░░░██████████████  │ from slot `settled` on nothing improves any more,
            k = begin       ░░██████████████████  ┘ so what is beyond is copied
                            0 s0  s1    s2    stop
        """
        if begin >= end:
            return
        base = 0 if last == self._top else self._recompute_base(first, last)
        steps = self._first_steps[first] if last == self._top else self._steps[first]
        low = steps[0][1] + base
        bodies, rests = self._body[first], self._rest[0][last]
        for number in range(len(steps)):
            row_end, slot_end = (steps[number + 1][0], steps[number + 1][1] + base) if number + 1 < len(steps) else (end, self._size)
            row_end = min(row_end, end)
            if row_end == end:
                slot_end = self._size
            stop = min(slot_end, max(settled, low) + 1, self._size)
            if begin < row_end and low < stop:
                space = workspace[: row_end - begin, : stop - low]
                np.add(bodies[begin - first : row_end - first, low:stop], rests[begin + 1 : row_end + 1, low:stop], out=space)
                np.minimum.reduce(space, axis=0, out=split[low:stop])
                split[stop:slot_end] = split[stop - 1]
            if row_end == end:
                return
            low = slot_end

    def _fill_rest(self, first: int, last: int, split: Seconds) -> None:
        """rest_c(first, last) for every class c of the boundary."""
        stage = self._stages[first]
        for number, saved in enumerate(stage.saved_before):
            rest = self._rest[number][last][first]
            paid = stage.input_slots
            low = min(paid + self._segment_need(first, last, saved_before=saved > 0), self._size)
            rest[:low] = math.inf
            rest[low:] = split[low - paid : max(self._size - paid, 0)]
            for leaf in stage.leaves:
                low = self._rest_need(leaf, first, last, number)
                self._keep(rest, leaf, first, last, leaf.input_retained[number], low)

    def _fill_body(self, first: int, last: int, split: Seconds) -> None:
        body = self._whole if last == self._top else self._body[first][last - first]
        body[:] = split
        for leaf in self._stages[first].leaves:
            self._keep(body, leaf, first, last, 0, self._body_need(leaf, first, last))
        if last < self._top:
            body[: min(leaf.trigger for leaf in self._stages[last].leaves if leaf.saves)] = math.inf
            body += self._number(self._discarded_seconds(first, last))
            self._end_bare(body, first, last)

    def _fill_bare_body(self, first: int, last: int) -> None:
        """No option of ``last`` saves anything."""
        body = self._body[first][last - first]
        body[:] = math.inf
        self._end_bare(body, first, last)

    def _end_bare(self, body: Seconds, first: int, last: int) -> None:
        """Options under which ``last`` saves nothing: its backward runs first, and what is recomputed ends before it."""
        for leaf in self._stages[last].leaves:
            if not leaf.saves:
                low = self._bare_need(leaf, first, last)
                np.minimum(body[low:], self._bare_seconds(leaf, first, last, slice(low, None)), out=body[low:])

    def _bare_seconds(self, leaf: LeafCost, first: int, last: int, where: slice | int) -> Any:
        seconds = self._number(leaf.backward_seconds + self._stages[last].discard_seconds)
        if first == last:
            return seconds + self._number(self._needs.segment_seconds)
        return self._body[first][last - 1 - first, where] + seconds

    def _keep(self, target: Seconds, leaf: LeafCost, first: int, last: int, paid: int, low: int) -> None:
        """Keep stage ``first`` under an option where ``low`` slots are left; ``paid`` of them go to its input."""
        if first == last:
            target[low:] = np.minimum(target[low:], self._number(self._last_seconds(leaf, last)))
            return
        taken = paid + leaf.retained
        low = max(low, taken)
        if low < self._size:
            rest = self._rest[leaf.output_class][last][first + 1, low - taken : self._size - taken]
            np.minimum(target[low:], rest + self._number(leaf.seconds), out=target[low:])

    # ---------------------------------------------------------------- thresholds of one decision

    def _rest_need(self, leaf: LeafCost, first: int, last: int, number: int) -> int:
        """Least memory to keep ``first`` when its input must be paid for and stage ``first - 1`` saved class ``number`` of it."""
        paid, held = leaf.input_retained[number], self._stages[first].saved_before[number] > 0
        backward = self._backward_need(leaf, first, last)
        forward = self._stages[first].input_slots + self._forward_need(leaf, first, last)
        return max(forward, paid + (backward.held if held else backward.plain))

    def _body_need(self, leaf: LeafCost, first: int, last: int) -> int:
        """Least memory to keep ``first`` when somebody else pays for its input."""
        backward = self._backward_need(leaf, first, last)
        return max(self._forward_need(leaf, first, last), backward.nested if first else backward.held)

    def _bare_need(self, leaf: LeafCost, first: int, last: int) -> int:
        if first < last:
            return leaf.bare
        return leaf.backward.segment if first else leaf.backward.held

    def _forward_need(self, leaf: LeafCost, first: int, last: int) -> int:
        if last == self._top:
            return leaf.forward + self._needs.forward_base[first]
        return (leaf.replay if first == last else leaf.forward) + self._recompute_base(first, last)

    def _backward_need(self, leaf: LeafCost, first: int, last: int) -> BackwardNeed:
        return leaf.last_backward if first == last < self._top else leaf.backward

    def _segment_need(self, first: int, last: int, *, saved_before: bool) -> int:
        """Least memory for a segment that starts at ``first``, beyond what its body needs when nobody holds its input."""
        needs = self._stages[first].needs_as_segment
        if saved_before or first == 0:
            return needs.held
        return needs.segment if last == self._top else 0

    def _recompute_base(self, first: int, last: int) -> int:
        """What is alive while ``first`` and the stages after it run in a recomputation that the backward of ``last`` started."""
        aside = self._needs.rng_slots if self._needs.first_draw[first] <= last else 0
        return self._needs.recompute_base[last] + aside

    def _last_seconds(self, leaf: LeafCost, last: int) -> float:
        if last == self._top:
            return leaf.seconds
        return leaf.last_seconds if leaf.saves else math.inf

    def _discarded_seconds(self, first: int, last: int) -> float:
        return float(self._discard_before[last + 1] - self._discard_before[first]) + self._needs.segment_seconds

    # ---------------------------------------------------------------- reading

    def schedule(self, memory: int) -> Schedule:
        """The schedule behind ``seconds[memory]``, which must be finite. O(n) per item of the schedule."""
        return Schedule(tuple(self._body_items(memory, 0, self._top)))

    def _body_items(self, memory: int, first: int, last: int) -> Iterator[Item]:
        """Items behind body(memory, first, last)."""
        bare = []
        while last < self._top and (leaf := self._bare_leaf(memory, first, last)) is not None:
            bare.append(Leaf(last, leaf.option))
            last -= 1
            if last < first:
                break
        if first <= last:
            yield from self._recorded_items(memory, first, last)
        yield from reversed(bare)

    def _recorded_items(self, memory: int, first: int, last: int) -> Iterator[Item]:
        number: int | None = None  # class of the input boundary, None while it is paid for
        while first <= last:
            size = 0 if number is None else self._stages[first].input_slots
            leaf, leaf_seconds = self._best_leaf(memory, first, last, number)
            end, segment_seconds = self._best_segment(memory - size, first, last, number)
            assert min(leaf_seconds, segment_seconds) < math.inf, "the table holds no schedule here"
            if segment_seconds < leaf_seconds:
                memory -= size + (self._needs.rng_slots if self._needs.first_draw[first] <= end else 0)
                yield Segment(tuple(self._body_items(memory, first, end)))
                first, number = end + 1, 0
            else:
                memory -= leaf.retained + (0 if number is None else leaf.input_retained[number])
                yield Leaf(first, leaf.option)
                first, number = first + 1, leaf.output_class

    def _best_leaf(self, memory: int, first: int, last: int, number: int | None) -> tuple[LeafCost, float]:
        options = self._stages[first].leaves
        seconds = [self._leaf_seconds(memory, leaf, first, last, number) for leaf in options]
        best = min(range(len(options)), key=seconds.__getitem__)
        return options[best], seconds[best]

    def _leaf_seconds(self, memory: int, leaf: LeafCost, first: int, last: int, number: int | None) -> float:
        need = self._body_need(leaf, first, last) if number is None else self._rest_need(leaf, first, last, number)
        if memory < need:
            return math.inf
        if first == last:
            return self._last_seconds(leaf, last)
        left = memory - leaf.retained - (0 if number is None else leaf.input_retained[number])
        return leaf.seconds + float(self._rest[leaf.output_class][last][first + 1, left]) if left >= 0 else math.inf

    def _best_segment(self, memory: int, first: int, last: int, number: int | None) -> tuple[int, float]:
        """Last stage and seconds of the best segment that starts at ``first``, whose input is paid for."""
        stage = self._stages[first]
        saved_before = number is not None and stage.saved_before[number] > 0
        if first == last or memory < self._segment_need(first, last, saved_before=saved_before):
            return first, math.inf
        ends = np.arange(first, last)
        left = np.where(ends < self._needs.first_draw[first], memory, memory - self._needs.rng_slots)
        if last == self._top:
            needs = self._needs.first_discard[first, first:last]
        else:
            needs = self._needs.discard[first, first:last] + self._recompute_base(first, last)
        inside = np.maximum(left, 0)
        seconds = self._body[first][ends - first, inside].astype(np.float64) + self._rest[0][last][ends + 1, inside]
        seconds[left < np.maximum(needs, 0)] = math.inf
        best = int(np.argmin(seconds))
        return first + best, float(seconds[best]) + (self._needs.segment_seconds if last < self._top else 0.0)

    def _bare_leaf(self, memory: int, first: int, last: int) -> LeafCost | None:
        """The option under which ``last`` saves nothing, if the table's value comes from it."""
        for leaf in self._stages[last].leaves:
            if not leaf.saves and memory >= self._bare_need(leaf, first, last):
                seconds = self._bare_seconds(leaf, first, last, memory)
                if seconds <= self._body[first][last - first, memory]:
                    return leaf
        return None


def _steps(peaks: npt.NDArray[np.int64], first: int) -> list[tuple[int, int]]:
    """Where the peaks of discarded passes from ``first`` on rise: the pass's last stage, and its peak."""
    rises = np.flatnonzero(np.diff(peaks[first:], prepend=-1))
    return [(first + int(rise), int(peaks[first + rise])) for rise in rises]


def _settled(seconds: Seconds) -> int:
    """First slot from which on more memory does not help."""
    return int(np.count_nonzero(seconds > seconds[-1]))
