r"""Runs of stages as chains of their own, and the fastest schedule of one that has several micro-batches in flight.

Between its forward and its backward a micro-batch holds ``H`` bytes: what its schedule keeps, the inputs of its
segments, its output. While one of ``k`` runs, the others hold theirs. So of all schedules with a peak ``P`` for a
micro-batch alone we want the fastest with

    (k - 1) · H + P  ≤  budget

The dynamic program must not charge ``k`` times for what it keeps. When the backward of item ``t`` runs, this
micro-batch has given up what is behind ``t``, and the others have not; so the segments at the front would get memory
that is not there::

                item        0       t              T
    k - 1 others            ████████████████████████     all of H, throughout
    the one that runs       ████████░░░░░░░░░░░░░░░░     what is before t, and what t takes meanwhile

But if ``H`` were known, only the budget would change, to ``budget - (k - 1) · H``, and a floor: what is left when the
last stage is kept must be that budget less ``H``. So a *node* ``lo ≤ H ≤ hi`` is solved::

    node [lo, hi]     m = budget - (k - 1) · lo  at the start,  at least  m - hi  left at the end

Its seconds bound those of every schedule with such an ``H``. If its schedule fits with the ``H`` that it has, it is the
best of the node; if not, the node is split into ``[lo, H - 1]`` and ``[H, hi]``. The node with the least bound comes
next. Slots are whole numbers, so this ends, with the optimum of the table. Only the table's last column depends on the
node: O(n² · slots) each. ``k = 1`` is left to :func:`lightning_rotor.planning.plan`.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from lightning_rotor.chain import Chain, Option, Skip, StageCost
from lightning_rotor.errors import BudgetError
from lightning_rotor.pipeline.stage_loads import MicroBatchLoad
from lightning_rotor.planning.backtracking import schedule_at
from lightning_rotor.planning.effort import SAME
from lightning_rotor.planning.kernels import Seconds
from lightning_rotor.planning.schedule_search import keep_all_fastest, segments_around, solved_table
from lightning_rotor.planning.solver import Solver
from lightning_rotor.schedule import Leaf, Schedule, Segment
from lightning_rotor.simulator import Simulation, simulate

END = "hand over"
"""Name of the stage that :func:`with_end` adds."""
# Sums of two numbers in one table: 0.1 s.
_SUMS = 2e7
_LEAST_SLOTS, _MOST_SLOTS = 400, 4000
_PLAN_WORK = 500_000
# Nodes before the search takes what it has, and how much slower than its bound that may be when it stops before.
_NODES = 48
_CLOSE_ENOUGH = 5e-4
# Reach of tables beyond the peak of the plainest schedules.
_ROOM = 1.25
# Schedules with less memory that are tried where one exceeds its slots.
_TRIES = 16


# -------------------------------------------------------------------- runs of stages


def sub_chain(chain: Chain, first: int, last: int) -> Chain:
    """Stages ``first..last`` as a chain whose input, output and parts of skips that cross its ends are the caller's."""
    if first == 0 and last == len(chain) - 1:
        return chain
    inside = {number: _inside(skip, first, last) for number, skip in enumerate(chain.skips) if skip.born != last}
    skips = {number: skip for number, skip in inside.items() if skip is not None}
    numbers = {number: place for place, number in enumerate(skips)}
    # Skips that the last stage makes for stages behind are parts of the output like any other.
    handed_bytes = sum(skip.size_bytes for skip in chain.skips if skip.born == last)
    stages = list(chain.stages[first : last + 1])
    for place, stage in enumerate(stages):
        if any(option.saved_skips for option in stage.options):
            saved = [tuple(numbers[n] for n in option.saved_skips if n in numbers) for option in stage.options]
            options = (replace(option, saved_skips=own) for option, own in zip(stage.options, saved, strict=True))
            stages[place] = replace(stage, options=tuple(options))
    stages[-1] = replace(stages[-1], output_bytes=stages[-1].output_bytes + handed_bytes)
    input_bytes = boundary_bytes(chain, first) if first else chain.input_bytes
    return replace(chain, stages=tuple(stages), input_bytes=input_bytes, skips=tuple(skips.values()))


