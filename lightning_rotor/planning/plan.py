"""A plan: a schedule for one chain and one budget, with its simulated cost; the curve of all budgets; both as tables.

A plan holds for one model with one input signature on one kind of device. Its file has nothing measured in seconds: it
names every stage with the tensors that it reads, saves and hands on, and a chain that differs in any of it is refused.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, pairwise, takewhile, zip_longest
from pathlib import Path
from typing import Any, ClassVar

from rich import box
from rich.console import Group
from rich.table import Table
from typing_extensions import Unpack

from lightning_rotor.chain import Chain, StageIdentity
from lightning_rotor.errors import BudgetError, PlanError, ScheduleError
from lightning_rotor.planning.bounds import lower_bound_seconds
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment, leaves, segments_in, shorten, text_of
from lightning_rotor.simulator import Conditions, Simulation, held_by_stage, simulate
from lightning_rotor.units import cell, format_bytes, format_seconds, parse_bytes, rendered

DEFAULT_SLOTS = 500
# Relative difference between sums of the same durations in another order.
SAME = 1e-9
_BAR = 24
_FORMAT = 1
_MOST_CHARACTERS = 100
_MOST_ROWS = 24
_MOST_NAME, _MOST_MODULES = 30, 46


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for one chain and one budget. Printed, it is a table.

    Attributes:
        budget_bytes: Memory that was allowed.
        simulation: Peak and duration, step by step.
        solve_seconds: Time spent on finding it. Plans from one solver share the table; the first one pays for it.
        gradients_exist: See :func:`lightning_rotor.simulator.simulate`.
        lingering_bytes: See :func:`lightning_rotor.simulator.simulate`.
        slots: Memory levels that the program told apart.
    """

    chain: Chain
    schedule: Schedule
    budget_bytes: int
    simulation: Simulation
    solve_seconds: float
    gradients_exist: bool = False
    lingering_bytes: int = 0
    slots: int = DEFAULT_SLOTS

    # Set by the module that solves, since it imports this one.
    solved_frontier: ClassVar[Callable[[Plan], Frontier]]

    @property
    def conditions(self) -> Conditions:
        """The step around the chain, for whatever simulates or plans it."""
        return {"gradients_exist": self.gradients_exist, "lingering_bytes": self.lingering_bytes}

    @property
    def peak_bytes(self) -> int:
        """Simulated peak, at most ``budget_bytes``."""
        return self.simulation.peak_bytes

    @property
    def seconds(self) -> float:
        """Simulated duration of forward, recomputation and backward."""
        return self.simulation.seconds

    @property
    def overhead(self) -> float:
        """Time beyond plain training as a fraction of it: 0.25 is 25 % slower."""
        return self.simulation.overhead

    @property
    def lower_bound_seconds(self) -> float:
        """Least duration of any execution within the budget, as far as is proven: see :mod:`.bounds`."""
        return lower_bound_seconds(self.chain, self.budget_bytes, **self.conditions)

    @property
    def gap(self) -> float:
        """Part of the duration that another execution might save: at 0.01 none is more than 1 % faster."""
        return 1 - self.lower_bound_seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Numbers of the stages whose forward runs more than once."""
        return self.schedule.recomputed

    @property
    def inverted(self) -> tuple[int, ...]:
        """Numbers of the stages that drop their input and rebuild it from their output."""
        every = (leaf for item in self.schedule.items for leaf in leaves(item))
        return tuple(leaf.stage for leaf in every if self.chain.stages[leaf.stage].options[leaf.option].inverts)

    @property
    def calls(self) -> tuple[Plan, ...]:
        """The plans of the calls that it is for: a plan for a step may be for several."""
        return (self,)

    def frontier(self) -> Frontier:
        """The curve of memory against time for the plan's chain, which is solved once more: a plan holds no tables."""
        return Plan.solved_frontier(self)

    def to_plain(self) -> dict[str, Any]:
        """All but the chain and seconds as strings, numbers and flags by name, for files and checkpoints."""
        plain = {"schedule": str(self.schedule), "budget_bytes": self.budget_bytes}
        return {**plain, **self.conditions, "slots": self.slots}

    def save(self, path: Path | str) -> None:
        """Write the plan to a file, which is replaced if it exists, for the same model and input."""
        content = {"format": _FORMAT, **self._content()}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _content(self) -> dict[str, Any]:
        """What a plan needs to move to another chain, which :func:`_moved` checks."""
        return {
            "fingerprint": self.chain.fingerprint,
            "device": self.chain.device,
            "stages": [asdict(stage) for stage in self.chain.identity],
            **self.to_plain(),
        }

    @classmethod
    def load(cls, path: Path | str, chain: Chain) -> Plan:
        """Read a plan for the chain that it was made for.

        Args:
            path: What :meth:`save` has written.
            chain: Of the model that is to run under the plan, as measured now: it gives the costs on this machine.
        Returns:
            The plan, simulated anew.
        Raises:
            PlanError: The file holds no plan; the plan was made for another model, shape, dtype or device (says what
                differs first); or it takes more than its budget on this machine.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                found = shorten(repr(content["format"]))
                raise PlanError(f"{path} has format {found}: expected {_FORMAT}, written by this version")
            return _moved(path, content, chain)
        except PlanError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            reason = error if isinstance(error, ScheduleError) else shorten(f"{type(error).__name__}: {error}")
            raise PlanError(f"{path} holds no plan ({reason}): expected a file that Plan.save has written") from error

    def summary(self) -> str:
        """The plan on one line."""
        return (
            f"{len(self.chain)} stages within {format_bytes(self.budget_bytes)}: peak {format_bytes(self.peak_bytes)}, "
            f"{format_seconds(self.seconds)} per step (+{self.overhead:.1%}), "
            f"{len(self.recomputed)} stages recomputed: {schedule_line(self.schedule)}"
        )

    def table(self) -> Group:
        """What the plan costs, and what it does with which stages, for ``rich.print``; printed, a plan shows it."""
        return Group(plan_table(self), stage_table(self))

    __rich__ = table

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.summary()}>"

    __str__ = rendered


def scheduled(
    chain: Chain,
    schedule: Schedule,
    budget_bytes: int | None = None,
    *,
    solve_seconds: float = 0.0,
    slots: int = DEFAULT_SLOTS,
    **step: Unpack[Conditions],
) -> Plan:
    """A schedule from elsewhere as a plan, by default with its peak as budget; a ScheduleError if it is another's."""
    simulation = simulate(chain, schedule, **step)
    budget_bytes = simulation.peak_bytes if budget_bytes is None else budget_bytes
    return Plan(chain, schedule, budget_bytes, simulation, solve_seconds, slots=slots, **step)


