"""Schedules that a solved table proposes, judged by the simulator.

A table is a staircase of schedules by memory. It counts in slots and approximates, so a schedule from slightly above a
budget may fit it in bytes and one from slightly below may not: only the simulator tells.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from lightning_rotor.chain import Chain
from lightning_rotor.planning import kernel
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.kernel import CLASS, TAKEN, Choices, Integers, Seconds
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment, make_room_for
from lightning_rotor.simulator import Conditions, Simulation, first_inverted, simulate_below

# -------------------------------------------------- a table → schedules: decisions found again, in O(n) per item

# Calls per level of nested segments, the construction of tuples included.
_CALLS = 4


def schedule_at(table: Table, memory: int) -> Schedule:
    """The schedule behind ``table.seconds[memory]``, which must be finite."""
    make_room_for(_CALLS * len(table.requirements.endings))  # the depth is not known before
    return Schedule(tuple(_Backtracking(table).recorded(memory, 0, len(table.requirements.endings) - 1, 0, 0)))


class _Decision(NamedTuple):
    """How an interval begins: with a leaf, or with a segment of ``body_memory`` slots; the rest gets ``left`` slots."""

    seconds: float
    leaf: Leaf | None
    end: int
    body_memory: int
    variant: int
    left: int
    source: int


class _Backtracking:
    def __init__(self, table: Table) -> None:
        self._a, self._t = table.requirements, table.rows
        self._top = len(self._a.endings) - 1
        self._variants, self._options = self._a.bare.shape[1] - 1, self._a.bare.shape[2]

    def recorded(self, memory: int, first: int, last: int, ending: int, source: int) -> Iterator[Item]:
        """Items of a rest, or of a body that needs a recomputation."""
        while first <= last:
            decision = self._decide(memory, first, last, ending, source)
            assert decision.seconds < np.inf, "the table holds no schedule here"
            yield decision.leaf or Segment(
                tuple(self._body(decision.body_memory, first, decision.end, decision.variant))
            )
            memory, first, source = decision.left, decision.end + 1, decision.source

    def _body(self, memory: int, first: int, last: int, variant: int) -> Iterator[Item]:
        """Items of a body."""
        bare: list[Leaf] = []
        while first <= last:
            seconds = self._seconds(kernel.bare(self._a, self._t, first, last, variant), memory)
            row = kernel.body_row(self._a, self._t, first, last, variant)
            if seconds.min() > self._numbers(np.array([row]), np.array([memory]))[0]:
                endings = np.flatnonzero(self._a.trigger[last, : self._a.endings[last]] <= memory).tolist()
                best = min(endings, key=lambda ending: self._decide(memory, first, last, ending, variant).seconds)
                yield from self.recorded(memory, first, last, best, variant)
                break
            bare.append(Leaf(last, int(np.argmin(seconds))))
            last -= 1
        yield from reversed(bare)

    def _decide(self, memory: int, first: int, last: int, ending: int, source: int) -> _Decision:
        """The best beginning of an interval."""
        a, t = self._a, self._t
        choices = kernel.kept(a, t, first, last, ending, source)
        seconds = self._seconds(choices, memory)
        way = int(np.argmin(seconds))
        ways = (a.ended[last, ending] if first == last else a.kept[first])[source, :, way]
        leaf = Leaf(first, way % self._options)
        left, following = memory - int(ways[TAKEN]), self._variants + int(ways[CLASS])
        kept = _Decision(float(seconds[way]), leaf, first, 0, 0, left, following)
        variant = source
        if source >= self._variants:
            at = int(last == self._top), first, source - self._variants
            if memory < a.segment_least[at]:
                return kept
            memory, variant = memory - int(a.input_slots[first]), int(a.segment_variant[at])
        if first == last:
            return kept
        choices = kernel.segments(a, t, first, last, ending, variant)
        seconds = self._seconds(choices, memory)
        best = int(np.argmin(seconds))
        if kept.seconds <= seconds[best]:
            return kept
        body_memory, left = memory - int(choices.shift[best]), memory - int(choices.other_shift[best])
        return _Decision(float(seconds[best]), None, first + best, body_memory, variant, left, self._variants)

    def _seconds(self, choices: Choices, memory: int) -> Seconds:
        """Seconds of each choice; infinite where the memory is too little."""
        seconds = self._numbers(choices.row, memory - choices.shift)
        seconds = seconds + self._numbers(choices.other, memory - choices.other_shift) + choices.seconds
        return np.where(choices.low <= memory, seconds, np.inf)

    def _numbers(self, rows: Integers, slots: Integers) -> Seconds:
        """Numbers of the table by row and slot."""
        start, first, last = self._t.spans[rows].T
        there = slots >= first
        return np.where(there, self._t.values[np.where(there, start + np.minimum(slots, last), 0)], np.inf)


# -------------------------------------------------- edits, for the last bytes that no table sees


_LONGEST_WRAP = 3
# Sums of the same durations in another order differ by less.
_ROUNDING = 1 - 1e-12


def edits(schedule: Schedule, chain: Chain) -> Iterator[Schedule]:
    """Every schedule that is one edit away: O(n) for ``n`` stages."""
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
    """The options that save the next less and the next more bytes."""
    options = chain.stages[stage].options
    ranks = sorted(range(len(options)), key=lambda each: options[each].kept_bytes)
    at = ranks.index(option)
    return ranks[max(at - 1, 0) : at] + ranks[at + 1 : at + 2]


# -------------------------------------------------------------------- schedules near a budget


# Stairs tried above the budget: at least the first number, and on short chains the second number over the stages.
_HOPEFUL = 16
_HOPEFUL_STAGES = 512
# Most stages for two edits, instead of one, of a candidate that is just too large.
_TWICE_EDITED_STAGES = 8


# Sort keys: the fastest first, or the smallest.
by_seconds, by_peak = attrgetter("seconds", "peak_bytes"), attrgetter("peak_bytes", "seconds")


class Judge:
    """Simulates schedules of a chain, each of them once. The tables of a solver share it."""

    def __init__(self, chain: Chain, step: Conditions) -> None:
        self._chain, self._step = chain, step
        self._known: dict[Schedule, Simulation | float] = {}  # or what it takes at least

    def __call__(self, schedule: Schedule) -> Simulation:
        """What a schedule costs."""
        judged = self.within(math.inf, schedule)
        assert judged is not None
        return judged

    def within(self, budget_bytes: float, schedule: Schedule) -> Simulation | None:
        """What a schedule costs if it fits a budget. That one does not is known before its simulation ends."""
        known = self._known.get(schedule, 0.0)
        if not isinstance(known, Simulation) and known <= budget_bytes:
            found = simulate_below(self._chain, schedule, budget_bytes + 1, **self._step)
            known = self._known[schedule] = budget_bytes + 1 if found is None else found
        return known if isinstance(known, Simulation) and known.peak_bytes <= budget_bytes else None


@dataclass(eq=False)
class Candidates:
    """Proposals of one table, by rising memory and falling seconds; judged when asked for and remembered.

    The table may be wrong by ``uncertain_bytes``. If ``thorough``, candidates that exceed a budget by no more than that
    are edited until they fit, and the smallest one until it gets no smaller.
    """

    chain: Chain
    table: Table
    unit: float
    is_exact: bool
    judge: Judge
    uncertain_bytes: int
    thorough: bool

    def __post_init__(self) -> None:
        seconds = self.table.seconds
        self._stairs = [int(slot) for slot in np.flatnonzero(seconds < np.concatenate(([math.inf], seconds[:-1])))]
        self._candidates: dict[int, Simulation] = {}
        self._near: dict[int, list[Schedule]] = {}

    def __len__(self) -> int:
        return len(self._stairs)

    @property
    def lowest_bytes(self) -> float:
        """Least memory for which the table holds a schedule, by its own count."""
        return self._stairs[0] * self.unit if self._stairs else math.inf

    def __getitem__(self, stair: int) -> Simulation:
        if stair not in self._candidates:
            self._candidates[stair] = self.judge(schedule_at(self.table, self._stairs[stair]))
        return self._candidates[stair]

    def fastest(self, budget_bytes: int) -> Simulation | None:
        """The fastest that fits of all hopeful candidates and their edits; never slower for more budget."""
        best: Simulation | None = None
        for stair in range(self._hopeful_stair(budget_bytes), -1, -1):
            if best is not None and self.table.seconds[self._stairs[stair]] * _ROUNDING >= best.seconds:
                break
            fitting = self._fitting(stair, budget_bytes)
            best = min(fitting if best is None else [best, *fitting], key=by_seconds, default=None)
        return best

    def lowest(self) -> list[Simulation]:
        """Those that may have the least peak as far as the table tells, by rising peak."""
        # With skips the table is further from the truth, so the least may be anywhere.
        hopeful = len(self) - 1 if self.thorough and self.chain.skips else self._hopeful_stair(0)
        return sorted((self[stair] for stair in range(hopeful + 1)), key=by_peak)

    def descended(self, candidate: Simulation) -> Simulation:
        """The candidate after edits, as long as they make it smaller."""
        while self.thorough:
            least = candidate
            for schedule in self._neighbours(candidate.schedule):
                found = self.judge.within(least.peak_bytes, schedule)
                if found is not None and by_peak(found) < by_peak(least):
                    least = found
            if least is candidate:
                break
            candidate = least
        return candidate

    def _hopeful_stair(self, budget_bytes: int) -> int:
        """The highest stair worth a try."""
        fitting = int(np.searchsorted(self._stairs, budget_bytes / self.unit, side="right")) - 1
        return min(fitting + max(_HOPEFUL, _HOPEFUL_STAGES // len(self.chain)), len(self._stairs) - 1)

    def _fitting(self, stair: int, budget_bytes: int) -> list[Simulation]:
        """The candidate if it fits; if it is just too large, its edits that do."""
        base = self[stair]
        if base.peak_bytes <= budget_bytes:
            return [base]
        if not self.thorough or base.peak_bytes - budget_bytes > self.uncertain_bytes:
            return []
        if stair not in self._near:
            self._near[stair] = self._neighbours(base.schedule)
        edited = [self.judge.within(budget_bytes, schedule) for schedule in self._near[stair]]
        # None is faster, so the stairs stay in order; and none takes so much less that other budgets would not find it.
        least = base.peak_bytes - self.uncertain_bytes
        return [each for each in edited if each and each.peak_bytes >= least and each.seconds >= base.seconds]

    def _neighbours(self, schedule: Schedule) -> list[Schedule]:
        """Schedules one edit away, or two if the chain is short."""
        seen = {schedule}
        front, near = [schedule], []
        for _ in range(2 if len(self.chain) <= _TWICE_EDITED_STAGES else 1):
            new = {edited: None for each in front for edited in edits(each, self.chain) if edited not in seen}
            seen.update(new)
            front = list(new)
            near += front
        return near
