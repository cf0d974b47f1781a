"""A forward that measures and plans itself on its first training call, and from that very call on runs inside its budget.

:class:`PlannedForward` is what :class:`~lightning_rotor.checkpointable.Checkpointable` and the Lightning callback have in common; they
differ in where the budget comes from. :mod:`lightning_rotor.attaching` puts one in the place of a module's ``forward``.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from lightning_rotor.agreement import Agreement
from lightning_rotor.allowance import Allowance, AllowanceSource
from lightning_rotor.compiled import CompiledModules
from lightning_rotor.cutting import SequentialCut, check_module
from lightning_rotor.errors import BudgetError, ModelError, ProfilerBusyError, ProfilingError, UnitError
from lightning_rotor.execution.second_backward import guard_second_backward
from lightning_rotor.known_cuts import KnownCuts, Signature
from lightning_rotor.measurements import Measurements
from lightning_rotor.plan_cache import PlanCache, Prepared
from lightning_rotor.plan_records import call_fingerprint, recall, record_of
from lightning_rotor.planning import Plan, menu, minimum_budget, plan, plan_for, scheduled
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.progress import MeasuringProgress
from lightning_rotor.recomputation import is_recomputing
from lightning_rotor.schedule import Schedule
from lightning_rotor.shortage import BeforeForward, CopiedStatistics, is_shortage, shortage_error
from lightning_rotor.tensors import check_sample
from lightning_rotor.tracing import GraphCut
from lightning_rotor.units import format_bytes

_log = logging.getLogger(__name__)

MAX_PLANS = 64
# Out of memory so many times, a forward gets the plan that takes the least.
_CAUTIOUS_ATTEMPTS = 2


def _outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a function out of what torch.compile captures, for dynamo would flatten nested checkpoints into one.

    torch's private spelling of ``torch.compiler.disable`` imports dynamo only when something is compiled; the reason is for those who compile
    with ``fullgraph=True``.
    """
    kept_out: Any = _disable_dynamo(function)
    kept_out._torchdynamo_disable = True
    kept_out._torchdynamo_disable_msg = (
        "lightning-rotor runs this module under a recomputation plan, which cannot be one graph: expected torch.compile without "
        "fullgraph=True, or torch.compile of the layers inside the planned module"
    )
    return kept_out  # type: ignore[no-any-return]