def from_plain(record: Mapping[str, Any], chain: Chain) -> Plan:
    """A plan from :meth:`Plan.to_plain` and its seconds, simulated anew; a LookupError, TypeError or ValueError."""
    return scheduled(
        chain,
        Schedule.parse(record["schedule"]),
        _number(record, "budget_bytes"),
        solve_seconds=record["solve_seconds"],
        slots=max(_number(record, "slots"), 1),
        gradients_exist=bool(record["gradients_exist"]),
        lingering_bytes=_number(record, "lingering_bytes"),
    )


def _number(record: Mapping[str, Any], name: str) -> int:
    """A size or a count out of a file."""
    value = record[name]
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{name} is {shorten(repr(value))}, expected a whole number of at most 63 bits")
    return value


def plan_for(plan: Plan, chain: Chain) -> Plan:
    """The plan with the costs of a chain that differs only in timings and in what kernels take, as measured now.

    Raises a PlanError as :meth:`Plan.load` does.
    """
    if plan.chain == chain:
        return plan
    return replace(_moved("the plan", plan._content(), chain), solve_seconds=plan.solve_seconds)


def _moved(what: object, content: Mapping[str, Any], chain: Chain) -> Plan:
    """The plan that :meth:`Plan.save` writes, on a chain; a PlanError if it is another's, or takes too much there."""
    stages = [StageIdentity(**with_tuples(stage)) for stage in content["stages"]]
    if content["fingerprint"] != chain.fingerprint:
        difference = _difference(stages, content["device"], chain)
        raise PlanError(f"{what} was made for something else: {difference}. Plan for this model and input anew")
    plan = from_plain({**content, "solve_seconds": 0.0}, chain)
    if plan.peak_bytes > plan.budget_bytes:
        raise PlanError(
            f"{what} takes {format_bytes(plan.peak_bytes)} on this machine, which is more than its budget of "
            f"{format_bytes(plan.budget_bytes)}: plan anew"
        )
    return plan


def with_tuples(value: Any) -> Any:
    """A value from a file with tuples in the place of lists, at any depth."""
    if isinstance(value, dict):
        return {key: with_tuples(item) for key, item in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, (list, tuple)) else value


