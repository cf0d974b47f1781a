"""What is ready for which call of one module, its cut, costs and plan, and how a new call gets there.

From cheap to dear: a call's plan is in the cache; a checkpoint says what was measured and planned; its costs follow
from those of measured sizes around it (:class:`.Measurements`); it is measured and planned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any
from weakref import ReferenceType

from torch import nn

from lightning_rotor.capture.compiled import CompiledModules, Variants
from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.capture.sequentialize import SequentialCut, check_module
from lightning_rotor.chain import Chain
from lightning_rotor.errors import (
    BudgetError,
    MessageError,
    ModelError,
    PlanError,
    ProfilerBusyError,
    ProfilingError,
    RotorError,
    UnitError,
)
from lightning_rotor.execution.pending import Pending
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.agreement import Agreement
from lightning_rotor.planned.cache import (
    MAX_PLANS,
    MOST_TIMED,
    Measurements,
    PlanCache,
    Prepared,
    Record,
    Turn,
    call_fingerprint,
    corrected,
    recalled,
    record_of,
)
from lightning_rotor.planned.cuts import KnownCuts, Signature
from lightning_rotor.planning import Plan, minimum_budget, plan_for, scheduled
from lightning_rotor.planning.plan import DEFAULT_SLOTS
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.meters import measuring_progress
from lightning_rotor.schedule import Schedule
from lightning_rotor.units import format_bytes, format_seconds

_log = logging.getLogger(__name__)
_SERVED = 4  # sizes to come, at least, that pay for measuring one
_FAR_OFF, _NOTABLE = 0.05, 0.005  # of an overhead, and of a step
_SLIGHT = 0.01  # of a step
_NEAREST = 4  # schedules that are tried for a new size


class BudgetSource:
    """Says what the plans of modules may use, and hears what happens. Errors end the call unless it takes them."""

    ranks: Agreement  # its own
    accumulates = True  # budgets may be for steps that add to gradients which are there

    @property
    def turn(self) -> Turn:
        """Names of the modules whose calls wait for their backward."""
        return ()

    def budget(self, plans: Plans, profile: Profile) -> Budget:
        """What one of these plans may use at this moment."""
        raise NotImplementedError

    def may_plan_again(self, plans: Plans) -> bool:
        """True if one of these plans may be replaced by a faster one."""
        return True

    def before_measuring(self) -> None:
        """The module is about to run for cutting and measuring, which needs torch's profiler."""

    def on_plan(self, plan: Plan) -> None:
        """A plan was made, and will run."""

    def on_start(self, value: Any) -> None:
        """A call is about to run under a plan, with this input."""

    def on_run(self, plans: Plans, signature: Signature, prepared: Prepared, pending: ReferenceType[Pending]) -> None:
        """A call has run under a plan."""

    def on_unsupported(self, plans: Plans, error: RotorError) -> None:
        """The module turned out to be no chain. It runs plainly, unless this raises."""
        raise error

    def objection(self, plans: Plans, cut: SequentialCut | GraphCut) -> ModelError | None:
        """Why a new cut of a module should not be planned, but the module's parts; None if it should."""
        return None

    def on_busy(self, error: ProfilerBusyError) -> None:
        """The module cannot be measured in this call. It runs plainly this time, unless this raises."""
        raise error

    def on_infeasible(self, error: BudgetError) -> None:
        """No plan fits. The one that takes least runs, unless this raises."""
        raise error


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """How plans are made; ``UnitError`` unless ``slots`` and ``max_plans`` are positive integers."""

    slots: int = DEFAULT_SLOTS
    max_plans: int = MAX_PLANS
    compiled_variants: Variants = "exact"
    show_progress: bool = True

    def __post_init__(self) -> None:
        for name, number, default in (("slots", self.slots, DEFAULT_SLOTS), ("max_plans", self.max_plans, MAX_PLANS)):
            if number < 1:
                raise UnitError(f"{name} is {number!r}: expected a positive integer, such as the default {default}")


@dataclass(slots=True)
class _Account:
    """What steps have lost for want of something better, and what that takes."""

    price_seconds: float = 0.0
    lost_seconds: float = 0.0

    def pays(self, lost_seconds: float) -> bool:
        """True if with this loss, steps have lost more than the better takes since it was had last."""
        self.lost_seconds += lost_seconds
        if self.lost_seconds <= self.price_seconds:
            return False
        self.lost_seconds = 0.0
        return True


