"""The curve of memory against time: what every budget buys, from one solve.

A table of the dynamic program holds a schedule for every memory. The simulator judges them, and those that others beat
in both memory and time are left out::

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
from dataclasses import dataclass
from itertools import groupby, pairwise

from rich import box
from rich.table import Table

from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError, ScheduleError
from lightning_rotor.schedule import Item, Leaf, Segment
from lightning_rotor.simulator import Simulation
from lightning_rotor.units import format_bytes, format_seconds, parse_bytes, rendered

# Relative difference between sums of the same durations in another order.
SAME = 1e-9
_BAR = 24


@dataclass(frozen=True, slots=True)
class Gain:
    """What additional memory buys.

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
        budget, more = format_bytes(reserved_bytes + self.budget_bytes), format_bytes(self.extra_bytes)
        if self.seconds <= 0:
            return f"{more} more than {budget} buys nothing: the overhead stays at {self.before.overhead:.1%}"
        return (
            f"{more} more than {budget} lowers the overhead from {self.before.overhead:.1%} "
            f"to {self.after.overhead:.1%} ({self.speedup - 1:.1%} more steps per second)"
        )

    __str__ = describe


@dataclass(frozen=True, slots=True)
class Frontier:
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
        """What additional memory would buy.

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
        width, height = last.peak_bytes - first.peak_bytes, first.seconds - last.seconds

        def below(point: Simulation) -> float:
            if not width or not height:
                return 0.0
            return 1 - (point.peak_bytes - first.peak_bytes) / width - (point.seconds - last.seconds) / height

        return max(self.points, key=below)

    def thinned(self, most: int) -> Frontier:
        """The frontier with at most ``most`` points (4 or more), spread evenly; ends, knee and plan's point stay."""
        if len(self.points) <= most:
            return self
        first, last = self.points[0], self.points[-1]
        spread = most - 3
        marks = [first.peak_bytes + (last.peak_bytes - first.peak_bytes) * k // spread for k in range(spread)]
        fixed = {first, last, self.knee} | ({self.at(self.budget_bytes)} if self.budget_bytes else set())
        chosen = {*fixed, *(self.at(max(mark, 1)) for mark in marks)}
        return Frontier(tuple(point for point in self.points if point in chosen), self.budget_bytes)

    def __repr__(self) -> str:
        ends = (f"{format_bytes(end.peak_bytes)} (+{end.overhead:.1%})" for end in (self.points[0], self.points[-1]))
        return f"<Frontier of {len(self)} points from {' to '.join(ends)}>"

    def __rich__(self) -> Table:
        return frontier_table(self)

    __str__ = rendered


def frontier_table(frontier: Frontier, *, reserved_bytes: int = 0, most_rows: int = 14) -> Table:
    """Table of budgets against their time, ``reserved_bytes`` of the process added, for ``rich.print``."""
    shown = frontier.thinned(most_rows)
    worst = shown[0].overhead
    table = Table(title="Budget against overhead", box=box.ROUNDED, title_justify="left")
    for name in ("budget", "overhead", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=_BAR)
    table.add_column("", no_wrap=True)
    planned = None if frontier.budget_bytes is None else frontier.at(frontier.budget_bytes)
    last = shown[-1] if shown[-1].overhead < 1e-6 else None
    marked = {"least": shown[0], "knee": frontier.knee, "this plan": planned, "keep all": last}
    for point in shown:
        table.add_row(
            format_bytes(reserved_bytes + point.peak_bytes),
            f"{point.overhead:.2%}",
            format_seconds(point.seconds),
            "█" * round(_BAR * point.overhead / worst) if worst else "",
            ", ".join(note for note, at in marked.items() if at == point),
        )
    return table


def pareto(points: Iterable[Simulation]) -> tuple[Simulation, ...]:
    """Points that no other one beats in both memory and time, by rising memory."""
    best: list[Simulation] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.seconds)):
        if not best or point.seconds < best[-1].seconds * (1 - SAME):
            best.append(point)
    return tuple(best)


# -------------------------------------------------------------------- schedules without a planner


def no_schedule_is_faster(chain: Chain) -> bool:
    """True if no schedule can be faster than :func:`.keep_all_fastest`: so on measured chains without inverses."""
    # Both forwards of a measured stage are timed as one, so dropping and recomputing it alone saves no time.
    for stage in chain:
        ways = [each.seconds for each in stage.options]
        if stage.recomputable:
            ways += [stage.discard_seconds + each.again_seconds + each.backward_seconds for each in stage.options]
        if min(ways) < min(each.seconds for each in stage.options if not each.inverts):
            return False
    return True


def segments_around(chain: Chain, first: int, last: int) -> list[Item]:
    """Stages ``first..last`` as one segment, or as several around stages that must be kept."""
    items: list[Item] = []
    for recomputable, stages in groupby(range(first, last + 1), lambda stage: chain.stages[stage].recomputable):
        run = tuple(map(Leaf, stages))
        items += [Segment(run)] if recomputable else run
    return items
