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

Intervals of the same length do not need one another. So a band of a few dozen columns is filled diagonal by diagonal, all intervals of one at
once, and the next band may follow a diagonal behind::

            l   0  1  2  3
    i   0       1  2  3  4      Row (i, l) needs the rows to its left (bodies that start at i)
        1          1  2  3      and those below it (rests that end at l).
        2             1  2
        3                1

For ``n`` stages and ``S`` slots: time O(n³ S), memory O(n² S) for ``body`` and each ``rest_c``. Decisions are not stored; see
:mod:`lightning_rotor.planning.extraction`.

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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from lightning_rotor.planning.decisions import Decisions, Integers
from lightning_rotor.planning.machine_code import CompiledTable, compiled_code, is_worthwhile
from lightning_rotor.planning.packed import Seconds
from lightning_rotor.planning.sharing import first_twins
from lightning_rotor.planning.splits import SplitRows, Splits
from lightning_rotor.planning.storage import Numbers, Storage, windows
from lightning_rotor.planning.thresholds import NEVER, Thresholds

if TYPE_CHECKING:
    from types import ModuleType

    from lightning_rotor.planning.device_splits import DeviceSplits

# Intervals that are computed together: their arrays fit the second cache.
_ROWS = 32
# More threads wait for one another: the interpreter runs one at a time, and NumPy's calls are short.
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


@dataclass(frozen=True, slots=True)
class _Group:
    """Intervals of one length, all or none of them the step's own forward.

    Attributes:
        first: Their first stages.
        last: Their last stages.
        ending: How a recomputation ends, a number in :attr:`Decisions.endings` of the last stage.
        forward: ``(rows, options)`` slots to run the first stage recorded.
    """

    first: Integers
    last: Integers
    ending: int
    forward: Integers

    @property
    def is_single(self) -> bool:
        """One stage each."""
        return bool(self.first[0] == self.last[0])


