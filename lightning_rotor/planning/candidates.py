"""Schedules that a solved table proposes, judged by the simulator.

A table is a staircase: with more memory the step gets faster at some slots and stays the same between them. Each stair
is a schedule. The table counts in slots and with a few approximations, so a schedule from slightly above a budget may
fit it in bytes, and one from slightly below may not; only the simulator tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from lightning_rotor.chain import Chain
from lightning_rotor.planning.backtracking import schedule_at
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment
from lightning_rotor.simulator import Simulation, first_inverted

# ----------------------------------------------------------------------------------------------------
# Small changes of a schedule, for the last bytes that the dynamic program cannot see.


_LONGEST_WRAP = 3
# Sums of the same durations in another order differ by less.
_ROUNDING = 1 - 1e-12


def edits(schedule: Schedule, chain: Chain) -> Iterator[Schedule]:
    """Every schedule that is one edit away. There are O(n) of them for ``n`` stages."""
    found = (Schedule(items) for items in _edited(schedule.items, chain))
    if not any(option.inverts for stage in chain for option in stage.options):
        return found
    return (each for each in found if first_inverted(chain, each) is None)


def _edited(items: tuple[Item, ...], chain: Chain) -> Iterator[tuple[Item, ...]]:
    for index, item in enumerate(items):
        before, after = items[:index], items[index + 1 :]
        match item:
            case Segment(inside):
                yield (*before, *inside, *after)
                yield from ((*before, Segment(changed), *after) for changed in _edited(inside, chain))
                if len(inside) > 1 and isinstance(inside[-2], Leaf):
                    yield (*before, Segment(inside[:-1]), inside[-1], *after)
                match after:
                    case (Segment(more), *rest):
                        yield (*before, Segment(inside + more), *rest)
                        yield (*before, Segment((item, *more)), *rest)
                    case (Leaf(stage) as leaf, *rest) if rest and chain.stages[stage].recomputable:
                        yield (*before, Segment((*inside, leaf)), *rest)
            case Leaf(stage, option):
                yield from ((*before, Leaf(stage, other), *after) for other in _next_options(chain, stage, option))
                for length in range(1, _LONGEST_WRAP + 1):
                    wrapped, behind = items[index : index + length], items[index + length :]
                    if behind and all(
                        isinstance(each, Leaf) and chain.stages[each.stage].recomputable for each in wrapped
                    ):
                        yield (*before, Segment(wrapped), *behind)


def _next_options(chain: Chain, stage: int, option: int) -> list[int]:
    """The options that save the next less and the next more."""
    options = chain.stages[stage].options
    saved = [
        (each.saved_bytes + each.saved_input_bytes + each.saved_output_bytes, number)
        for number, each in enumerate(options)
    ]
    ranks = [number for _, number in sorted(saved)]
    at = ranks.index(option)
    return ranks[max(at - 1, 0) : at] + ranks[at + 1 : at + 2]


# ----------------------------------------------------------------------------------------------------


# Stairs above the budget that are tried all the same: at least so many, and for short chains so many that their number
# times the number of stages is the second figure.
_HOPEFUL = 16
_HOPEFUL_STAGES = 512
# With skips, so many of the smallest candidates are made smaller by edits.
_DESCENTS = 6
# Up to this many stages a candidate that is just too large gets two edits instead of one.
_TWICE_EDITED_STAGES = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule and what the simulator says of it."""

    schedule: Schedule
    simulation: Simulation

    @property
    def by_seconds(self) -> tuple[float, int]:
        """Sorts the fastest first."""
        return self.simulation.seconds, self.simulation.peak_bytes

    @property
    def by_peak(self) -> tuple[int, float]:
        """Sorts the smallest first."""
        return self.simulation.peak_bytes, self.simulation.seconds


