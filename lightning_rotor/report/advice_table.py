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

_COLUMNS = (
    "way",
    "batch a copy",
    "bytes a device",
    "step",
    "samples/s",
    "recomputed",
    "limited by",
)
# Columns of words, which begin on the left, while numbers are compared from their last digit on.
_WORDS = ("way", "limited by")
# Entries of the answer in JSON.
_OF_A_WAY = (
    "kind",
    "devices",
    "batch_per_device",
    "accumulated",
    "copies",
    "shards",
    "stages",
    "schedule",
    "micro_batches",
    "reshard",
    "recomputed",
    "chain_length",
    "peak_bytes",
    "lines",
)
_OF_SECONDS = ("total", "compute", "recomputation", "link", "bubble")


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
    nodes = ""
    if cluster.nodes > 1:
        nodes = f"{cluster.nodes} x "
    table = Table(
        title=f"{advice.batch} samples a step on {nodes}{cluster.devices} x {cluster.gpu.name}, "
        f"{format_bytes(advice.limit_bytes)} each",
        box=box.ROUNDED,
        title_justify="left",
    )
    table.add_column("", justify="right")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    for number, choice in enumerate(advice.choices, 1):
        recomputed = ""
        if choice.recomputed:
            recomputed = f"{choice.recomputed} of {choice.chain_length}"
        table.add_row(
            # The lines of Python below the table go by it.
            str(number),
            cell(choice.name),
            _batch(choice),
            format_bytes(choice.peak_bytes),
            format_seconds(choice.seconds.total),
            # Of all devices: ways differ in how many copies of the model they have.
            f"{advice.batch / choice.seconds.total:,.0f}",
            recomputed,
            _limit(choice),
        )
    return table


def _batch(choice: Choice) -> str:
    # What a device holds follows from the parts in which it has its batch.
    if choice.micro_batches > 1:
        return f"{choice.batch_per_device} in {choice.micro_batches}"
    if choice.accumulated > 1:
        return f"{choice.batch_per_device} in {choice.accumulated} steps"
    return str(choice.batch_per_device)


def _limit(choice: Choice) -> str:
    limit = choice.seconds.limited_by
    # Of a model without operations that are counted, all seconds are 0.
    share = 0.0
    if choice.seconds.total:
        share = getattr(choice.seconds, limit) / choice.seconds.total
    return f"{limit}, {share:.0%}"


def advice_parts(advice: Advice, *, most_lines: int = 3) -> Iterator[Any]:
    """The table, what was left out, and how to run the first ways."""
    yield advice_table(advice)
    for way, why in advice.left_out:
        yield f"Not listed: {way}: {why}."
    yield "Seconds are a roofline's and data sheets', to compare ways, not to promise."
    # The seconds of neighbours may be in another order in truth, so the fastest alone would be too few.
    for number, choice in enumerate(advice.choices[:most_lines], 1):
        yield f"\n# {number}: {choice.name}\n{choice.lines}"


def advice_as_json(advice: Advice, model: str) -> dict[str, Any]:
    """Everything that the table shows, and the lines of Python of all ways; bytes and seconds as numbers."""
    ways = []
    for choice in advice.choices:
        # By names of their own and not by those of all fields: scripts read this.
        way: dict[str, Any] = {name: getattr(choice, name) for name in _OF_A_WAY}
        way["seconds"] = {name: getattr(choice.seconds, name) for name in _OF_SECONDS}
        way["limited_by"] = choice.seconds.limited_by
        ways.append(way)
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
