"""A plan: a schedule for one chain and one budget, with its simulated cost; plans as JSON and as tables.

A plan holds for one model with one input signature on one kind of device. Its file has nothing measured in seconds: it
names every stage with the tensors that it reads, saves and hands on, and a chain that differs in any of it is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, takewhile, zip_longest
from pathlib import Path
from typing import Any, ClassVar

from rich import box
from rich.console import Group
from rich.table import Table
from typing_extensions import Unpack

from lightning_rotor.chain import Chain, StageIdentity
from lightning_rotor.errors import PlanError, ScheduleError
from lightning_rotor.planning.bounds import lower_bound_seconds
from lightning_rotor.planning.frontier import Frontier
from lightning_rotor.schedule import Item, Leaf, Schedule, leaves, segments_in
from lightning_rotor.simulator import Conditions, Simulation, held_by_stage, simulate
from lightning_rotor.units import format_bytes, format_seconds, rendered

DEFAULT_SLOTS = 500
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
        content = {
            "format": _FORMAT,
            "fingerprint": self.chain.fingerprint,
            "device": self.chain.device,
            "stages": [asdict(stage) for stage in self.chain.identity],
            **self.to_plain(),
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

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
                raise PlanError(f"{path} has format {content['format']!r}: expected {_FORMAT}, written by this version")
            stages = [StageIdentity(**{key: _as_tuple(stage[key]) for key in stage}) for stage in content["stages"]]
            if content["fingerprint"] != chain.fingerprint:
                raise _made_for_another(path, stages, content["device"], chain)
            return _fitting(path, from_plain({**content, "solve_seconds": 0.0}, chain))
        except PlanError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reason = error if isinstance(error, ScheduleError) else f"{type(error).__name__}: {error}"
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
    """A schedule from elsewhere as a plan, whose budget is its peak if none is given.

    Arguments as for :func:`lightning_rotor.planning.plan`. A ScheduleError if it does not belong to the chain.
    """
    simulation = simulate(chain, schedule, **step)
    budget_bytes = simulation.peak_bytes if budget_bytes is None else budget_bytes
    return Plan(chain, schedule, budget_bytes, simulation, solve_seconds, slots=slots, **step)


def from_plain(record: Mapping[str, Any], chain: Chain) -> Plan:
    """A plan from what :meth:`Plan.to_plain` wrote and its seconds, simulated anew on its chain as measured now.

    Raises a ScheduleError if it does not belong to the chain; a KeyError, TypeError or ValueError if it is damaged.
    """
    return scheduled(
        chain,
        Schedule.parse(record["schedule"]),
        int(record["budget_bytes"]),
        solve_seconds=record["solve_seconds"],
        slots=int(record["slots"]),
        gradients_exist=bool(record["gradients_exist"]),
        lingering_bytes=int(record["lingering_bytes"]),
    )


def plan_for(plan: Plan, chain: Chain) -> Plan:
    """The plan with the costs of a chain that differs only in timings and in what kernels take.

    Args:
        plan: For the same model and input.
        chain: Of the model that is to run under it, as measured now.
    Raises:
        PlanError: As for :meth:`Plan.load`.
    """
    if plan.chain == chain:
        return plan
    if plan.chain.fingerprint != chain.fingerprint:
        raise _made_for_another("the plan", plan.chain.identity, plan.chain.device, chain)
    return _fitting("the plan", from_plain({**plan.to_plain(), "solve_seconds": plan.solve_seconds}, chain))


def _fitting(what: object, plan: Plan) -> Plan:
    """The plan; a PlanError if it takes more than its budget."""
    if plan.peak_bytes > plan.budget_bytes:
        raise PlanError(
            f"{what} takes {format_bytes(plan.peak_bytes)} on this machine, which is more than its budget of "
            f"{format_bytes(plan.budget_bytes)}: plan anew"
        )
    return plan


def _as_tuple(value: Any) -> Any:
    """JSON's lists as tuples, at any depth."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _made_for_another(what: object, saved: Sequence[StageIdentity], device: str, chain: Chain) -> PlanError:
    """PlanError for a plan that was made for other stages, or another device, than a chain's."""
    difference = _difference(saved, device, chain)
    return PlanError(f"{what} was made for something else: {difference}. Plan for this model and input anew")


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


