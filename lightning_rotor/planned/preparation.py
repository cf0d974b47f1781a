"""What is ready for which call of one module, its cut, costs and plan, and how a call gets there that is new."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from lightning_rotor.capture.compiled import CompiledModules, Variants
from lightning_rotor.errors import BudgetError, ProfilingError
from lightning_rotor.memory.budget import AllowedPlans
from lightning_rotor.planned.cache import MAX_PLANS, PlanCache, Prepared, call_fingerprint, recall, record_of
from lightning_rotor.planned.known_cuts import KnownCuts, Signature
from lightning_rotor.planned.new_shapes import Measurements
from lightning_rotor.planned.ranks import Agreement
from lightning_rotor.planning import Plan, plan_for, scheduled
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.step import MeasuringProgress
from lightning_rotor.schedule import Schedule


class Preparation:
    """Prepares calls of one module.

    Args:
        module: Is cut and measured.
        plans: Plans it.
        max_plans: Plans that are kept, those used last.
        compiled_variants: See :class:`.CompiledModules`.
        show_progress: Show a progress bar when measuring takes long.
        on_measure: Called before cutting and measuring.
        on_plan: Called after each plan.
        agreement: With the other processes of a distributed training.
    """

    def __init__(
        self,
        module: nn.Module,
        plans: AllowedPlans,
        *,
        max_plans: int,
        compiled_variants: Variants,
        show_progress: bool,
        on_measure: Callable[[], None] | None,
        on_plan: Callable[[Plan], None] | None,
        agreement: Agreement | None,
    ) -> None:
        self._plans = plans
        self._cuts = KnownCuts(module, most=max_plans, on_cut=self._stop_watching)
        self._cache = PlanCache(max_plans)
        self._measurements = Measurements(plans.menu)
        self._compiled = CompiledModules(compiled_variants)
        self._show_progress = show_progress
        self._on_measure = on_measure
        self._on_plan = on_plan
        self._agreement = agreement
        self._records: dict[str, dict[str, Any]] = {}

    @property
    def latest(self) -> Prepared | None:
        """What is ready for the signature used last."""
        return self._cache.latest[1] if len(self._cache) else None

    @property
    def has_cut(self) -> bool:
        """Whether the module has ever turned out to be a chain."""
        return self._cuts.made > 0

    @property
    def together(self) -> bool:
        """Whether other processes measure and plan whenever this one does."""
        return self._agreement is not None and self._agreement.together

    # ---------------------------------------------------------------- a call

    def keep_in_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start afresh if another process must, and cannot do so alone."""
        if self._agreement is not None and self.together:
            ready = self.is_prepared(args, kwargs)
            if self._agreement.must_start_afresh(ready=ready):
                self._records.clear()
                self.forget()

    def _replan_together(self, stale: Plan | None) -> Plan:
        """The plan that this process proposes next time; the others learn of it at the next forward, and plan with this process."""
        prepared = next((entry[1] for entry in self._cache if entry[1].plan is stale), self._cache.latest[1])
        solved = self._plans.solve(prepared.profile, self._plans.allowance(prepared.profile))
        if isinstance(solved, BudgetError):
            raise solved
        self.forget()
        return solved

    def follow_changes(self) -> None:
        """Forget everything if the module has changed."""
        if self._cuts.follow_changes():
            self.forget()

    def _stop_watching(self) -> None:
        if self._on_measure is not None:
            self._on_measure()

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, Any]:
        """What a plan for a call depends on, and the chain's input. The module is cut if it must be.

        Raises:
            ModelError: It can be no chain.
            SampleError: The call holds no tensor.
        """
        made = self._cuts.made
        cut, value = self._cuts.bind(args, kwargs)
        if self._cuts.made != made:
            for cache in (self._cache, self._measurements):
                cache.drop(lambda signature: signature.cut in self._cuts)
        return self._cuts.signature(cut, value), value

    def is_prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has a plan, or only needs one."""
        self.follow_changes()
        return any(self._cuts.signature(cut, value) in self._cache for cut, value in self._cuts.known(args, kwargs))

    def prepare(self, signature: Signature, value: Any) -> Prepared:
        """What is ready for a call, or is now: the ladder of :mod:`lightning_rotor.planned.new_shapes`.

        Raises:
            ProfilerBusyError: It cannot be measured now.
            BudgetError: No schedule fits.
        """
        prepared = self._cache.use(signature) or self._recalled(signature) or self._estimated(signature)
        if prepared is None:
            self.measure(signature, value)
            prepared = self._cache.latest[1]
        return self.plan_again(signature, prepared) if prepared.executor is None else prepared

    def _estimated(self, signature: Signature) -> Prepared | None:
        """Plan a new shape from what is known of others, if that will do."""
        profile = None if self.together else self._measurements.estimate(signature)
        if profile is None:
            return None
        solved = self._measurements.choose(signature, profile, self._plans.allowance(profile), slots=self._plans.slots)
        if solved is None or (solved.recomputed and self._measurements.is_vague(signature)):
            return None
        return self._use(signature, Prepared.of(signature, profile, solved, estimated=True))

    def _recalled(self, signature: Signature) -> Prepared | None:
        record = self._records.pop(self._call(signature), None) if self._records else None
        recalled = None if record is None else recall(record, signature.cut.stages)
        if recalled is None:
            return None
        profile, solved = recalled.profile, recalled.plan
        self._measurements.add(signature, profile)
        self._cache.put(signature, Prepared(profile))
        if solved is not None and self._plans.allowance(profile).fits(solved) and solved.slots >= self._plans.slots:
            self._use(signature, Prepared.of(signature, profile, solved))
        return self._cache.latest[1]

    def _call(self, signature: Signature) -> str:
        return call_fingerprint(signature.cut.stages, (signature.plain, self._compiled.choice), signature.device)

    def measure(self, signature: Signature, value: Any) -> Profile:
        """Measure, whether or not that was done before."""
        self._stop_watching()
        with MeasuringProgress(enabled=self._show_progress) as progress:
            profile = profile_chain(
                signature.cut.stages, value, progress=progress, compiled=self._compiled, in_lockstep=self.together
            )
        self._measurements.add(signature, profile)
        self._cache.put(signature, Prepared(profile))
        return profile

    def plan_again(self, signature: Signature, prepared: Prepared) -> Prepared:
        """Plan anew for known costs. Estimated ones are not worth a solution, unless no schedule at hand fits."""
        profile = prepared.profile
        allowance = self._plans.allowance(profile)
        solved = None
        if prepared.estimated:
            solved = self._measurements.choose(signature, profile, allowance, slots=self._plans.slots)
        if solved is None:
            outcome = self._plans.solve(profile, allowance)
            solved = self._agreed(signature, outcome)
        return self._use(signature, Prepared.of(signature, profile, solved, estimated=prepared.estimated))

    def _agreed(self, signature: Signature, outcome: Plan | BudgetError) -> Plan:
        """What all processes run, if there are others."""
        if self._agreement is not None:
            return self._agreement.settle(self._call(signature), outcome)
        if isinstance(outcome, BudgetError):
            raise outcome
        return outcome

    def _use(self, signature: Signature, prepared: Prepared) -> Prepared:
        assert prepared.plan is not None
        self._cache.put(signature, prepared)
        self._measurements.note(signature, prepared.plan)
        if self._on_plan is not None:
            self._on_plan(prepared.plan)
        return prepared

    # ---------------------------------------------------------------- all calls

    def replan(self, stale: Plan | None = None) -> Plan:
        """Plan with the allowance of this moment.

        Args:
            stale: A plan in use, which the new one replaces; the others stay. By default the plan for the signature used last, and the others are
                made anew when they come again.
        Raises:
            ProfilingError: Nothing has been measured yet.
            BudgetError: No schedule fits.
        """
        if not len(self._cache):
            raise ProfilingError("there is nothing to plan yet: measure a sample first, with measure(sample)")
        if self.together:
            return self._replan_together(stale)
        if stale is not None:
            found = next((entry for entry in self._cache if entry[1].plan is stale), None)
            if found is None:  # dropped from the cache in the meantime
                return stale
            return _plan_of(self.plan_again(*found))
        solved = _plan_of(self.plan_again(*self._cache.latest))
        self.unplan(lambda plan: plan is solved)
        return solved

    def use(self, plan: Plan | Schedule) -> Plan:
        """Run a plan or a schedule that was made before, for the signature used last."""
        if not len(self._cache):
            raise ProfilingError("there is nothing to run a plan for yet: measure a sample first, with measure(sample)")
        signature, prepared = self._cache.latest
        profile = prepared.profile
        if isinstance(plan, Schedule):
            allowance = self._plans.allowance(profile)
            used = scheduled(
                profile.chain,
                plan,
                gradients_exist=allowance.gradients_exist,
                lingering_bytes=allowance.lingering_bytes,
                slots=self._plans.slots,
            )
        else:
            used = plan_for(plan, profile.chain)
        self._use(signature, Prepared.of(signature, profile, used))
        return used

    def unplan(self, keep: Callable[[Plan], bool]) -> None:
        """Plan anew, when they come again, all signatures whose plan is not to be kept."""
        if self.together:
            self.forget()
        else:
            self._cache.unplan(keep)

    def records(self) -> list[dict[str, Any]]:
        """Everything measured and planned so far in plain types, for :meth:`recall`."""
        found = {
            call: record_of(call, signature.cut.stages, prepared.profile, prepared.plan)
            for signature, prepared in self._cache
            if not prepared.estimated
            for call in [self._call(signature)]
        }
        return list({**self._records, **found}.values())[-MAX_PLANS:]

    def recall(self, records: Iterable[dict[str, Any]]) -> None:
        """Do not measure what an equal module has measured before on this machine, and plan it as before if the allowance is the same.

        Args:
            records: From :meth:`records`, perhaps of another process.
        """
        self._records = {record["call"]: record for record in records}

    def forget(self) -> None:
        """Drop every plan and measurement; the next training call starts afresh."""
        self._cache.clear()
        self._measurements.clear()
        self._cuts.forget()


def _plan_of(prepared: Prepared) -> Plan:
    assert prepared.plan is not None
    return prepared.plan
