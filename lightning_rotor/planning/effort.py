"""The work that planning may take: every constant that trades seconds of planning for quality of plans.

None of them changes what fits or what is a bound: the simulator judges each schedule in bytes, and a bound from fewer
sums is lower, but holds.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_SLOTS = 500
"""Memory levels of a table that the user chose nothing for."""

SAME = 1e-9
"""Relative difference below which seconds are equal: sums of the same durations in another order differ by less."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard planning tries, with the reason for each default.

    Attributes:
        most_slots: Slots of any table, however short the chain.
        cheap_sums: Sums that the table of a short chain may take: they last about 0.1 s.
        cheap_numbers: Numbers that the table of a short chain may hold: to fill them lasts about 0.1 s.
        refined_stages: A chain of at most so many stages gets a refined table, which takes up to three times as long,
            and its candidates are edited.
        edited_options: If the stages have more options than this in total, no candidate is edited: a schedule has as
            many edits as there are options.
        fine_slots: A table with fewer slots is coarse: some boundaries of a long chain take no slot in it.
        finer: Each finer table reaches up to this share of the budgets of the one before.
        small: The last finer table reaches up to this multiple of the least memory.
        near: No finer table comes between two that reach within this factor of each other.
        beyond: A finer table is asked up to this multiple of its reach, so that a larger budget is not worse off for
            having a coarser table.
        close: The schedule of least peak is tried for budgets within this share of the least memory.
        hopeful: Stairs tried above the budget, since the table's count may be too high: at least so many.
        hopeful_stages: On short chains, whose candidates are judged fast, so many stages of stairs above the budget.
        longest_wrap: Most neighbours that one edit puts into a new segment.
        twice_edited_stages: On chains of at most so many stages, edits of edits are tried as well.
        descents: With skips, so many of the smallest candidates of each table are made smaller by edits.
        judged_stages: Stages, over all schedules, that are simulated for a curve or a descent, and remembered. Each
            simulation of a long chain takes megabytes with its events.
        frontier_questions: Budgets between two points that the curve of one stage may ask for; a chain of ``n`` stages
            asks an ``n``-th of them, which takes a second or two.
        bound_sums: Sums for the gaps of a lower bound: they last about 0.1 s.
        bound_most_slots: Most slots of a lower bound.
        bound_least_slots: Fewest slots of a lower bound. Long chains get shorter gaps rather than fewer slots.
    """

    most_slots: int = 20_000
    cheap_sums: float = 1e8
    cheap_numbers: float = 8e6
    refined_stages: int = 40
    edited_options: int = 80
    fine_slots: int = 2000
    finer: float = 1 / 8
    small: float = 2.0
    near: float = 1.5
    beyond: float = 1.5
    close: float = 0.05
    hopeful: int = 16
    hopeful_stages: int = 512
    longest_wrap: int = 3
    twice_edited_stages: int = 8
    descents: int = 3
    judged_stages: int = 50_000
    frontier_questions: int = 1500
    bound_sums: float = 5e7
    bound_most_slots: int = 4000
    bound_least_slots: int = 500


current = Effort()
"""The effort of whatever is planned from now on; read as ``effort.current``, so that tests can set a smaller one."""
