"""Bodies of segments from a table, for the program over memory and link: its decisions found again.

:mod:`.backtracking` does the same for whole schedules, in one compiled loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.kernels import bare, best_ending, best_of, body_row, decide, seconds_at
from lightning_rotor.schedule import Item, Leaf, Segment, make_room_for

# Calls per level of nested segments, the construction of tuples included.
_CALLS = 4


class Bodies:
    """Decisions of one table.

    They are asked of the plain loops, whatever filled the table: of the compiled ones, Python can call no more than
    those that fill tables and read whole schedules.
    """

    def __init__(self, table: Table) -> None:
        # Segments are nested at most as deeply as the chain is long; how deeply is not known before.
        make_room_for(_CALLS * len(table.requirements.endings))
        self._requirements = table.requirements
        self._rows = table.rows

    def body(self, memory: int, first: int, last: int, variant: int) -> tuple[Item, ...]:
        """Items of a segment, recomputed with so many slots."""
        requirements, rows = self._requirements, self._rows
        # From behind: stages that save nothing at the end of a segment are not recomputed.
        bare_leaves: list[Leaf] = []
        for end in range(last, first - 1, -1):
            choices = bare(requirements, rows, first, end, variant)
            option, seconds = best_of(rows, choices, memory)
            row = body_row(requirements, rows, first, end, variant)
            if seconds > seconds_at(rows, row, memory):
                # The stage saves something, so from here on the segment is recomputed.
                ending = best_ending(requirements, rows, memory, first, end, variant)
                recomputed = self._recomputed(memory, first, end, ending, variant)
                return (*recomputed, *reversed(bare_leaves))
            bare_leaves.append(Leaf(end, option))
        return tuple(reversed(bare_leaves))

    def _recomputed(self, memory: int, first: int, last: int, ending: int, source: int) -> Iterator[Item]:
        """Items of a recomputation, each with what the ones before have left."""
        while first <= last:
            decision = decide(self._requirements, self._rows, memory, first, last, ending, source)
            assert decision.seconds < float("inf"), "the table holds no schedule here"
            if decision.option >= 0:
                yield Leaf(first, decision.option)
            else:
                yield Segment(self.body(decision.body_memory, first, decision.end, decision.variant))
            memory = decision.left
            first = decision.end + 1
            source = decision.source