@dataclass(slots=True)
class Ceiling:
    """The most that any plan may take since the device ran out of memory; None if it never did."""

    size_bytes: int | None = None

    def lower(self, plan: Plan, *, to_the_least: bool = False) -> bool:
        """Let all plans take less than one that was too much, halfway to the least or the least. True if possible."""
        least = minimum_budget(plan.chain, slots=plan.slots, **plan.conditions).peak_bytes
        if plan.peak_bytes <= least:
            return False
        self.size_bytes = least if to_the_least else (plan.peak_bytes + least) // 2
        return True

    def caps(self, plan: Plan) -> bool:
        """True if a plan has all that plans may take since then."""
        return self.size_bytes is not None and plan.budget_bytes >= self.size_bytes


class Plans:
    """The plans of one module, or ``ModelError`` if it can be no chain; ``name`` says where in the model it is."""

    def __init__(self, module: nn.Module, source: BudgetSource, settings: PlanSettings, name: str = "") -> None:
        check_module(module)
        self.name = name
        self.ceiling = Ceiling()
        self._source, self._settings = source, settings
        self._cuts = KnownCuts(module, most=settings.max_plans, on_cut=source.before_measuring, ranks=source.ranks)
        self.cache = PlanCache(settings.max_plans)
        self._measurements = Measurements()
        self._compiled = CompiledModules(settings.compiled_variants)
        self._records: dict[str, Record] = {}  # of an earlier training, by call
        self.measuring_seconds = 0.0
        self._searching, self._measuring = _Account(), _Account()

    @property
    def plan(self) -> Plan | None:
        """The plan for the signature used last."""
        return self.cache.latest[1].plan if len(self.cache) else None

    @property
    def cuts_made(self) -> int:
        """How often the module was cut; 0 until it has turned out to be a chain."""
        return self._cuts.made

    @property
    def together(self) -> bool:
        """True if other processes measure and plan whenever this one does, as messages were seen between them."""
        return self._source.ranks.together

    # ---------------------------------------------------------------- a call

    def _follow_changes(self) -> None:
        """Forget everything if the module has changed."""
        if self._cuts.follow_changes():
            self.forget()

    def follow_others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Cut, measure or plan a call anew if another process must, or has another plan for it. All must ask."""
        self._follow_changes()
        ranks, signature = self._source.ranks, self._cuts.known_signature(args, kwargs)
        known = None if signature is None else self.cache.use(signature, self._source.turn)
        if ranks.all_run(None if known is None else known.schedule):
            return
        if ranks.any(known is not None and known.is_chosen):
            raise MessageError(
                "a schedule was chosen by use() that other processes do not run for this call, with which the module "
                "exchanges messages: expected use() of the same schedule in each of them, or in none"
            )
        if signature is not None and known is not None:
            self.cache.put(signature, known.without_plan())
        if ranks.any(known is None):
            self._records.clear()
            self.cache.drop(lambda each: each != signature)
            if ranks.any(signature is None):
                self._cuts.forget_those_for(args, kwargs)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, Any]:
        """What a plan for a call depends on, and the chain's input. The module is cut if it must be."""
        self._follow_changes()
        made, began = self._cuts.made, time.perf_counter()
        cut, value = self._cuts.bind(args, kwargs)
        if self._cuts.made != made:
            self.measuring_seconds += time.perf_counter() - began
            for known in (self.cache, self._measurements):
                known.drop(lambda signature: signature.cut in self._cuts)
        return self._cuts.signature(cut, value), value

    def is_prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if a call has a plan, or costs for one."""
        self._follow_changes()
        return self._cuts.known_signature(args, kwargs) in self.cache

    def prepare(self, signature: Signature, value: Any) -> Prepared:
        """The prepared entry of a call, made now if there is none."""
        turn, spent = self._source.turn, self.measuring_seconds
        known = self.cache.use(signature, turn)
        alone = not self.together  # else all run what they have agreed on, and measure what one has not
        if alone and known is not None and not known.is_settled and self._source.may_plan_again(self):
            known = self._by_seconds(signature, known) if known.is_timed else known
        prepared = known
        if prepared is None and alone:
            prepared = self._recalled(signature) or self._estimated(signature)
        if prepared is None:
            prepared = self.measure(signature, value)
        elif alone and prepared.rough_seconds and self._measuring.pays(prepared.rough_seconds):
            try:
                prepared = self.measure(signature, value)
            except ProfilerBusyError:  # this plan does until torch's profiler is free
                self._measuring.lost_seconds = self._measuring.price_seconds
        if prepared.turn != turn or (alone and prepared.lost_seconds and self._searching.pays(prepared.lost_seconds)):
            prepared = replace(prepared.without_plan(), turn=turn)
        prepared = self.plan_again(signature, prepared) if prepared.executor is None else prepared
        if self.measuring_seconds > spent or known is None:
            _tell(signature, prepared, self.measuring_seconds - spent)
        self.cache.settle(signature, prepared, None if self.together else self._cuts.facts_besides(signature.cut))
        return prepared

    def _recalled(self, signature: Signature) -> Prepared | None:
        """What a checkpoint says about a call."""
        record = self._records.pop(call_fingerprint(signature, self._compiled.choice), None) if self._records else None
        found = None if record is None else recalled(record, signature.cut.stages)
        if found is None:
            return None
        prepared, plan = self._keep(signature, found.profile), found.plan
        if plan is None or plan.slots < self._settings.slots or not self.budget(found.profile).fits(plan):
            return prepared
        return self.use_plan(signature, prepared, plan)

    def _estimated(self, signature: Signature) -> Prepared | None:
        """A plan for a new size from the costs of others, or None if those do not do."""
        estimate = self._measurements.estimate(signature)
        if estimate is None:
            return None
        profile, is_close = estimate
        chain, budget = profile.chain, self.budget(profile)
        alike = self.cache.alike(signature, chain.names)
        least = _least_overhead(alike, signature.size, chain, budget)
        known = _best_of(chain, [plan for _, plan, _ in alike], budget, least, slots=self._settings.slots)
        lost_seconds = 0.0 if known is None else _lost(known, least)
        if self._searching.pays(lost_seconds):
            known, lost_seconds = None, 0.0
        try:
            solved = known or self._solve(profile)
        except BudgetError:
            return None
        rough_seconds = 0.0 if is_close else _lost(solved, least)
        prepared = Prepared(profile, estimated=True, lost_seconds=lost_seconds, rough_seconds=rough_seconds)
        return self.use_plan(signature, prepared, solved)

    def _by_seconds(self, signature: Signature, prepared: Prepared) -> Prepared:
        """An entry with the costs of segments that its calls have shown, planned again if they were far off."""
        followed, plan = _by_seconds(prepared, self._solve)
        if plan is prepared.plan:
            self.cache.put(signature, followed)
            return followed
        self._measurements.add(signature, followed.profile)
        return self.use_plan(signature, followed, plan)

    def measure(self, signature: Signature, value: Any) -> Prepared:
        """Measure a call, again if it was measured before."""
        self._source.before_measuring()
        start = time.perf_counter()
        how = dict[str, Any](compiled=self._compiled, ranks=self._source.ranks, accumulating=self._source.accumulates)
        with measuring_progress(enabled=self._settings.show_progress) as progress:
            profile = profile_chain(signature.cut.stages, value, progress=progress, **how)
        seconds = time.perf_counter() - start
        self.measuring_seconds += seconds
        self._measuring.price_seconds = seconds / _SERVED
        rough = {known for known, prepared in self.cache if prepared.rough_seconds}
        self.cache.drop(lambda known: known not in rough)  # the new costs may say more of these, too
        return self._keep(signature, profile)

    def _keep(self, signature: Signature, profile: Profile) -> Prepared:
        """An entry with costs that were measured."""
        prepared = Prepared(profile)
        self._measurements.add(signature, profile)
        self.cache.put(signature, prepared)
        return prepared

    def budget(self, profile: Profile, *, ceiling: bool = True) -> Budget:
        """What a plan may use; without the ceiling, if the device had as much as it seemed to have."""
        budget = self._source.budget(self, profile)
        budget = replace(budget, lingering_bytes=budget.lingering_bytes + profile.copied_bytes)
        return budget.capped(self.ceiling.size_bytes) if ceiling else budget

    def _solve(self, profile: Profile) -> Plan:
        plan = self.budget(profile).plan(profile.chain, slots=self._settings.slots)
        self._searching.price_seconds = max(self._searching.price_seconds, plan.solve_seconds)
        return plan

    def plan_again(self, signature: Signature, prepared: Prepared) -> Prepared:
        """Plan anew for known costs, as all processes agree."""
        settled = self._source.ranks.settle(self._outcome(prepared.profile))
        return self.use_plan(signature, prepared.without_plan(), settled)

    def _outcome(self, profile: Profile) -> Plan | BudgetError:
        """The plan of this process, or why it has none. An error is kept, since others may wait for it."""
        budget = self.budget(profile)
        try:
            return self._solve(profile)
        except BudgetError as error:
            try:
                self._source.on_infeasible(error)
            except BudgetError as refusal:
                return refusal
            return budget.least_plan(profile.chain, error, slots=self._settings.slots)

    def use_plan(self, signature: Signature, prepared: Prepared, plan: Plan) -> Prepared:
        """Run a call under a plan from now on."""
        prepared = prepared.under(signature, plan)
        self.cache.put(signature, prepared)
        self._source.on_plan(plan)
        return prepared

    # ---------------------------------------------------------------- all calls

    def under(self, plan: Plan) -> Prepared | None:
        """The entry that a plan is in use for, or None."""
        return next((prepared for _, prepared in self.cache if prepared.plan is plan), None)

    def replan(self, stale: Plan | None = None) -> Plan:
        """Plan with the budget of this moment.

        The new plan replaces ``stale``, a plan in use. By default it is for the signature used last, and the others are
        made anew when they come again. Raises ``ProfilingError`` before any measurement, ``BudgetError`` if none fits.
        """
        if not len(self.cache):
            raise ProfilingError("there is nothing to plan yet: measure a sample first, with measure(sample)")
        used = [entry for entry in self.cache if stale is not None and entry[1].plan is stale]
        signature, prepared = used[0] if used else self.cache.latest
        if self.together:
            # The others learn of it at the next forward, and plan with this process.
            solved = self._solve(prepared.profile)
            self.cache.put(signature, prepared.without_plan())
            return solved
        solved = _plan_of(self.plan_again(signature, prepared))
        if stale is None:
            self.cache.unplan(lambda plan: plan is solved)
        return solved

    def use(self, plan: Plan | Schedule | str) -> Plan:
        """Run an earlier plan or schedule, for the signature used last. See :meth:`.Checkpointable.use`."""
        if not len(self.cache):
            raise ProfilingError("there is nothing to run a plan for yet: measure a sample first, with measure(sample)")
        if not isinstance(plan, (Plan, Schedule, str)):
            raise PlanError(
                f"use() was given {type(plan).__name__}: expected a Plan, a Schedule, or a schedule's text such as "
                "'(0-1) 2'. Plan.load(path, net.chain) reads a file"
            )
        signature, prepared = self.cache.latest
        chain, conditions = prepared.profile.chain, self.budget(prepared.profile).conditions
        if isinstance(plan, str):
            plan = Schedule.parse(plan)
        if isinstance(plan, Schedule):
            used = scheduled(chain, plan, slots=self._settings.slots, **conditions)
        else:
            used = plan_for(plan, chain)
        self.use_plan(signature, replace(prepared, is_chosen=True), used)
        return used

    def records(self) -> list[Record]:
        """Everything measured and planned so far in plain types, for :meth:`recall`."""
        records = dict(self._records)
        for signature, prepared in self.cache:
            if not prepared.estimated:
                call = call_fingerprint(signature, self._compiled.choice)
                records[call] = record_of(call, prepared)
        return list(records.values())[-MAX_PLANS:]

    def recall(self, records: Iterable[Record]) -> None:
        """Take over what an equal module has measured on this machine, and its plans if the budget is the same."""
        self._records = {record["call"]: record for record in records}

    def forget(self) -> None:
        """Drop every plan and measurement; the next training call starts afresh."""
        for known in (self.cache, self._measurements):
            known.drop(lambda signature: False)
        self._cuts.forget()


def _for_equal_costs(plans: Iterable[Plan], chain: Chain, budget: Budget) -> Plan | None:
    """The fastest plan for this budget and a chain that differs in the first stage's shapes alone."""
    alike = (
        replace(plan, chain=chain)
        for plan in plans
        if plan.peak_bytes <= plan.budget_bytes == budget.available_bytes
        and plan.conditions == budget.conditions
        and _costs_the_same(plan.chain, chain)
    )
    return min(alike, key=attrgetter("seconds"), default=None)


