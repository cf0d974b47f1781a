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

:mod:`lightning_rotor.planning.kernel` fills columns from the left, each from below::

            l   0  1  2  3
    i   0       1  3  6 10      Row (i, l) needs the rows to its left (bodies that start at i)
        1          2  5  9      and those below it (rests that end at l).
        2             4  8
        3                7

Where Numba is installed it compiles them for long chains, and threads fill blocks of columns and lengths. A block needs
the ones to its left and below, so all blocks of a wave are filled at once::

    columns      0-15  16-31  32-47
    length 33-                  4
    length 17-           2      3        the wave of each block
    length  1-     0     1      2

Time O(n³ S) for ``n`` stages and ``S`` slots, memory O(n² S) for ``body`` and each ``rest_c``. Decisions are not
stored: :mod:`lightning_rotor.planning.candidates` finds them again.

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from lightning_rotor.planning import kernel
from lightning_rotor.planning.kernel import FIRST, LEAST, NEVER, TAKEN, Requirements, Rows, Seconds

_log = logging.getLogger(__name__)

# Columns and lengths of a block.
_BLOCK = 16
# Most threads: more wait for one another.
_MOST_THREADS = 4
# Least stages for compiled code: below, plain Python is faster than loading it.
_COMPILED_STAGES = 60


class Table:
    """Least seconds for every interval and every memory of ``0 .. slots``.

    By default compiled code fills it for long chains where Numba is installed; the numbers are the same.

    Attributes:
        seconds: Least seconds of the whole step by memory; infinite where nothing fits. Never increases.
        is_compiled: Compiled code fills it.
    """

    def __init__(self, requirements: Requirements, *, slots: int, compiled: bool | None = None) -> None:
        self._stages = len(requirements.endings)
        self.requirements, self._ended = requirements, requirements.ended
        self.rows = _room_for(requirements, slots + 1)
        self.seconds: Seconds = np.full(slots + 1, math.inf)
        compiled = self._stages >= _COMPILED_STAGES if compiled is None else compiled
        self._compiled = compiled_solve() if compiled else None
        self.is_compiled = self._compiled is not None
        self._last_column_begins = int(self.rows.used[-1])

    def solve(self) -> None:
        """Fill the table."""
        top = self._stages - 1
        if self._compiled is None:
            self._fill(range(top), range(top))
        else:
            columns = [range(begin, min(begin + _BLOCK, top)) for begin in range(0, top, _BLOCK)]
            with ThreadPoolExecutor(min(_MOST_THREADS, _cores())) as pool:
                for wave in range(2 * len(columns)):
                    blocks = range(-(-wave // 2), min(wave + 1, len(columns)))
                    lengths = [range((wave - block) * _BLOCK, (wave - block + 1) * _BLOCK) for block in blocks]
                    list(pool.map(self._fill, columns[blocks.start :], lengths))
        self.solve_last_column()

    def solve_last_column(self, *, floor: int | None = None) -> None:
        """Fill, perhaps again, what ends with the last stage; keeping that stage must leave ``floor`` slots."""
        if floor is not None:
            ended = self._ended.copy()
            least, taken = ended[-1, ..., LEAST, :], ended[-1, ..., TAKEN, :]
            np.maximum(least, taken + floor, out=least)
            self.requirements = self.requirements._replace(ended=ended)
        self.rows.used[-1] = self._last_column_begins
        self._fill(range(self._stages - 1, self._stages), range(self._stages))

    def _fill(self, columns: range, lengths: range) -> None:
        """Fill all intervals that end in some columns and have one of some lengths (less one)."""
        solve = self._compiled or kernel.solve
        solve(self.requirements, self.rows, (columns.start, columns.stop), (lengths.start, lengths.stop), self.seconds)


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
    """:func:`.kernel.solve` in machine code; None where it cannot be compiled, and planning takes longer."""
    try:
        import numba
    except ImportError as error:  # Numba raises it, too, if it is too old for NumPy
        _log.debug("long chains are planned without compilation: %s", error)
        return None
    if getattr(numba.config, "DISABLE_JIT", False):  # it would run the same code as Python, without the shortcuts
        return None
    names: dict[str, Any] = dict(vars(kernel))
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
    if not any(Path(names["solve"].stats.cache_path).glob("kernel.solve*.nbi")):
        _log.info("compiling the planner for long chains, which takes some seconds, once")
    return solve


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
