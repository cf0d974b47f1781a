r"""How fast any execution of a step could be: a proven lower bound on its seconds for a budget.

It holds for *every* execution that fits: any stage may run again at any time from its input, sets and boundaries may be
dropped at any time, each stage may use any option. Bytes and seconds are the simulator's.

**What is looked at.** Only moments at which backwards finish. When that of stage ``t`` does, memory holds at least

* what is alive whatever was done: output, pinned tensors, gradients of parameters behind ``t`` and of passing skips;
* the set of stage ``t`` and the peak of its backward, which counts both gradients;
* the *kept* sets: those of stages before ``t`` that are there and will not be made again;
* the *held* boundaries: those that are there and from which something will run again.

The other stages before ``t`` are *absent* and will run again. A longest run of them with no held boundary inside is a
*gap* ``c..l``. Boundaries ``c+1 .. l`` are not there, so before the backward of ``l`` all of it runs again in order;
when the backward of ``l`` finishes, the same question arises for ``c..l-1``::

               kept      gap c..l              kept          t
            ──────────┬───────────────────┬────────────┬─────────┄┄┄
      boundary c: held, or made again     :            :  backward
        by the kept stages before it      boundary l+1    finishes

**What it costs.** ``gap(c, l)`` is the least that runs and backwards of the stages ``c..l`` take from the moment on::

    gap(c, l) = Σ first(i) for c ≤ i < l  +  replay and backward of l
                + the least, over all that fits beside the backward of l, of
                      kept stages i among c..l-1:     both(i) - first(i) + backward(i)
                      the gaps c'..l' between them:   gap(c', l')
                      outputs of stages i for a gap:  first(i)

    first(i)    a run that gives the output: discarding or recording, what is faster
    both(i)     output and set: recording, or first(i) and a replay if that is faster

That least is a 0-1 knapsack along the chain, one table per ``c`` for all ``l``. The step is ``gap(0, n - 1)``, whose
last stage gives its output too. ``n`` stages and ``S`` slots take O(n³ S) time and O(n² S) memory.

**Why it holds**, for a gap ``c..l`` of any execution that fits:

1. Before ``l`` makes its set, each of ``c..l-1`` runs for its output: ``Σ first(i)`` and a replay of ``l``.
2. When the backward of ``l`` finishes, each of ``c..l-1`` is kept, and has given output and set since (``both(i)``), or
   absent. The absent ones form gaps, which take ``gap(c', l')`` from then on, by induction.
3. A gap whose first boundary is not held gets it from the stage before: a kept one that runs once more, from an input
   that is held or comes from the stage before in turn. What ends a gap may give its output by ``both``, not a replay.
4. Each boundary counts once: whole if it is held, else as far as sets save it. What is left out only adds to it.
5. Stages in different gaps are different, and the seconds of different stages add up.

The same holds at the backward of any ``t`` in ``c..l``, and for the step at the first run of any ``t``, where what
lingers counts and stages from ``t`` on take ``both`` at least. The largest of all is taken. Sizes are rounded down.

**What it leaves out**, and so may be too low by: what one gap holds while another one runs again, peaks of reruns, host
time of segments, states that they remember, skips that a gap must read. Saved skips are divided among their savers.

**Inverted stages** are kept ones with a slower backward, beside whose set their input takes nothing: the backward
rebuilds it for the set of the stage before alone. So no inverse gives a boundary that a gap or a rerun needs. Left out
is that the stage before may need every bit of what it saved.

**Over a link** something may be elsewhere at each of these moments. It was copied out before, and comes back behind it.
In a step of ``T`` seconds that is at most

    min(bytes per second out × (T - what must still run),  bytes per second back × (T - what has run for sure))

and at most what the other memory has room for. So every moment has room for so much more, and the bound is the least
``T`` that the moments allow with the rooms that ``T`` itself gives them.

Knapsacks over one moment and the linear relaxation of Checkmate's program (Jain et al., arXiv:1910.02653) are looser,
see ``benchmarks/oracle.py``. The recursion is rotor's (Beaumont et al., hal-02352969) turned around: there gaps share
the memory and give a schedule, here each has all of it and they give a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal, TypeAlias

import numpy as np
from typing_extensions import Unpack

from lightning_rotor.chain import Chain
from lightning_rotor.link import Link
from lightning_rotor.planning import effort
from lightning_rotor.planning.kernels import Seconds
from lightning_rotor.planning.least_costs import LeastStage, LeastWay, least_stages
from lightning_rotor.simulator import Conditions, bytes_around

_Key: TypeAlias = tuple[int, Literal["no", "kept", "gap"]]
"""A boundary that is not held: the part of it that the stage before saves, and whether that stage makes it again.

