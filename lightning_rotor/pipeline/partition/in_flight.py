r"""The fastest schedule of a run of stages that has several micro-batches in flight.

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError
from lightning_rotor.pipeline.partition.sub_chains import END, with_end, without_end
from lightning_rotor.pipeline.stage_loads import MicroBatchLoad
from lightning_rotor.planning.backtracking import schedule_at
from lightning_rotor.planning.effort import SAME
from lightning_rotor.planning.kernels import Seconds
from lightning_rotor.planning.schedule_search import keep_all_fastest, segments_around, solved_table
from lightning_rotor.planning.solver import Solver
from lightning_rotor.schedule import Leaf, Schedule, Segment
from lightning_rotor.simulator import Event, Simulation, simulate

# Sums of two numbers in one table: 0.1 s. A table of n stages has about n³ / 6 of them for each slot.
_SUMS = 2e7
_LEAST_SLOTS, _MOST_SLOTS = 400, 4000
# Of a plan besides its table, in the units of ``search``'s work: a constant, so that cuts do not depend on the machine.
_PLAN_WORK = 500_000
# Nodes before the search takes what it has, and how much slower than its bound that may be when it stops before.
_NODES = 48
_CLOSE_ENOUGH = 5e-4
# Reach of tables beyond the peak of the plainest schedules.
_ROOM = 1.25
# Schedules with less memory that are tried where one exceeds its slots.
_TRIES = 16


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
        forwards: list[Event] = []
        backwards: list[Event] = []
        event_seconds = 0.0
        recompute_seconds = 0.0
        for event in self.simulation.events:
            event_seconds += event.seconds
            if event.phase == "recompute":
                recompute_seconds += event.seconds
            part = forwards if event.phase == "forward" else backwards
            part.append(event)
        # The host's time around segments is in no event. They are there for the recomputation, so it is that's.
        segment_seconds = self.seconds - event_seconds
        forward_seconds = sum(event.seconds for event in forwards)
        first_backwards = [event for event in self.first_simulation.events if event.phase != "forward"]
        return MicroBatchLoad(
            forward_seconds=forward_seconds,
            backward_seconds=self.seconds - forward_seconds,
            recompute_seconds=recompute_seconds + segment_seconds,
            held_bytes=self.held_bytes,
            forward_peak_bytes=_peak_bytes(forwards),
            backward_peak_bytes=_peak_bytes(backwards),
            first_backward_peak_bytes=_peak_bytes(first_backwards),
        )


def _peak_bytes(events: Sequence[Event]) -> int:
    return max(event.peak_bytes for event in events)


class InFlightPlanner:
    """Plans one part of a chain for any number of micro-batches in flight and any budget; known plans are kept."""

    def __init__(self, chain: Chain, *, gradients_exist: bool = True, received: bool = False) -> None:
        self._chain, self._received, self._gradients_exist = chain, received, gradients_exist
        # As many as one table may cost.
        slots = _SUMS / (len(chain) ** 3 / 6)
        self._slots = int(min(max(slots, _LEAST_SLOTS), _MOST_SLOTS))
        # Micro-batches in flight, budget, and the plan; None where there is none.
        self._plans: list[tuple[int, int, StagePlan | None]] = []
        # Work that plans have cost: a table each, and what comes with it.
        self.work = 0
        self.least, self._columns = cache(self._least), cache(self._solved)

    @cached_property
    def kept(self) -> StagePlan:
        """Plan without recomputation, every stage under the fastest of its options."""
        return StagePlan(self._chain, keep_all_fastest(self._chain))

    @cached_property
    def checkpointed(self) -> StagePlan:
        """Plan with the whole part in one segment, as torchgpipe's partitions; what must be kept, is."""
        chain = self._chain
        items = segments_around(chain, 0, len(chain) - 1)
        if isinstance(items[-1], Segment):
            # A schedule must not end in a segment.
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
        # The best plan for more memory is best wherever it fits. If there was none for more memory, there is none.
        for fewer, more, other in self._plans:
            is_looser = fewer <= in_flight and more >= budget_bytes
            if is_looser and (other is None or self._fits(other, in_flight, budget_bytes)):
                return other
        self.work += _PLAN_WORK + self._slots * len(self._chain) ** 3 // 6
        plan = self._planned(in_flight, budget_bytes)
        self._plans.append((in_flight, budget_bytes, plan))
        return plan

    def _fits(self, plan: StagePlan, in_flight: int, budget_bytes: int) -> bool:
        alone = plan.first_simulation
        if self._gradients_exist:
            alone = plan.simulation
        return (in_flight - 1) * plan.held_bytes + alone.peak_bytes <= budget_bytes

    def _planned(self, in_flight: int, budget_bytes: int) -> StagePlan | None:
        if in_flight == 1:
            # No others hold anything: the planner of a single device has the optimum.
            try:
                plan = self._solver.plan(max(budget_bytes, 1))
            except BudgetError:
                return None
            return StagePlan(self._chain, plan.schedule)
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
        # Bisection by budgets. A plan often takes less than its budget, so what it takes is the new upper end.
        plans = (self.kept, self.checkpointed)
        best = min(plans, key=lambda plan: plan.bytes(in_flight))
        low, high = 0, best.bytes(in_flight)
        while high - low > max(high // 1000, 1):
            middle = (low + high) // 2
            plan = self.plan(in_flight, middle)
            if plan is None:
                low = middle
            else:
                best, high = plan, plan.bytes(in_flight)
        return best

    def _solved(self, ended: bool) -> _Columns:
        """A table of the chain with an end or without, for all budgets that matter."""
        chain = self._chain
        if ended:
            chain = with_end(chain, received=self._received)
        # A schedule that holds less may have a larger peak than one that keeps everything.
        kept = StagePlan(chain, keep_all_fastest(chain))
        most_bytes = max(kept.bytes(1), self.checkpointed.bytes(1))
        return _Columns(chain, math.ceil(_ROOM * most_bytes), self._slots)


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
        # The table is solved again in place for the next floor.
        return self._table.seconds.copy()

    def plan(self, memory: int, floor: int) -> StagePlan:
        """Plan of ``seconds(floor)[memory]``, which must be finite; without the end where it needs none."""
        # The table may stand at another floor.
        self._table.solve_last_column(floor=floor)
        chain, schedule = self.chain, schedule_at(self._table, memory)
        if chain.names[-1] != END:
            return StagePlan(chain, schedule)
        shorter = without_end(schedule)
        if shorter is None:
            return StagePlan(chain, schedule)
        return StagePlan(replace(chain, stages=chain.stages[:-1]), shorter)


class _Search:
    """Best-first search over the memory that a micro-batch may hold."""

    def __init__(
        self,
        columns: _Columns,
        in_flight: int,
        budget_bytes: int,
        best: StagePlan | None,
    ) -> None:
        self._columns, self._in_flight = columns, in_flight
        self._budget_bytes, self._best = budget_bytes, best
        # A heap of the bound in seconds and of the slots that may be held.
        self._nodes: list[tuple[float, int, int]] = []
        # The table does not count these.
        self._always_bytes = columns.chain.always_bytes

    def run(self) -> StagePlan | None:
        """The fastest plan that fits, or None."""
        unit = self._columns.unit
        # Each of k micro-batches holds at most a k-th of the budget.
        own_bytes = self._budget_bytes / self._in_flight - self._always_bytes
        most = int(own_bytes / unit) + 1
        self._push(0, min(most, self._columns.top))
        for _ in range(_NODES):
            if not self._nodes or not self._may_be_better(self._nodes[0][0]):
                return self._best
            _, low, high = heapq.heappop(self._nodes)
            memory = self._memory(low)
            floor = max(memory - high, 0)
            plan = self._columns.plan(memory, floor)
            if self._takes(plan):
                continue
            held = round((plan.held_bytes - self._always_bytes) / unit)
            held = min(max(held, low), high)
            if held == low or low == high:
                # The node counts with what the plan holds, and it does not fit all the same: its peak is larger in
                # bytes than in slots. A split would find it again.
                self._take_below(memory, floor)
            if low < high:
                middle = max(held, low + 1)
                self._push(low, middle - 1)
                self._push(middle, high)
        # Out of patience: what surely fits, since others are taken to hold the most.
        for _, _, high in self._nodes:
            memory = self._memory(high)
            self._take_below(memory, max(memory - high, 0))
        return self._best

    def _memory(self, held: int) -> int:
        """Slots for one micro-batch if each of the others holds ``held`` slots."""
        unit = self._columns.unit
        others_bytes = (self._in_flight - 1) * (self._always_bytes + held * unit)
        slots = math.floor((self._budget_bytes - others_bytes) / unit)
        if not self._columns.exact:
            # Costs are rounded up, so a schedule that fits in bytes may need a slot more. Bytes decide in the end.
            slots += 1
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
        # Rounded costs prove nothing finer than that.
        tolerance = SAME if self._columns.exact else _CLOSE_ENOUGH
        return seconds < self._best.seconds * (1 - tolerance)

    def _take_below(self, memory: int, floor: int) -> None:
        """Take the first of the schedules with less memory that fits in bytes."""
        if memory < 0:
            return
        seconds = self._columns.seconds(floor)[: memory + 1]
        # Where less memory takes more seconds there is another schedule; most memory, and so least seconds, first.
        before = np.concatenate(([math.inf], seconds[:-1]))
        stairs = np.flatnonzero(seconds < before)[::-1]
        for stair in stairs[:_TRIES].tolist():
            if not self._may_be_better(float(seconds[stair])):
                return
            if self._takes(self._columns.plan(stair, floor)):
                return

    def _takes(self, plan: StagePlan) -> bool:
        """Keep a plan if it is the fastest so far; False if it does not fit."""
        fits = plan.bytes(self._in_flight) <= self._budget_bytes
        if fits and (self._best is None or plan.seconds < self._best.seconds):
            self._best = plan
        return fits
