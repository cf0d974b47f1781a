"""One chain, any number of budgets: the search for schedules in the tables of a chain.

Tables are made when they are needed and kept. Each covers budgets up to some memory in equal slots::

    budgets      0 ─────────────────────────────────────────────── all kept
    for all      │    slot    │    slot    │    slot    │    slot    │        perhaps twice, by two rules for skips
    finer        │  │  │  │  │                                               up to an eighth of it
    finest       ││││                                                       up to twice the least memory
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, fields
from functools import cached_property, lru_cache, partial
from itertools import groupby

from typing_extensions import Unpack

from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.planning import effort
from lightning_rotor.planning.candidates import Candidates, by_peak, by_seconds
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.effort import DEFAULT_SLOTS
from lightning_rotor.planning.requirements import requirements_of
from lightning_rotor.planning.retained_skips import retains_from_birth
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment
from lightning_rotor.simulator import BytesAround, Conditions, Simulation, bytes_around, simulate
from lightning_rotor.units import require_positive_integer


def fine_slots(stages: int, slots: int = DEFAULT_SLOTS) -> int:
    """At least ``slots``, and more for short chains, where they cost next to nothing."""
    require_positive_integer("slots", slots, DEFAULT_SLOTS)
    limits = effort.current
    sums_per_slot = stages**3 / 6
    numbers_per_slot = stages**2
    affordable = min(
        limits.cheap_sums / sums_per_slot,
        limits.cheap_numbers / numbers_per_slot,
        limits.most_slots,
    )
    return max(slots, int(affordable))


class ScheduleSearch:
    """Schedules of one chain for any number of budgets; arguments as for :func:`lightning_rotor.planning.plan`."""

    def __init__(self, chain: Chain, *, slots: int = DEFAULT_SLOTS, **conditions: Unpack[Conditions]) -> None:
        self.chain = chain
        self.slots = slots
        self.conditions = conditions
        self.effort = effort.current
        # Tables share what they judge. All that is judged of a long chain, with its events, would take 100 MB.
        remembered = max(self.effort.judged_stages // len(chain), 1)
        judge = partial(simulate, chain, **conditions)
        self._judge: Callable[[Schedule], Simulation] = lru_cache(remembered)(judge)
        self._tables: dict[tuple[int, bool], Candidates] = {}

    def fastest(self, budget_bytes: int, *, with_least: bool = True) -> Simulation | None:
        """The fastest schedule that fits; None if none does.

        Without ``with_least``, the schedule of least peak is not looked for, which takes most of the time where only
        that one could fit.
        """
        if self.keep_all.peak_bytes <= budget_bytes and no_schedule_is_faster(self.chain):
            # Saves the table, which takes seconds for a long chain.
            return self.keep_all
        of_tables = [table.fastest(budget_bytes) for table in self._for_all]
        finest = None
        for top in self._finer_tops:
            if budget_bytes <= self.effort.beyond * top:
                finest = top
        if finest is not None:
            # Only the one whose slots suit the budget best: tables are made when they are asked for.
            of_tables.append(self._up_to(finest).fastest(budget_bytes))
        fitting = [simulation for simulation in of_tables if simulation is not None]
        if self.keep_all.peak_bytes <= budget_bytes:
            fitting.append(self.keep_all)
        # The least peak is known after many simulations, so it is asked for only where it may be the answer.
        if with_least and (of_tables[0] is None or of_tables[0].peak_bytes <= self.close_bytes):
            smallest = self.smallest_of_tables
            if smallest.peak_bytes > budget_bytes:
                return None
            fitting.append(smallest)
        return min(fitting, key=by_seconds, default=None)

    @cached_property
    def smallest(self) -> Simulation:
        """The schedule of least peak."""
        return self.smallest_of_tables

    @cached_property
    def smallest_of_tables(self) -> Simulation:
        """The schedule of least peak, of those of all tables and their edits."""
        tables = list(self._for_all)
        if self._finer_tops:
            tables.append(self._up_to(self._finer_tops[-1]))
        has_skips = tables[0].thorough and bool(self.chain.skips)
        descents = self.effort.descents if has_skips else 1
        starts: dict[Schedule, Simulation] = {}
        for table in tables:
            for simulation in table.lowest()[:descents]:
                starts[simulation.schedule] = simulation
        # Shared by all descents, those from the smallest first: a long chain, whose judging is slow, gets fewer.
        attempts = iter(range(max(self.effort.judged_stages // len(self.chain), 1)))
        least = self.keep_all
        for start in sorted(starts.values(), key=by_peak):
            least = min(least, tables[0].descended(start, attempts), key=by_peak)
        # Edits lead down from other stairs, too. What no budget finds is not there: see Candidates.fastest().
        while True:
            fastest = [table.fastest(least.peak_bytes - 1) for table in tables]
            smaller = [simulation for simulation in fastest if simulation is not None]
            if not smaller:
                return least
            least = tables[0].descended(min(smaller, key=by_peak), attempts)

    def candidates(self) -> tuple[Simulation, ...]:
        """Every schedule of the tables, by rising peak; of long chains, whose judging is slow, evenly spread ones."""
        candidates = [self.smallest, self.keep_all]
        tables = self.tables
        for table in tables:
            stages = len(table) * len(tables) * len(self.chain)
            apart = max(stages // self.effort.curve_stages, 1)
            candidates += [table[stair] for stair in range(0, len(table), apart)]
        # By identity: to compare two simulations is to compare all their events.
        distinct = {id(simulation): simulation for simulation in candidates}
        least = by_peak(self.smallest)
        # A stair that nobody has judged before may lie below: what no budget finds is not there.
        above = [simulation for simulation in distinct.values() if by_peak(simulation) >= least]
        return tuple(sorted(above, key=by_peak))

    @cached_property
    def keep_all(self) -> Simulation:
        """Without recomputation, every stage under the fastest of its options."""
        return self._judge(keep_all_fastest(self.chain))

    @property
    def close_bytes(self) -> float:
        """Most bytes that the schedule of least peak may take, as far as the table tells."""
        return self._for_all[0].lowest_bytes * (1 + self.effort.close)

    @property
    def questions(self) -> int:
        """Budgets between the points of a curve that are worth a search."""
        return self.effort.frontier_questions // len(self.chain)

    @property
    def tables(self) -> tuple[Candidates, ...]:
        """Candidates of every table, made now."""
        return (*self._for_all, *map(self._up_to, self._finer_tops))

    @property
    def _most_bytes(self) -> int:
        return max(self.keep_all.peak_bytes, 1)

    @cached_property
    def _for_all(self) -> tuple[Candidates, ...]:
        """Candidates for every budget, under both rules for skips if they differ; the simulator decides."""
        tables = [self._up_to(self._most_bytes)]
        if retains_from_birth(self.chain):
            # One rule charges more than some schedules take, the other less.
            tables.append(self._up_to(self._most_bytes, readers_pay=True))
        return tuple(tables)

    @cached_property
    def _finer_tops(self) -> tuple[int, ...]:
        """By falling memory, the largest budget of each finer table in bytes.

        In a coarse table of a long chain some boundaries take no slot, and the program picks those: with a budget of
        only a few dozen boundaries, schedules exceed their slots by far.
        """
        if self.slots >= self.effort.fine_slots or self._for_all[0].is_exact:
            return ()
        small = min(self.effort.small * self._for_all[0].lowest_bytes, self._most_bytes)
        tops = []
        top = self.effort.finer * self._most_bytes
        while top > self.effort.near * small:
            tops.append(math.ceil(top))
            top *= self.effort.finer
        return (*tops, math.ceil(small))

    def _up_to(self, most_bytes: int, *, readers_pay: bool = False) -> Candidates:
        """Candidates of one table for budgets up to ``most_bytes``, made when first asked for."""
        key = most_bytes, readers_pay
        if key not in self._tables:
            self._tables[key] = self._solve(most_bytes, readers_pay)
        return self._tables[key]

    def _solve(self, most_bytes: int, readers_pay: bool) -> Candidates:
        table, unit, is_exact = solved_table(
            self.chain,
            most_bytes,
            self.slots,
            readers_pay=readers_pay,
            **bytes_around(self.conditions),
        )
        uncertain_bytes = _uncounted_bytes(self.chain)
        if not is_exact:
            uncertain_bytes += math.ceil(2 * unit)
        # Edits of a schedule are as many as its options, and each is simulated.
        options = sum(len(stage.options) for stage in self.chain)
        few_options = options <= self.effort.edited_options
        thorough = few_options and len(self.chain) <= self.effort.refined_stages
        return Candidates(
            self.chain,
            table,
            unit,
            is_exact,
            self._judge,
            uncertain_bytes,
            thorough,
            self.effort,
        )


def keep_all_fastest(chain: Chain) -> Schedule:
    """Schedule without any recomputation, not even of inputs from outputs; every stage runs its fastest option."""
    leaves = []
    for number, stage in enumerate(chain):
        # Pairs, so that any option that keeps its input comes before all that rebuild it.
        costs = [(option.inverts, option.seconds) for option in stage.options]
        leaves.append(Leaf(number, costs.index(min(costs))))
    return Schedule(tuple(leaves))


def no_schedule_is_faster(chain: Chain) -> bool:
    """True if no schedule can be faster than :func:`keep_all_fastest`: so on measured chains without inverses."""
    # Both forwards of a measured stage are timed as one, so dropping and recomputing it alone saves no time.
    for stage in chain:
        keeping = min(option.seconds for option in stage.options if not option.inverts)
        for option in stage.options:
            if option.seconds < keeping:
                return False
            recomputing = stage.discard_seconds + option.again_seconds + option.backward_seconds
            if stage.recomputable and recomputing < keeping:
                return False
    return True


def segments_around(chain: Chain, first: int, last: int) -> list[Item]:
    """Stages ``first..last`` as one segment, or as several around stages that must be kept."""
    items: list[Item] = []
    for recomputable, stages in groupby(range(first, last + 1), lambda stage: chain.stages[stage].recomputable):
        run = tuple(map(Leaf, stages))
        if recomputable:
            items.append(Segment(run))
        else:
            items.extend(run)
    return items


def solved_table(
    chain: Chain, most_bytes: int, slots: int, *, readers_pay: bool = False, **conditions: Unpack[BytesAround]
) -> tuple[Table, float, bool]:
    """The table for budgets up to so many bytes, the bytes of a slot, and True if every size is whole slots."""
    # If a slot can be a divisor of every size, nothing rounds, and the table's count is right but for what it leaves
    # out.
    divisor = math.gcd(*_sizes_in(chain), conditions.get("lingering_bytes", 0))
    is_exact = divisor * slots >= most_bytes
    unit = float(divisor) if is_exact else most_bytes / slots
    refined = len(chain) <= effort.current.refined_stages
    requirements = requirements_of(
        chain,
        unit=unit,
        refined=refined,
        readers_pay=readers_pay,
        **conditions,
    )
    # A little more than everything takes, for what rounds up.
    table = Table(requirements, slots=math.ceil(most_bytes / unit) + len(chain) // 16 + 4)
    table.solve()
    return table, unit, is_exact


def _uncounted_bytes(chain: Chain) -> int:
    """Bytes by which the approximations of an exact table may be wrong."""
    # The states that nested segments remember, and what a discarded pass holds for stages that will be inverted.
    state_bytes = 0
    for stage in chain:
        state_bytes += stage.state_bytes
        for option in stage.options:
            if option.inverts:
                state_bytes += option.saved_bytes
    if any(stage.draws_random for stage in chain):
        state_bytes += chain.rng_state_bytes
    # A skip has one fixed holder in the table, and is held by others in some schedules.
    skip_bytes = 0
    for skip in chain.skips:
        skip_bytes = max(skip_bytes, skip.size_bytes, *skip.gradient_bytes)
    return 4 * state_bytes + skip_bytes


def _sizes_in(chain: Chain) -> list[int]:
    """Every size that a simulation adds or subtracts."""
    sizes = [chain.rng_state_bytes]
    for skip in chain.skips:
        sizes += [skip.size_bytes, *skip.gradient_bytes]
    for stage in chain:
        sizes += _byte_fields(stage)
        for option in stage.options:
            sizes += _byte_fields(option)
            sizes += astuple(option.backward_peaks(gradients_exist=True))
    return sizes


def _byte_fields(costs: Option | StageCost) -> list[int]:
    """Values of all fields that count bytes; 0 for None."""
    # By the names of fields, so that a new size of a chain needs no line here.
    sizes = []
    for field in fields(costs):
        if field.name.endswith("_bytes"):
            sizes.append(getattr(costs, field.name) or 0)
    return sizes
