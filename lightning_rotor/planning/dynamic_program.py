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

The functions in :mod:`.kernels` are plain loops over intervals and decisions, and NumPy over memory. They run as they
stand, or compiled by Numba where it is installed, for long chains. Each decision is said once, as
:class:`.kernels.Choices`: the loops fill the table from it, and :mod:`.backtracking` reads schedules from it.

Time O(n³ S) for ``n`` stages and ``S`` slots, memory O(n² S) for ``body`` and each ``rest_c``. Decisions are not
stored: :mod:`.backtracking` finds them again.

Optimal among all schedule trees when the unit divides every size, up to approximations that the simulator judges:

* States that nested segments remember (of generators, of buffers) count only from when their parent is recomputed.
* Copies of buffers that a recomputation saves count only in the backward that started it.
* The inputs of nested segments that a discarded pass holds do not count; they matter only where gradients grow.
* Segments nested more than twice cost more host time than counted.
* Unless refined, a table counts a segment's input until its first stage is done, even parts which that stage frees.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains",
hal-02352969, refined: gradients and temporaries count only while they are alive, shared boundaries count once.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_rotor.planning import kernels
from lightning_rotor.planning.compilation import compiled_kernels, prepare
from lightning_rotor.planning.kernels import FIRST, LEAST, NEVER, TAKEN, Integers, Requirements, Rows, Seconds

# Columns and lengths of a block.
_BLOCK = 16
# Most threads: more wait for one another.
_MOST_THREADS = 4
# Least stages for compiled code: for one shorter chain, plain Python is faster than loading it.
_COMPILED_STAGES = 60
# Seconds that loading compiled code takes. A process whose shorter chains have taken more in plain Python (there is
# another one for each new length of sentences) will likely plan further ones, four times as fast in compiled code.
_LOADING_SECONDS = 1.5
# Seconds that the tables of a chain take in plain Python, as a multiple of its stages cubed.
_PLAIN_SECONDS = 4e-6


def prepare_for(stages: int) -> None:
    """Tell that a chain of so many stages may be planned: what its tables need is made ready meanwhile."""
    if stages >= _COMPILED_STAGES:
        prepare()


@dataclass(slots=True)
class _Spent:
    """Seconds that plain loops have taken in this process."""

    seconds: float = 0.0


_spent = _Spent()


class Table:
    """Least seconds for every interval and memory of ``0 .. slots``, in ``seconds`` those of the whole step.

    By default compiled code fills it for long chains where Numba is installed, once it is compiled; the numbers are the
    same.
    """

    def __init__(
        self,
        requirements: Requirements,
        *,
        slots: int,
        compiled: bool | None = None,
    ) -> None:
        self._stages = len(requirements.endings)
        self.requirements = requirements
        self._ended = requirements.ended
        self.rows = _room_for(requirements, slots + 1)
        self.seconds: Seconds = np.full(slots + 1, math.inf)
        compiled_module = None
        if compiled:
            compiled_module = compiled_kernels()
        elif compiled is None and (self._stages >= _COMPILED_STAGES or _spent.seconds >= _LOADING_SECONDS):
            compiled_module = compiled_kernels(_PLAIN_SECONDS * self._stages**3)
        self.is_compiled = compiled_module is not None
        self._kernels: Any = compiled_module or kernels
        # Where rows of the last column are filled in again, over those of another floor.
        self._last_column_begins = int(self.rows.used[-1])
        self._floor = 0

    def solve(self) -> None:
        """Fill the table, in compiled code block by block: those of a wave do not need each other."""
        top = self._stages - 1
        begin = time.thread_time()
        if self.is_compiled:
            self._fill_in_waves(top)
        else:
            # Threads of plain Python would wait for one another's lock.
            self._fill((0, top), (0, top))
        # Apart from the others, since it is filled again for another floor.
        self._fill((top, self._stages), (0, self._stages))
        if not self.is_compiled:
            _spent.seconds += time.thread_time() - begin

    def _fill_in_waves(self, top: int) -> None:
        """Fill all columns before ``top``, in as many threads as there are cores."""
        columns = [(begin, min(begin + _BLOCK, top)) for begin in range(0, top, _BLOCK)]
        with ThreadPoolExecutor(min(_MOST_THREADS, _cores())) as pool:
            # An interval needs shorter ones with its first stage, and with its last. Blocks of one wave have neither
            # in common: one column block further right, one length block shorter.
            for wave in range(2 * len(columns)):
                blocks = range(-(-wave // 2), min(wave + 1, len(columns)))
                lengths = []
                for block in blocks:
                    shortest = (wave - block) * _BLOCK
                    lengths.append((shortest, shortest + _BLOCK))
                list(pool.map(self._fill, columns[blocks.start :], lengths))

    def _fill(self, columns: tuple[int, int], lengths: tuple[int, int]) -> None:
        """Fill all intervals that end in some columns and have one of some lengths (less one)."""
        self._kernels.solve(self.requirements, self.rows, columns, lengths, self.seconds)

    def traced(self, memory: int) -> Integers:
        """The schedule behind the seconds for some memory, as :func:`.kernels.traced` returns it."""
        items: Integers = self._kernels.traced(self.requirements, self.rows, memory)
        return items

    def solve_last_column(self, *, floor: int) -> None:
        """Fill again what ends with the last stage, unless it is so: keeping that stage must leave ``floor`` slots."""
        if floor == self._floor:
            return
        self._floor = floor
        # From what was there first: the floors before must not add up.
        ended = self._ended.copy()
        least = ended[-1, ..., LEAST, :]
        taken = ended[-1, ..., TAKEN, :]
        np.maximum(least, taken + floor, out=least)
        self.requirements = self.requirements._replace(ended=ended)
        self.rows.used[-1] = self._last_column_begins
        self._fill((self._stages - 1, self._stages), (0, self._stages))


def _room_for(needs: Requirements, size: int) -> Rows:
    """Empty rows for a table. Memory that no row needs is never touched, and so never taken."""
    n = len(needs.endings)
    # Rows of each area: bodies by first stage, then rests by last stage.
    of_bodies = needs.variants * (n - np.arange(n))
    of_rests = needs.endings * needs.class_before[1:]
    counts = np.concatenate([of_bodies, of_rests])
    # Row 0 is zero everywhere, and needs a single number.
    rows = np.cumsum([1, *counts])
    starts = np.cumsum([1, *(counts * size)])
    spans = np.zeros((int(rows[-1]), 3), np.int64)
    spans[1:, FIRST] = NEVER
    values = _untouched(int(starts[-1]))
    values[0] = 0.0
    return Rows(size, rows[:n], rows[n:-1], spans, values, starts[:-1].copy())


def _untouched(count: int) -> np.ndarray:
    """Numbers that take memory once they are written."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return np.zeros(count)
    # Not from NumPy, whose huge pages would be taken as a whole.
    return np.frombuffer(mmap.mmap(-1, 8 * count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _cores() -> int:
    """Number of cores that this process may use."""
    # Not every system tells. Containers and schedulers of clusters give a process fewer than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
