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
    """The defaults are made for plans within a second or two, on one core, of chains of up to 340 stages."""

    # Tables.

    # Slots of any table, however short the chain: more make no plan better.
    most_slots: int = 20_000
    # Sums that the table of a short chain may take: these last about 0.1 s.
    cheap_sums: float = 1e8
    # Numbers that the table of a short chain may hold: to fill these lasts about 0.1 s.
    cheap_numbers: float = 8e6
    # Most stages for a refined table, which takes up to three times as long, and for edits of its candidates.
    refined_stages: int = 40
    # A table with fewer slots is coarse: some boundaries of a long chain take no slot in it, and the program picks
    # those. So it gets finer ones for small budgets.
    fine_slots: int = 2000
    # Each finer table reaches up to this share of the budgets of the one before.
    finer: float = 1 / 8
    # The last finer table reaches up to this multiple of the least memory,
    small: float = 2.0
    # and there is none between two that reach within this factor of each other.
    near: float = 1.5
    # A finer table is asked up to this multiple of its reach, so that a larger budget is not worse off for having a
    # coarser table.
    beyond: float = 1.5

    # Candidates of a table for one budget.

    # Stairs above the budget that are tried as well, since the table's count may be too high: at least so many,
    hopeful: int = 16
    # and on short chains, whose candidates are judged fast, so many divided by the number of stages.
    hopeful_stages: int = 512
    # Most options of all stages together for edits: a schedule has as many edits as there are options.
    edited_options: int = 80
    # Most neighbours that one edit puts into a new segment.
    longest_wrap: int = 3
    # Most stages for edits of edits: their number grows with the square of the stages.
    twice_edited_stages: int = 8

    # The least memory.

    # The schedule of least peak is tried for budgets within this share of the least memory.
    close: float = 0.05
    # With skips, whose bytes the table only approximates, so many of each table's smallest candidates are edited.
    descents: int = 3
    # Stages, over all schedules, that are simulated for a descent, and remembered. All that is judged of a long chain,
    # with its events, would take 100 MB.
    judged_stages: int = 50_000

    # Stages, over all schedules of all tables, that are simulated for the curve of all budgets. These take a second.
    curve_stages: int = 30_000
    # Questions between its points, times the number of stages. They take a second or two.
    frontier_questions: int = 1500

    # Moves to another memory.

    # Slots of the program over memory and link, whose work grows with their square,
    moved_slots: int = 100
    # and how many memories at and below the budget are asked of it.
    moved_memories: int = 7
    # Stages, over all schedules, for which points are placed: those of the tables,
    moved_stages: int = 5_000
    # and those of edits.
    moved_edits: int = 3_000
    # Edits that are looked at for each one that is placed: most are slower whatever they move, which is soon seen.
    moved_looks: int = 10
    # Share of a step beyond keeping everything at which a plan that moves is fast enough, and nothing more is tried.
    negligible: float = 1e-4
    # Most subsets of a schedule's items that are tried; of more items only all of them, and all but one.
    moved_subsets: int = 32
    # Budgets of a curve.
    moved_budgets: int = 16

    # The lower bound.

    # Sums for its gaps: these last about 0.1 s.
    bound_sums: float = 5e7
    # Slots of the whole step, and the most of its gaps.
    bound_most_slots: int = 4000
    # Fewest slots of its gaps: long chains get shorter gaps rather than fewer slots.
    bound_least_slots: int = 500


current = Effort()
"""The effort of whatever is planned from now on; read as ``effort.current``, so that tests can set a smaller one."""