class Candidates:
    """What one table proposes, by rising memory and falling seconds. Judged when asked for, and then remembered.

    Args:
        chain: What the table was solved for.
        table: The solved table.
        unit: Bytes per slot.
        judge: Simulates a schedule.
        uncertain_bytes: By how much the table may be wrong, in the eyes of the simulator.
        thorough: Edit candidates that exceed a budget by no more than that until they fit, and the smallest one until it
            gets no smaller.
    """

    def __init__(
        self,
        chain: Chain,
        table: Table,
        *,
        unit: float,
        judge: Callable[[Schedule], Candidate],
        uncertain_bytes: int,
        thorough: bool,
    ) -> None:
        self._chain = chain
        self._table = table
        self._unit = unit
        self._judge = judge
        self._uncertain_bytes = uncertain_bytes if thorough else 0
        self._thorough = thorough
        seconds = table.seconds
        self._stairs = [int(slot) for slot in np.flatnonzero(seconds < np.concatenate(([math.inf], seconds[:-1])))]
        self._candidates: dict[int, Candidate] = {}
        self._edited: dict[int, list[Candidate]] = {}

    def __len__(self) -> int:
        return len(self._stairs)

    @property
    def lowest_bytes(self) -> float:
        """Least memory for which the table holds a schedule, by its own count."""
        return self._stairs[0] * self._unit if self._stairs else math.inf

    def __getitem__(self, stair: int) -> Candidate:
        if not 0 <= stair < len(self._stairs):
            raise IndexError(f"stair {stair} of {len(self._stairs)}")
        if stair not in self._candidates:
            self._candidates[stair] = self._judge(schedule_at(self._table, self._stairs[stair]))
        return self._candidates[stair]

    def fastest(self, budget_bytes: int) -> Candidate | None:
        """The fastest that fits of all hopeful candidates and their edits.

        Candidates get slower downwards, so the search ends soon. A larger budget starts at the same stair or a higher
        one, and everything that fitted before still does: it never ends at a slower one.
        """
        best: Candidate | None = None
        for stair in range(self._hopeful_stair(budget_bytes), -1, -1):
            if best is not None and self._table.seconds[self._stairs[stair]] * _ROUNDING >= best.simulation.seconds:
                break
            fitting = [each for each in self._around(stair, budget_bytes) if each.simulation.peak_bytes <= budget_bytes]
            best = min(fitting if best is None else [best, *fitting], key=lambda each: each.by_seconds, default=None)
        return best

    def smallest(self) -> Candidate | None:
        """The least peak: of one of the lowest schedules, as the simulator says, or of what edits make of it."""
        # With skips the table is further from the truth, so the least may be anywhere.
        hopeful = len(self) - 1 if self._thorough and self._chain.skips else self._hopeful_stair(0)
        lowest = [self[stair] for stair in range(hopeful + 1)]
        lowest.sort(key=lambda each: each.by_peak)
        starts = lowest[: _DESCENTS if self._chain.skips else 1]
        least = min(map(self._descended, starts), key=lambda each: each.by_peak, default=None)
        # Edits lead down from other stairs, too. What no budget finds is not there: see fastest().
        while least is not None and (less := self.fastest(least.simulation.peak_bytes - 1)) is not None:
            least = self._descended(less)
        return least

    def _descended(self, candidate: Candidate) -> Candidate:
        """What edits make of it, as long as it gets smaller."""
        while self._thorough:
            better = min([candidate, *self._neighbours(candidate)], key=lambda each: each.by_peak)
            if better is candidate:
                break
            candidate = better
        return candidate

    def _hopeful_stair(self, budget_bytes: int) -> int:
        """The highest stair worth a try."""
        fitting = int(np.searchsorted(self._stairs, budget_bytes / self._unit, side="right")) - 1
        return min(fitting + max(_HOPEFUL, _HOPEFUL_STAGES // len(self._chain)), len(self._stairs) - 1)

    def _around(self, stair: int, budget_bytes: int) -> list[Candidate]:
        """A candidate, and if it is just too large, its edits."""
        candidate = self[stair]
        if not 0 < candidate.simulation.peak_bytes - budget_bytes <= self._uncertain_bytes:
            return [candidate]
        if stair not in self._edited:
            self._edited[stair] = self._edit(candidate)
        return [candidate, *self._edited[stair]]

    def _edit(self, candidate: Candidate) -> list[Candidate]:
        """Schedules near another that need a little less memory; none is faster, so that the stairs stay in order."""
        base = candidate.simulation
        return [
            each
            for each in self._neighbours(candidate)
            # Only by so much that an edit is tried for every budget that it fits: see _around.
            if 0 < base.peak_bytes - each.simulation.peak_bytes <= self._uncertain_bytes
            and each.simulation.seconds >= base.seconds
        ]

    def _neighbours(self, candidate: Candidate) -> list[Candidate]:
        """What is one edit away, or two if the chain is short."""
        seen = {candidate.schedule}
        front, near = [candidate.schedule], []
        for _ in range(2 if len(self._chain) <= _TWICE_EDITED_STAGES else 1):
            new = {edited: None for schedule in front for edited in edits(schedule, self._chain) if edited not in seen}
            seen.update(new)
            front = list(new)
            near += front
        return [self._judge(schedule) for schedule in near]
