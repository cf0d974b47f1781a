"""Tables of rich: a plan in a few rows, what it does with each stage, and the curve of budgets.

Registered in :mod:`lightning_rotor.shown`, so that plans and curves show them when they are printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter

from rich import box
from rich.console import Group
from rich.table import Table

from lightning_rotor.chain import Chain
from lightning_rotor.link import Link
from lightning_rotor.planning import Frontier, Plan
from lightning_rotor.planning.plan import plain_simulation
from lightning_rotor.report.stage_names import from_to, shortened, times
from lightning_rotor.schedule import Item, Leaf, schedule_line
from lightning_rotor.shown import cell, printable, table_of
from lightning_rotor.simulator import held_by_stage, traffic
from lightning_rotor.units import format_bytes, format_seconds, format_speed

_BAR_WIDTH = 24
_MOST_ROWS = 24
_MODULES_WIDTH = 46


# Here and not as methods of a plan: planning imports neither torch nor rich.
@table_of.register
def _(plan: Plan) -> Group:
    return Group(plan_table(plan), stage_table(plan))


@table_of.register
def _(frontier: Frontier) -> Table:
    return frontier_table(frontier)


def plan_table(
    plan: Plan,
    *,
    limit_bytes: int | None = None,
    reserved_bytes: int = 0,
    final_peak_bytes: int = 0,
    measured_peak_bytes: int | None = None,
    plain_peak_bytes: int | None = None,
    measured_overhead: float | None = None,
    measuring_seconds: float | None = None,
    memory_rows: Iterable[tuple[str, str]] = (),
    extra_rows: Iterable[tuple[str, str]] = (),
    reason: str = "",
) -> Table:
    """Summarise a plan in a few rows, for ``rich.print``, in the order of a reader's questions.

    Does it fit, what does it cost, what is recomputed, could it be better. ``reserved_bytes``, what the process holds
    besides activations, are added to the plan's budget and peaks, and are included in the measured and the plain peak.
    ``final_peak_bytes`` is the peak behind the backward, when optimizers step, which no plan changes. The plain peak is
    the simulator's unless it is given, and the limit what the plan was to keep. ``reason`` says why a table is printed
    that was printed before.
    """
    peak_bytes = reserved_bytes + plan.peak_bytes
    if plain_peak_bytes is None:
        # The optimizer steps in a plain step as well.
        plain_peak_bytes = max(reserved_bytes + plain_simulation(plan).peak_bytes, final_peak_bytes)
    if limit_bytes is None:
        limit_bytes = reserved_bytes + plan.budget_bytes
    title = "Recomputation plan"
    if reason:
        title += f", printed again: {printable(reason)}"
    table = Table(title=title, box=box.ROUNDED, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    # A long schedule goes on in the next line: a part of it would be another schedule.
    table.add_column(overflow="fold")
    # Does it fit?
    table.add_row("Limit", _limit(limit_bytes, peak_bytes, reserved_bytes))
    table.add_row("Peak without recomputation", format_bytes(plain_peak_bytes))
    table.add_row("Peak with this plan", _peak(peak_bytes, final_peak_bytes, measured_peak_bytes))
    _add(table, memory_rows)
    table.add_section()
    # What does it cost?
    table.add_row("Time added to these modules", _overhead(plan, measured_overhead))
    table.add_row(*_preparation(plan, measuring_seconds))
    table.add_section()
    # What is recomputed?
    table.add_row("Recomputed", f"{len(plan.recomputed)} of {_stages(plan)}")
    # Also where nothing is moved: who has asked for it wants to know why.
    if plan.link is not None:
        table.add_row("Moved", _moved(plan))
        table.add_row("Link", _link(plan, plan.link))
    if plan.inverted:
        table.add_row("Inverted", f"{len(plan.inverted)} of {_stages(plan)}, whose input is rebuilt from their output")
    withheld = [stage for stage in plan.chain if stage.not_inverted]
    if withheld:
        # One reason says enough, as mostly all have the same.
        last = withheld[-1]
        table.add_row("Not inverted", cell(f"{len(withheld)}, such as {last.name!r}: {last.not_inverted}"))
    table.add_row("Schedule, recomputed in ()", schedule_line(plan.schedule))
    _add(table, extra_rows)
    table.add_section()
    # Could it be better?
    table.add_row("A better plan could save", _gap(plan))
    return table


def _moved(plan: Plan) -> str:
    """The stages that a plan moves, and what the step waits for that."""
    if not plan.moved:
        return f"none of {_stages(plan)}"
    waits = "no waits"
    if plan.stall_seconds:
        waits = f"{format_seconds(plan.stall_seconds)} of waits"
    moved = f"{len(plan.moved)} of {_stages(plan)}"
    return f"{moved}, {format_bytes(plan.host_bytes)} elsewhere, {waits}"


def _link(plan: Plan, link: Link) -> str:
    """The speed of the link, what that is beside the peak, and how busy the plan keeps it."""
    # In any case: a slow link is why nothing moves.
    speed = f"{format_speed(link.out)} out and {format_speed(link.back)} back"
    if link.out == link.back:
        speed = f"{format_speed(link.out)} each way"
    carried = f"{speed}: in a forward {plan.carried_share or 0.0:.0%} of the peak without recomputation"
    if not plan.moved:
        return carried
    copies = traffic(plan.chain, plan.schedule, plan.conditions)
    return f"{carried}; busy {copies.busy('out'):.0%} of the forward, {copies.busy('back'):.0%} of the backward"


def _add(table: Table, rows: Iterable[tuple[str, str]]) -> None:
    for name, value in rows:
        # Users' names may hold what rich takes for markup.
        table.add_row(cell(name), cell(value))


def _stages(plan: Plan) -> str:
    count = len(plan.chain)
    if count == 1:
        return "1 stage"
    return f"{count} stages"


def _limit(limit_bytes: int, peak_bytes: int, reserved_bytes: int) -> str:
    limit = format_bytes(limit_bytes)
    # Nothing fits, and on_infeasible lets training go on.
    if limit_bytes < peak_bytes:
        return f"{limit}, which no plan keeps: this one takes least"
    if reserved_bytes:
        return f"{limit}, {format_bytes(limit_bytes - reserved_bytes)} of it for activations and new gradients"
    return limit


def _peak(peak_bytes: int, final_peak_bytes: int, measured_peak_bytes: int | None) -> str:
    """The measured peak, or the predicted one before there is any."""
    # One number for one thing: beside a measurement, a prediction would only make readers ask which one counts.
    if measured_peak_bytes is not None:
        return f"{format_bytes(measured_peak_bytes)}, measured"
    peak = format_bytes(peak_bytes)
    if final_peak_bytes > peak_bytes:
        # No plan lowers the optimizer's own peak, so both are said.
        return f"{format_bytes(final_peak_bytes)}, when the optimizer steps; {peak} until then"
    return peak


def _overhead(plan: Plan, measured: float | None) -> str:
    """Time that recomputation adds, by the time of the planned modules without it: measured, or as planned."""
    # The predicted one is a sum of stages' seconds, which knows no caches and no waiting for the host.
    if measured is None:
        return f"{100 * plan.overhead:.1f} %, predicted"
    return f"{100 * measured:.1f} %, measured"


def _preparation(plan: Plan, measuring_seconds: float | None) -> tuple[str, str]:
    planning = format_seconds(plan.solve_seconds)
    if measuring_seconds is None:
        return "Planning took", planning
    return "Measuring, planning took", f"{format_seconds(measuring_seconds)}, {planning}"


def _gap(plan: Plan) -> str:
    # Less would be shown as 0.0 %.
    if plan.gap < 0.0005:
        return "nothing: no schedule within this limit is faster"
    return f"at most {100 * plan.gap:.1f} % of that time"


def stage_table(plan: Plan, *, most_rows: int = _MOST_ROWS) -> Table:
    """Treatment, bytes and seconds of a plan's stages; alike neighbours share a row, long tables lose the middle."""
    *rows, total = _rows(plan)
    if len(rows) > most_rows:
        # Both ends stay, as plans recompute early stages and keep late ones.
        first_left_out = most_rows // 2
        first_after = len(rows) - (most_rows - 1) // 2
        rows[first_left_out:first_after] = [tuple("⋮⋮⋮⋮⋮")]
    table = Table(box=box.ROUNDED, title="Stages", title_justify="left")
    # Where it is narrow, names give way and numbers do not.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table.add_column("stages", justify="right", no_wrap=True, min_width=max(widths[0], 6))
    table.add_column("modules", overflow="ellipsis", no_wrap=True, max_width=_MODULES_WIDTH)
    table.add_column("forward", no_wrap=True, min_width=widths[2])
    table.add_column("keeps", justify="right", min_width=8)
    table.add_column("run again", justify="right", no_wrap=True, min_width=9)
    for row in rows:
        table.add_row(*map(cell, row))
    table.add_section()
    table.add_row(*map(cell, total), style="bold")
    return table


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Cells for each run of stages that the schedule treats alike, and then for all of them together."""
    names = plan.chain.names
    held_bytes = held_by_stage(plan.chain, plan.schedule)
    again_seconds = [0.0] * len(plan.chain)
    for event in plan.simulation.events:
        # Added up, since a stage runs again once for each segment that it is in.
        if event.phase == "recompute":
            again_seconds[event.stage] += event.seconds

    def sums(first: int, last: int) -> tuple[str, str]:
        held = format_bytes(sum(held_bytes[first : last + 1]))
        again = sum(again_seconds[first : last + 1])
        # An empty cell is seen faster than a zero among numbers.
        return held, format_seconds(again) if again else ""

    moved = {move.item for move in plan.schedule.moves}
    treated: list[tuple[str, Item]] = []
    for number, item in enumerate(plan.schedule.items):
        treatment = _treatment(plan.chain, item)
        if number in moved:
            treatment += ", move"
        treated.append((treatment, item))
    for treatment, group in groupby(treated, key=itemgetter(0)):
        items = [item for _, item in group]
        # Each segment holds an input of its own, so each gets a row.
        runs = [[item] for item in items]
        if isinstance(items[0], Leaf):
            runs = [items]
        for run in runs:
            first = run[0].first
            last = run[-1].last
            span = str(first) if first == last else f"{first}-{last}"
            modules = from_to(names[first], names[last], shortened)
            yield span, modules, treatment, *sums(first, last)
    peak_stage = shortened(names[plan.simulation.peak_stage])
    peak = f"peak {format_bytes(plan.peak_bytes)} at {peak_stage}"
    yield "", peak, "", *sums(0, len(names))


def _treatment(chain: Chain, item: Item) -> str:
    """A word or two for the column ``forward``."""
    if isinstance(item, Leaf):
        option = chain.stages[item.stage].options[item.option]
        if option.inverts:
            return option.name
        if item.option:
            return f"keep, {option.name}"
        return "keep"
    # A stage runs once more for each segment that it is in.
    if item.depth == 1:
        return "recompute"
    return f"recompute, up to {times(item.depth)}"


def frontier_table(
    frontier: Frontier,
    *,
    reserved_bytes: int = 0,
    most_rows: int = 14,
    staying: Frontier | None = None,
) -> Table:
    """Table of budgets against their time, ``reserved_bytes`` of the process added, for ``rich.print``.

    ``staying`` is the curve of plans that move nothing; with it, each budget also says what those would cost.
    """
    rows = frontier.thinned(most_rows)
    worst = rows[0].overhead
    table = Table(title="Budget against overhead", box=box.ROUNDED, title_justify="left")
    for name in ("budget", "overhead", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    bar_width = _BAR_WIDTH
    if staying is not None:
        table.add_column("without moves", justify="right", no_wrap=True)
        # So that no number is cut in a terminal of 80 columns.
        bar_width //= 2
    table.add_column("", no_wrap=True, min_width=bar_width)
    table.add_column("", no_wrap=True)
    marked = {"least": rows[0], "knee": frontier.knee}
    if frontier.budget_bytes is not None:
        marked["this plan"] = frontier.at(frontier.budget_bytes)
    if rows[-1].overhead < 1e-6:
        marked["keep all"] = rows[-1]
    for point in rows:
        # Nothing is drawn for a curve without any overhead.
        bar = ""
        if worst:
            bar = "█" * round(bar_width * point.overhead / worst)
        # One point may be several of them: the least budget is the knee of a short curve.
        notes = [note for note, marked_point in marked.items() if marked_point == point]
        cells = [
            format_bytes(reserved_bytes + point.peak_bytes),
            f"{point.overhead:.2%}",
            format_seconds(point.seconds),
        ]
        if staying is not None:
            fits = staying[0].peak_bytes <= point.peak_bytes
            cells.append(f"{staying.at(point.peak_bytes).overhead:.2%}" if fits else "no plan")
        table.add_row(*cells, bar, ", ".join(notes))
    return table
