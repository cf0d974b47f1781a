"""Tables of advice: batch sizes, and ways to train on several devices with the lines of Python for some of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from lightning_rotor.advising import Advice, Choice
from lightning_rotor.planned.batch_sizes import BatchSizeAdvice
from lightning_rotor.shown import cell, table_of
from lightning_rotor.units import format_bytes, format_seconds

_COLUMNS = ("way", "batch a copy", "bytes a device", "step", "samples/s", "recomputed", "limited by")


@table_of.register
def _(advice: Advice) -> Group:
    return Group(advice_table(advice))


@table_of.register
def _(advice: BatchSizeAdvice) -> Table:
    measured = f"from measurements at {advice.measured}"
    table = Table(title=f"Batch sizes within {format_bytes(advice.limit_bytes)}, {measured}")
    for heading in ("Batch size", "Samples/s", "Peak", "Overhead", "Stages recomputed", ""):
        table.add_column(heading, justify="right")
    for option in advice.options:
        table.add_row(
            str(option.batch_size),
            f"{option.samples_per_second:,.0f}",
            format_bytes(option.peak_bytes),
            f"{option.plan.overhead:.1%}",
            str(len(option.plan.recomputed)),
            "best" if option is advice.best else "",
        )
    return table


def advice_table(advice: Advice) -> Table:
    """Ways that fit, fastest first."""
    cluster = advice.cluster
    nodes = f"{cluster.nodes} x " if cluster.nodes > 1 else ""
    table = Table(
        title=f"{advice.batch} samples a step on {nodes}{cluster.devices} x {cluster.gpu.name}, "
        f"{format_bytes(advice.limit_bytes)} each",
        box=box.ROUNDED,
        title_justify="left",
    )
    table.add_column("", justify="right")
    for number, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if number in (0, 6) else "right")
    for number, choice in enumerate(advice.choices, 1):
        table.add_row(
            str(number),
            cell(choice.name),
            _batch(choice),
            format_bytes(choice.peak_bytes),
            format_seconds(choice.seconds.total),
            f"{advice.batch / choice.seconds.total:,.0f}",
            f"{choice.recomputed} of {choice.chain_length}" if choice.recomputed else "",
            _limit(choice),
        )
    return table


def _batch(choice: Choice) -> str:
    if choice.micro_batches > 1:
        return f"{choice.batch_per_device} in {choice.micro_batches}"
    if choice.accumulated > 1:
        return f"{choice.batch_per_device} in {choice.accumulated} steps"
    return str(choice.batch_per_device)


def _limit(choice: Choice) -> str:
    limit = choice.seconds.limited_by
    share = getattr(choice.seconds, limit) / choice.seconds.total if choice.seconds.total else 0.0
    return f"{limit}, {share:.0%}"


def advice_parts(advice: Advice, *, most_lines: int = 3) -> Iterator[Any]:
    """The table, what was left out, and how to run the first ways."""
    yield advice_table(advice)
    for way, why in advice.left_out:
        yield f"Not listed: {way}: {why}."
    yield "Seconds are a roofline's and data sheets', to compare ways, not to promise."
    for number, choice in enumerate(advice.choices[:most_lines], 1):
        yield f"\n# {number}: {choice.name}\n{choice.lines}"


def advice_as_json(advice: Advice, model: str) -> dict[str, Any]:
    """Everything that the table shows, and the lines of Python of all ways; bytes and seconds as numbers."""
    ways = []
    for choice in advice.choices:
        seconds = {
            name: getattr(choice.seconds, name) for name in ("total", "compute", "recomputation", "link", "bubble")
        }
        names = (
            *("kind", "devices", "batch_per_device", "accumulated", "copies", "stages", "schedule", "micro_batches"),
            *("reshard", "recomputed", "chain_length", "peak_bytes", "lines"),
        )
        ways.append(
            {name: getattr(choice, name) for name in names}
            | {"seconds": seconds, "limited_by": choice.seconds.limited_by}
        )
    return {
        "model": model,
        "gpu": advice.cluster.gpu.name,
        "devices": advice.cluster.devices,
        "nodes": advice.cluster.nodes,
        "batch": advice.batch,
        "limit_bytes": advice.limit_bytes,
        "choices": ways,
        "left_out": dict(advice.left_out),
    }
