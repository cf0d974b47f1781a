"""A forward that measures and plans itself on its first training call, and runs inside its budget.

:class:`PlannedForward` stands in the place of a module's ``forward``::

    call ──► plans: cut, measured, planned ──► run under the plan, or a smaller one ──► output
                    ▲
                    └── budget: that of a Checkpointable, or of the planner of steps
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_rotor.devices import kind_of
from lightning_rotor.errors import ModelError, ProfilerBusyError, ProfilingError, SampleError, ShortageError
from lightning_rotor.execution.passes import is_recomputing
from lightning_rotor.execution.pending import await_backward
from lightning_rotor.planned.attachment import inactive, is_attached, plain_forward
from lightning_rotor.planned.budget_source import BudgetSource, CallBegins, CallRan, NoChain, ProfilerBusy, objection
from lightning_rotor.planned.key_value_caches import KeyValueCaches
from lightning_rotor.planned.module_plans import ModulePlans
from lightning_rotor.planned.out_of_memory import BeforeForward, CopiedBuffers, is_shortage, shortage_message
from lightning_rotor.planned.plan_settings import PlanSettings
from lightning_rotor.planned.prepared import Prepared
from lightning_rotor.planned.signature import Signature
from lightning_rotor.private.functional_collectives import waited_for
from lightning_rotor.private.torch_names import CompiledCall, is_transformed, outside_of_graphs, shares_weights
from lightning_rotor.private.values import call_with, check_sample
from lightning_rotor.profiling import Profile
from lightning_rotor.units import format_bytes

_log = logging.getLogger(__name__)
# With fullgraph=True torch.compile ends in an error of its own here, which shows this reason.
NO_GRAPH = (
    "lightning-rotor runs this module under a recomputation plan, which cannot be one graph: expected torch.compile "
    "without fullgraph=True, or torch.compile of the layers inside the planned module"
)
# A forward that was out of memory so many times gets the plan that takes the least: halving goes on for long.
_CAUTIOUS_ATTEMPTS = 2


class _BoundCall(NamedTuple):
    """A call with the input of its chain, and its plan.

    ``is_recorded`` tells if the recording is right for the call, where nobody has asked that yet.
    """

    signature: Signature
    value: Any
    prepared: Prepared
    is_recorded: Callable[[], bool] | None = None


class PlannedForward:
    """Runs a module under a recomputation plan, one plan for each input signature.

    Outside training (``eval()``, ``no_grad``, inference mode) the module runs plainly. So it does under a plan that
    recomputes nothing, if that has room for what its code holds longer than stages would. If the device runs out of
    memory, the forward runs again under a smaller plan, to the same bits. A module that can be no chain raises
    ``ModelError``. A copy of the module (an averaged model, a pickled checkpoint) runs its own weights plainly.

    With ``compiled``, it stands in the place of what the user compiled as a whole, and that is what runs plainly.
    """

    active = True

    def __init__(
        self,
        module: nn.Module,
        source: BudgetSource,
        settings: PlanSettings,
        name: str = "",
        *,
        compiled: CompiledCall | None = None,
    ) -> None:
        self.plans = ModulePlans(module, source, settings, name, compiled=compiled)
        self.compiled = compiled
        self._module, self._source = module, source
        self._buffers = CopiedBuffers()
        self.key_value_caches = KeyValueCaches(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return inactive, ()

    # torch.compile around it would flatten nested checkpoints into one, and keep what the plan drops.
    @partial(outside_of_graphs, reason=NO_GRAPH)
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of a module or its copy; in training, under the plan for this input's signature, made now if missing.

        Raises ``ModelError`` (no chain), ``SampleError`` (no tensor), ``BudgetError`` (no schedule fits) or
        ``ShortageError`` (the device has no memory left, whatever the plan).
        """
        run = plain_forward(module) if self.compiled is None else self.compiled.run
        plainly = partial(run, *args, **kwargs)
        if not self._plans_for(module, args, kwargs):
            self.plans.ran_without_gradients |= module.training and not torch.is_grad_enabled()
            return plainly()
        # A recomputation reads the arguments again, and what arrives meanwhile would have changed them.
        args, kwargs = waited_for(args, kwargs)
        with self.key_value_caches.off():
            # In the order of what they take: the first asks least, and most steps come no further than the second.
            call = (
                self._roomy_call(args, kwargs) or self._steady_call(args, kwargs) or self._prepared_call(args, kwargs)
            )
            if call is None:
                # If what was compiled is taken apart from now on, another forward plans its own code in its place.
                if self.compiled is not None and self.compiled.slot == "forward" and is_attached(module, besides=self):
                    return module.forward(*args, **kwargs)
                return plainly()
            source = self._source
            source.hear(CallBegins())
            # The plan that ran in the end: out of memory, the forward runs again under a smaller one.
            output, prepared = self._run(call, plainly if call.prepared.runs_plainly else None)
            pending = await_backward(output, call.value, once=not prepared.runs_plainly)
            source.hear(CallRan(self.plans.name, call.signature, prepared, pending))
            return output

    def _plans_for(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if this call trains, and is not part of something that takes the module as it is."""
        if not (module.training and torch.is_grad_enabled()) or torch.is_inference_mode_enabled():
            return False
        if is_transformed():
            # torch.func's transforms run the forward on tensors of their own, which saved-tensor hooks do not see.
            return False
        # Inside a stage that is being measured there is no plan of its own.
        return not is_recomputing() or self.plans.is_prepared(args, kwargs)

    def _steady_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _BoundCall | None:
        """The call, if it is like the last one and nothing has changed: no more is asked of it."""
        steady = self.plans.cache.steady
        # A plan has room for the calls that waited then. Others may hold more.
        if steady is None or steady.waiting != self._source.waiting:
            return None
        if shares_weights(self._module) or not steady.facts.holds():
            return None
        value = steady.signature.cut.bind(args, kwargs)
        if value is None or not steady.signature.is_of(value):
            return None
        return _BoundCall(steady.signature, value, steady.prepared)

    def _roomy_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _BoundCall | None:
        """The call, if a larger one runs plainly and leaves at least half of its budget.

        The module's own forward runs then, so it does not matter if it does something else for this size, for which
        its recording would have to be asked: that takes longer than a small model's step.
        """
        plans, roomy = self.plans, self.plans.cache.roomy
        if roomy is None or not self._source.plans_by_seconds(plans.name) or shares_weights(self._module):
            return None
        call = plans.signature_and_input_unasked(roomy.signature.cut, args, kwargs)
        if call is None or not roomy.serves(call[0]):
            return None
        return _BoundCall(*call, roomy.prepared, partial(self._is_recorded, roomy.signature, args, kwargs))

    def _prepared_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _BoundCall | None:
        """The call with its plan, made now if it must be; None if the module runs plainly."""
        plans, source = self.plans, self._source
        was_together = plans.together
        # First of all: what one process must measure anew, all of them measure.
        if was_together:
            plans.follow_others(args, kwargs)
        was_cut = plans.cuts_made > 0
        try:
            signature, value = plans.signature_and_input(args, kwargs)
            if plans.together and not was_together:  # it has exchanged its first message now
                plans.follow_others(args, kwargs)
                signature, value = plans.signature_and_input(args, kwargs)
        except (ModelError, SampleError) as error:
            # No chain, or a call without tensors. A module that was cut before is planned, so that this is an error.
            if was_cut:
                raise
            source.hear(NoChain(plans.name, error))
            return None
        # The first cut of a module decides whether it is planned, and later ones follow it.
        reason = None if was_cut else objection(source, plans.name, signature.cut)
        if reason is not None:
            source.hear(NoChain(plans.name, reason))
            return None
        try:
            return _BoundCall(signature, value, plans.prepare(signature, value))
        except ProfilerBusyError as error:
            source.hear(ProfilerBusy(error))
        except ModelError as error:
            # A stage does not run without those before it.
            source.hear(NoChain(plans.name, error))
        return None

    # ---------------------------------------------------------------- out of memory

    def _run(self, call: _BoundCall, plainly: Callable[[], Any] | None) -> tuple[Any, Prepared]:
        """Output of a call, and what it ran with: a smaller plan if the device has no memory left, and so on.

        ``plainly`` runs the module's own forward, if its plan lets it.
        """
        prepared = call.prepared
        before = BeforeForward(prepared.profile, call.value, self._buffers)
        for attempt in itertools.count():
            try:
                output = prepared.executor(call.value) if plainly is None or attempt else plainly()
                before.forget()
                return output, prepared
            except RuntimeError as error:
                if not is_shortage(error):
                    raise
                failure = error
            # Frames of the traceback hold what the failed forward has made, which is to be freed.
            failure.__traceback__ = failure.__context__ = None
            prepared = self._with_less(call, prepared, failure, restored=before.restore(), attempt=attempt)
        raise AssertionError

    def _with_less(
        self, call: _BoundCall, prepared: Prepared, failure: RuntimeError, *, restored: bool, attempt: int
    ) -> Prepared:
        """The next smaller plan for a failed forward; ``ShortageError`` if there is none, or it cannot run again."""
        plans, failed = self.plans, prepared.plan
        if plans.together:
            reason = "The forward communicates with other processes, so it cannot run again here alone"
        elif not restored:
            reason = "The forward has changed its input or a large buffer, so it cannot run again with a smaller plan"
        elif call.is_recorded is not None and not call.is_recorded():
            # A plan would run what was recorded for a larger size, and only what that changes was set back.
            reason = "The forward does something else for this size, so it cannot run again with a smaller plan"
            plans.cache.roomy = None
        elif plans.ceiling.lower(failed, to_the_least=attempt >= _CAUTIOUS_ATTEMPTS):
            kind_of(call.signature.device).empty_cache()
            ceiling_bytes = plans.ceiling.size_bytes or 0
            plans.cache.keep_only_plans(lambda plan: plan.peak_bytes <= ceiling_bytes)
            smaller = plans.plan_again(call.signature, prepared)
            _log.warning(
                "out of memory under a plan of %s: the forward runs again, and all that follow, with plans of at "
                "most %s",
                format_bytes(failed.peak_bytes),
                format_bytes(ceiling_bytes),
            )
            return smaller
        else:
            reason = "No plan takes less"
        budget = plans.budget(prepared.profile, ceiling=False)
        limit_bytes, predicted_bytes = budget.limit_bytes, budget.reserved_bytes + failed.peak_bytes
        message = shortage_message(failure, reason, limit_bytes=limit_bytes, predicted_bytes=predicted_bytes)
        raise ShortageError(message, limit_bytes=limit_bytes, predicted_bytes=predicted_bytes) from failure

    def _is_recorded(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if the recording of a larger call is right for this one, which is recorded if it must be."""
        try:
            return self.plans.signature_and_input(args, kwargs)[0].cut is signature.cut
        except (ModelError, SampleError):
            return False  # for want of memory, perhaps

    # ---------------------------------------------------------------- samples

    def measure(self, sample: Any) -> Profile:
        """Measure the module for the sample's signature, again if it was measured before.

        ``sample`` is the input of an ``nn.Sequential``; for any other module a tuple holds positional arguments and a
        dict keyword arguments, as in Lightning's ``example_input_array``.
        """
        check_sample(sample)
        is_sequential = type(self._module).forward is nn.Sequential.forward
        args, kwargs = call_with((sample,) if is_sequential else sample)
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise ProfilingError(
                "costs are those of training: expected gradients to be enabled, but this runs under no_grad or "
                "inference_mode"
            )
        modes = [(module, module.training) for module in self._module.modules()]
        # Costs are those of training. Where the module trains, parts that do not are as the user wants them.
        if not self._module.training:
            self._module.train()
        try:
            with self.key_value_caches.off():
                signature, value = self.plans.signature_and_input(args, kwargs)
                return self.plans.measure(signature, value).profile
        finally:
            for module, mode in modes:
                module.training = mode
