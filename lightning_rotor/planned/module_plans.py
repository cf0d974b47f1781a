"""The plans of one module, and how a new call gets one.

From cheap to dear: a call's plan is in the cache; a checkpoint says what was measured and planned; its costs follow
from those of measured sizes around it (:class:`.Measurements`); it is measured and planned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.capture.sequentialize import Cut, check_module
from lightning_rotor.chain import Chain
from lightning_rotor.errors import (
    BudgetError,
    MessageError,
    PlanError,
    ProfilerBusyError,
    ProfilingError,
)
from lightning_rotor.execution.executor import Executor
from lightning_rotor.execution.moving import OtherMemory
from lightning_rotor.link import Link
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.budget_source import BudgetSource, MeasuringBegins, NothingFits, PlanMade
from lightning_rotor.planned.cache import MAX_PLANS, PlanCache
from lightning_rotor.planned.call_profiler import CallProfiler
from lightning_rotor.planned.known_cuts import KnownCuts
from lightning_rotor.planned.measurements import Measurements, for_call
from lightning_rotor.planned.offloading import Offloading, offloading
from lightning_rotor.planned.other_sizes import best_of, covering, least_overhead_of, lost_by
from lightning_rotor.planned.plan_settings import PlanSettings
from lightning_rotor.planned.prepared import (
    Costs,
    Prepared,
    TimedSchedule,
    Turn,
    corrected,
    costs_of,
    may_be_planned_again,
)
from lightning_rotor.planned.records import Record, call_fingerprint, recalled, record_of
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planned.size_classes import SizeClasses
from lightning_rotor.planning import Plan, minimum_budget, plan_for, scheduled
from lightning_rotor.private.torch_names import CompiledCall, keep_library_out_of_graphs
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.progress_bar import planning_progress
from lightning_rotor.schedule import Schedule
from lightning_rotor.units import format_bytes, format_seconds

_log = logging.getLogger(__name__)
# The first measurements of a training pay for themselves soonest, as bounds from few sizes are rough: until all have
# taken so many seconds, one is made for this share of its price. Later ones wait until steps have lost all of it.
_FIRST_SECONDS = 5.0
_FIRST_SHARE = 1 / 16
# A measured overhead this far from the predicted one, as a share of it, leads to another plan; not if it is less than
# the second share of a step, which noise is.
_FAR_OFF = 0.05
_NOTABLE = 0.005


@dataclass(slots=True)
class Account:
    """Seconds that steps have lost for want of something better, and the price of that in seconds."""

    price_seconds: float = 0.0
    lost_seconds: float = 0.0

    def charge(self, lost_seconds: float) -> bool:
        """Add a loss. True if all since the last payment exceed the price, which counts as paid then."""
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
        least = minimum_budget(plan.chain, slots=plan.slots, **plan.conditions)
        if plan.peak_bytes <= least.peak_bytes:
            return False
        self.size_bytes = least.peak_bytes
        if not to_the_least:
            # Nobody knows what the device has, so half of what can be given up is tried first.
            self.size_bytes = (plan.peak_bytes + least.peak_bytes) // 2
        return True

    def caps(self, plan: Plan) -> bool:
        """True if a plan has all that plans may take since then."""
        return self.size_bytes is not None and plan.budget_bytes >= self.size_bytes


class ModulePlans:
    """The plans of one module, or ``ModelError`` if it can be no chain; ``name`` says where in the model it is."""

    def __init__(
        self,
        module: nn.Module,
        source: BudgetSource,
        settings: PlanSettings,
        name: str = "",
        *,
        compiled: CompiledCall | None = None,
    ) -> None:
        if compiled is None:
            check_module(module)
        self.name = name
        self.ceiling = Ceiling()
        self.cache = PlanCache(settings.max_plans)
        self.measuring_seconds = 0.0
        self.ran_without_gradients = False
        self._source = source
        self._settings = settings
        self._cuts = KnownCuts(
            module,
            most=settings.max_plans,
            on_cut=partial(source.hear, MeasuringBegins()),
            ranks=source.ranks,
            compiled=compiled,
        )
        self._measurements = Measurements()
        self.classes = SizeClasses()
        self._profiler = CallProfiler(source, settings, self.budget)
        # By device, where plans move what they move. Kept for the pinned memory, which takes long to get.
        self._offloadings: dict[torch.device, Offloading] = {}
        # Of an earlier training, by the fingerprint of the call.
        self._records: dict[str, Record] = {}
        self._estimating = Account()
        self._searching = Account()
        self._measuring = Account()

    @property
    def is_to_come(self) -> bool:
        """True if it has run without gradients alone, as a reentrant checkpoint runs it before the backward."""
        return self.ran_without_gradients and self.plan is None

    @property
    def plan(self) -> Plan | None:
        """The plan for the signature used last."""
        if not len(self.cache):
            return None
        entry = self.cache.latest[1]
        return entry.plan if isinstance(entry, Prepared) else None

    @property
    def cuts_made(self) -> int:
        """Number of times that the module was cut; 0 until it has turned out to be a chain."""
        return self._cuts.made

    @property
    def together(self) -> bool:
        """True if other processes measure and plan whenever this one does, as messages were seen between them."""
        return self._source.ranks.together

    # ---------------------------------------------------------------- the cut and the signature of a call

    def _follow_changes(self) -> None:
        """Forget everything if the module has changed."""
        if self._cuts.follow_changes():
            self.forget()

    def follow_others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Cut, measure or plan a call anew if another process must, or has another plan for it. All must ask."""
        self._follow_changes()
        ranks = self._source.ranks
        signature = self._cuts.known_signature(args, kwargs)
        entry = None
        if signature is not None:
            entry = self.cache.use(signature, self._source.turn)
        prepared = None
        if isinstance(entry, Prepared):
            prepared = entry
        # Each question below goes round all processes, so each process must ask the same ones in the same order.
        if ranks.all_run(None if prepared is None else prepared.schedule):
            return
        if ranks.any(prepared is not None and prepared.is_chosen):
            raise MessageError(
                "a schedule was chosen by use() that other processes do not run for this call, with which the module "
                "exchanges messages: expected use() of the same schedule in each of them, or in none"
            )
        # Costs stay, the plan goes: it follows from what all of them need now.
        if signature is not None and entry is not None:
            self.cache.put(signature, costs_of(entry))
        if ranks.any(entry is None):
            # Measured anew by all, also where this process knows the costs.
            self._records.clear()
            self.cache.keep_only(lambda other: other != signature)
            if ranks.any(signature is None):
                self._cuts.forget_those_for(args, kwargs)

    def expect_unused(self, outputs: frozenset[int]) -> None:
        """Take these numbers of returned tensors for unused. What was measured under others is measured anew."""
        if outputs != self._profiler.unused_outputs:
            self._profiler.unused_outputs = outputs
            self._forget_costs()

    def signature_and_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, Any]:
        """The signature of a call, and the chain's input. The module is cut if it must be."""
        self._follow_changes()
        made = self._cuts.made
        began = time.perf_counter()
        cut, value = self._cuts.cut_and_input(args, kwargs)
        if self._cuts.made != made:
            self.measuring_seconds += time.perf_counter() - began
            # A new cut may have pushed out others, whose layers are gone or which were not used for long.
            self.cache.keep_only(lambda signature: signature.cut in self._cuts)
            self._measurements.keep_only(lambda signature: signature.cut in self._cuts)
        return self._cuts.signature(cut, value), value

    def signature_and_input_unasked(
        self, cut: Cut, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Signature, Any] | None:
        """The signature of a call and the chain's input, whatever a recording would say to its sizes.

        None if the call differs from the recorded one in more, or values could decide, too.
        """
        if not isinstance(cut, GraphCut):
            value = cut.bind(args, kwargs)
        elif cut.number_slots or cut.guards.asks_values:
            return None
        else:
            value = cut.guards.bind_unasked(args, kwargs)
        return None if value is None else (self._cuts.signature(cut, value), value)

    def is_prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if a call has a plan, or costs for one."""
        self._follow_changes()
        return self._cuts.known_signature(args, kwargs) in self.cache

    # ---------------------------------------------------------------- the plan of a call

    def prepare(self, signature: Signature, value: Any) -> Prepared:
        """The plan of a call, made now if there is none."""
        keep_library_out_of_graphs()
        prepared = None
        spent_seconds = self.measuring_seconds
        # Processes that exchange messages plan calls of one step behind it, together.
        if not self.together:
            prepared = self._source.plan_beside(self.name, signature, value)
        if prepared is None:
            prepared = self._prepared_alone(signature, value)
        # Another recording may do something else, even if all of its stages have equal names.
        assert prepared.signature.cut is signature.cut
        if self.measuring_seconds > spent_seconds:
            _tell(signature, prepared, self.measuring_seconds - spent_seconds)
        facts = None
        if not self.together:
            # Together, no call is steady: all processes ask each other at each of them.
            facts = self._cuts.facts_besides(signature.cut)
        self.cache.note_last(signature, prepared, facts, self._source.waiting)
        return prepared

    def _prepared_alone(self, signature: Signature, value: Any) -> Prepared:
        """The plan of a call for the budget that is left for it alone."""
        turn = self._source.turn
        spent_seconds = self.measuring_seconds
        cached = self.cache.use(signature, turn)
        entry: Costs | Prepared
        if self.together:
            # All run what they have agreed on, and measure what one has not. What follows is by the clock of each.
            entry = self._measured_as_needed(signature, value) if cached is None else cached
        elif cached is None:
            entry = self._new_entry(signature, value)
        else:
            entry = self._kept_or_better(signature, value, cached)
        # A plan for another turn has another part of the budget, so only its costs are taken over.
        if costs_of(entry).turn != turn:
            entry = replace(costs_of(entry), turn=turn)
        prepared = entry if isinstance(entry, Prepared) else self.plan_again(signature, entry)
        if cached is None and self.measuring_seconds == spent_seconds:
            _tell(signature, prepared, 0.0)
        return prepared

    def _new_entry(self, signature: Signature, value: Any) -> Costs | Prepared:
        """A call that is not in the cache: from a checkpoint, from other sizes, or measured."""
        known = None
        if signature.cut.way != "compiled":  # of which each size is a graph of its own
            known = self._recalled(signature) or self._plan_of_larger_size(signature) or self._estimated(signature)
        return self._kept_or_better(signature, value, known or self._measured_as_needed(signature, value))

    def _kept_or_better(self, signature: Signature, value: Any, entry: Costs | Prepared) -> Costs | Prepared:
        """The entry, or a better one where its calls have shown more, or steps have lost what a better one costs."""
        if self._profiler.wants_other_code(signature, entry):
            return self._measured_as_needed(signature, value, before=costs_of(entry))
        if isinstance(entry, Prepared) and entry.costs.origin == "larger size" and not entry.costs.rough_seconds:
            may_estimate = bool(entry.lost_seconds) and self._estimating.charge(entry.lost_seconds)
            return (may_estimate and self._estimated(signature, entry)) or entry
        shows_seconds = isinstance(entry, Prepared) and not entry.is_settled and entry.is_timed
        if isinstance(entry, Prepared) and shows_seconds and self._source.plans_by_seconds(self.name):
            entry = self._planned_by_seconds(signature, entry)
        rough_seconds = costs_of(entry).rough_seconds
        if rough_seconds and self._measuring.charge(rough_seconds):
            try:
                if self._is_small_of_rough(signature):
                    return self._measured_as_needed(signature, value)
            except ProfilerBusyError:
                pass  # this plan does until torch's profiler is free
            self._measuring.lost_seconds = self._measuring.price_seconds  # the next call may be measured
        if isinstance(entry, Prepared) and entry.lost_seconds and self._searching.charge(entry.lost_seconds):
            return entry.costs
        return entry

    def _is_small_of_rough(self, signature: Signature) -> bool:
        """True if most sizes whose costs are rough are larger: they are bounded by what this one takes, as well."""
        sizes = []
        for other, entry in self.cache:
            if costs_of(entry).rough_seconds:
                sizes.append(other.size)
        if not sizes:
            return True
        median = sorted(sizes)[len(sizes) // 2]
        return signature.size <= median

    def costs_beside(self, signature: Signature, value: Any, turn: Turn) -> tuple[Signature, Costs]:
        """Costs of a call in a step of several, and the signature that they are for: its own, or its class's.

        They are known, bounds for its class of sizes, of a checkpoint, or else measured now.
        """
        entry = self.cache.use(signature, turn)
        if entry is None:
            in_class = self.classes.of(signature)
            costs = self.class_costs(in_class, turn)
            if costs is not None:
                return in_class, costs
            entry = self._recalled(signature) or self._measured_as_needed(signature, value)
        return signature, replace(costs_of(entry), turn=turn)

    def class_costs(self, signature: Signature, turn: Turn) -> Costs | None:
        """Costs of a class of sizes: known already, or bounds from measured sizes; None if those do not do."""
        entry = self.cache.use(signature, turn)
        if entry is not None:
            return costs_of(entry)
        estimate = self._measurements.estimate(signature)
        if estimate is None:
            return None
        return Costs(estimate.profile, turn, origin="bounds")

    def _recalled(self, signature: Signature) -> Costs | Prepared | None:
        """The entry that a checkpoint has for a call; None if it has none."""
        if not self._records:
            return None
        call = call_fingerprint(signature, self._profiler.compiled.choice)
        record = self._records.pop(call, None)
        if record is None:
            return None
        recorded = recalled(record, signature.cut.stages)
        if recorded is None:
            return None
        profile, plan = recorded
        costs = self._keep(signature, Costs(profile))
        if plan is None or plan.slots < self._settings.slots:
            return costs
        if not self.budget(profile).fits(plan):
            return costs
        return self.use_plan(signature, costs, plan)

    def _plan_of_larger_size(self, signature: Signature) -> Prepared | None:
        """The plan of a larger size, or a better one once steps have lost what looking takes; None if neither."""
        turn = self._source.turn
        if not self._source.plans_by_seconds(self.name):
            return None  # other calls share the budget
        # Behind other calls, a plan may have been made for another part of the budget.
        planned: list[tuple[Signature, Prepared]] = []
        taken_over: list[tuple[Signature, Prepared]] = []
        for other, prepared in self.cache.planned():
            if prepared.turn == turn:
                list_of_its_kind = taken_over if prepared.costs.origin == "larger size" else planned
                list_of_its_kind.append((other, prepared))
        # Most sizes run under the plan of a larger one, which serves all that they could serve. They count only where
        # that one is forgotten.
        found = covering(signature, planned) or covering(signature, taken_over)
        if found is None:
            return None
        larger, lost_seconds = found
        # Where costs of the larger size are rough, those of this one would be, too, so that looking does not help.
        rough_seconds = min(lost_seconds, larger.costs.rough_seconds)
        if not rough_seconds and self._estimating.charge(lost_seconds):
            return self._estimated(signature, larger)
        return self._taking_over(larger, signature, lost_seconds=lost_seconds, rough_seconds=rough_seconds)

    def _taking_over(
        self, larger: Prepared, signature: Signature, *, lost_seconds: float, rough_seconds: float = 0.0
    ) -> Prepared:
        """A call under the plan of a larger size as it is."""
        turn = larger.turn
        profile = for_call(larger.profile, signature)
        costs = Costs(profile, turn=turn, origin="larger size", rough_seconds=rough_seconds)
        plan = replace(larger.plan, chain=profile.chain)
        # What is used must not be forgotten before what is not: the sizes that it serves each have an entry, too.
        self.cache.use(larger.signature, turn)
        return self.use_plan(
            signature,
            costs,
            plan,
            lost_seconds=lost_seconds,
            executor=larger.shared_executor,
        )

    def _estimated(self, signature: Signature, larger: Prepared | None = None) -> Prepared | None:
        """A plan for a new size from the costs of others, or None if those do not do.

        ``larger`` has a plan that covers the size. It stays where none is found that is faster.
        """
        began = time.perf_counter()
        estimate = self._measurements.estimate(signature)
        if estimate is None:
            return None
        profile, chain = estimate.profile, estimate.profile.chain
        budget = self.budget(profile)
        # Of any recording with equal stages: a schedule is judged by this call's own costs, and runs its own stages.
        alike = self.cache.alike(signature, chain.names)
        least_overhead = least_overhead_of(alike, signature.size, chain, budget)
        plan = best_of(chain, alike, signature.size, budget, least_overhead, slots=self._settings.slots)

        def rough_seconds_of(plan: Plan) -> float:
            if estimate.is_near:
                return 0.0
            # Costs that equal a larger size's are that one's bounds, so they say nothing of this one.
            smaller = [(size, prepared) for size, prepared in alike if size <= signature.size]
            return lost_by(plan, least_overhead_of(smaller, signature.size, chain, budget))

        before_seconds = self._estimating.price_seconds
        self._estimating.price_seconds = time.perf_counter() - began
        is_found = plan is not None and (larger is None or plan.overhead < larger.plan.overhead)
        if larger is not None and not is_found:
            # The next look will most likely find nothing, too: it has to wait for twice the loss.
            self._estimating.price_seconds += before_seconds
            plan = larger.plan
        lost_seconds = 0.0
        if plan is not None:
            lost_seconds = lost_by(plan, least_overhead)
        # Losses of all sizes add up, since a search for one of them gives the others a schedule to try.
        if self._searching.charge(lost_seconds):
            plan = None
            lost_seconds = 0.0
        elif larger is not None and not is_found:
            rough_seconds = rough_seconds_of(larger.plan)
            return self._taking_over(larger, signature, lost_seconds=lost_seconds, rough_seconds=rough_seconds)
        if plan is None and budget.available_bytes > 0:
            plan = self._solve_if_easy(profile, budget)
            if plan is None:
                # Bounds may be too high where the truth fits, so it is measured.
                return None
        elif plan is None:
            # Other calls share the step: the least plan runs, until a joint one follows.
            outcome, _ = self._outcome(profile)
            if not isinstance(outcome, Plan):
                return None
            plan = outcome
        costs = Costs(profile, origin="bounds", rough_seconds=rough_seconds_of(plan))
        return self.use_plan(signature, costs, plan, lost_seconds=lost_seconds)

    def _planned_by_seconds(self, signature: Signature, prepared: Prepared) -> Prepared:
        """An entry with the costs of segments that its calls have shown, planned again if they were far off.

        A new plan is the second and last; of the two, the faster one stays.
        """
        plan = prepared.plan
        costs = prepared.with_timing()
        overhead = costs.timed[-1].overhead
        budget = self.budget(costs.profile)

        def scheduled_as(timed: TimedSchedule, chain: Chain) -> Plan:
            return scheduled(chain, timed.schedule, plan.budget_bytes, slots=plan.slots, **plan.conditions)

        # A schedule that calls have run under before may have been given up because a step has exceeded the limit.
        allowed = [each for each in costs.timed[:-1] if budget.keeps(scheduled_as(each, plan.chain))]
        fastest = min([*allowed, costs.timed[-1]], key=lambda timed: timed.overhead)
        tolerance = max(_FAR_OFF * max(overhead, plan.overhead), _NOTABLE)
        is_far_off = abs(overhead - plan.overhead) > tolerance
        if fastest.schedule is plan.schedule and not is_far_off:
            # The executor stays: another one would warm up once more.
            timed = replace(prepared, costs=costs)
            self.cache.put(signature, timed)
            return timed

        chain = corrected(scheduled_as(fastest, plan.chain), fastest.overhead)
        may_solve = may_be_planned_again(costs)
        costs = replace(costs, profile=replace(costs.profile, chain=chain))
        best = replace(scheduled_as(fastest, chain), solve_seconds=plan.solve_seconds)
        if may_solve:
            with suppress(BudgetError):
                solved = self._solve(costs.profile, budget)
                # With what measured steps foretell, it may have less room than the plan of now.
                if solved.schedule != fastest.schedule and solved.overhead < best.overhead:
                    best = solved
        _log.info(
            "A plan was to take %.1f %% more than plain steps, and takes %.1f %%: the next one is to take %.1f %%",
            100 * plan.overhead,
            100 * overhead,
            100 * best.overhead,
        )
        self._measurements.add(signature, costs.profile)
        return self.use_plan(signature, costs, best, lost_seconds=prepared.lost_seconds)

    def measure(self, signature: Signature, value: Any) -> Costs:
        """Measure a call with all options of its stages, even if it was measured before, and cache its costs."""
        began = time.perf_counter()
        costs = self._profiler.measure(signature, value)
        return self._keep_measured(signature, costs, time.perf_counter() - began)

    def _measured_as_needed(self, signature: Signature, value: Any, before: Costs | None = None) -> Costs:
        """Measure a call with the options that its budget asks for, and cache its costs.

        ``before`` are costs of the call as it was measured last, if its plans have less room since.
        """
        began = time.perf_counter()
        costs = self._profiler.measure_as_needed(signature, value, before)
        if costs is before:
            return costs
        return self._keep_measured(signature, costs, time.perf_counter() - began)

    def _keep_measured(self, signature: Signature, costs: Costs, seconds: float) -> Costs:
        """Cache costs that took so long to measure."""
        self.measuring_seconds += seconds
        share = _FIRST_SHARE if self.measuring_seconds < _FIRST_SECONDS else 1.0
        self._measuring.price_seconds = share * seconds
        # The new costs may say more of calls whose costs are rough, too.
        rough = set()
        for other, entry in self.cache:
            if costs_of(entry).rough_seconds:
                rough.add(other)
        self.cache.keep_only(lambda other: other not in rough)
        return self._keep(signature, costs)

    def _keep(self, signature: Signature, costs: Costs) -> Costs:
        """An entry with costs that were measured."""
        self._measurements.add(signature, costs.profile)
        self.cache.put(signature, costs)
        return costs

    def budget(self, profile: Profile, *, ceiling: bool = True) -> Budget:
        """The budget of a plan. ``ceiling=False`` ignores what running out of memory has taught, for its error.

        The answer counts what the step holds by now, so it is asked for right before a plan is made or judged. The step
        notes it as the last one, for the words of an error.
        """
        budget = self._source.budget(self.name, profile)
        # Copies of small buffers, for a second run, are there from the forward's begin to its end.
        lingering_bytes = budget.lingering_bytes + profile.copied_bytes
        # A provisional plan runs for a step or two, and pinned memory takes long to get.
        link = None if budget.is_provisional else self._link(profile)
        budget = replace(budget, lingering_bytes=lingering_bytes, link=link)
        return budget.capped(self.ceiling.size_bytes) if ceiling else budget

    def _link(self, profile: Profile) -> Link | None:
        """The link over which plans may move what stages hold; None if they move nothing."""
        there = self._offloading(torch.device(profile.chain.device))
        return None if there is None else there.link

    def _offloading(self, device: torch.device) -> Offloading | None:
        """Where plans for a device move what stages hold; None if they move nothing."""
        if self._settings.offload is None:
            return None
        if device not in self._offloadings:
            self._offloadings[device] = offloading(self._settings.offload, device)
        return self._offloadings[device]

    def _memory(self, signature: Signature, plan: Plan) -> OtherMemory | None:
        """The other memory for a plan, with room for it; None if it moves nothing, or there is no such memory."""
        if not plan.schedule.moves:
            return None
        there = self._offloading(signature.device)
        if there is None:
            return None
        # Now, and not in the forward: the device stands still while memory of the host is pinned.
        there.memory.reserve(plan.host_bytes)
        return there.memory

    def _solve(self, profile: Profile, budget: Budget) -> Plan:
        with planning_progress(len(profile.chain), enabled=self._settings.show_progress):
            plan = budget.plan(profile.chain, slots=self._settings.slots)
        self._note_price(plan)
        return plan

    def _solve_if_easy(self, profile: Profile, budget: Budget) -> Plan | None:
        """The plan, but for the one of least peak; None if there is none."""
        with planning_progress(len(profile.chain), enabled=self._settings.show_progress):
            plan = budget.plan_of_tables(profile.chain, slots=self._settings.slots)
        if plan is not None:
            self._note_price(plan)
        return plan

    def _note_price(self, plan: Plan) -> None:
        # The dearest so far: a search whose table was there already says nothing of the next one.
        self._searching.price_seconds = max(self._searching.price_seconds, plan.solve_seconds)

    def plan_again(self, signature: Signature, entry: Costs | Prepared) -> Prepared:
        """Plan anew for known costs, as all processes agree."""
        outcome, exceeds = self._outcome(entry.profile)
        plan = self._source.ranks.settle(outcome, exceeds=exceeds)
        return self.use_plan(signature, costs_of(entry), plan)

    def _outcome(self, profile: Profile) -> tuple[Plan | BudgetError, bool]:
        """The plan of this process, or why it has none; and whether the plan is beyond its budget.

        An error is kept, since others may wait for it.

        Where nothing fits, it is the plan that takes least if the step can go on under it: the step then shows what
        training needs, and the limit ends it behind its backward. Else it is the error.
        """
        budget = self.budget(profile)
        try:
            return self._solve(profile, budget), False
        except BudgetError as error:
            if not budget.is_provisional:
                try:
                    self._source.hear(NothingFits(error))
                except BudgetError as too_small:
                    return too_small, False
            return budget.least_plan(profile.chain, error, slots=self._settings.slots), True

    def use_plan(
        self,
        signature: Signature,
        costs: Costs,
        plan: Plan,
        *,
        lost_seconds: float = 0.0,
        is_chosen: bool = False,
        executor: Executor | None = None,
    ) -> Prepared:
        """Run a call under a plan from now on; ``executor`` is one for the schedule and the call's stages, if any."""
        memory = self._memory(signature, plan)
        prepared = costs.under(
            signature,
            plan,
            lost_seconds=lost_seconds,
            is_chosen=is_chosen,
            memory=memory,
            executor=executor,
        )
        self.cache.put(signature, prepared)
        self._source.hear(PlanMade(plan, signature))
        return prepared

    # ---------------------------------------------------------------- all calls

    def may_have_other_code(self, plan: Plan) -> bool:
        """True if a plan is for a graph that can be planned inside once more, or taken apart."""
        for signature, prepared in self.cache.planned():
            if prepared.plan is plan:
                return signature.cut.way == "compiled" and self._source.takes_apart
        return False

    def entry_under(self, plan: Plan) -> Prepared | None:
        """The entry that a plan is in use for, or None."""
        for _, prepared in self.cache.planned():
            if prepared.plan is plan:
                return prepared
        return None

    def replan(self, stale: Plan | None = None) -> Plan:
        """Plan with the budget of this moment.

        The new plan replaces ``stale``, a plan in use. By default it is for the signature used last, and the others are
        made anew when they come again. Raises ``ProfilingError`` before any measurement, ``BudgetError`` if none fits.
        """
        if not len(self.cache):
            raise ProfilingError("there is nothing to plan yet: measure a sample first, with measure(sample)")
        signature, entry = self.cache.latest
        for other, prepared in self.cache.planned():
            if prepared.plan is stale:
                signature, entry = other, prepared
                break
        if self.together:
            # The others learn of it at the next forward, and plan with this process.
            solved = self._solve(entry.profile, self.budget(entry.profile))
            self.cache.put(signature, costs_of(entry))
            return solved
        solved = self.plan_again(signature, entry).plan
        if stale is None:
            # The budget has changed for all of them.
            self.cache.keep_only_plans(lambda plan: plan is solved)
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
        signature, entry = self.cache.latest
        chain = entry.profile.chain
        conditions = self.budget(entry.profile).conditions
        if isinstance(plan, str):
            plan = Schedule.parse(plan)
        if isinstance(plan, Schedule):
            used = scheduled(chain, plan, slots=self._settings.slots, **conditions)
        else:
            used = plan_for(plan, chain)
        self.use_plan(signature, costs_of(entry), used, is_chosen=True)
        return used

    def records(self) -> list[Record]:
        """Everything measured and planned so far in plain types, for :meth:`recall`."""
        records = dict(self._records)
        for signature, entry in self.cache:
            # Estimates are made again at once from what was measured.
            if not costs_of(entry).estimated:
                call = call_fingerprint(signature, self._profiler.compiled.choice)
                records[call] = record_of(call, entry)
        return list(records.values())[-MAX_PLANS:]

    def recall(self, records: Iterable[Record]) -> None:
        """Take over what an equal module has measured on this machine, and its plans if the budget is the same."""
        self._records = {record["call"]: record for record in records}

    def forget(self) -> None:
        """Drop every plan and measurement; the next training call starts afresh."""
        self._forget_costs()
        self._cuts.forget()

    def _forget_costs(self) -> None:
        self.cache.keep_only(lambda signature: False)
        self._measurements.keep_only(lambda signature: False)


def _tell(signature: Signature, prepared: Prepared, seconds: float) -> None:
    """Log what a new shape costs, on one line."""
    plan = prepared.plan
    origin = "known from a checkpoint"
    if prepared.costs.estimated:
        origin = "taken from those of other shapes"
    if seconds:
        origin = f"measured in {format_seconds(seconds)}"
    _log.info(
        "%s for %s: costs %s, peak of activations %s of %s, %d of %d stages recomputed%s (+%.1f %% of the step)",
        type(signature.cut.module).__name__,
        " and ".join("×".join(map(str, shape)) for shape in signature.shapes),
        origin,
        format_bytes(plan.peak_bytes),
        format_bytes(plan.budget_bytes),
        len(plan.recomputed),
        len(plan.chain),
        f", {len(plan.moved)} moved ({format_bytes(plan.host_bytes)})" if plan.moved else "",
        100 * plan.overhead,
    )