def _difference(saved: Sequence[StageIdentity], device: str, chain: Chain) -> str:
    """The first difference between a chain and what a plan was made for: what the plan says, and what there is."""
    if device != chain.device:
        return f"device {device!r}, and this chain was measured on {chain.device!r}"
    alike = [(stage.name, stage.takes) for stage in (saved[0], chain.identity[0])]
    estimated = [not any(stage.takes for stage in stages[1:]) for stages in (saved, chain.identity)]
    if alike[0] == alike[1] and len(saved) == len(chain) and estimated[0] != estimated[1]:
        then_so, now_so = ("estimated from other shapes" if guess else "measured" for guess in estimated)
        shapes = ", ".join(saved[0].takes)
        return f"what stages cost at {shapes} was {then_so}, and is {now_so} (measure(sample) measures a shape)"
    for number, (then, now) in enumerate(zip_longest(saved, chain.identity)):
        if then is None or now is None or then.name != now.name:
            there, here = ("no such stage" if each is None else repr(each.name) for each in (then, now))
            return f"stage {number} was {there} of {len(saved)}, and is {here} of {len(chain)}"
        if then.takes != now.takes:
            return f"stage {now.name!r} took {', '.join(then.takes)}, and takes {', '.join(now.takes)}"
        for what in ("output_bytes", "options", "skips"):
            if getattr(then, what) != getattr(now, what):
                return f"{what} of stage {now.name!r} was {getattr(then, what)}, and is {getattr(now, what)}"
    return "the file was changed after it was written"


# -------------------------------------------------------------------- the curve of memory against time
#
#     overhead
#        │ ●                    first point: the least budget for which there is a schedule
#        │  ●
#        │    ● ← knee: from here on, memory buys less
#        │        ●
#        │               ●
#        └───────────────────●  budget      last point: the least memory without any recomputation


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