If it does as the end of a gap, the next gap must not begin there: the two would be one.
"""

ROUNDING = 1e-12
"""Relative difference between sums of the same durations in another order."""

# With a link the bound is found by halving an interval, so many times.
_HALVINGS = 8
# How often the upper end of that interval is doubled before the lower one counts.
_MOST_DOUBLINGS = 30


@lru_cache(maxsize=32)
def lower_bound_seconds(chain: Chain, budget_bytes: int, **conditions: Unpack[Conditions]) -> float:
    """Least seconds of any execution within a budget, as far as is proven.

    Takes about 0.2 s for 50 stages, and ten times that with a link. The last results are remembered.

    Args:
        chain: Costs of ``n`` stages. An option without saved tensors saves no bytes.
        budget_bytes: As for :func:`lightning_rotor.planning.plan`, like the other arguments.
        conditions: ``gradients_exist``, ``lingering_bytes`` and ``link``.
    Returns:
        At most the seconds of any schedule whose simulated peak fits; infinite if it proves that none does.
    """
    stages = least_stages(chain, budget_bytes, **bytes_around(conditions))
    link = conditions.get("link")
    if link is None:
        return _bound_within(stages, budget_bytes)
    return _bound_over(link, chain, stages, budget_bytes)


def _bound_over(link: Link, chain: Chain, stages: list[LeastStage], budget_bytes: int) -> float:
    """The bound where a link may carry bytes away and back."""
    forward = [stage.first_seconds for stage in stages]
    backward = [min(option.backward_seconds for option in stage.options) for stage in chain]
    low = (sum(forward) + sum(backward)) * (1 - ROUNDING)

    def allowed_by(seconds: float) -> float:
        """The bound of steps that take no longer than this."""
        roomier, most_bytes = _with_rooms(link, stages, forward, backward, seconds)
        return _bound_within(roomier, budget_bytes + most_bytes)

    if allowed_by(low) <= low * (1 + 2 * ROUNDING):
        return low
    # More seconds give more room, so the bound falls, and what takes less than it cannot be.
    high = 2 * low
    for _ in range(_MOST_DOUBLINGS):
        if allowed_by(high) <= high:
            break
        low, high = high, 2 * high
    else:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if allowed_by(middle) <= middle:
            high = middle
        else:
            low = middle
    return low


def _with_rooms(
    link: Link, stages: list[LeastStage], forward: list[float], backward: list[float], seconds: float
) -> tuple[list[LeastStage], int]:
    """The stages with room for what can be elsewhere in a step of so many seconds, and the most of that."""
    before_forward = list(accumulate(forward, initial=0.0))
    # Of the stages behind, whose backwards run first.
    before_backward = list(accumulate(reversed(backward), initial=0.0))
    before_backward.reverse()
    whole = before_forward[-1] + before_backward[0]

    def elsewhere(done: float, left: float) -> int:
        sent = link.out * max(seconds - left, 0.0)
        fetched = link.back * max(seconds - done, 0.0)
        away = math.ceil(min(sent, fetched))
        if link.room_bytes is None:
            return away
        return min(away, link.room_bytes)

    roomier = []
    most_bytes = 0
    for number, stage in enumerate(stages):
        # While a stage runs it is neither done nor still to come.
        done_backward = before_forward[-1] + before_backward[number + 1]
        away = elsewhere(done_backward, whole - done_backward - backward[number])
        done_forward = before_forward[number]
        away_forward = elsewhere(done_forward, whole - done_forward - forward[number])
        most_bytes = max(most_bytes, away, away_forward)
        roomier.append(
            replace(
                stage,
                room_bytes=stage.room_bytes + away,
                forward_room_bytes=stage.forward_room_bytes + away_forward,
            )
        )
    return roomier, most_bytes


def _bound_within(stages: list[LeastStage], budget_bytes: int) -> float:
    """The bound for stages and the rooms that they have; none of these is larger than the budget."""
    n = len(stages)
    limits = effort.current
    # A gap of each length up to ``reach`` from each stage takes n · reach² / 2 sums of rows with so many slots.
    longest = int(math.sqrt(2 * limits.bound_sums / (limits.bound_least_slots * n)))
    reach = min(n, max(longest, 2))
    affordable = int(2 * limits.bound_sums / (n * reach**2))
    slots = max(min(affordable, limits.bound_most_slots), limits.bound_least_slots)
    # Least seconds of every run of stages that can be one.
    gaps: Seconds = np.full((n, n), math.inf)
    if n > 2:
        starts = range(1, n - 1)
        _Knapsacks(stages, gaps, budget_bytes, slots=slots, starts=starts, reach=reach).solve()
        for first in reversed(range(n - reach)):
            # A longer one takes at least the sum of its parts.
            cut = first + reach
            gaps[first, cut:] = gaps[first, cut - 1] + gaps[cut, cut:]
    # The step is a single gap, which can afford the most slots.
    most_slots = limits.bound_most_slots
    step = _Knapsacks(stages, gaps, budget_bytes, slots=most_slots, starts=range(1), reach=n)
    return step.solve() * (1 - ROUNDING)


class _Knapsacks:
    """Least seconds of the stages from ``c`` to before ``t`` by the memory kept and held, for some ``c`` and all ``t``.

    A row of each array belongs to one ``c``, a column to an amount of memory in slots. Of ``gaps``, those that start at
    one of the consecutive ``starts`` are filled in; the later ones must be there.
    """

    def __init__(
        self,
        stages: list[LeastStage],
        gaps: Seconds,
        budget_bytes: int,
        *,
        slots: int,
        starts: range,
        reach: int,
    ) -> None:
        self._stages = stages
        self._gaps = gaps
        self._unit = max(budget_bytes / slots, 1.0)
        self._size = int(budget_bytes / self._unit) + 2
        self._starts = starts
        self._reach = reach
        # By stage: least seconds of all before it, where its input is there for a gap that starts with it.
        self._sources: dict[int, Seconds] = {}
        # By start: the largest bound of all moments so far, without first runs; and the first runs so far.
        self._best = np.zeros(len(starts))
        self._first = np.zeros(len(starts))
        # By start: every stage so far can be part of a gap.
        self._unbroken = np.ones(len(starts), bool)

    def solve(self) -> float:
        """Fill in the gaps; returns least seconds from the first start on if the first runs there are the step's."""
        states: dict[_Key, Seconds] = {}
        # The largest bound of all first runs.
        forward = 0.0
        for index in range(self._starts.start, len(self._stages)):
            rows = self._rows(index)
            if index in self._starts:
                # From here on another start: nothing is kept, and nothing has run.
                states.setdefault((0, "kept"), self._nothing())[rows.stop - 1] = 0.0
            # From the first run of a stage on it still takes its set and backward, and so do all behind it.
            forward = max(forward, self._forward_moment(index, states)) + self._stages[index].kept_seconds
            self._moment(index, rows, states)
            states = self._next(index, rows, states)
        return float(max(forward, self._best[0]) + self._first[0])

    def _rows(self, index: int) -> slice:
        """Rows of the starts that can reach a stage."""
        begin = max(index - self._reach + 1, self._starts.start)
        return slice(begin - self._starts.start, min(index + 1, self._starts.stop) - self._starts.start)

    def _nothing(self) -> Seconds:
        """No execution yet, for any start and memory."""
        return np.full((len(self._starts), self._size), math.inf)

    def _moment(self, index: int, rows: slice, states: dict[_Key, Seconds]) -> None:
        """Record the backward of a stage: gaps that end here, and the best of all moments."""
        stage = self._stages[index]
        kept = self._least(stage, rows, states, lambda way: way.kept_seconds)
        first = self._first[rows]
        best = self._best[rows]
        if stage.recomputable:
            ends = self._least(stage, rows, states, lambda way: way.last_seconds if way.saves else math.inf)
            last = min(way.last_seconds for way in stage.ways)
            # The largest of all moments counts: of this backward, and of those before it with what this one takes.
            gap = first + np.maximum(ends, best + last)
            if not all(way.saves for way in stage.ways):
                # Nothing runs for a stage that saves nothing: the gap ends before it.
                before = np.zeros_like(gap)
                if index:
                    before = self._gaps[self._starts.start :, index - 1][rows].copy()
                own_row = index - self._starts.start - rows.start
                if own_row < len(before):
                    # A gap of this stage alone has nothing before it.
                    before[own_row] = 0.0
                free = min(way.last_seconds for way in stage.ways if not way.saves)
                gap = np.minimum(gap, before + free)
            gap[~self._unbroken[rows]] = math.inf
            self._gaps[self._starts.start :][rows, index] = gap
        else:
            # A stage that must be kept is in no gap.
            self._unbroken[rows] = False
        best = np.maximum(best + stage.kept_seconds, kept)
        self._best[rows] = best
        self._first[rows] = first + stage.first_seconds

    def _least(
        self,
        stage: LeastStage,
        rows: slice,
        states: dict[_Key, Seconds],
        seconds: Callable[[LeastWay], float],
    ) -> Seconds:
        """By row, the least seconds of the stage and of everything before it that fits beside its backward."""
        least = np.full(rows.stop - rows.start, math.inf)
        for way in stage.ways:
            for (saved, _), before in states.items():
                room = stage.room_bytes - way.moment_bytes(stage.input_bytes, saved)
                if room >= 0:
                    column = before[rows, self._column(room)]
                    np.minimum(least, column + seconds(way), out=least)
        return least

    def _forward_moment(self, index: int, states: dict[_Key, Seconds]) -> float:
        """Least seconds from the first start on of what fits beside the first run of a stage, its input held."""
        stage = self._stages[index]
        room = stage.forward_room_bytes - stage.input_bytes
        if room < 0:
            return math.inf
        column = self._column(room)
        return min(float(before[0, column]) for before in states.values())

    def _column(self, room_bytes: int) -> int:
        """Column of an amount of memory. Sizes are rounded down and room up, so that the bound holds."""
        return min(math.ceil(room_bytes / self._unit), self._size - 1)

    def _next(self, index: int, rows: slice, states: dict[_Key, Seconds]) -> dict[_Key, Seconds]:
        """States after a stage that is kept or that ends a gap."""
        stage = self._stages[index]
        held = self._nothing()
        for before in states.values():
            self._put(held, before, rows, stage.input_bytes, 0.0)
        # A gap starts from a boundary that is held, or that the kept stage before it makes again.
        source = held.copy()
        for (saved, again), before in states.items():
            if again == "kept":
                self._put(source, before, rows, saved, 0.0)
        self._sources[index] = source
        # No gap reaches further back, and each of these arrays has a row for every start.
        self._sources.pop(index - self._reach, None)
        after: dict[_Key, Seconds] = {}
        for way in stage.ways:
            lost = after.setdefault((way.output_bytes, "no"), self._nothing())
            made = after.setdefault((way.output_bytes, "kept"), self._nothing())
            # Its input is held, or there as far as sets save it; True if it can run once more from it.
            inputs = [(True, held, 0)]
            for (saved, again), before in states.items():
                inputs.append((again != "no", before, way.saved_input_bytes(stage.input_bytes, saved)))
            for can_run_again, before, input_bytes in inputs:
                size = way.set_bytes + input_bytes
                self._put(lost, before, rows, size, way.kept_seconds)
                if can_run_again and stage.recomputable:
                    self._put(made, before, rows, size, way.kept_seconds + stage.first_seconds)
        if stage.recomputable:
            gap = self._after_gaps(index)
            lost = after.setdefault((0, "no"), self._nothing())
            np.minimum(lost, gap, out=lost)
            after[0, "gap"] = gap + stage.output_seconds
        return after

    def _after_gaps(self, last: int) -> Seconds:
        """Least seconds up to a stage that ends a gap."""
        least = self._nothing()
        for first, source in self._sources.items():
            seconds = self._gaps[first, last]
            if seconds < math.inf:
                rows = slice(self._rows(last).start, self._rows(first).stop)
                np.minimum(least[rows], source[rows] + seconds, out=least[rows])
        return least

    def _put(self, into: Seconds, before: Seconds, rows: slice, size_bytes: int, seconds: float) -> None:
        """Lower ``into`` to ``before`` with an addition of ``size_bytes`` and ``seconds``."""
        slots = int(size_bytes / self._unit)
        if slots < self._size:
            target = into[rows, slots:]
            np.minimum(target, before[rows, : self._size - slots] + seconds, out=target)