def boundary_bytes(chain: Chain, boundary: int) -> int:
    """Bytes that cross a cut before a stage: its input and every skip that is needed behind it; nothing at the ends."""
    if not 0 < boundary < len(chain):
        return 0
    crossing = [skip for skip in chain.skips if skip.born < boundary and (skip.in_output or skip.last_use >= boundary)]
    return chain.stages[boundary - 1].output_bytes + sum(skip.size_bytes for skip in crossing)


def with_end(chain: Chain, *, received: bool = False) -> Chain:
    """A chain with a stage that does nothing at its end, so that everything before it may be a segment.

    In a pipeline other micro-batches come between forward and backward. The output counts as the end's, which the
    caller holds; a copy saved by the stage before counts apart: exact if recomputed, too much if kept. ``received``
    says that the output's gradient lies in a buffer that is counted elsewhere.
    """
    last = chain.stages[-1]
    gradient_bytes = 0 if received else last.output_bytes
    peaks = ("unpack_peak_bytes", "backward_peak_bytes", "backward_segment_peak_bytes", "backward_held_peak_bytes")
    nothing: dict[str, Any] = {each.name: 0 for each in fields(Option) if each.default is MISSING}
    gradients = dict.fromkeys((*peaks, "unpack_bytes", "input_gradient_bytes"), gradient_bytes)
    keep = Option(**(nothing | gradients | {"name": "keep"}))
    end = StageCost(END, last.output_bytes, 0, 0.0, (keep,))
    return replace(chain, stages=(*chain.stages, end))


def without_end(schedule: Schedule) -> Schedule | None:
    """A schedule of a chain with an end for the chain without it; None if it needs the end."""
    items = schedule.items[:-1]
    return Schedule(items) if items and isinstance(items[-1], Leaf) else None


def _inside(skip: Skip, first: int, last: int) -> Skip | None:
    """Part of a skip within ``first..last``, if it is read or made there before ``last``."""
    read = [number for number, use in enumerate(skip.uses) if first <= use <= last]
    uses = tuple(skip.uses[number] - first for number in read)
    gradients = tuple(skip.gradient_bytes[number] for number in read)
    if skip.born < first:
        return Skip(-1, uses, 0, gradients) if uses else None
    if skip.born > last:
        return None
    leaves_here = skip.in_output or skip.last_use > last
    if not uses:  # only handed on: as if the last stage read it; its gradient arrives from outside
        uses, gradients = (last - first,), (0,)
    return Skip(skip.born - first, uses, skip.size_bytes, gradients, in_output=leaves_here)


@dataclass(frozen=True)
class StagePlan:
    """A pipeline stage with its schedule for a micro-batch, and an end (:func:`with_end`) if the schedule needs one."""

    chain: Chain
    schedule: Schedule

    @cached_property
    def simulation(self) -> Simulation:
        """Simulation of one micro-batch where gradients of parameters exist: every one but the first."""
        return simulate(self.chain, self.schedule, gradients_exist=True)

    @cached_property
    def first_simulation(self) -> Simulation:
        """Simulation of the first micro-batch, whose backward makes the gradients of parameters."""
        return simulate(self.chain, self.schedule)

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward of a micro-batch, recomputation included."""
        return self.simulation.seconds

    @property
    def held_bytes(self) -> int:
        """Bytes of a micro-batch between forward and backward."""
        return self.simulation.held_bytes

    def bytes(self, in_flight: int) -> int:
        """Most bytes of so many micro-batches together, without the gradients of parameters."""
        return (in_flight - 1) * self.held_bytes + self.simulation.peak_bytes

    @cached_property
    def load(self) -> MicroBatchLoad:
        """Costs for the pipeline's simulator."""
        events, first = self.simulation.events, self.first_simulation.events
        forward = [each for each in events if each.phase == "forward"]
        forward_seconds = sum(each.seconds for each in forward)
        segment_seconds = self.seconds - sum(each.seconds for each in events)
        return MicroBatchLoad(
            forward_seconds=forward_seconds,
            backward_seconds=self.seconds - forward_seconds,
            recompute_seconds=sum(each.seconds for each in events if each.phase == "recompute") + segment_seconds,
            held_bytes=self.held_bytes,
            forward_peak_bytes=max(each.peak_bytes for each in forward),
            backward_peak_bytes=max(each.peak_bytes for each in events if each.phase != "forward"),
            first_backward_peak_bytes=max(each.peak_bytes for each in first if each.phase != "forward"),
        )