def _costs_the_same(one: Chain, other: Chain) -> bool:
    """True if two chains differ in the first stage's shapes alone, which say for what they are."""
    if one.stages[1:] != other.stages[1:]:
        return False
    return replace(one.stages[0], takes=()) == replace(other.stages[0], takes=())


def _best_of(chain: Chain, plans: Sequence[Plan], budget: Budget, least: float, *, slots: int) -> Plan | None:
    """The fastest that fits of no recomputation and the first few unlike schedules of plans; None if none does.

    Those behind one whose overhead is next to the ``least`` possible are not tried.
    """
    if (known := _for_equal_costs(plans, chain, budget)) is not None:
        return known
    limit_bytes, best = max(budget.available_bytes, 1), None
    unlike = {id(each): each for each in (Schedule.keep_all(len(chain)), *(plan.schedule for plan in plans))}
    for each in list(unlike.values())[: 1 + _NEAREST]:
        plan = scheduled(chain, each, limit_bytes, slots=slots, **budget.conditions)
        if plan.peak_bytes <= limit_bytes and (best is None or plan.seconds < best.seconds):
            best = plan
            if plan.overhead <= least + _SLIGHT:
                break
    return best


def _least_overhead(alike: Iterable[tuple[int, Plan, bool]], size: int, chain: Chain, budget: Budget) -> float:
    """What a plan for a size must take at least, by plans of others: the larger one needs no less recomputation.

    Sizes with the same costs need the same.
    """
    overheads = (
        plan.overhead
        for known, plan, best in alike
        if best
        and (known <= size or (plan.budget_bytes >= budget.available_bytes and _costs_the_same(plan.chain, chain)))
    )
    return max(overheads, default=0.0)