# -------------------------------------------------------------------- a plan in a few rows


def plan_table(
    plan: Plan,
    *,
    limit_bytes: int | None = None,
    reserved_bytes: int = 0,
    measured_peak_bytes: int | None = None,
    plain_peak_bytes: int | None = None,
    extra_rows: Iterable[tuple[str, str]] = (),
) -> Table:
    """Summarise a plan in a few rows, for ``rich.print``.

    ``reserved_bytes``, what the process holds besides activations, are added to the plan's budget and peaks, and are
    included in the measured and the plain peak. The plain peak is the simulator's unless it is given, and the limit
    what the plan was to keep.
    """
    if plain_peak_bytes is None:
        plain_peak_bytes = reserved_bytes + plain_simulation(plan).peak_bytes
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
    table.add_row("Peak with the plan", format_bytes(reserved_bytes + plan.peak_bytes))
    if measured_peak_bytes is not None:
        table.add_row("Peak measured", format_bytes(measured_peak_bytes))
    table.add_row("Recompute overhead", f"{100 * plan.overhead:.1f} % of the step")
    table.add_row("Gap to the optimum", f"at most {100 * plan.gap:.1f} % of the step")
    table.add_row("Recomputed stages", f"{len(plan.recomputed)} of {len(plan.chain)}")
    if plan.inverted:
        table.add_row("Inverted stages", f"{len(plan.inverted)} of {len(plan.chain)}")
    if withheld := [stage for stage in plan.chain if stage.not_inverted]:
        table.add_row("Not inverted", f"{len(withheld)}, such as {withheld[-1].name!r}: {withheld[-1].not_inverted}")
    table.add_row("Planning", format_seconds(plan.solve_seconds))
    table.add_row("Schedule", schedule_line(plan.schedule))
    for name, value in extra_rows:
        table.add_row(name, value)
    return table


def plain_simulation(plan: Plan) -> Simulation:
    """Simulation of a plan's chain without recomputation, under the same conditions."""
    return simulate(plan.chain, Schedule.keep_all(len(plan.chain)), **plan.conditions)


# -------------------------------------------------------------------- a plan stage by stage


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
        table.add_row(*row)
    table.add_section()
    table.add_row(*total, style="bold")
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


# -------------------------------------------------------------------- a schedule on one line


_GAPS = re.compile("…( …)+")  # neighbours, which become one


def schedule_line(schedule: Schedule, *, most_characters: int = _MOST_CHARACTERS) -> str:
    """The text of a schedule on one line of ``most_characters``, shortened from the inside.

    Stages are consecutive, so neighbours of ``…`` tell what is missing. The most deeply nested segments go first, then
    all segments, then the middle.

    Example:
        >>> schedule_line(Schedule.parse("0 ((1 2) 3 4) 5"), most_characters=12)
        '0 (… 3-4) 5'
    """
    text = str(schedule)
    for depth in reversed(range(schedule.depth)):
        if len(text) > most_characters:
            text = _without_deeper(text, depth)
    words, kept = text.split(), len(text.split())
    while len(text) > most_characters and kept:
        kept -= 1
        tail = (kept + 1) // 2
        text = _GAPS.sub("…", " ".join([*words[: kept - tail], "…", *words[len(words) - tail :]]))
    return text


def _without_deeper(text: str, depth: int) -> str:
    """Replace parentheses nested deeper than ``depth``."""
    kept, level = [], 0
    for character in text:
        level += character == "("
        if level <= depth:
            kept.append(character)
        elif character == "(" and level == depth + 1:
            kept.append("…")
        level -= character == ")"
    return _GAPS.sub("…", "".join(kept))