class InFlightPlanner:
    """Plans one part of a chain for any number of micro-batches in flight and any budget; known plans are kept."""

    def __init__(self, chain: Chain, *, gradients_exist: bool = True, received: bool = False) -> None:
        self._chain, self._received, self._gradients_exist = chain, received, gradients_exist
        self._slots = int(min(max(_SUMS / (len(chain) ** 3 / 6), _LEAST_SLOTS), _MOST_SLOTS))
        self._plans: list[tuple[int, int, StagePlan | None]] = []  # by micro-batches in flight and budget
        self.work = 0  # that plans have cost: a table each, and what comes with it
        self.least, self._columns = cache(self._least), cache(self._solved)

    @cached_property
    def kept(self) -> StagePlan:
        """Plan without recomputation, every stage under the fastest of its options."""
        return StagePlan(self._chain, keep_all_fastest(self._chain))

    @cached_property
    def checkpointed(self) -> StagePlan:
        """Plan with the whole part in one segment, as torchgpipe's partitions; what must be kept, is."""
        chain, items = self._chain, segments_around(self._chain, 0, len(self._chain) - 1)
        if isinstance(items[-1], Segment):
            chain = with_end(chain, received=self._received)
            items.append(Leaf(len(chain) - 1))
        return StagePlan(chain, Schedule(tuple(items)))

    @cached_property
    def _solver(self) -> Solver:
        return Solver(self._chain, slots=self._slots, gradients_exist=self._gradients_exist)

    def plan(self, in_flight: int, budget_bytes: int) -> StagePlan | None:
        """The fastest plan that fits, or None if none does; optimal up to the table's approximations."""
        if self._fits(self.kept, in_flight, budget_bytes):
            return self.kept
        # The best plan for more memory is best wherever it fits.
        for fewer, more, known in self._plans:
            stricter = fewer <= in_flight and more >= budget_bytes
            if stricter and (known is None or self._fits(known, in_flight, budget_bytes)):
                return known
        self.work += _PLAN_WORK + self._slots * len(self._chain) ** 3 // 6
        found = self._planned(in_flight, budget_bytes)
        self._plans.append((in_flight, budget_bytes, found))
        return found

    def _fits(self, plan: StagePlan, in_flight: int, budget_bytes: int) -> bool:
        alone = plan.simulation if self._gradients_exist else plan.first_simulation
        return (in_flight - 1) * plan.held_bytes + alone.peak_bytes <= budget_bytes

    def _planned(self, in_flight: int, budget_bytes: int) -> StagePlan | None:
        if in_flight == 1:
            try:
                return StagePlan(self._chain, self._solver.plan(max(budget_bytes, 1)).schedule)
            except BudgetError:
                return None
        if budget_bytes <= 0:
            return None
        best = _Search(self._columns(True), in_flight, budget_bytes, None).run()
        # A chain with an end has every schedule of one without, but counts an output that the last stage saves twice.
        if any(option.saved_output_bytes for option in self._chain.stages[-1].options):
            best = _Search(self._columns(False), in_flight, budget_bytes, best).run()
        return best

    def _least(self, in_flight: int) -> StagePlan:
        """The plan of least memory, up to one part in a thousand."""
        if in_flight == 1:
            return StagePlan(self._chain, self._solver.minimum().schedule)
        best = min((self.kept, self.checkpointed), key=lambda plan: plan.bytes(in_flight))
        low, high = 0, best.bytes(in_flight)
        while high - low > max(high // 1000, 1):
            found = self.plan(in_flight, (low + high) // 2)
            if found is None:
                low = (low + high) // 2
            else:
                best, high = found, found.bytes(in_flight)
        return best

    def _solved(self, ended: bool) -> _Columns:
        """A table of the chain with an end or without, for all budgets that matter."""
        chain = with_end(self._chain, received=self._received) if ended else self._chain
        # A schedule that holds less may have a larger peak than one that keeps everything.
        kept = StagePlan(chain, keep_all_fastest(chain))
        return _Columns(chain, math.ceil(_ROOM * max(kept.bytes(1), self.checkpointed.bytes(1))), self._slots)


class _Columns:
    """A solved table, and its last column under a floor."""

    def __init__(self, chain: Chain, most_bytes: int, slots: int) -> None:
        self.chain = chain
        self._table, self.unit, self.exact = solved_table(chain, most_bytes, slots, gradients_exist=True)
        self.top = len(self._table.seconds) - 1
        self.seconds = cache(self._seconds)

    def _seconds(self, floor: int) -> Seconds:
        """Least seconds by memory if ``floor`` slots must be left when the last stage is kept."""
        self._table.solve_last_column(floor=floor)
        return self._table.seconds.copy()

    def plan(self, memory: int, floor: int) -> StagePlan:
        """Plan of ``seconds(floor)[memory]``, which must be finite; without the end where it needs none."""
        self._table.solve_last_column(floor=floor)
        chain, schedule = self.chain, schedule_at(self._table, memory)
        shorter = without_end(schedule) if chain.names[-1] == END else None
        if shorter is not None:
            chain, schedule = replace(chain, stages=chain.stages[:-1]), shorter
        return StagePlan(chain, schedule)


class _Search:
    """Best-first search over the memory that a micro-batch may hold."""

    def __init__(self, columns: _Columns, in_flight: int, budget_bytes: int, best: StagePlan | None) -> None:
        self._columns, self._in_flight, self._budget_bytes, self._best = columns, in_flight, budget_bytes, best
        self._nodes: list[tuple[float, int, int]] = []
        self._always_bytes = columns.chain.always_bytes  # which the table does not count

    def run(self) -> StagePlan | None:
        """The fastest plan that fits, or None."""
        unit = self._columns.unit
        most = int((self._budget_bytes / self._in_flight - self._always_bytes) / unit) + 1
        self._push(0, min(most, self._columns.top))
        for _ in range(_NODES):
            if not self._nodes or not self._may_be_better(self._nodes[0][0]):
                return self._best
            _, low, high = heapq.heappop(self._nodes)
            memory, floor = self._memory(low), max(self._memory(low) - high, 0)
            plan = self._columns.plan(memory, floor)
            if self._takes(plan):
                continue
            held = min(max(round((plan.held_bytes - self._always_bytes) / unit), low), high)
            if held == low or low == high:
                self._take_below(memory, floor)
            if low < high:
                middle = max(held, low + 1)
                self._push(low, middle - 1)
                self._push(middle, high)
        for _, _, high in self._nodes:  # out of patience: what surely fits
            self._take_below(self._memory(high), max(self._memory(high) - high, 0))
        return self._best

    def _memory(self, held: int) -> int:
        """Slots for one micro-batch if each of the others holds ``held`` slots."""
        others = (self._in_flight - 1) * (self._always_bytes + held * self._columns.unit)
        slots = math.floor((self._budget_bytes - others) / self._columns.unit) + (0 if self._columns.exact else 1)
        return min(slots, self._columns.top)

    def _push(self, low: int, high: int) -> None:
        memory = self._memory(low)
        if low > high or memory < 0:
            return
        seconds = float(self._columns.seconds(max(memory - high, 0))[memory])
        if self._may_be_better(seconds):
            heapq.heappush(self._nodes, (seconds, low, high))

    def _may_be_better(self, seconds: float) -> bool:
        if self._best is None:
            return seconds < math.inf
        return seconds < self._best.seconds * (1 - (SAME if self._columns.exact else _CLOSE_ENOUGH))

    def _take_below(self, memory: int, floor: int) -> None:
        """Take the first of the schedules with less memory that fits in bytes."""
        if memory < 0:
            return
        seconds = self._columns.seconds(floor)[: memory + 1]
        stairs = np.flatnonzero(seconds < np.concatenate(([math.inf], seconds[:-1])))[::-1]
        for stair in stairs[:_TRIES].tolist():
            if not self._may_be_better(float(seconds[stair])) or self._takes(self._columns.plan(stair, floor)):
                return

    def _takes(self, plan: StagePlan) -> bool:
        """Keep a plan if it is the fastest so far; False if it does not fit."""
        fits = plan.bytes(self._in_flight) <= self._budget_bytes
        if fits and (self._best is None or plan.seconds < self._best.seconds):
            self._best = plan
        return fits
