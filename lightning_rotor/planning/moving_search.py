"""Schedules that may move what stages hold, for any number of budgets.

Plans without moves keep late stages, which live shortest, and recompute early ones. A link wants early ones, whose
copies have the whole forward to finish. So two kinds of candidates are tried, and the simulator decides:

* schedules of the tables for whatever they take, fastest first, with so much of them moved that they fit;
* those of :mod:`.move_program`, which chooses between keeping, recomputing and moving for one budget;

and then edits of the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import combinations

from typing_extensions import Unpack

from lightning_rotor.chain import Chain
from lightning_rotor.link import Link
from lightning_rotor.planning.candidates import by_peak, by_seconds
from lightning_rotor.planning.edits import neighbours
from lightning_rotor.planning.effort import DEFAULT_SLOTS, SAME
from lightning_rotor.planning.move_program import MoveProgram
from lightning_rotor.planning.placing import placed
from lightning_rotor.planning.schedule_search import ScheduleSearch, no_schedule_is_faster
from lightning_rotor.schedule import Move, Schedule
from lightning_rotor.simulator import Conditions, Simulation, bytes_around, least_seconds, movable, simulate


class MovingSearch(ScheduleSearch):
    """Schedules of one chain; without a link in ``step`` those of :class:`ScheduleSearch`, which move nothing."""

    def __init__(self, chain: Chain, *, slots: int = DEFAULT_SLOTS, **conditions: Unpack[Conditions]) -> None:
        super().__init__(chain, slots=slots, **conditions)
        self._link = conditions.get("link")
        self._found: dict[int, Simulation | None] = {}

    def fastest(self, budget_bytes: int, *, with_least: bool = True) -> Simulation | None:
        """The fastest schedule that fits; None if none does.

        Without ``with_least``, and where nothing moves, the schedule of least peak is not looked for.
        """
        if self._link is None:
            return super().fastest(budget_bytes, with_least=with_least)
        if budget_bytes not in self._found:
            self._found[budget_bytes] = self._fastest_over(self._link, budget_bytes)
        return self._found[budget_bytes]

    @cached_property
    def smallest(self) -> Simulation:
        """The schedule of least peak."""
        least = self.smallest_of_tables
        if self._link is None:
            return least
        for schedule in self._staying:
            moved = self._all_moved(schedule)
            if by_peak(moved) < by_peak(least):
                least = moved
        # Other candidates may lead further down. What no budget finds is not there.
        while True:
            smaller = self._fastest_of_candidates(self._link, least.peak_bytes - 1)
            if smaller is None:
                return least
            least = self._moved_longer(smaller)

    def _moved_longer(self, simulation: Simulation) -> Simulation:
        """The smallest of a schedule, itself with what it moves away for longer, and itself with more moved."""
        # Its moves fill the budget; away for as long as they can be, they leave more of it.
        items = simulation.schedule.items
        moves = [Move.whole(move.item, len(items)) for move in simulation.schedule.moves]
        longest = simulate(self.chain, Schedule(items, tuple(moves)), **self.conditions)
        all_moved = self._all_moved(simulation.schedule)
        fitting = filter(self._fits, (simulation, longest, all_moved))
        return min(fitting, key=by_peak)

    def candidates(self) -> tuple[Simulation, ...]:
        """Schedules from the least peak to no recomputation, by rising peak."""
        if self._link is None:
            return super().candidates()
        least = self.smallest
        most = self.keep_all
        # A table holds schedules for every budget, but moves are placed for one. So the curve asks budget by budget.
        apart = max((most.peak_bytes - least.peak_bytes) // self.effort.moved_budgets, 1)
        by_schedule = {least.schedule: least, most.schedule: most}
        for budget_bytes in range(least.peak_bytes, most.peak_bytes, apart):
            simulation = self.fastest(budget_bytes)
            if simulation is not None:
                by_schedule[simulation.schedule] = simulation
        return tuple(sorted(by_schedule.values(), key=by_peak))

    @property
    def questions(self) -> int:
        """Budgets between the points of a curve that are worth a search; each takes one of its own with a link."""
        questions = super().questions
        return questions if self._link is None else min(questions, self.effort.moved_budgets)

    def _fastest_over(self, link: Link, budget_bytes: int) -> Simulation | None:
        best = self._fastest_of_candidates(link, budget_bytes)
        # To find the least peak takes a search of its own, so it is asked for only where it may be the answer.
        if best is None or (
            best.peak_bytes <= self.close_bytes and best.peak_bytes <= self.smallest_of_tables.peak_bytes
        ):
            least = self.smallest
            is_faster = best is None or by_seconds(least) < by_seconds(best)
            if least.peak_bytes <= budget_bytes and is_faster:
                best = least
        if best is None or self._is_fast_enough(best):
            return best
        return self._edited(best, budget_bytes)

    def _fastest_of_candidates(self, link: Link, budget_bytes: int) -> Simulation | None:
        """The fastest candidate that fits, before any edit; None if none does."""
        # Not slower than a plan that moves nothing, whatever the approximations of the program over the link.
        best = super().fastest(budget_bytes)
        if best is not None and self._is_fast_enough(best):
            return best
        # The most hopeful first, so that few have to be placed.
        for schedule in sorted(self._staying, key=partial(self._least_seconds, budget_bytes)):
            best = self._better(best, schedule, None, budget_bytes)
        if best is not None and self._is_fast_enough(best):
            return best
        for schedule, wanted in self._program_schedules(link, budget_bytes):
            best = self._better(best, schedule, wanted, budget_bytes)
            best = self._better(best, schedule, None, budget_bytes)
        return best

    def _is_fast_enough(self, best: Simulation) -> bool:
        """True if nothing could be much faster: a search takes longer than what it could save."""
        if best.schedule == self.keep_all.schedule:
            return True
        return best.seconds <= self.keep_all.seconds * (1 + self.effort.negligible) and self._keeping_is_fastest

    @cached_property
    def _keeping_is_fastest(self) -> bool:
        return no_schedule_is_faster(self.chain)

    def _fits(self, simulation: Simulation) -> bool:
        """True if the other memory has room for what moves."""
        return self._link is None or self._link.holds(simulation.host_bytes)

    @cached_property
    def _staying(self) -> list[Schedule]:
        """Schedules that move nothing; of long chains few, evenly spread over each table."""
        schedules = [self.keep_all.schedule]
        tables = self.tables
        for table in tables:
            stages = len(tables) * len(table) * len(self.chain)
            apart = max(math.ceil(stages / self.effort.moved_stages), 1)
            schedules += map(table.schedule, range(0, len(table), apart))
        # Each once, in an order that is the same in every run.
        return list(dict.fromkeys(schedules))

    def _program_schedules(self, link: Link, budget_bytes: int) -> Iterator[tuple[Schedule, Sequence[int]]]:
        """Schedules of the program over memory and link at and near the budget, with what they move."""
        refined = len(self.chain) <= self.effort.refined_stages
        program = MoveProgram(
            self.chain,
            budget_bytes,
            link,
            slots=self.effort.moved_slots,
            refined=refined,
            **bytes_around(self.conditions),
        )
        # The program rounds, so what it takes for less memory may be the best that fits the budget in bytes.
        seen = set()
        for memory in range(program.slots, program.slots - self.effort.moved_memories, -1):
            schedule_and_moved = program.schedule_at(memory)
            text = str(schedule_and_moved)
            if schedule_and_moved is not None and text not in seen:
                seen.add(text)
                yield schedule_and_moved

    def _edited(self, best: Simulation, budget_bytes: int) -> Simulation:
        """The best of a schedule and its edits, and of the edits of that."""
        untried = self._edits(best)
        attempts = self.effort.moved_edits // len(self.chain)
        looks = self.effort.moved_looks * attempts
        while attempts and looks:
            edit = next(untried, None)
            if edit is None:
                break
            schedule, wanted = edit
            looks -= 1
            if self._is_slower(schedule, best, budget_bytes):
                continue
            attempts -= 1
            edited = self._better(best, schedule, wanted, budget_bytes)
            if edited is not None and edited is not best:
                # On from the better one at once: judging all edits of each would use up the attempts.
                best = edited
                untried = self._edits(best)
        return best

    def _edits(self, best: Simulation) -> Iterator[tuple[Schedule, Sequence[int] | None]]:
        """Schedules near one, with what they may move: one item less than it does, or an edit away, and anything."""
        stays = Schedule(best.schedule.items)
        moved = {move.item for move in best.schedule.moves}
        for number in sorted(moved):
            yield stays, sorted(moved - {number})
        # Two edits away on short chains.
        for schedule in neighbours(self.chain, stays, divide=True):
            yield schedule, None
        # The least hopeful last: each takes an attempt, however slow the schedule is without any wait.
        able = movable(self.chain, stays.items)
        for number in able:
            yield stays, [other for other in able if other != number]

    def _better(
        self,
        best: Simulation | None,
        schedule: Schedule,
        wanted: Sequence[int] | None,
        budget_bytes: int,
    ) -> Simulation | None:
        """The faster of the best and a schedule with some items moved, by default any; those that can."""
        if best is not None and self._is_slower(schedule, best, budget_bytes):
            return best
        able = movable(self.chain, schedule.items)
        if wanted is not None:
            able = sorted(set(able) & set(wanted))
        for chosen in self._choices(able):
            moved = placed(self.chain, schedule, chosen, budget_bytes, self.conditions)
            if moved is None:
                continue
            # Only if it is faster by more than the order of sums: else edits could lead in a circle.
            if best is None or moved.seconds < best.seconds * (1 - SAME):
                best = moved
        return best

    def _is_slower(self, schedule: Schedule, best: Simulation, budget_bytes: int) -> bool:
        """True if a schedule cannot become the best whatever it moves."""
        return self._least_seconds(budget_bytes, schedule) >= best.seconds * (1 - SAME)

    def _least_seconds(self, budget_bytes: int, schedule: Schedule) -> float:
        return least_seconds(self.chain, schedule, budget_bytes, self.conditions)

    def _choices(self, able: Sequence[int]) -> Iterator[Sequence[int]]:
        """All items that may move; of few, all subsets: what one item brings back may be too much beside another."""
        yield able
        if 2 ** len(able) <= self.effort.moved_subsets:
            for count in reversed(range(1, len(able))):
                yield from combinations(able, count)

    def _all_moved(self, schedule: Schedule) -> Simulation:
        """The schedule with all moved that can, for as long as it can, and for which there is room."""
        items = schedule.items
        able = movable(self.chain, items)
        while True:
            moves = tuple(Move.whole(number, len(items)) for number in able)
            simulation = simulate(self.chain, Schedule(items, moves), **self.conditions)
            if self._fits(simulation):
                return simulation
            # The first half: items of early stages are away for longest.
            able = able[: len(able) // 2]
