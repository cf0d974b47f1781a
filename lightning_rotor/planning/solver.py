"""One chain, any number of budgets: the tables of a chain, made when they are needed and kept.

A table is a staircase of schedules by memory. It counts in slots and approximates, so a schedule from slightly above a
budget may fit it in bytes and one from slightly below may not: only the simulator tells.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import groupby, pairwise
from operator import attrgetter

import numpy as np
from typing_extensions import Unpack

from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.errors import BudgetError
from lightning_rotor.planning.bounds import ROUNDING
from lightning_rotor.planning.dynamic_program import Table, schedule_at
from lightning_rotor.planning.plan import DEFAULT_SLOTS, SAME, Frontier, Plan, pareto
from lightning_rotor.planning.requirements import requirements_of, retains_from_birth
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment
from lightning_rotor.simulator import Conditions, Simulation, first_inverted, simulate
from lightning_rotor.units import format_bytes, formatted_apart, is_positive_integer

_MOST_SLOTS = 20_000
# Sums and numbers in the table of a short chain; either takes about 0.1 s.
_CHEAP_SUMS = 1e8
_CHEAP_NUMBERS = 8e6
# Most stages for a refined table.
_REFINED_STAGES = 40
# Most options of all stages together for edits: each schedule has as many of them.
_EDITED_OPTIONS = 80
# A table with fewer slots is coarse and gets finer ones for small budgets: each up to _FINER of the one before, the
# last up to _SMALL times the least memory, and none if that is within _NEAR.
_FINE_SLOTS = 2000
_FINER = 1 / 8
_SMALL = 2.0
_NEAR = 1.5
# Finer tables are asked beyond their reach, so that a larger budget is not worse off with a coarser one.
_BEYOND = 1.5
# Relative distance to the least memory within which the schedule of least peak is tried.
_CLOSE = 0.05
# Questions for a curve, times the number of stages: a second or two.
_QUESTIONS = 1500
# With skips, number of the smallest candidates of each table that edits make smaller.
_DESCENTS = 3
# Stages, over all schedules, that are judged for a curve (at least), edited for the least peak, and remembered.
_JUDGED = 50_000


def plan(chain: Chain, budget_bytes: int, *, slots: int = DEFAULT_SLOTS, **step: Unpack[Conditions]) -> Plan:
    """Plan the fastest schedule that fits a memory budget.

    Takes O(n³ · slots) for ``n`` stages. Optimal among schedule trees up to the rounding to slots and the
    approximations named in :mod:`lightning_rotor.planning.dynamic_program`; never above the budget. More budget never
    gives a slower plan.

    Args:
        chain: Costs of ``n`` stages, measured on one device.
        budget_bytes: Activation memory beyond what is allocated when the step begins; parameters are not included.
        slots: Memory levels that the program tells apart, at least. Short chains get more for the same time.
        step: ``gradients_exist``, if parameters already have gradients, so that the backward adds none, and
            ``lingering_bytes``, held during the forward: see :func:`lightning_rotor.simulator.simulate`.
    Returns:
        A plan whose simulated peak is at most ``budget_bytes``.
    Raises:
        BudgetError: No schedule fits (says the least budget and the stage that sets it), or no positive integer.
    Example:
        >>> plan(chain, parse_bytes("2 GiB"))
    Source:
        Beaumont et al., "Optimal checkpointing for heterogeneous chains", hal-02352969.
    """
    return _solver(chain, slots, **step).plan(budget_bytes)


def minimum_budget(chain: Chain, *, slots: int = DEFAULT_SLOTS, **step: Unpack[Conditions]) -> Plan:
    """Plan with the least simulated peak, which is its ``budget_bytes``; arguments as for :func:`plan`."""
    return _solver(chain, slots, **step).minimum()


def frontier(chain: Chain, *, slots: int = DEFAULT_SLOTS, **step: Unpack[Conditions]) -> Frontier:
    """Every useful budget and what it costs in time, from one solve; arguments as for :func:`plan`."""
    return frontier_of(_solver(chain, slots, **step))


# A chain is often planned again at once: for another budget, its curve, its minimum. Tables take tens of megabytes.
@lru_cache(maxsize=1)
def _solver(chain: Chain, slots: int, **step: Unpack[Conditions]) -> Solver:
    return Solver(chain, slots=fine_slots(len(chain), slots), **step)


def fine_slots(stages: int, slots: int = DEFAULT_SLOTS) -> int:
    """At least ``slots``, and more for short chains, where they cost next to nothing."""
    if not is_positive_integer(slots):
        raise ValueError(f"slots is {slots!r}: expected a positive integer, such as {DEFAULT_SLOTS}")
    affordable = min(_CHEAP_SUMS / (stages**3 / 6), _CHEAP_NUMBERS / stages**2, _MOST_SLOTS)
    return max(slots, int(affordable))


class Solver:
    """Plans one chain for any number of budgets, from a table made for the first; arguments as for :func:`plan`.

    A chain of more than about 60 stages gets fewer slots than it has boundaries. Its least budget may then be two
    percent too high; plans at larger budgets are hardly slower (0.1 percent of a step).
    """

    def __init__(self, chain: Chain, *, slots: int = DEFAULT_SLOTS, **step: Unpack[Conditions]) -> None:
        self.chain = chain
        self._slots = slots
        self._step = step
        # Tables share what they judge. All that is judged of a long chain, with its events, would take 100 MB.
        self._judge = lru_cache(max(_JUDGED // len(chain), 1))(partial(simulate, chain, **step))
        self._tables: dict[tuple[int, bool], Candidates] = {}

    def plan(self, budget_bytes: int) -> Plan:
        """The fastest plan that fits; a BudgetError if none does, or the budget is no positive integer."""
        start = time.perf_counter()
        found = None
        if is_positive_integer(budget_bytes):
            fits = self._keep_all.peak_bytes <= budget_bytes
            # Saves the table, which takes seconds for a long chain.
            found = self._keep_all if fits and no_schedule_is_faster(self.chain) else self._fastest(budget_bytes)
        if found is None:
            raise self._refusal(budget_bytes)
        return self._plan(found, budget_bytes, time.perf_counter() - start)

    def minimum(self) -> Plan:
        """The plan with the least simulated peak, which is also its budget."""
        start = time.perf_counter()
        least = self._smallest
        return self._plan(least, least.peak_bytes, time.perf_counter() - start)

    def _plan(self, found: Simulation, budget_bytes: int, seconds: float) -> Plan:
        return Plan(self.chain, found.schedule, budget_bytes, found, seconds, slots=self._slots, **self._step)

    def candidates(self) -> tuple[Simulation, ...]:
        """Every schedule of the tables, by rising peak; of long chains, whose judging is slow, evenly spread ones."""
        found = [self._smallest, self._keep_all]
        for table in (*self._for_all, *map(self._up_to, self._finer_tops)):
            found += [table[stair] for stair in range(0, len(table), max(len(table) * len(self.chain) // _JUDGED, 1))]
        distinct = {id(each): each for each in found if by_peak(each) >= by_peak(self._smallest)}
        return tuple(sorted(distinct.values(), key=by_peak))

    def _fastest(self, budget_bytes: int) -> Simulation | None:
        found = [table.fastest(budget_bytes) for table in self._for_all]
        finer = [top for top in self._finer_tops if budget_bytes <= _BEYOND * top]
        found += [self._up_to(top).fastest(budget_bytes) for top in finer[-1:]]
        if self._keep_all.peak_bytes <= budget_bytes:
            found.append(self._keep_all)
        if found[0] is None or found[0].peak_bytes <= self._for_all[0].lowest_bytes * (1 + _CLOSE):
            if self._smallest.peak_bytes > budget_bytes:
                return None
            found.append(self._smallest)
        return min((each for each in found if each is not None), key=by_seconds, default=None)

    @cached_property
    def _smallest(self) -> Simulation:
        """The candidate of least peak, of those of all tables and their edits."""
        tables = [*self._for_all, *map(self._up_to, self._finer_tops[-1:])]
        descents = _DESCENTS if tables[0].thorough and self.chain.skips else 1
        starts = {each.schedule: each for table in tables for each in table.lowest()[:descents]}
        descended = tables[0].descended
        least = min([self._keep_all, *map(descended, starts.values())], key=by_peak)
        # Edits lead down from other stairs, too. What no budget finds is not there: see Candidates.fastest().
        while found := [less for table in tables if (less := table.fastest(least.peak_bytes - 1)) is not None]:
            least = descended(min(found, key=by_peak))
        return least

    def _refusal(self, budget_bytes: object) -> BudgetError:
        least = self._smallest
        stage = self.chain.stages[least.peak_stage].name
        known = budget_bytes if isinstance(budget_bytes, int) else 0
        budget, minimum = formatted_apart(known, least.peak_bytes)
        gradients = 0 if self._step.get("gradients_exist") else _gradient_bytes_at_peak(self.chain, least)
        cause, remedy = cause_and_remedy(known, least.peak_bytes, stage, gradients)
        reason = f"this chain's minimum {minimum} ({cause})"
        if is_positive_integer(budget_bytes):
            message = f"budget {budget} is below {reason}: {remedy}"
        else:
            message = f"budget is {budget_bytes!r}: expected a positive integer of bytes, and at least {reason}"
        return BudgetError(
            message, budget_bytes=known, minimum_bytes=least.peak_bytes, stage=stage, gradient_bytes=gradients
        )

    @cached_property
    def _keep_all(self) -> Simulation:
        """Without recomputation, every stage under the fastest of its options."""
        return self._judge(keep_all_fastest(self.chain))

    @property
    def _most_bytes(self) -> int:
        return max(self._keep_all.peak_bytes, 1)

    @cached_property
    def _for_all(self) -> tuple[Candidates, ...]:
        """Candidates for every budget, under both rules for skips if they differ; the simulator decides."""
        rules = (False, True) if retains_from_birth(self.chain) else (False,)
        return tuple(self._up_to(self._most_bytes, readers_pay=rule) for rule in rules)

    @cached_property
    def _finer_tops(self) -> tuple[int, ...]:
        """By falling memory, the largest budget of each finer table in bytes.

        In a coarse table of a long chain some boundaries take no slot, and the program picks those: with a budget of
        only a few dozen boundaries, schedules exceed their slots by far.
        """
        if self._slots >= _FINE_SLOTS or self._for_all[0].is_exact:
            return ()
        small = min(_SMALL * self._for_all[0].lowest_bytes, self._most_bytes)
        tops = []
        top = _FINER * self._most_bytes
        while top > _NEAR * small:
            tops.append(math.ceil(top))
            top *= _FINER
        return (*tops, math.ceil(small))

    def _up_to(self, most_bytes: int, *, readers_pay: bool = False) -> Candidates:
        """Candidates of one table for budgets up to ``most_bytes``, made when first asked for."""
        key = most_bytes, readers_pay
        if key not in self._tables:
            self._tables[key] = self._solve(most_bytes, readers_pay)
        return self._tables[key]

    def _solve(self, most_bytes: int, readers_pay: bool) -> Candidates:
        table, unit, is_exact = solved_table(self.chain, most_bytes, self._slots, readers_pay=readers_pay, **self._step)
        states = sum(stage.state_bytes for stage in self.chain)
        states += sum(option.saved_bytes for stage in self.chain for option in stage.options if option.inverts)
        states += self.chain.rng_state_bytes if any(stage.draws_random for stage in self.chain) else 0
        skips = max((max(skip.size_bytes, *skip.gradient_bytes) for skip in self.chain.skips), default=0)
        uncertain_bytes = 4 * states + skips + (0 if is_exact else math.ceil(2 * unit))
        few_options = sum(len(stage.options) for stage in self.chain) <= _EDITED_OPTIONS
        thorough = few_options and len(self.chain) <= _REFINED_STAGES
        return Candidates(self.chain, table, unit, is_exact, self._judge, uncertain_bytes, thorough)


def keep_all_fastest(chain: Chain) -> Schedule:
    """Schedule without any recomputation, not even of inputs from outputs; every stage runs its fastest option."""
    costs = ([(option.inverts, option.seconds) for option in stage.options] for stage in chain)
    return Schedule(tuple(Leaf(stage, each.index(min(each))) for stage, each in enumerate(costs)))


def no_schedule_is_faster(chain: Chain) -> bool:
    """True if no schedule can be faster than :func:`keep_all_fastest`: so on measured chains without inverses."""
    # Both forwards of a measured stage are timed as one, so dropping and recomputing it alone saves no time.
    for stage in chain:
        ways = [each.seconds for each in stage.options]
        if stage.recomputable:
            ways += [stage.discard_seconds + each.again_seconds + each.backward_seconds for each in stage.options]
        if min(ways) < min(each.seconds for each in stage.options if not each.inverts):
            return False
    return True


def segments_around(chain: Chain, first: int, last: int) -> list[Item]:
    """Stages ``first..last`` as one segment, or as several around stages that must be kept."""
    items: list[Item] = []
    for recomputable, stages in groupby(range(first, last + 1), lambda stage: chain.stages[stage].recomputable):
        run = tuple(map(Leaf, stages))
        items += [Segment(run)] if recomputable else run
    return items


def solved_table(
    chain: Chain, most_bytes: int, slots: int, *, readers_pay: bool = False, **step: Unpack[Conditions]
) -> tuple[Table, float, bool]:
    """The table for budgets up to so many bytes, the bytes of a slot, and True if every size is whole slots."""
    divisor = math.gcd(*_sizes_in(chain), step.get("lingering_bytes", 0))
    is_exact = divisor * slots >= most_bytes
    unit = float(divisor) if is_exact else most_bytes / slots
    refined = len(chain) <= _REFINED_STAGES
    requirements = requirements_of(chain, unit=unit, refined=refined, readers_pay=readers_pay, **step)
    # A little more than everything takes, for what rounds up.
    table = Table(requirements, slots=math.ceil(most_bytes / unit) + len(chain) // 16 + 4)
    table.solve()
    return table, unit, is_exact


def _gradient_bytes_at_peak(chain: Chain, simulation: Simulation) -> int:
    """Bytes of the parameter gradients that the step has made by its peak."""
    peak = max(range(len(simulation.events)), key=lambda number: simulation.events[number].peak_bytes)
    learnt = {event.stage for event in simulation.events[: peak + 1] if event.phase == "backward"}
    return sum(chain.stages[stage].keep.parameter_gradient_bytes for stage in learnt)


def cause_and_remedy(budget_bytes: int, minimum_bytes: int, stage: str, gradient_bytes: int) -> tuple[str, str]:
    """For the message of a BudgetError, what sets the minimum of a chain, and what the user can do."""
    cause, remedy = f"set by {stage!r}", "raise mem_limit or lower the batch size"
    if 2 * gradient_bytes >= minimum_bytes:
        cause += f", with {format_bytes(gradient_bytes)} of new parameter gradients"
        if gradient_bytes >= budget_bytes:
            remedy = "raise mem_limit, for a smaller batch does not make the gradients smaller"
    return cause, remedy


def _sizes_in(chain: Chain) -> list[int]:
    """Every size that a simulation adds or subtracts."""
    sizes = [chain.rng_state_bytes]
    sizes += [size for skip in chain.skips for size in (skip.size_bytes, *skip.gradient_bytes)]
    for stage in chain:
        sizes += [getattr(stage, size.name) or 0 for size in fields(StageCost) if size.name.endswith("_bytes")]
        for option in stage.options:
            sizes += [getattr(option, size.name) or 0 for size in fields(Option) if size.name.endswith("_bytes")]
            sizes += astuple(option.backward_peaks(gradients_exist=True))
    return sizes


def frontier_of(solver: Solver, *, budget_bytes: int | None = None) -> Frontier:
    """The frontier of a chain, as fast as ``solver.plan`` at any budget but for gaps between points close together.

    Judging the table's schedules takes about as long again as solving it, for long chains. The planner also tries what
    the table does not hold; so where two points are far apart, it is asked for budgets between. ``budget_bytes`` is
    where :meth:`Frontier.gain` starts.
    """
    points = pareto(solver.candidates())
    asked: set[int] = set()
    for _ in range(_QUESTIONS // len(solver.chain)):
        gaps = [gap for gap in pairwise(points) if gap[1].peak_bytes not in asked]
        if not gaps:
            break
        left, right = max(
            gaps, key=lambda gap: (gap[1].peak_bytes - gap[0].peak_bytes) * (gap[0].seconds - gap[1].seconds)
        )
        asked.add(right.peak_bytes)
        # With more memory the planner is never slower: its best below the right end is the best of the whole gap.
        best = solver.plan(right.peak_bytes - 1)
        if best.seconds < left.seconds * (1 - SAME):
            points = pareto([*points, best.simulation])
    # Hundreds of steps in every detail would take megabytes for as long as somebody has the curve.
    return Frontier(tuple(replace(point, events=()) for point in points), budget_bytes)


# -------------------------------------------------- edits, for the last bytes that no table sees


_LONGEST_WRAP = 3
# Most stages for two edits, instead of one, of a candidate that is just too large.
_TWICE_EDITED_STAGES = 8


def edits(schedule: Schedule, chain: Chain) -> Iterator[Schedule]:
    """Every schedule that is one edit away: O(n) for ``n`` stages."""
    found = (Schedule(items) for items in _edited(schedule.items, chain))
    if not any(option.inverts for stage in chain for option in stage.options):
        return found
    return (each for each in found if first_inverted(chain, each) is None)


def _neighbours(chain: Chain, schedule: Schedule) -> list[Schedule]:
    """Schedules one edit away, or two if the chain is short."""
    near = [*edits(schedule, chain)]
    if len(chain) <= _TWICE_EDITED_STAGES:
        near += [each for edited in near for each in edits(edited, chain)]
    return list(dict.fromkeys(near))


def _edited(items: tuple[Item, ...], chain: Chain) -> Iterator[tuple[Item, ...]]:
    for index, item in enumerate(items):
        before, after = items[:index], items[index + 1 :]
        match item:
            case Segment(inside):
                yield (*before, *inside, *after)
                yield from ((*before, Segment(changed), *after) for changed in _edited(inside, chain))
                if len(inside) > 1 and isinstance(inside[-2], Leaf):
                    yield (*before, Segment(inside[:-1]), inside[-1], *after)
                match after:
                    case (Segment(more), *rest):
                        yield (*before, Segment(inside + more), *rest)
                        yield (*before, Segment((item, *more)), *rest)
                    case (Leaf(stage) as leaf, *rest) if rest and chain.stages[stage].recomputable:
                        yield (*before, Segment((*inside, leaf)), *rest)
            case Leaf(stage, option):
                yield from ((*before, Leaf(stage, other), *after) for other in _next_options(chain, stage, option))
                for length in range(1, _LONGEST_WRAP + 1):
                    wrapped, behind = items[index : index + length], items[index + length :]
                    if behind and all(
                        isinstance(each, Leaf) and chain.stages[each.stage].recomputable for each in wrapped
                    ):
                        yield (*before, Segment(wrapped), *behind)


def _next_options(chain: Chain, stage: int, option: int) -> list[int]:
    """The options that save the next less and the next more bytes."""
    options = chain.stages[stage].options
    ranks = sorted(range(len(options)), key=lambda each: options[each].kept_bytes)
    at = ranks.index(option)
    return ranks[max(at - 1, 0) : at] + ranks[at + 1 : at + 2]


# -------------------------------------------------------------------- schedules near a budget


# Stairs tried above the budget: at least the first number, and on short chains the second number over the stages.
_HOPEFUL = 16
_HOPEFUL_STAGES = 512


# Sort keys: the fastest first, or the smallest.
by_seconds, by_peak = attrgetter("seconds", "peak_bytes"), attrgetter("peak_bytes", "seconds")


@dataclass(eq=False)
class Candidates:
    """Proposals of one table, by rising memory and falling seconds; judged when asked for and remembered.

    The table may be wrong by ``uncertain_bytes``. If ``thorough``, candidates that exceed a budget by no more than that
    are edited until they fit.
    """

    chain: Chain
    table: Table
    unit: float
    is_exact: bool
    judge: Callable[[Schedule], Simulation]
    uncertain_bytes: int
    thorough: bool

    def __post_init__(self) -> None:
        seconds = self.table.seconds
        self._stairs = [int(slot) for slot in np.flatnonzero(seconds < np.concatenate(([math.inf], seconds[:-1])))]
        self._candidates: dict[int, Simulation] = {}
        self._near = cache(partial(_neighbours, self.chain))

    def __len__(self) -> int:
        return len(self._stairs)

    @property
    def lowest_bytes(self) -> float:
        """Least memory for which the table holds a schedule, by its own count."""
        return self._stairs[0] * self.unit if self._stairs else math.inf

    def __getitem__(self, stair: int) -> Simulation:
        if stair not in self._candidates:
            self._candidates[stair] = self.judge(schedule_at(self.table, self._stairs[stair]))
        return self._candidates[stair]

    def fastest(self, budget_bytes: int) -> Simulation | None:
        """The fastest that fits of all hopeful candidates and their edits; never slower for more budget."""
        best: Simulation | None = None
        for stair in range(self._hopeful_stair(budget_bytes), -1, -1):
            if best is not None and self.table.seconds[self._stairs[stair]] * (1 - ROUNDING) >= best.seconds:
                break
            fitting = self._fitting(stair, budget_bytes)
            best = min(fitting if best is None else [best, *fitting], key=by_seconds, default=None)
        return best

    def lowest(self) -> list[Simulation]:
        """Those that may have the least peak as far as the table tells, by rising peak."""
        # With skips the table is further from the truth, so the least may be anywhere.
        hopeful = len(self) - 1 if self.thorough and self.chain.skips else self._hopeful_stair(0)
        return sorted((self[stair] for stair in range(hopeful + 1)), key=by_peak)

    def descended(self, candidate: Simulation) -> Simulation:
        """The candidate after edits that make it smaller; a long chain, whose judging is slow, gets fewer."""
        edited = iter(_neighbours(self.chain, candidate.schedule))
        for _ in range(max(_JUDGED // len(self.chain), 1)):
            schedule = next(edited, None)
            if schedule is None:
                break
            less = self.judge(schedule)
            if less.peak_bytes < candidate.peak_bytes:
                candidate, edited = less, iter(_neighbours(self.chain, less.schedule))
        return candidate

    def _hopeful_stair(self, budget_bytes: int) -> int:
        """The highest stair worth a try."""
        fitting = int(np.searchsorted(self._stairs, budget_bytes / self.unit, side="right")) - 1
        return min(fitting + max(_HOPEFUL, _HOPEFUL_STAGES // len(self.chain)), len(self._stairs) - 1)

    def _fitting(self, stair: int, budget_bytes: int) -> list[Simulation]:
        """The candidate if it fits; if it is just too large, its edits that do."""
        base = self[stair]
        if base.peak_bytes <= budget_bytes:
            return [base]
        if not self.thorough or base.peak_bytes - budget_bytes > self.uncertain_bytes:
            return []
        edited = map(self.judge, self._near(base.schedule))
        # None is faster, so the stairs stay in order; and none takes so much less that other budgets would not find it.
        least = base.peak_bytes - self.uncertain_bytes
        return [each for each in edited if least <= each.peak_bytes <= budget_bytes and each.seconds >= base.seconds]


def _frontier_of_plan(plan: Plan) -> Frontier:
    solver = Solver(plan.chain, slots=fine_slots(len(plan.chain), plan.slots), **plan.conditions)
    return frontier_of(solver, budget_bytes=plan.budget_bytes)


Plan.solved_frontier = _frontier_of_plan
