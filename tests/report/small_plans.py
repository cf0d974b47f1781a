"""Plans of a chain of eight equal stages, and what tables and legends of them say."""

from __future__ import annotations

import io

from matplotlib.figure import Figure
from rich.console import Console

from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.link import Link
from lightning_rotor.planning import Plan
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate

MIB = 2**20


def stage(number: int) -> StageCost:
    size = 4 * MIB
    keep = Option(
        name="keep",
        saved_bytes=size,
        saved_input_bytes=size,
        saved_output_bytes=0,
        saved_tensors=2,
        forward_peak_bytes=2 * size,
        replay_peak_bytes=2 * size,
        unpack_peak_bytes=size,
        unpack_bytes=size,
        backward_peak_bytes=2 * size,
        backward_segment_peak_bytes=2 * size,
        backward_held_peak_bytes=2 * size,
        input_gradient_bytes=size,
        parameter_gradient_bytes=0,
        forward_seconds=0.001,
        replay_seconds=0.001,
        backward_seconds=0.002,
    )
    return StageCost(f"layer{number}", size, 2 * size, 0.001, (keep,))


CHAIN = Chain(tuple(stage(number) for number in range(8)))
# Of these, moves are searched for quickly.
FEW = Chain(CHAIN.stages[:5])
KEEP_ALL = simulate(CHAIN, Schedule.keep_all(8))


def plan_for(text: str, budget_bytes: int = 60 * MIB, link: Link | None = None) -> Plan:
    schedule = Schedule.parse(text)
    return Plan(CHAIN, schedule, budget_bytes, simulate(CHAIN, schedule, link=link), 0.0123, link=link)


def printed(table: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def rows(table: object) -> dict[str, str]:
    cells = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in printed(table, 200).splitlines()]
    return {row[0]: row[1] for row in cells if len(row) == 2}


def cells(table: object) -> list[list[str]]:
    """Without the header."""
    _, *lines = [line for line in printed(table, 120).splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]
