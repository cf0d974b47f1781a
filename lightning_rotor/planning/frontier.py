"""The curve of memory against time: schedules that no other one beats in both.

::

overhead
│ ●                    first point: the least budget for which there is a schedule
│  ●
│    ● ← knee: from here on, memory buys less
│        ●
│               ●
└───────────────────●  budget      last point: the least memory without any recomputation
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_rotor.errors import BudgetError, ScheduleError
from lightning_rotor.planning.candidates import by_peak
from lightning_rotor.planning.effort import SAME
from lightning_rotor.planning.schedule_search import ScheduleSearch
from lightning_rotor.shown import Shown
from lightning_rotor.simulator import Simulation
from lightning_rotor.units import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True)
class Gain:
    """Time that additional memory buys.

    Attributes:
        budget_bytes: The budget without it.
        extra_bytes: Additional memory.
        before: The best schedule for the budget.
        after: The best schedule for the budget and the additional memory.
    """

    budget_bytes: int
    extra_bytes: int
    before: Simulation
    after: Simulation

    @property
    def seconds(self) -> float:
        """Seconds saved per step; never negative."""
        return self.before.seconds - self.after.seconds

    @property
    def speedup(self) -> float:
        """Steps per second with it over those without; 1 if it buys nothing."""
        return self.before.seconds / self.after.seconds if self.after.seconds else 1.0

    def describe(self, *, reserved_bytes: int = 0) -> str:
        """The gain in one sentence; ``reserved_bytes`` are added to the budget, so that it is the whole process's."""
        budget = format_bytes(reserved_bytes + self.budget_bytes)
        more = format_bytes(self.extra_bytes)
        # A plan for more memory may be another one of the same duration.
        if self.seconds <= 0:
            return f"{more} more than {budget} buys nothing: the overhead stays at {self.before.overhead:.1%}"
        return (
            f"{more} more than {budget} lowers the overhead from {self.before.overhead:.1%} "
            f"to {self.after.overhead:.1%} ({self.speedup - 1:.1%} more steps per second)"
        )

    __str__ = describe


