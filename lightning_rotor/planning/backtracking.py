"""Schedules from a table: its decisions found again, in O(n) per item, since no table stores them."""

from __future__ import annotations

from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.kernels import LEAF, OPEN
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment


def schedule_at(table: Table, memory: int) -> Schedule:
    """The schedule behind ``table.seconds[memory]``, which must be finite."""
    # Of the segments that are not closed yet, outermost first.
    open_items: list[list[Item]] = [[]]
    for kind, stage, option in table.traced(memory).tolist():
        if kind == OPEN:
            open_items.append([])
        elif kind == LEAF:
            open_items[-1].append(Leaf(stage, option))
        else:
            inside = open_items.pop()
            open_items[-1].append(Segment(tuple(inside)))
    return Schedule(tuple(open_items[0]))
