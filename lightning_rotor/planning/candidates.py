"""Schedules of one table near a budget, and what the simulator says of them.

A table is a staircase: each stair is a schedule that takes more memory and less time than the one below::

    seconds │▔▔▔▔╲                  The table counts in slots. So a stair from slightly above a budget may fit it in
            │     ▔▔▔╲              bytes, and one from slightly below may not: only the simulator tells.
            │         ▔▔▔▔▔▔▔
            └────────┼──────── memory
                   budget
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter

import numpy as np

from lightning_rotor.chain import Chain
from lightning_rotor.planning.backtracking import schedule_at
from lightning_rotor.planning.bounds import ROUNDING
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.edits import neighbours
from lightning_rotor.planning.effort import Effort
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import Simulation

by_seconds = attrgetter("seconds", "peak_bytes")
"""Sort key of simulations: the fastest first."""

by_peak = attrgetter("peak_bytes", "seconds")
"""Sort key of simulations: the smallest first."""


@dataclass(eq=False)
class Candidates:
    """Schedules of one table, by rising memory and falling seconds; judged when asked for and remembered.

    Attributes:
        chain: The table's chain.
        table: Filled.
        unit: Bytes of a slot.
        is_exact: Every size of the chain is a whole number of slots.
        judge: Simulates a schedule.
        uncertain_bytes: The table's count may be wrong by so much.
        thorough: Candidates that exceed a budget by no more than ``uncertain_bytes`` are edited until they fit.
        effort: How many are tried.
    """

    chain: Chain
    table: Table
    unit: float
    is_exact: bool
    judge: Callable[[Schedule], Simulation]
    uncertain_bytes: int
    thorough: bool
    effort: Effort

    def __post_init__(self) -> None:
        seconds = self.table.seconds
        # A level with no schedule has infinite seconds, so the first stair is the least memory for which there is one.
        is_lower = seconds < np.concatenate(([math.inf], seconds[:-1]))
        self._stairs: list[int] = np.flatnonzero(is_lower).tolist()
        self._judged: dict[int, Simulation] = {}
        self._neighbours = cache(partial(neighbours, self.chain))

    def __len__(self) -> int:
        return len(self._stairs)

    @property
    def lowest_bytes(self) -> float:
        """Least memory for which the table holds a schedule, by its own count."""
        if not self._stairs:
            return math.inf
        return self._stairs[0] * self.unit

    def __getitem__(self, stair: int) -> Simulation:
        if stair not in self._judged:
            self._judged[stair] = self.judge(self.schedule(stair))
        return self._judged[stair]

    def schedule(self, stair: int) -> Schedule:
        """The schedule of a stair, without a judgement."""
        return schedule_at(self.table, self._stairs[stair])

    def fastest(self, budget_bytes: int) -> Simulation | None:
        """The fastest that fits of all hopeful candidates and their edits; never slower for more budget."""
        best: Simulation | None = None
        # Downwards, so that the first that fits is nearly the fastest, and few are judged.
        for stair in range(self._hopeful_stair(budget_bytes), -1, -1):
            least_seconds = self.table.seconds[self._stairs[stair]] * (1 - ROUNDING)
            if best is not None and least_seconds >= best.seconds:
                # So is every stair below.
                break
            fitting = self._fitting(stair, budget_bytes)
            if best is not None:
                fitting = [best, *fitting]
            best = min(fitting, key=by_seconds, default=None)
        return best

    def lowest(self) -> list[Simulation]:
        """Candidates that may have the least peak, as far as the table tells, by rising peak."""
        if self.thorough and self.chain.skips:
            # With skips the table is further from the truth, so the least may be anywhere.
            last_stair = len(self) - 1
        else:
            last_stair = self._hopeful_stair(0)
        simulations = [self[stair] for stair in range(last_stair + 1)]
        return sorted(simulations, key=by_peak)

    def descended(self, candidate: Simulation, attempts: Iterator[int]) -> Simulation:
        """The candidate after edits that make it smaller, as long as there are attempts left."""
        untried = iter(neighbours(self.chain, candidate.schedule))
        for _ in attempts:
            schedule = next(untried, None)
            if schedule is None:
                break
            edited = self.judge(schedule)
            if edited.peak_bytes < candidate.peak_bytes:
                candidate = edited
                # From the better one on: its neighbours differ from those of the one before.
                untried = iter(neighbours(self.chain, edited.schedule))
        return candidate

    def _hopeful_stair(self, budget_bytes: int) -> int:
        """The highest stair worth a try."""
        fitting = int(np.searchsorted(self._stairs, budget_bytes / self.unit, side="right")) - 1
        # The table rounds every size up to slots, so a schedule that it counts above the budget may fit in bytes.
        above = max(self.effort.hopeful, self.effort.hopeful_stages // len(self.chain))
        return min(fitting + above, len(self._stairs) - 1)

    def _fitting(self, stair: int, budget_bytes: int) -> list[Simulation]:
        """The candidate if it fits; if it is just too large, its edits that do."""
        candidate = self[stair]
        if candidate.peak_bytes <= budget_bytes:
            return [candidate]
        if not self.thorough or candidate.peak_bytes - budget_bytes > self.uncertain_bytes:
            return []
        # An edit counts only if it is no faster, so that the stairs stay in order, and if it takes so little less that
        # every budget for which it is the best would find it here: else more budget could give a slower plan.
        least_bytes = candidate.peak_bytes - self.uncertain_bytes
        fitting = []
        for schedule in self._neighbours(candidate.schedule):
            edited = self.judge(schedule)
            if least_bytes <= edited.peak_bytes <= budget_bytes and edited.seconds >= candidate.seconds:
                fitting.append(edited)
        return fitting
