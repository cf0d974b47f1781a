"""Plans and frontiers as tables, for a terminal or, through ``print``, as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby, takewhile

from rich import box
from rich.table import Table

from lightning_rotor.chain import Chain
from lightning_rotor.planning.plan import Plan
from lightning_rotor.schedule import Item, Leaf, Schedule, segments_in
from lightning_rotor.simulator import Simulation, held_by_stage, simulate
from lightning_rotor.units import format_bytes, format_seconds

_MOST_CHARACTERS = 100
_MOST_ROWS = 24
_MOST_NAME, _MOST_MODULES = 30, 46


# -------------------------------------------------------------------- a plan in a few rows


def plan_table(
    plan: Plan,
    *,
    reserved_bytes: int = 0,
    measured_peak_bytes: int | None = None,
    plain_peak_bytes: int | None = None,
    extra_rows: Iterable[tuple[str, str]] = (),
) -> Table:
    """Summarise a plan in a few rows, for ``rich.print``.

    ``reserved_bytes``, what the process holds besides activations, are added to the plan's budget and peaks, and are
    included in the measured and the plain peak. The plain peak is the simulator's unless it is given.
    """
    if plain_peak_bytes is None:
        plain_peak_bytes = reserved_bytes + plain_simulation(plan).peak_bytes
    budget = format_bytes(reserved_bytes + plan.budget_bytes)
    if reserved_bytes:
        budget += f", {format_bytes(reserved_bytes)} of it not for activations"
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


@dataclass(frozen=True, slots=True)
class _Row:
    """A run of stages ``first..last`` that a schedule treats alike."""

    first: int
    last: int
    treatment: str
    held_bytes: int  # alive because of it between the forward and the backward
    recompute_seconds: float


def stage_table(plan: Plan, *, most_rows: int = _MOST_ROWS) -> Table:
    """Treatment, bytes and seconds of a plan's stages; alike neighbours share a row, long tables lose the middle."""
    names, rows = plan.chain.names, _rows(plan)
    shown: list[_Row | None] = [*rows]
    if len(rows) > most_rows:
        shown[most_rows // 2 : len(rows) - (most_rows - 1) // 2] = [None]
    table = Table(box=box.ROUNDED, title="Stages", title_justify="left")
    # Where it is narrow, names give way and numbers do not.
    width = max(len(_range(row.first, row.last)) for row in shown if row is not None)
    table.add_column("stages", justify="right", no_wrap=True, min_width=max(width, 6))
    table.add_column("modules", overflow="ellipsis", no_wrap=True, max_width=_MOST_MODULES)
    table.add_column("forward", no_wrap=True, min_width=max(len(row.treatment) for row in rows))
    table.add_column("held", justify="right", min_width=8)
    table.add_column("again", justify="right", no_wrap=True, min_width=7)
    for row in shown:
        if row is None:
            table.add_row(*"⋮⋮⋮⋮⋮")
            continue
        table.add_row(
            _range(row.first, row.last),
            from_to(names[row.first], names[row.last], shortened),
            row.treatment,
            format_bytes(row.held_bytes),
            format_seconds(row.recompute_seconds) if row.recompute_seconds else "",
        )
    total = sum(row.recompute_seconds for row in rows)
    table.add_section()
    table.add_row(
        "",
        f"peak {format_bytes(plan.peak_bytes)} at {shortened(names[plan.simulation.peak_stage])}",
        "",
        format_bytes(sum(row.held_bytes for row in rows)),
        format_seconds(total) if total else "",
        style="bold",
    )
    return table


def _rows(plan: Plan) -> list[_Row]:
    held = held_by_stage(plan.chain, plan.schedule)
    seconds = [0.0] * len(plan.chain)
    for event in plan.simulation.events:
        seconds[event.stage] += event.seconds if event.phase == "recompute" else 0.0
    rows: list[_Row] = []
    for treatment, group in groupby(plan.schedule.items, key=partial(_treatment, plan.chain)):
        items = list(group)
        # Each segment holds an input of its own, so each gets a row.
        for run in [items] if isinstance(items[0], Leaf) else [[item] for item in items]:
            first, last = run[0].first, run[-1].last
            span = slice(first, last + 1)
            rows.append(_Row(first, last, treatment, sum(held[span]), sum(seconds[span])))
    return rows


def _treatment(chain: Chain, item: Item) -> str:
    if isinstance(item, Leaf):
        option = chain.stages[item.stage].options[item.option]
        return option.name if option.inverts else f"keep, {option.name}" if item.option else "keep"
    nested = sum(1 for _ in segments_in(item.items))
    return "recompute" + (f", {nested} nested" if nested else "")


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


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
        text = _with_one_gap(" ".join([*words[: kept - tail], "…", *words[len(words) - tail :]]))
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
    return _with_one_gap("".join(kept))


def _with_one_gap(text: str) -> str:
    """Merge neighbouring gaps into one."""
    return re.sub(r"…( …)+", "…", text)


Plan.tables = lambda plan: (plan_table(plan), stage_table(plan))