@dataclass(frozen=True, slots=True)
class Frontier(Shown):
    """Schedules from the least memory to no recomputation, by rising memory and falling time.

    Attributes:
        points: Simulations of schedules that no other one beats in both memory and time, at least one, perhaps without
            events. The first has the least budget for which there is a schedule, the last one takes no longer than
            plain training.
        budget_bytes: The budget of the plan that it was asked of, or None.
    Raises:
        ScheduleError: There are no points, or they do not rise in memory and fall in time.
    Example:
        >>> frontier = plan.frontier()  # doctest: +SKIP
        >>> print(frontier.gain("1GiB"))  # doctest: +SKIP
        1.00 GiB more than 4.00 GiB lowers the overhead from 14.2% to 9.0% (4.8% more steps per second)
    """

    points: tuple[Simulation, ...]
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.points:
            raise ScheduleError("a frontier has no points: expected at least one")
        for left, right in pairwise(self.points):
            if left.peak_bytes >= right.peak_bytes or left.seconds <= right.seconds:
                raise ScheduleError(
                    f"frontier points of {left.peak_bytes} and {right.peak_bytes} bytes take {left.seconds} "
                    f"and {right.seconds} s: expected memory to rise and time to fall"
                )

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Simulation]:
        return iter(self.points)

    def __getitem__(self, index: int) -> Simulation:
        return self.points[index]

    def at(self, budget_bytes: int | str) -> Simulation:
        """The fastest point within a budget.

        Args:
            budget_bytes: Bytes, or a size such as ``"4GiB"``.
        Raises:
            BudgetError: The budget is below the first point.
            UnitError: The size cannot be read.
        """
        budget = parse_bytes(budget_bytes)
        # Points rise in memory and fall in time, so the last that fits is the fastest.
        index = bisect_right(self.points, budget, key=lambda point: point.peak_bytes)
        if not index:
            least = self.points[0].peak_bytes
            raise BudgetError(
                f"budget {format_bytes(budget)} ({budget:,} bytes) is below the first point of the frontier, "
                f"{format_bytes(least)} ({least:,} bytes): expected at least that much",
                budget_bytes=budget,
                minimum_bytes=least,
                stage="",
            )
        return self.points[index - 1]

    def gain(self, extra_bytes: int | str, *, budget_bytes: int | str | None = None) -> Gain:
        """The gain of additional memory.

        Args:
            extra_bytes: Additional memory: bytes, or a size such as ``"1GiB"``.
            budget_bytes: Memory before. By default the budget of the plan that the frontier is of, or the least one.
        Raises:
            BudgetError: The budget is below the first point.
            UnitError: A size cannot be read.
        """
        if budget_bytes is None:
            budget_bytes = self.budget_bytes or self.points[0].peak_bytes
        budget, extra = parse_bytes(budget_bytes), parse_bytes(extra_bytes)
        return Gain(budget, extra, self.at(budget), self.at(budget + extra))

    @property
    def knee(self) -> Simulation:
        """Where the curve bends most: up to there memory buys much, behind it little.

        The (first) point farthest below the line between the ends, with both axes scaled to 1, as in Satopää et al.,
        "Finding a kneedle in a haystack", ICDCS Workshops 2011, without its smoothing.
        """
        first, last = self.points[0], self.points[-1]
        width = last.peak_bytes - first.peak_bytes
        height = first.seconds - last.seconds

        def below(point: Simulation) -> float:
            """Distance below the line between the ends."""
            # A frontier of one point, or of points that rounding cannot tell apart, bends nowhere.
            if not width or not height:
                return 0.0
            right = (point.peak_bytes - first.peak_bytes) / width
            up = (point.seconds - last.seconds) / height
            return 1 - right - up

        return max(self.points, key=below)

    def thinned(self, most: int) -> Frontier:
        """The frontier with at most ``most`` points (4 or more), spread evenly; ends, knee and plan's point stay."""
        if len(self.points) <= most:
            return self
        first, last = self.points[0], self.points[-1]
        chosen = {first, last, self.knee}
        if self.budget_bytes:
            chosen.add(self.at(self.budget_bytes))
        # The first of the evenly spread budgets is the first point's own, so last, knee and plan come on top of them.
        spread = most - 3
        for number in range(spread):
            budget_bytes = first.peak_bytes + (last.peak_bytes - first.peak_bytes) * number // spread
            chosen.add(self.at(max(budget_bytes, 1)))
        return Frontier(tuple(point for point in self.points if point in chosen), self.budget_bytes)

    def __repr__(self) -> str:
        first, last = (f"{format_bytes(end.peak_bytes)} (+{end.overhead:.1%})" for end in (self[0], self[-1]))
        return f"<Frontier of {len(self)} points from {first} to {last}>"


def pareto(points: Iterable[Simulation]) -> tuple[Simulation, ...]:
    """Points that no other one beats in both memory and time, by rising memory."""
    best: list[Simulation] = []
    for point in sorted(points, key=by_peak):
        # A point that is faster by less than rounding makes no difference, and a curve of hundreds of them is slow to
        # draw.
        if not best or point.seconds < best[-1].seconds * (1 - SAME):
            best.append(point)
    return tuple(best)


def frontier_of(search: ScheduleSearch, *, budget_bytes: int | None = None) -> Frontier:
    """The frontier of a chain, as fast as ``Solver.plan`` at any budget but for gaps between points close together.

    Judging the table's schedules takes about as long again as solving it, for long chains. The planner also tries what
    the table does not hold; so where two points are far apart, it is asked for budgets between. ``budget_bytes`` is
    where :meth:`Frontier.gain` starts.
    """
    points = pareto(search.candidates())
    asked: set[int] = set()
    for _ in range(search.questions):
        gaps = [gap for gap in pairwise(points) if gap[1].peak_bytes not in asked]
        if not gaps:
            break
        left, right = max(gaps, key=_area)
        asked.add(right.peak_bytes)
        # With more memory the planner is never slower: its best below the right end is the best of the whole gap.
        best = search.fastest(right.peak_bytes - 1)
        if best is not None and best.seconds < left.seconds * (1 - SAME):
            points = pareto([*points, best])
    # Hundreds of steps in every detail would take megabytes for as long as somebody has the curve.
    return Frontier(tuple(replace(point, events=()) for point in points), budget_bytes)


def _area(gap: tuple[Simulation, Simulation]) -> float:
    """Memory times seconds between two neighbours: the most that a better point in the gap could be worth."""
    left, right = gap
    return (right.peak_bytes - left.peak_bytes) * (left.seconds - right.seconds)
