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

Each decision has thresholds on ``m``, see :mod:`lightning_rotor.planning.requirements`. Intervals that end at ``l = n - 1`` exist only
in the step's own forward, the others only in a recomputation, which the backward of ``l`` starts while it holds its gradient and
which stops at the last saved tensor of ``l``. A stage ``l`` that saves nothing at the end of a segment is not recomputed at all:
body(m, i, l) = backward of ``l`` + body(m, i, l - 1).

Columns are filled from the left, each from below::

            l   0  1  2  3
    i   0       1  3  6 10      Row (i, l) needs the rows to its left (bodies that start at i)
        1          2  5  9      and those below it (rests that end at l).
        2             4  8
        3                7

:mod:`.loops` does that as it stands here. :mod:`.compiled` does it for long chains in machine code, and in threads: each has a band of
columns and follows the one before it, a few lengths behind.

For ``n`` stages and ``S`` slots: time O(n³ S), memory O(n² S) for ``body`` and each ``rest_c``. Decisions are not stored; see
:mod:`lightning_rotor.planning.backtracking`.

Optimal among all schedule trees when the unit divides every size, up to approximations which the simulator judges afterwards:

* States that nested segments remember (of generators, of buffers) count only from when their parent is recomputed.
* Copies of buffers that a recomputation saves count only in the backward that started it.
* A discarded pass over nested segments holds their inputs, which can matter only where a later gradient is larger than an
  earlier one.
* Segments nested more than twice cost more host time than counted.
* In a table that is not refined, the input of a segment counts until its first stage is done, although what that stage
  does not save of it is free once the segment is recomputed.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains", hal-02352969, whose
recurrence this refines: gradients and temporaries count only when they are alive, shared boundaries count once.
"""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from lightning_rotor.planning.kernel import Loops, Seconds, Storage, first_twins
from lightning_rotor.planning.machine_code import CompiledTable, compiled_code, is_worthwhile
from lightning_rotor.planning.requirements import NEVER, Decisions, Thresholds

# Columns of a band: what they need of one another fits the second cache.
_COLUMNS = 32
# More threads wait for one another.
_MOST_THREADS = 4


class _Progress:
    """How far each band is: the length up to which its intervals are solved."""

    def __init__(self) -> None:
        self._reached: dict[int, int] = {-1: NEVER}
        self._changed = threading.Condition()

    def reach(self, band: int, length: int) -> None:
        with self._changed:
            self._reached[band] = length
            self._changed.notify_all()

    def wait_for(self, band: int, length: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._reached.get(band, -1) >= length)


class Table:
    """Least seconds for every interval and every memory, and the schedules behind them.

    Args:
        thresholds: The chain, in slots.
        slots: The table holds memories ``0 .. slots``.
        refined: Count seconds in double precision, and tell apart who holds a segment's input even where that seldom matters.
            Takes up to six times as long.
        compiled: Whether compiled code fills the table. By default it does where that pays and Numba is there; only tables
            that are not refined can be. The numbers are the same.
    """

    def __init__(self, thresholds: Thresholds, *, slots: int, refined: bool, compiled: bool | None = None) -> None:
        self.decisions = Decisions(thresholds, refined=refined)
        self.size = slots + 1
        self._refined = refined
        dtype = np.float64 if refined else np.float32
        self.storage = Storage(self.decisions, self.size, dtype)
        self._whole: Seconds = np.full(self.size, math.inf, dtype)
        if compiled is None:
            compiled = is_worthwhile(len(thresholds.stages), slots)
        self._code = compiled_code() if compiled and not refined else None

    @property
    def seconds(self) -> Seconds:
        """Least seconds of the whole step by memory; infinite where nothing fits. Never increases."""
        return self._whole

    @property
    def is_compiled(self) -> bool:
        """Compiled code fills it, not loops."""
        return self._code is not None

    @property
    def accuracy(self) -> float:
        """Factor that makes ``seconds`` a lower bound: single precision rounds."""
        return 1 - 1e-12 if self._refined else 1 - 1e-6

    def solve(self, *, packed: bool = True) -> None:
        """Fill the table.

        Args:
            packed: Keep it in a quarter of its room, see :meth:`.Storage.pack`.
        """
        if self._code is None:
            Loops(self.decisions, self.storage, self._whole).solve()
        else:
            twins = first_twins(self.decisions)
            self._solve_in_bands(CompiledTable(self.decisions, self.storage, twins, self._whole, self._code))
        if packed:
            self.storage.pack()

    def solve_column(self, last: int, thresholds: Thresholds) -> None:
        """Fill all intervals that end in ``last`` again, after their thresholds have changed.

        Of tables that loops have filled and that are not packed.
        """
        self.decisions.take_over(thresholds)
        Loops(self.decisions, self.storage, self._whole, is_filled=True).solve_column(last)

    def _solve_in_bands(self, table: CompiledTable) -> None:
        n = self.decisions.top + 1
        bands = [range(begin, min(begin + _COLUMNS, n)) for begin in range(0, n, _COLUMNS)]
        solve = partial(self._solve_band, table, _Progress())
        with ThreadPoolExecutor(min(_MOST_THREADS, _cores(), len(bands))) as pool:
            for solved in [pool.submit(solve, number, band) for number, band in enumerate(bands)]:
                solved.result()

    def _solve_band(self, table: CompiledTable, progress: _Progress, number: int, band: range) -> None:
        """All intervals that end in ``band``, by rising length, some lengths at once."""
        try:
            for lengths in table.steps(band):
                progress.wait_for(number - 1, lengths[-1])
                table.solve(band, lengths)
                progress.reach(number, lengths[-1])
        finally:
            progress.reach(number, NEVER)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