class Table:
    """Least seconds for every interval and every memory, and the schedules behind them.

    Args:
        thresholds: The chain, in slots.
        slots: The table holds memories ``0 .. slots``.
        refined: Count seconds in double precision, and tell apart who holds a segment's input even where that seldom matters.
            Takes up to six times as long.
        shared: Plan intervals that are the same once, see :mod:`lightning_rotor.planning.sharing`.
        device: Where torch adds up what segments cost, such as ``"cuda"``; by default the processor does, on all cores.
        compiled: Whether compiled code fills the table. By default it does where that pays and Numba is there; only tables
            that are not refined can be. The numbers are the same.
    """

    def __init__(
        self,
        thresholds: Thresholds,
        *,
        slots: int,
        refined: bool,
        shared: bool = True,
        device: str | None = None,
        compiled: bool | None = None,
    ) -> None:
        self.decisions = Decisions(thresholds, refined=refined)
        self.size = slots + 1
        self._refined = refined
        dtype = np.float64 if refined else np.float32
        self.storage = Storage(self.decisions, self.size, dtype)
        self._twins = first_twins(self.decisions) if shared else None
        if compiled is None:
            compiled = device is None and is_worthwhile(len(thresholds.stages), slots)
        self._code = compiled_code() if compiled and not refined else None
        self._splits: Splits | DeviceSplits = (
            Splits(self.decisions, self.storage) if device is None else self._on_device(device)
        )
        self._top = self.decisions.top
        self._number: Numbers = dtype
        # Row `low` of it is infinite below `low` and no obstacle from there on; `size + 1` of them.
        self._obstacles = np.concatenate((np.full(self.size, math.inf, dtype), np.full(self.size, -math.inf, dtype)))
        self._whole: Seconds = np.full(self.size, math.inf, dtype)

    def _on_device(self, device: str) -> DeviceSplits:
        from lightning_rotor.planning.device_splits import DeviceSplits  # planning as such needs no torch

        return DeviceSplits(self.decisions, self.storage, device)

    @property
    def seconds(self) -> Seconds:
        """Least seconds of the whole step by memory; infinite where nothing fits. Never increases."""
        return self._whole

    @property
    def is_compiled(self) -> bool:
        """Compiled code fills it, not NumPy."""
        return self._code is not None

    @property
    def accuracy(self) -> float:
        """Factor that makes ``seconds`` a lower bound: single precision rounds."""
        return 1 - 1e-12 if self._refined else 1 - 1e-6

    def solve(self, *, packed: bool = True) -> None:
        """Fill the table, band by band. Several threads follow one another through neighbouring bands, each a length behind the one before.

        Args:
            packed: Keep it in a quarter of its room, see :meth:`.Storage.pack`.
        """
        n = self._top + 1
        # An accelerator takes whole diagonals: one band.
        rows = _ROWS if isinstance(self._splits, Splits) else n
        bands = [range(begin, min(begin + rows, n)) for begin in range(0, n, rows)]
        threads = min(_MOST_THREADS, _cores(), len(bands))
        progress = _Progress()
        solve = self._solve_band
        if self._code is not None:
            solve = partial(self._solve_band_compiled, self._compiled_table(self._code))
        with ThreadPoolExecutor(threads) as pool:
            for solved in [pool.submit(solve, number, band, progress) for number, band in enumerate(bands)]:
                solved.result()
        if packed:
            self.storage.pack()

    def _compiled_table(self, code: ModuleType) -> CompiledTable:
        return CompiledTable(self.decisions, self.storage, self._twins, self._whole, code)

    def _solve_band_compiled(self, table: CompiledTable, number: int, band: range, progress: _Progress) -> None:
        """The same as :meth:`_solve_band`, some lengths at once."""
        try:
            for lengths in table.steps(band):
                progress.wait_for(number - 1, lengths[-1])
                table.solve(band, lengths)
                progress.reach(number, lengths[-1])
        finally:
            progress.reach(number, NEVER)

    def solve_column(self, last: int) -> None:
        """Fill all intervals that end in ``last`` again, after their thresholds have changed.

        Of tables that NumPy has filled and that are not packed.
        """
        for length in range(last + 1):
            self._solve_group(np.array([last - length]), length)

    def _solve_band(self, number: int, band: range, progress: _Progress) -> None:
        """All intervals that end in ``band``, by rising length."""
        n = self._top + 1
        try:
            for length in range(band.stop):
                # Twins end in this band or one before, and have the same length.
                progress.wait_for(number - 1, length - 1 if self._twins is None else length)
                last = np.arange(max(band.start, length), min(band.stop, self._top))
                first = last - length
                possible = first >= self.decisions.outermost[last]
                self.storage.forbid_bodies(first[~possible], length)
                if possible.any():
                    self._solve_or_copy(first[possible], length)
                if band.stop > self._top:
                    self._solve_group(np.array([self._top - length]), length)
                if not isinstance(self._splits, Splits):
                    self._splits.follow(np.arange(n - length), length)
                progress.reach(number, length)
        finally:
            progress.reach(number, NEVER)

    # ---------------------------------------------------------------- one group of intervals

    def _solve_or_copy(self, first: Integers, length: int) -> None:
        if self._twins is None:
            self._solve_group(first, length)
            return
        twins = self._twins[length, first]
        if (twins == first).any():
            self._solve_group(first[twins == first], length)
        if (twins != first).any():
            self.storage.copy(twins[twins != first], first[twins != first], length)

    def _solve_group(self, first: Integers, length: int) -> None:
        """All that concerns the intervals of this length from these stages on."""
        last = first + length
        variants = max(len(self.decisions.contexts[index]) for index in first.tolist())
        bodies = np.full((variants, len(first), self.size), math.inf, self._number)
        for ending in range(self.decisions.ending_base.shape[1]):
            has = np.flatnonzero(self.decisions.ending_count[last] > ending)
            if len(has):
                forward = self.decisions.forward_needs(first[has], last[has], ending)
                group = _Group(first[has], last[has], ending, forward)
                self._solve_ending(group, bodies, slice(None) if len(has) == len(first) else has)
        if last[0] < self._top:
            for variant in range(variants):
                self._end_bare(first, last, variant, bodies[variant])
            self.storage.put_bodies(first, last, bodies)

    def _solve_ending(self, group: _Group, bodies: Seconds, rows: slice | Integers) -> None:
        splits = self._splits.of(group.first, group.last, group.ending, variants=len(bodies))
        if group.first[-1] > 0:
            self._fill_rests(group, splits)
        is_top = group.last[0] == self._top
        if is_top and group.first[0] > 0:
            return
        for variant in range(len(bodies)):
            starts = splits.rows(variant)
            self._keep_first(group, starts, variant)
            if is_top:
                self._whole[:] = starts[0]
                return
            starts += self.decisions.discarded_seconds(group.first, group.last)[:, None].astype(self._number)
            self._forbid_below(starts, self.decisions.ending_trigger[group.last, group.ending])
            bodies[variant, rows] = np.minimum(bodies[variant, rows], starts)

    def _fill_rests(self, group: _Group, splits: SplitRows) -> None:
        """rest_c for every class c of the boundary."""
        first, decisions = group.first, self.decisions
        for number in range(decisions.class_held.shape[1]):
            chosen = np.flatnonzero(decisions.class_count[first] > number)
            if not len(chosen):
                return
            part = _Group(first[chosen], group.last[chosen], group.ending, group.forward[chosen])
            is_top = bool(group.last[0] == self._top)
            columns = decisions.class_columns(part.first, number, top=is_top)
            paid = decisions.input_slots[part.first]
            rest = splits.shifted(decisions.variant[part.first, columns], chosen, paid)
            needs = decisions.segment_needs(part.first, columns)
            if needs.any():
                self._forbid_below(rest, paid + needs)
            lows = decisions.rest_needs(part.first, part.last, part.forward, number)
            for option in range(lows.shape[1]):
                taken = decisions.input_retained[part.first, number, option] + decisions.retained[part.first, option]
                self._keep(rest, part, option, taken, lows[:, option])
            self.storage.put_rests(part.first, part.last, group.ending, number, rest)

    def _keep_first(self, group: _Group, target: Seconds, variant: int) -> None:
        """Keep the first stage, whose input is paid for."""
        decisions, first = self.decisions, group.first
        lows = decisions.body_needs(first, group.last, group.forward, variant)
        for option in range(lows.shape[1]):
            self._keep(target, group, option, decisions.retained[first, option], lows[:, option])
        if variant or group.is_single:
            return
        # A nested segment gives its input up when it has been recomputed; what the first stage does not save of it serves the
        # backwards. The recomputation itself must do without it, which is known to work if it could keep everything.
        apart = decisions.are_apart(first)
        recording = decisions.recording[group.ending][first + 1, group.last]
        for option in range(lows.shape[1]):
            freed, retained = decisions.freed[first, option], decisions.retained[first, option]
            if (apart & (freed > 0)).any():
                low = np.maximum(lows[:, option], retained + recording)
                self._keep(target, group, option, retained - freed, np.where(apart & (freed > 0), low, NEVER))

    def _keep(self, target: Seconds, group: _Group, option: int, taken: Integers, low: Integers) -> None:
        """Keep the first stage under an option where ``low`` slots are left and ``taken`` of them go to it."""
        first, last, decisions = group.first, group.last, self.decisions
        if (low >= self.size).all():
            return
        if group.is_single:
            seconds = decisions.last_seconds[first, option].astype(self._number)
            kept = np.repeat(seconds[:, None], self.size, axis=1)
        else:
            low = np.maximum(low, taken)
            kept = self.storage.rests(first + 1, last, group.ending, decisions.output_class[first, option], taken)
            kept += decisions.seconds[first, option].astype(self._number)[:, None]
            for row in np.flatnonzero(taken < 0).tolist():  # the input becomes free, beyond what the table holds
                kept[row, self.size + taken[row] :] = math.inf
        self._forbid_below(kept, low)
        np.minimum(target, kept, out=target)

    def _end_bare(self, first: Integers, last: Integers, variant: int, bodies: Seconds) -> None:
        """Options under which ``last`` saves nothing: its backward runs first, and what is recomputed ends before it."""
        decisions = self.decisions
        rows = np.flatnonzero((decisions.bare[last] < NEVER).any(axis=1))
        if not len(rows):
            return
        first, last = first[rows], last[rows]
        lows = decisions.bare_needs(first, last, variant)
        for option in range(lows.shape[1]):
            seconds = decisions.bare_seconds[last, option][:, None]
            if first[0] == last[0]:
                ended = np.full((len(rows), self.size), seconds + decisions.thresholds.segment_seconds, self._number)
            else:
                shorter = np.minimum(variant, decisions.variant_count[first] - 1)
                ended = self.storage.bodies(first, last - 1, shorter) + seconds.astype(self._number)
            self._forbid_below(ended, lows[:, option])
            bodies[rows] = np.minimum(bodies[rows], ended)

    def _forbid_below(self, seconds: Seconds, low: Integers) -> None:
        """Nothing fits in less memory than ``low``, by row."""
        np.maximum(seconds, windows(self._obstacles, self.size - np.clip(low, 0, self.size), self.size), out=seconds)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
