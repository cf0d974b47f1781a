"""A forward that measures and plans itself on its first training call, and from that very call on runs inside its budget.

:class:`PlannedForward` is what :class:`~lightning_rotor.checkpointable.Checkpointable` and the Lightning callback have in common; they
differ in where the budget comes from. :mod:`lightning_rotor.planned.forward` puts one in the place of a module's ``forward``::

    call ──► preparation ── cut, measured, planned ──► attempts ── under the plan, or a smaller one ──► output
                 └── allowed_plans: what a plan may use ──┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from lightning_rotor.capture.compiled import Variants
from lightning_rotor.capture.cuts import check_module
from lightning_rotor.errors import BudgetError, ModelError, ProfilerBusyError, ProfilingError, UnitError
from lightning_rotor.execution.executor import guard_second_backward
from lightning_rotor.execution.recomputation import is_recomputing
from lightning_rotor.memory.budget import AllowanceSource, AllowedPlans
from lightning_rotor.planned.cache import MAX_PLANS
from lightning_rotor.planned.out_of_memory import Attempts
from lightning_rotor.planned.preparation import Preparation
from lightning_rotor.planned.ranks import Agreement
from lightning_rotor.planning import Plan
from lightning_rotor.private.torch_names import is_captured, is_transformed, outside_of_graphs
from lightning_rotor.private.values import check_sample
from lightning_rotor.profiling import Profile
from lightning_rotor.schedule import Schedule

_NO_GRAPH = (
    "lightning-rotor runs this module under a recomputation plan, which cannot be one graph: expected torch.compile without "
    "fullgraph=True, or torch.compile of the layers inside the planned module"
)


class PlannedForward:
    """Runs a module under a recomputation plan, one plan for each input signature.

    Outside training (``eval()``, ``no_grad``, inference mode) the module runs plainly. So it does under a plan that recomputes nothing, if
    that has room for what its code holds longer than stages would. How it is cut into stages is found out at the first
    training call, again for a call whose arguments differ in more than their tensors, and again when the module has changed.

    Args:
        module: An ``nn.Sequential``, or any module that :func:`~lightning_rotor.capture.cuts.sequentialize` can cut.
        allowance: Where the budget comes from.
        slots: Resolution of the dynamic program.
        max_plans: Plans that are kept, those used last; a plan that was dropped is made again when its signature returns.
        compiled_variants: Which variants of compiled blocks may run, see :class:`.CompiledModules`.
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
        compiled_variants: Variants = "exact",
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
        self._plans = AllowedPlans(allowance, slots=slots, on_infeasible=on_infeasible)
        self._preparation = Preparation(
            module,
            self._plans,
            max_plans=max_plans,
            compiled_variants=compiled_variants,
            show_progress=show_progress,
            on_measure=on_measure,
            on_plan=on_plan,
            agreement=agreement,
        )
        self._attempts = Attempts(self._preparation, self._plans)
        self._on_run = on_run
        self._on_unsupported = on_unsupported
        self._on_busy = on_busy
        self._active = True

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
        latest = self._preparation.latest
        return None if latest is None else latest.plan

    @property
    def profile(self) -> Profile | None:
        """The costs of the input signature used last, or None."""
        latest = self._preparation.latest
        return None if latest is None else latest.profile

    @property
    def ceiling_bytes(self) -> int | None:
        """The most that any plan may take since the device ran out of memory, or None if it never did."""
        return self._plans.ceiling_bytes

    @ceiling_bytes.setter
    def ceiling_bytes(self, ceiling_bytes: int | None) -> None:
        self._plans.ceiling_bytes = ceiling_bytes

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
            self._preparation.follow_changes()
            return self._preparation.measure(*self._preparation.bind(args, kwargs))

    def replan(self, stale: Plan | None = None) -> Plan:
        """Plan with the allowance of this moment; see :meth:`.Preparation.replan`."""
        return self._preparation.replan(stale)

    def use(self, plan: Plan | Schedule) -> Plan:
        """Run a plan or a schedule that was made before, for the signature used last; see :meth:`.Checkpointable.use`."""
        return self._preparation.use(plan)

    def unplan(self, keep: Callable[[Plan], bool]) -> None:
        """Plan anew, when they come again, all signatures whose plan is not to be kept."""
        self._preparation.unplan(keep)

    def records(self) -> list[dict[str, Any]]:
        """Everything measured and planned so far in plain types, for :meth:`recall`."""
        return self._preparation.records()

    def recall(self, records: Iterable[dict[str, Any]]) -> None:
        """Do not measure what an equal module has measured before on this machine, and plan it as before if the allowance is the same.

        Args:
            records: From :meth:`records`, perhaps of another process.
        """
        self._preparation.recall(records)

    def forget(self) -> None:
        """Drop every plan and measurement; the next training call starts afresh."""
        self._preparation.forget()

    def is_capped(self, plan: Plan) -> bool:
        """Whether a plan has all that plans may take since the device ran out of memory, so that a larger allowance would change nothing."""
        return self.ceiling_bytes is not None and plan.budget_bytes >= self.ceiling_bytes

    def lower_ceiling(self) -> bool:
        """Let all plans from now on take less than the one used last, which was too much for the device. Whether that is possible."""
        return self.plan is not None and self._plans.lower_ceiling(self.plan)

    # dynamo would flatten nested checkpoints into one
    @partial(outside_of_graphs, reason=_NO_GRAPH)
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
        if is_transformed():
            return type(module).forward(
                module, *args, **kwargs
            )  # checkpoints do not work under torch.func's transforms
        if is_recomputing() and not self._preparation.is_prepared(args, kwargs):
            return type(module).forward(
                module, *args, **kwargs
            )  # inside a stage that is being measured: no plan of its own now
        self._preparation.keep_in_step(args, kwargs)
        try:
            self._preparation.follow_changes()
            signature, value = self._preparation.bind(args, kwargs)
        except ModelError as error:
            if self._on_unsupported is None or self._preparation.has_cut:
                raise
            self._on_unsupported(error)
            return type(module).forward(module, *args, **kwargs)
        try:
            prepared = self._preparation.prepare(signature, value)
        except ProfilerBusyError as error:
            if self._on_busy is None:
                raise
            self._on_busy(error)
            return type(module).forward(module, *args, **kwargs)
        if self._on_run is not None and prepared.plan is not None:
            self._on_run(prepared.plan)
        if prepared.runs_plainly:
            return self._attempts.run(
                signature, prepared, value, plainly=lambda: type(module).forward(module, *args, **kwargs)
            )
        output = self._attempts.run(signature, prepared, value)
        guard_second_backward(output, value)
        return output

    # ---------------------------------------------------------------- samples

    def _arguments(self, sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a sample stands for: as Lightning's ``example_input_array``, but an ``nn.Sequential`` takes one input, whatever it is."""
        if isinstance(self._module, nn.Sequential) and type(self._module).forward is nn.Sequential.forward:
            return (sample,), {}
        if isinstance(sample, dict):
            return (), sample
        return (sample if isinstance(sample, tuple) else (sample,)), {}

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


def _inactive() -> PlannedForward:
    planned = PlannedForward.__new__(PlannedForward)
    planned._active = False
    return planned


# ----------------------------------------------------------------------------------------------------
# A :class:`~lightning_rotor.planned.forward.PlannedForward` in the place of a module's ``forward``.


_KEY = "_lightning_rotor"


class ForwardInPlace(Protocol):
    """What runs instead of a module's ``forward``. A copy of it, in a copied module, is inactive and runs the module plainly."""

    @property
    def active(self) -> bool:
        """Whether it is more than a copy."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module."""


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``type(self).forward``.

    A bound method in the instance's ``__dict__``, and named like the one it replaces: ``copy`` and ``pickle`` then bind it to the copy,
    which a closure or a wrapper would not survive.
    """
    # Whoever takes the computation down for another runtime wants the module as the user wrote it.
    if is_captured():
        return type(self).forward(self, *args, **kwargs)
    return self.__dict__[_KEY](self, args, kwargs)


def attach(module: nn.Module, planned: ForwardInPlace) -> None:
    """Run a module through a planned forward from now on.

    Raises:
        ModelError: Somebody has already replaced the module's ``forward``.
    """
    if "forward" in module.__dict__ and (_KEY not in module.__dict__ or is_attached(module)):
        raise ModelError(
            f"the forward of this {type(module).__name__} has been replaced already: expected a module that only one callback or patch works "
            "on. torch.compile of a whole LightningModule replaces its forward too: name one of its submodules"
        )
    module.__dict__[_KEY] = planned
    module.__dict__["forward"] = MethodType(forward, module)


def detach(module: nn.Module) -> None:
    """Undo :func:`attach`. Does nothing if it was undone before."""
    if module.__dict__.pop(_KEY, None) is not None:
        module.__dict__.pop("forward", None)


def is_attached(module: nn.Module) -> bool:
    """Whether a module runs through a planned forward."""
    planned: ForwardInPlace | None = module.__dict__.get(_KEY)
    return planned is not None and planned.active


@contextmanager
def attached(module: nn.Module, planned: ForwardInPlace) -> Iterator[None]:
    """:func:`attach` for one call."""
    attach(module, planned)
    try:
        yield
    finally:
        detach(module)