class PlannedForward:
    """Runs a module under a recomputation plan, one plan for each input signature.

    Outside training (``eval()``, ``no_grad``, inference mode) the module runs plainly. So it does under a plan that recomputes nothing, if
    that has room for what its code holds longer than stages would. How it is cut into stages is found out at the first
    training call, again for a call whose arguments differ in more than their tensors, and again when the module has changed.

    Args:
        module: An ``nn.Sequential``, or any module that :func:`~lightning_rotor.cutting.sequentialize` can cut.
        allowance: Where the budget comes from.
        slots: Resolution of the dynamic program.
        max_plans: Plans that are kept, those used last; a plan that was dropped is made again when its signature returns.
        show_progress: Show a progress bar when measuring takes longer than two seconds.
        on_measure: Called before cutting and measuring, which run the module, and need torch's profiler for themselves.
        on_plan: Called after each plan, before it runs for the first time.
        on_run: Called before each run of a plan.
        on_unsupported: Called if the module turns out to be no chain; then it runs plainly. By default the error is raised.
        on_busy: Called if it cannot be measured in this call, because torch's profiler is recording; then it runs plainly this time. By
            default the error is raised.
        on_infeasible: Called if no schedule fits; then the one that takes least is run. By default the error is raised.
        agreement: With the other processes of a distributed training.
    Raises:
        ModelError: The module can be no chain, whatever its input.
        UnitError: ``slots`` or ``max_plans`` is no positive integer.
    """

    def __init__(
        self,
        module: nn.Module,
        allowance: AllowanceSource,
        *,
        slots: int = 500,
        max_plans: int = MAX_PLANS,
        show_progress: bool = True,
        on_measure: Callable[[], None] | None = None,
        on_plan: Callable[[Plan], None] | None = None,
        on_run: Callable[[Plan], None] | None = None,
        on_unsupported: Callable[[ModelError], None] | None = None,
        on_busy: Callable[[ProfilerBusyError], None] | None = None,
        on_infeasible: Callable[[BudgetError], None] | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        for name, number in (("slots", slots), ("max_plans", max_plans)):
            if number < 1:
                default = {"slots": 500, "max_plans": MAX_PLANS}[name]
                raise UnitError(f"{name} is {number!r}: expected a positive integer, such as the default {default}")
        check_module(module)
        self._module = module
        self._cuts = KnownCuts(module, most=max_plans, on_cut=self._stop_watching)
        self._cache = PlanCache(max_plans)
        self._measurements = Measurements(self._menu)
        self._compiled = CompiledModules()
        self._statistics = CopiedStatistics()
        self._allowance_source = allowance
        self._ceiling_bytes: int | None = None
        self._slots = slots
        self._show_progress = show_progress
        self._on_measure = on_measure
        self._on_plan = on_plan
        self._on_run = on_run
        self._on_unsupported = on_unsupported
        self._on_busy = on_busy
        self._on_infeasible = on_infeasible
        self._agreement = agreement
        self._active = True
        self._records: dict[str, dict[str, Any]] = {}

    # A copy of a live module (an averaged model, a pickled checkpoint) computes with its own weights, plainly.
    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        return _inactive()

    def __reduce__(self) -> tuple[Any, ...]:
        return _inactive, ()

    @property
    def active(self) -> bool:
        """Whether it plans: a copy does not."""
        return self._active

    @property
    def plan(self) -> Plan | None:
        """The plan of the input signature used last, or None."""
        return self._cache.latest[1].plan if len(self._cache) else None

    @property
    def profile(self) -> Profile | None:
        """The costs of the input signature used last, or None."""
        return self._cache.latest[1].profile if len(self._cache) else None

    @property
    def ceiling_bytes(self) -> int | None:
        """The most that any plan may take since the device ran out of memory, or None if it never did."""
        return self._ceiling_bytes

    @ceiling_bytes.setter
    def ceiling_bytes(self, ceiling_bytes: int | None) -> None:
        self._ceiling_bytes = ceiling_bytes

    def measure(self, sample: Any) -> Profile:
        """Measure the module for the sample's signature, again if it was measured before.

        Args:
            sample: The input of an ``nn.Sequential``; for any other module a tuple holds positional arguments and a dict keyword arguments.
        Raises:
            ModelError: The module cannot be turned into a chain.
            SampleError: The sample holds no tensor, or values that are not finite.
            ProfilingError: There is no meter for the sample's device, or gradients are switched off.
        """
        check_sample(sample)
        args, kwargs = self._arguments(sample)
        with self._training_mode():
            self._follow_changes()
            cut, value = self._bind(args, kwargs)
            return self._measure(self._cuts.signature(cut, value), value)

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
        if self._together:
            return self._replan_together(stale)
        if stale is not None:
            found = next((entry for entry in self._cache if entry[1].plan is stale), None)
            return stale if found is None else self._plan(*found)  # dropped from the cache in the meantime
        solved = self._plan(*self._cache.latest)
        self.unplan(lambda plan: plan is solved)
        return solved

    def use(self, plan: Plan | Schedule) -> Plan:
        """Run a plan or a schedule that was made before, for the signature used last; see :meth:`.Checkpointable.use`."""
        if not len(self._cache):
            raise ProfilingError("there is nothing to run a plan for yet: measure a sample first, with measure(sample)")
        signature, prepared = self._cache.latest
        profile = prepared.profile
        if isinstance(plan, Schedule):
            allowance = self._allowance(profile)
            used = scheduled(
                profile.chain,
                plan,
                gradients_exist=allowance.gradients_exist,
                lingering_bytes=allowance.lingering_bytes,
                slots=self._slots,
            )
        else:
            used = plan_for(plan, profile.chain)
        self._use(signature, Prepared.of(profile, used))
        return used

    def unplan(self, keep: Callable[[Plan], bool]) -> None:
        """Plan anew, when they come again, all signatures whose plan is not to be kept."""
        if self._together:
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

    @_outside_of_graphs
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of the module; in training, under the plan for this input's signature, made now if there is none.

        Args:
            module: The module itself, or a copy of it that this object came along with.
            args: Positional arguments of its forward.
            kwargs: Keyword arguments.
        Raises:
            ModelError: The module cannot be turned into a chain.
            SampleError: The input holds no tensor.
            BudgetError: No schedule fits.
            ShortageError: The device has no memory left, whatever the plan.
        """
        if not (self._active and module.training and torch.is_grad_enabled()) or torch.is_inference_mode_enabled():
            return type(module).forward(module, *args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return type(module).forward(
                module, *args, **kwargs
            )  # checkpoints do not work under torch.func's transforms
        if is_recomputing() and not self._is_prepared(args, kwargs):
            return type(module).forward(
                module, *args, **kwargs
            )  # inside a stage that is being measured: no plan of its own now
        self._keep_in_step(args, kwargs)
        try:
            self._follow_changes()
            cut, value = self._bind(args, kwargs)
        except ModelError as error:
            if self._on_unsupported is None or self._cuts.made:
                raise
            self._on_unsupported(error)
            return type(module).forward(module, *args, **kwargs)
        signature = self._cuts.signature(cut, value)
        try:
            prepared = self._prepare(signature, value)
        except ProfilerBusyError as error:
            if self._on_busy is None:
                raise
            self._on_busy(error)
            return type(module).forward(module, *args, **kwargs)
        if self._on_run is not None and prepared.plan is not None:
            self._on_run(prepared.plan)
        if prepared.runs_plainly:
            return self._run(signature, prepared, value, plainly=lambda: type(module).forward(module, *args, **kwargs))
        output = self._run(signature, prepared, value)
        guard_second_backward(output, value)
        return output

    # ---------------------------------------------------------------- running

    def _run(
        self, signature: Signature, prepared: Prepared, value: Any, *, plainly: Callable[[], Any] | None = None
    ) -> Any:
        """Run a call; if the device has no memory left for it, once more under a smaller plan, and so on."""
        before = BeforeForward(prepared.profile, value, self._statistics)
        for attempt in itertools.count():
            try:
                assert prepared.executor is not None
                output = plainly() if plainly is not None and not attempt else prepared.executor(value)
                before.forget()
                return output
            except RuntimeError as error:
                if not is_shortage(error):
                    raise
                failure = error
            failure.__traceback__ = failure.__context__ = None  # whose frames hold what the failed forward has made
            prepared = self._with_less(signature, prepared, failure, restored=before.restore(), attempt=attempt)
        raise AssertionError

    def _with_less(
        self, signature: Signature, prepared: Prepared, failure: RuntimeError, *, restored: bool, attempt: int
    ) -> Prepared:
        """The next smaller plan for a forward that has failed.

        Raises:
            ShortageError: There is none, or the forward cannot run again.
        """
        assert prepared.plan is not None
        allowance, solved = self._allowance_source(prepared.profile), prepared.plan  # as if there were enough
        reason = "The forward has changed its input or a large buffer, so it cannot run again with a smaller plan"
        if self._together:
            reason = "The forward communicates with other processes, so it cannot run again here alone"
        elif restored:
            reason = "No plan takes less"
            if self.lower_ceiling(to_the_least=attempt >= _CAUTIOUS_ATTEMPTS):
                if signature.device.type == "cuda":
                    torch.cuda.empty_cache()
                ceiling = self._ceiling_bytes
                self.unplan(lambda plan: ceiling is None or plan.peak_bytes <= ceiling)
                self._plan(signature, prepared)
                _log.warning(
                    "out of memory under a plan of %s: the forward runs again, and all that follow, with plans of at most %s",
                    format_bytes(solved.peak_bytes),
                    format_bytes(self._ceiling_bytes or 0),
                )
                return self._cache.latest[1]
        raise shortage_error(
            failure,
            reason,
            limit_bytes=allowance.limit_bytes,
            predicted_bytes=allowance.reserved_bytes + solved.peak_bytes,
        ) from failure

    def lower_ceiling(self, *, to_the_least: bool = False) -> bool:
        """Let all plans from now on take less than the one used last, which was too much for the device. Whether that is possible.

        Args:
            to_the_least: As little as a plan can do with, rather than halfway to that.
        """
        if not len(self._cache) or (solved := self.plan) is None:
            return False
        least = minimum_budget(
            solved.chain,
            slots=self._slots,
            gradients_exist=solved.gradients_exist,
            lingering_bytes=solved.lingering_bytes,
        ).peak_bytes
        if solved.peak_bytes <= least:
            return False
        self._ceiling_bytes = least if to_the_least else (solved.peak_bytes + least) // 2
        return True

    # ---------------------------------------------------------------- planning

    def _allowance(self, profile: Profile) -> Allowance:
        return self._allowance_source(profile).capped(self._ceiling_bytes)

    @property
    def _together(self) -> bool:
        """Whether other processes measure and plan whenever this one does."""
        return self._agreement is not None and self._agreement.together

    def _keep_in_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start afresh if another process must, and cannot do so alone."""
        if self._agreement is not None and self._agreement.together:
            ready = self._is_prepared(args, kwargs)
            if self._agreement.must_start_afresh(ready=ready):
                self._records.clear()
                self.forget()

    def _replan_together(self, stale: Plan | None) -> Plan:
        """The plan that this process proposes next time; the others learn of it at the next forward, and plan with this process."""
        prepared = next((entry[1] for entry in self._cache if entry[1].plan is stale), self._cache.latest[1])
        solved = self._solve(prepared.profile, self._allowance(prepared.profile))
        if isinstance(solved, BudgetError):
            raise solved
        self.forget()
        return solved

    def _follow_changes(self) -> None:
        if self._cuts.follow_changes():
            self.forget()

    def _stop_watching(self) -> None:
        if self._on_measure is not None:
            self._on_measure()

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[SequentialCut | GraphCut, Any]:
        made = self._cuts.made
        bound = self._cuts.bind(args, kwargs)
        if self._cuts.made != made:
            for cache in (self._cache, self._measurements):
                cache.drop(lambda signature: signature.cut in self._cuts)
        return bound

    def _arguments(self, sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a sample stands for: as Lightning's ``example_input_array``, but an ``nn.Sequential`` takes one input, whatever it is."""
        if isinstance(self._module, nn.Sequential) and type(self._module).forward is nn.Sequential.forward:
            return (sample,), {}
        if isinstance(sample, dict):
            return (), sample
        return (sample if isinstance(sample, tuple) else (sample,)), {}

    def _is_prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        self._follow_changes()
        return any(self._cuts.signature(cut, value) in self._cache for cut, value in self._cuts.known(args, kwargs))

    def _prepare(self, signature: Signature, value: Any) -> Prepared:
        """The ladder of :mod:`lightning_rotor.measurements`."""
        prepared = self._cache.use(signature) or self._recalled(signature)
        if prepared is None and not self._estimated(signature):
            self._measure(signature, value)
        prepared = self._cache.latest[1]
        if prepared.executor is None:
            self._plan(signature, prepared)
        return self._cache.latest[1]

    def _estimated(self, signature: Signature) -> bool:
        """Plan a new shape from what is known of others, if that will do."""
        profile = None if self._together else self._measurements.estimate(signature)
        if profile is None:
            return False
        solved = self._measurements.choose(signature, profile, self._allowance(profile), slots=self._slots)
        if solved is None or (solved.recomputed and self._measurements.is_vague(signature)):
            return False
        self._use(signature, Prepared.of(signature, profile, solved, estimated=True))
        return True

    def _recalled(self, signature: Signature) -> Prepared | None:
        record = self._records.pop(self._call(signature), None) if self._records else None
        recalled = None if record is None else recall(record, signature.cut.stages)
        if recalled is None:
            return None
        profile, solved = recalled.profile, recalled.plan
        self._measurements.add(signature, profile)
        self._cache.put(signature, Prepared(profile))
        if solved is not None and self._allowance(profile).fits(solved) and solved.slots >= self._slots:
            self._use(signature, Prepared.of(signature, profile, solved))
        return self._cache.latest[1]

    @staticmethod
    def _call(signature: Signature) -> str:
        return call_fingerprint(signature.cut.stages, signature.plain, signature.device)

    @contextmanager
    def _training_mode(self) -> Iterator[None]:
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise ProfilingError(
                "costs are those of training: expected gradients to be enabled, but this runs under no_grad or inference_mode"
            )
        training = [(submodule, submodule.training) for submodule in self._module.modules()]
        if not self._module.training:
            self._module.train()
        try:
            yield
        finally:
            for submodule, mode in training:
                submodule.training = mode

    def _measure(self, signature: Signature, value: Any) -> Profile:
        self._stop_watching()
        with MeasuringProgress(enabled=self._show_progress) as progress:
            profile = profile_chain(signature.cut.stages, value, progress=progress, compiled=self._compiled)
        self._measurements.add(signature, profile)
        self._cache.put(signature, Prepared(profile))
        return profile

    def _plan(self, signature: Signature, prepared: Prepared) -> Plan:
        """Plan anew for known costs. Estimated ones are not worth a solution, unless no schedule at hand fits."""
        profile = prepared.profile
        allowance = self._allowance(profile)
        solved = None
        if prepared.estimated:
            solved = self._measurements.choose(signature, profile, allowance, slots=self._slots)
        if solved is None:
            outcome = self._solve(profile, allowance)
            solved = self._agreed(signature, outcome)
        self._use(signature, Prepared.of(signature, profile, solved, estimated=prepared.estimated))
        return solved

    def _agreed(self, signature: Signature, outcome: Plan | BudgetError) -> Plan:
        """What all processes run, if there are others."""
        if self._agreement is not None:
            return self._agreement.settle(self._call(signature), outcome)
        if isinstance(outcome, BudgetError):
            raise outcome
        return outcome

    def _solve(self, profile: Profile, allowance: Allowance) -> Plan | BudgetError:
        def solve(budget_bytes: int) -> Plan:
            return plan(
                profile.chain,
                max(budget_bytes, 1),
                slots=self._slots,
                gradients_exist=allowance.gradients_exist,
                lingering_bytes=allowance.lingering_bytes,
            )

        try:
            return solve(allowance.budget_bytes)
        except BudgetError as error:
            if error.minimum_bytes <= allowance.budget_bytes + allowance.guessed_bytes:
                return solve(error.minimum_bytes)
            explained = allowance.explain(error)
            if self._on_infeasible is None:
                return explained
            self._on_infeasible(explained)
            return solve(error.minimum_bytes)

    def _use(self, signature: Signature, prepared: Prepared) -> None:
        assert prepared.plan is not None
        self._cache.put(signature, prepared)
        self._measurements.note(signature, prepared.plan)
        if self._on_plan is not None:
            self._on_plan(prepared.plan)

    def _menu(self, profile: Profile, allowance: Allowance) -> tuple[Schedule, ...]:
        return menu(
            profile.chain,
            slots=self._slots,
            gradients_exist=allowance.gradients_exist,
            lingering_bytes=allowance.lingering_bytes,
        )


def _inactive() -> PlannedForward:
    planned = PlannedForward.__new__(PlannedForward)
    planned._active = False
    return planned