def _by_seconds(prepared: Prepared, solve: Callable[[Profile], Plan]) -> tuple[Prepared, Plan]:
    """Costs that calls under a plan have shown, and a plan for them: the same one unless it was far off.

    A new plan is the second and last; of the two, the faster one stays.
    """
    plan, overhead = _plan_of(prepared), prepared.measured_overhead
    assert overhead is not None
    prepared = replace(prepared, timed=(*prepared.timed, (plan.schedule, overhead)))
    schedule, least = min(prepared.timed, key=itemgetter(1))
    is_far_off = abs(overhead - plan.overhead) > max(_FAR_OFF * max(overhead, plan.overhead), _NOTABLE)
    if schedule is plan.schedule and not is_far_off:
        return prepared, plan
    run = partial(scheduled, schedule=schedule, budget_bytes=plan.budget_bytes, slots=plan.slots, **plan.conditions)
    chain = corrected(run(plan.chain), least)
    prepared = replace(prepared, profile=replace(prepared.profile, chain=chain))
    best = replace(run(chain), solve_seconds=plan.solve_seconds)
    if len(prepared.timed) < MOST_TIMED:
        with suppress(BudgetError):
            solved = solve(prepared.profile)
            best = best if solved.schedule == schedule else solved
    _log.info(
        "A plan was to take %.1f %% more than plain steps, and takes %.1f %%: the next one is to take %.1f %%",
        *(100 * each for each in (plan.overhead, overhead, best.overhead)),
    )
    return prepared, best


def _lost(plan: Plan, least_overhead: float) -> float:
    """The most seconds that a better plan would save in each step."""
    return max(plan.overhead - least_overhead, 0.0) * plan.seconds / (1 + plan.overhead)


def _tell(signature: Signature, prepared: Prepared, seconds: float) -> None:
    """Log what a new shape costs, on one line."""
    plan = _plan_of(prepared)
    how = "taken from those of other shapes" if prepared.estimated else "known from a checkpoint"
    _log.info(
        "%s for %s: costs %s, peak of activations %s of %s, %d of %d stages recomputed (+%.1f %% of the step)",
        type(signature.cut.module).__name__,
        " and ".join("×".join(map(str, shape)) for shape in signature.shapes),
        f"measured in {format_seconds(seconds)}" if seconds else how,
        format_bytes(plan.peak_bytes),
        format_bytes(plan.budget_bytes),
        len(plan.recomputed),
        len(plan.chain),
        100 * plan.overhead,
    )


def _plan_of(prepared: Prepared) -> Plan:
    assert prepared.plan is not None
    return prepared.plan