def plan_table(
    plan: Plan,
    *,
    limit_bytes: int | None = None,
    reserved_bytes: int = 0,
    final_peak_bytes: int = 0,
    measured_peak_bytes: int | None = None,
    plain_peak_bytes: int | None = None,
    extra_rows: Iterable[tuple[str, str]] = (),
) -> Table:
    """Summarise a plan in a few rows, for ``rich.print``.

    ``reserved_bytes``, what the process holds besides activations, are added to the plan's budget and peaks, and are
    included in the measured and the plain peak. ``final_peak_bytes`` is the peak behind the backward, when optimizers
    step, which no plan changes. The plain peak is the simulator's unless it is given, and the limit what the plan was
    to keep.
    """
    if plain_peak_bytes is None:
        plain_peak_bytes = max(reserved_bytes + plain_simulation(plan).peak_bytes, final_peak_bytes)
    peak = format_bytes(max(reserved_bytes + plan.peak_bytes, final_peak_bytes))
    if final_peak_bytes > reserved_bytes + plan.peak_bytes:
        peak += f", when the optimizer steps; {format_bytes(reserved_bytes + plan.peak_bytes)} until then"
    limit_bytes = reserved_bytes + plan.budget_bytes if limit_bytes is None else limit_bytes
    budget = format_bytes(limit_bytes)
    if limit_bytes < reserved_bytes + plan.peak_bytes:
        budget += ", which no plan keeps: this one takes least"
    elif reserved_bytes:
        budget += f", {format_bytes(limit_bytes - reserved_bytes)} of it for activations and new gradients"
    table = Table(title="Recomputation plan", box=box.ROUNDED, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("Budget", budget)
    table.add_row("Peak without recomputation", format_bytes(plain_peak_bytes))
    table.add_row("Peak with the plan", peak)
    if measured_peak_bytes is not None:
        table.add_row("Peak measured", format_bytes(measured_peak_bytes))
    table.add_row("Recompute overhead", f"{100 * plan.overhead:.1f} % of the step")
    table.add_row("Gap to the optimum", f"at most {100 * plan.gap:.1f} % of the step")
    table.add_row("Recomputed stages", f"{len(plan.recomputed)} of {len(plan.chain)}")
    if plan.inverted:
        table.add_row("Inverted stages", f"{len(plan.inverted)} of {len(plan.chain)}")
    if withheld := [stage for stage in plan.chain if stage.not_inverted]:
        last = withheld[-1]
        table.add_row("Not inverted", cell(f"{len(withheld)}, such as {last.name!r}: {last.not_inverted}"))
    table.add_row("Planning", format_seconds(plan.solve_seconds))
    table.add_row("Schedule", schedule_line(plan.schedule))
    for name, value in extra_rows:
        table.add_row(cell(name), cell(value))
    return table


def plain_simulation(plan: Plan) -> Simulation:
    """Simulation of a plan's chain without recomputation, under the same conditions."""
    return simulate(plan.chain, Schedule.keep_all(len(plan.chain)), **plan.conditions)


def stage_table(plan: Plan, *, most_rows: int = _MOST_ROWS) -> Table:
    """Treatment, bytes and seconds of a plan's stages; alike neighbours share a row, long tables lose the middle."""
    *rows, total = _rows(plan)
    if len(rows) > most_rows:
        rows[most_rows // 2 : len(rows) - (most_rows - 1) // 2] = [tuple("⋮⋮⋮⋮⋮")]
    table = Table(box=box.ROUNDED, title="Stages", title_justify="left")
    # Where it is narrow, names give way and numbers do not.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table.add_column("stages", justify="right", no_wrap=True, min_width=max(widths[0], 6))
    table.add_column("modules", overflow="ellipsis", no_wrap=True, max_width=_MOST_MODULES)
    table.add_column("forward", no_wrap=True, min_width=widths[2])
    table.add_column("held", justify="right", min_width=8)
    table.add_column("again", justify="right", no_wrap=True, min_width=7)
    for row in rows:
        table.add_row(*map(cell, row))
    table.add_section()
    table.add_row(*map(cell, total), style="bold")
    return table


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Cells for each run of stages that the schedule treats alike, and then for all of them together."""
    names, held = plan.chain.names, held_by_stage(plan.chain, plan.schedule)
    seconds = [0.0] * len(plan.chain)
    for event in plan.simulation.events:
        seconds[event.stage] += event.seconds if event.phase == "recompute" else 0.0

    def sums(first: int, last: int) -> tuple[str, str]:
        again = sum(seconds[first : last + 1])
        return format_bytes(sum(held[first : last + 1])), format_seconds(again) if again else ""

    for treatment, group in groupby(plan.schedule.items, key=partial(_treatment, plan.chain)):
        items = list(group)
        # Each segment holds an input of its own, so each gets a row.
        for run in [items] if isinstance(items[0], Leaf) else [[item] for item in items]:
            first, last = run[0].first, run[-1].last
            span = str(first) if first == last else f"{first}-{last}"
            yield span, from_to(names[first], names[last], shortened), treatment, *sums(first, last)
    peak = f"peak {format_bytes(plan.peak_bytes)} at {shortened(names[plan.simulation.peak_stage])}"
    yield "", peak, "", *sums(0, len(names))


def _treatment(chain: Chain, item: Item) -> str:
    if isinstance(item, Leaf):
        option = chain.stages[item.stage].options[item.option]
        return option.name if option.inverts else f"keep, {option.name}" if item.option else "keep"
    nested = sum(1 for _ in segments_in(item.items))
    return "recompute" + (f", {nested} nested" if nested else "")


def from_to(first: str, last: str, shorten: Callable[[str], str]) -> str:
    """Name of the stages from one to another, its parts shortened."""
    start, end = first.partition(" … ")[0], last.rpartition(" … ")[2]
    return shorten(start) if start == end else f"{shorten(start)} … {shorten(_relative_name(start, end))}"


def _relative_name(start: str, end: str) -> str:
    """Name of a module without the modules that another one is in, too: ``d`` for ``a.b.d`` beside ``a.b.c``."""
    inside = end.split(".")
    modules = takewhile(lambda pair: pair[0] == pair[1], zip(start.split(".")[:-1], inside[:-1], strict=False))
    return ".".join(inside[len(list(modules)) :])


def shortened(name: str, most: int = _MOST_NAME) -> str:
    """A name without its middle if it is long: the end tells most, the beginning tells where it is."""
    head = most // 3
    return name if len(name) <= most else f"{name[:head]}…{name[1 + head - most :]}"


def schedule_line(schedule: Schedule, *, most_characters: int = _MOST_CHARACTERS) -> str:
    """The text of a schedule on one line of ``most_characters``: a longer one loses segments' insides, then more.

    Stages are consecutive, so neighbours of ``…`` tell what is missing.

    Example:
        >>> schedule_line(Schedule.parse("0 ((1 2) 3 4) 5"), most_characters=12)
        '0 (…) 5'
    """
    text = str(schedule)
    words: list[str] = []
    for is_segment, run in groupby(schedule.items, lambda item: isinstance(item, Segment)):
        items = tuple(run)
        words += ["(…)"] * len(items) if is_segment else text_of(items).split()
    kept = len(words)
    text = text if len(text) <= most_characters else " ".join(words)
    while len(text) > most_characters and kept:
        kept -= 1
        text = " ".join([*words[: kept // 2], "…", *words[len(words) - (kept + 1) // 2 :]])
    return text
