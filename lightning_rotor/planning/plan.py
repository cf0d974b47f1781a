"""Plans: the fastest schedule that fits a budget, with its simulated cost.

One solved table holds every budget, so a :class:`Solver` is kept and asked several times. The table works in slots and with a few
approximations; whatever it proposes is simulated in bytes, and only what fits the true budget becomes a :class:`Plan`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.errors import BudgetError
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.edits import edits
from lightning_rotor.planning.thresholds import thresholds_of
from lightning_rotor.schedule import Leaf, Schedule
from lightning_rotor.simulator import Simulation, simulate
from lightning_rotor.units import format_bytes, format_seconds

DEFAULT_SLOTS = 500
_MOST_SLOTS = 20_000
# How many sums of one float a table for a short chain may take: with these, any chain up to 60 stages is solved in about 0.1 s.
_CHEAP_SUMS = 1e8
_CHEAP_CELLS = 8e6
# Proposals above the budget that are tried all the same, at least, and for short chains so many more that their number times that of
# the stages is the second number.
_HOPEFUL = 16
_HOPEFUL_STAGES = 512
# Up to these lengths a chain gets a refined table, and proposals that are just too large get two edits instead of one.
_REFINED_STAGES = 40
_TWICE_EDITED_STAGES = 8
# Relative error of seconds in a table of single precision.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for one chain and one budget.

    Attributes:
        chain: What it was made for.
        schedule: What to keep and what to recompute.
        budget_bytes: What was allowed.
        simulation: Peak and duration, step by step.
        solve_seconds: Time spent on finding it. Plans from one solver share the table; the first one pays for it.
    """

    chain: Chain
    schedule: Schedule
    budget_bytes: int
    simulation: Simulation
    solve_seconds: float

    @property
    def peak_bytes(self) -> int:
        """Simulated peak, at most ``budget_bytes``."""
        return self.simulation.peak_bytes

    @property
    def seconds(self) -> float:
        """Simulated duration of forward, recomputation and backward."""
        return self.simulation.seconds

    @property
    def overhead(self) -> float:
        """Time beyond plain training as a fraction of it: 0.25 is 25 % slower."""
        return self.simulation.overhead

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Numbers of the stages whose forward runs more than once."""
        return self.schedule.recomputed

    def __str__(self) -> str:
        return (
            f"{len(self.chain)} stages within {format_bytes(self.budget_bytes)}: peak {format_bytes(self.peak_bytes)}, "
            f"{format_seconds(self.seconds)} per step (+{self.overhead:.1%}), {len(self.recomputed)} stages recomputed: {self.schedule}"
        )


def plan(
    chain: Chain,
    budget_bytes: int,
    *,
    slots: int = DEFAULT_SLOTS,
    gradients_exist: bool = False,
    lingering_bytes: int = 0,
) -> Plan:
    """Plan the fastest schedule that fits a memory budget.

    Takes O(n³ · slots) for ``n`` stages. Optimal among schedule trees up to the rounding to slots and the approximations named in
    :mod:`lightning_rotor.planning.dynamic_program`; never above the budget. More budget never gives a slower plan.

    Args:
        chain: Costs of ``n`` stages, measured on one device.
        budget_bytes: Activation memory beyond what is allocated when the step begins; parameters are not included.
        slots: Memory levels that the program tells apart, at least. Short chains get more for the same time.
        gradients_exist: Parameters already have gradients, so that the backward adds none.
        lingering_bytes: Held during the forward and freed before the backward, see :func:`lightning_rotor.simulator.simulate`.
    Returns:
        A plan whose simulated peak is at most ``budget_bytes``.
    Raises:
        BudgetError: No schedule fits, or the budget is no positive integer; says the least budget that does and which stage sets it.
    Example:
        >>> plan(chain, parse_bytes("2 GiB"))
    Source:
        Beaumont et al., "Optimal checkpointing for heterogeneous chains", hal-02352969.
    """
    return Solver(
        chain, slots=fine_slots(len(chain), slots), gradients_exist=gradients_exist, lingering_bytes=lingering_bytes
    ).plan(budget_bytes)


def minimum_budget(
    chain: Chain, *, slots: int = DEFAULT_SLOTS, gradients_exist: bool = False, lingering_bytes: int = 0
) -> Plan:
    """The plan with the least simulated peak; its ``budget_bytes`` is that peak.

    Arguments as for :func:`plan`.
    """
    return Solver(
        chain, slots=fine_slots(len(chain), slots), gradients_exist=gradients_exist, lingering_bytes=lingering_bytes
    ).minimum()


def fine_slots(stages: int, slots: int = DEFAULT_SLOTS) -> int:
    """At least ``slots``, and more for short chains, where they cost next to nothing."""
    affordable = min(_CHEAP_SUMS / (stages**3 / 6), _CHEAP_CELLS / stages**2, _MOST_SLOTS)
    return max(slots, int(affordable))


@dataclass(frozen=True, slots=True)
class Proposal:
    """A schedule from the table and what the simulator says of it."""

    schedule: Schedule
    simulation: Simulation


class Solver:
    """Plans one chain for any number of budgets with one table, which is made when the first of them is asked for.

    Args:
        chain: Costs of ``n`` stages.
        slots: Memory levels between nothing and what keeping every stage takes.
        gradients_exist: See :func:`plan`.
        lingering_bytes: See :func:`plan`.
    """

    def __init__(
        self, chain: Chain, *, slots: int = DEFAULT_SLOTS, gradients_exist: bool = False, lingering_bytes: int = 0
    ) -> None:
        if not _is_positive_integer(slots):
            raise ValueError(f"slots is {slots!r}: expected a positive integer, such as {DEFAULT_SLOTS}")
        self.chain = chain
        self._slots = slots
        self._gradients_exist = gradients_exist
        self._lingering_bytes = lingering_bytes
        self._proposals: dict[int, Proposal] = {}
        self._edits: dict[int, list[Proposal]] = {}

    def plan(self, budget_bytes: int) -> Plan:
        """The fastest plan that fits. Monotone: more budget is never slower.

        Raises:
            BudgetError: No schedule fits, or the budget is no positive integer.
        """
        start = time.perf_counter()
        found = self._search(budget_bytes) if _is_positive_integer(budget_bytes) else None
        if found is None:
            raise self._refusal(budget_bytes)
        return Plan(self.chain, found.schedule, budget_bytes, found.simulation, time.perf_counter() - start)

    def minimum(self) -> Plan:
        """The plan with the least simulated peak."""
        start = time.perf_counter()
        least = self._least
        return Plan(
            self.chain, least.schedule, least.simulation.peak_bytes, least.simulation, time.perf_counter() - start
        )

    def proposals(self) -> tuple[Proposal, ...]:
        """Every schedule that the table holds, by rising peak."""
        return tuple(sorted((self._proposal(level) for level in range(len(self._levels))), key=_by_peak))

    def _search(self, budget_bytes: int) -> Proposal | None:
        """The fastest that fits of all hopeful proposals and their edits.

        They get slower downwards, so the search ends soon. A larger budget starts at the same place or a faster one, and everything
        that fitted before still does: it never ends at a slower one.
        """
        best: Proposal | None = None
        for level in range(self._hopeful_level(budget_bytes / self._unit), -1, -1):
            if best is not None and self._table.seconds[self._levels[level]] >= best.simulation.seconds * (
                1 + _ROUNDING
            ):
                break
            fitting = [each for each in self._around(level, budget_bytes) if each.simulation.peak_bytes <= budget_bytes]
            best = min(fitting if best is None else [best, *fitting], key=_by_seconds, default=None)
        return best

    def _refusal(self, budget_bytes: object) -> BudgetError:
        least = self._least.simulation
        stage = self.chain.stages[least.peak_stage].name
        minimum = f"this chain's minimum {format_bytes(least.peak_bytes)} (set by {stage!r})"
        known = budget_bytes if isinstance(budget_bytes, int) else 0
        if _is_positive_integer(budget_bytes):
            message = f"budget {format_bytes(known)} is below {minimum}: raise mem_limit or lower the batch size"
        else:
            message = f"budget is {budget_bytes!r}: expected a positive integer of bytes, and at least {minimum}"
        return BudgetError(message, budget_bytes=known, minimum_bytes=least.peak_bytes, stage=stage)

    # ---------------------------------------------------------------- the table and what it proposes

    @cached_property
    def _most(self) -> Proposal:
        """Nothing recomputed, every stage under the fastest of its options."""
        fastest = [
            min(range(len(stage.options)), key=lambda k, o=stage.options: o[k].forward_seconds + o[k].backward_seconds)  # type: ignore[misc]
            for stage in self.chain
        ]
        return self._simulated(Schedule(tuple(Leaf(stage, option) for stage, option in enumerate(fastest))))

    @cached_property
    def _unit(self) -> float:
        """Bytes per slot; whole and exact if all sizes have a common divisor that is large enough."""
        return float(self._divisor) if self._is_exact else self._most_bytes / self._slots

    @property
    def _is_exact(self) -> bool:
        return self._divisor * self._slots >= self._most_bytes

    @cached_property
    def _divisor(self) -> int:
        return math.gcd(*_sizes(self.chain), self._lingering_bytes)

    @property
    def _most_bytes(self) -> int:
        return max(self._most.simulation.peak_bytes, 1)

    @cached_property
    def _table(self) -> Table:
        thresholds = thresholds_of(
            self.chain, unit=self._unit, gradients_exist=self._gradients_exist, lingering_bytes=self._lingering_bytes
        )
        # A little more than everything takes, for what rounds up.
        slots = math.ceil(self._most_bytes / self._unit) + len(self.chain) // 16 + 4
        table = Table(thresholds, slots=slots, refined=len(self.chain) <= _REFINED_STAGES)
        table.solve()
        return table

    @cached_property
    def _levels(self) -> npt.NDArray[np.intp]:
        """Slots at which the table gets faster. Each is a proposal; between them nothing changes."""
        seconds = self._table.seconds
        return np.flatnonzero(seconds < np.concatenate(([math.inf], seconds[:-1])))

    def _hopeful_level(self, slot: float) -> int:
        """Fastest proposal worth a try: some lie above a memory by the count of the table, but not in bytes."""
        fitting = int(np.searchsorted(self._levels, slot, side="right")) - 1
        # Short chains afford to try more.
        return min(fitting + max(_HOPEFUL, _HOPEFUL_STAGES // len(self.chain)), len(self._levels) - 1)

    @cached_property
    def _least(self) -> Proposal:
        """The proposal with the least peak. It is one of the first, and which one only the simulator knows."""
        first = range(self._hopeful_level(0) + 1)
        least = min((self._proposal(level) for level in first), key=_by_peak, default=self._most)
        near = (each for level in first for each in self._around(level, least.simulation.peak_bytes))
        return min(near, key=_by_peak, default=least)

    def _around(self, level: int, budget_bytes: int) -> list[Proposal]:
        """A proposal, and if it is only just too large, its edits."""
        proposal = self._proposal(level)
        excess = proposal.simulation.peak_bytes - budget_bytes
        return [proposal, *self._edited(level)] if 0 < excess <= self._uncertain_bytes else [proposal]

    def _proposal(self, level: int) -> Proposal:
        if level not in self._proposals:
            self._proposals[level] = self._simulated(self._table.schedule(int(self._levels[level])))
        return self._proposals[level]

    @cached_property
    def _uncertain_bytes(self) -> int:
        """By how much the table may be wrong in the eyes of the simulator, where it is worth to look closer."""
        if len(self.chain) > _REFINED_STAGES:
            return 0
        states = self.chain.rng_state_bytes if any(stage.draws_random for stage in self.chain) else 0
        return 4 * states + (0 if self._is_exact else math.ceil(2 * self._unit))

    def _edited(self, level: int) -> list[Proposal]:
        """Schedules near a proposal that need a little less memory and are not faster."""
        if level not in self._edits:
            self._edits[level] = self._neighbours(self._proposal(level))
        return self._edits[level]

    def _neighbours(self, proposal: Proposal) -> list[Proposal]:
        base = proposal.simulation
        seen = {proposal.schedule}
        front, near = [proposal], []
        for _ in range(2 if len(self.chain) <= _TWICE_EDITED_STAGES else 1):
            new = {schedule for each in front for schedule in edits(each.schedule, self.chain)} - seen
            seen |= new
            front = [
                each
                for each in map(self._simulated, new)
                if each.simulation.peak_bytes <= base.peak_bytes
                and base.seconds <= each.simulation.seconds <= 1.1 * base.seconds
            ]
            near += front
        # Only by so much that a proposal is tried for every budget that one of its edits fits: see _around.
        return [each for each in near if 0 < base.peak_bytes - each.simulation.peak_bytes <= self._uncertain_bytes]

    def _simulated(self, schedule: Schedule) -> Proposal:
        simulation = simulate(
            self.chain, schedule, gradients_exist=self._gradients_exist, lingering_bytes=self._lingering_bytes
        )
        return Proposal(schedule, simulation)


def _is_positive_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _by_peak(proposal: Proposal) -> tuple[int, float]:
    return proposal.simulation.peak_bytes, proposal.simulation.seconds


def _by_seconds(proposal: Proposal) -> tuple[float, int]:
    return proposal.simulation.seconds, proposal.simulation.peak_bytes


def _sizes(chain: Chain) -> list[int]:
    """Every size that a simulation adds or subtracts."""
    sizes = [chain.rng_state_bytes]
    for stage in chain:
        sizes += [getattr(stage, size.name) for size in fields(StageCost) if size.name.endswith("_bytes")]
        for option in stage.options:
            sizes += [getattr(option, size.name) for size in fields(Option) if size.name.endswith("_bytes")]
    return sizes
