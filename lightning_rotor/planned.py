"""A forward that measures and plans itself on its first training call, and from that very call on runs inside its budget.

:class:`PlannedForward` is what :class:`~lightning_rotor.checkpointable.Checkpointable` and the Lightning callback have in common; they
differ in where the budget comes from. :mod:`lightning_rotor.attaching` puts one in the place of a module's ``forward``.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.parameter import UninitializedParameter

from lightning_rotor.compiled import CompiledModules
from lightning_rotor.cutting import WAYS, SequentialCut, check_module, sequentialize
from lightning_rotor.errors import (
    BudgetError,
    ModelError,
    ProfilerBusyError,
    ProfilingError,
    RotorWarning,
    SampleError,
    UnitError,
)
from lightning_rotor.execution import Executor
from lightning_rotor.execution.second_backward import guard_second_backward
from lightning_rotor.plan_records import call_fingerprint, recall, record_of
from lightning_rotor.planning import Plan, plan
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.progress import MeasuringProgress
from lightning_rotor.profiling.reference import require_same
from lightning_rotor.recomputation import is_recomputing
from lightning_rotor.sequential import is_plain_stock
from lightning_rotor.tensors import tensors_in
from lightning_rotor.tracing import GraphCut
from lightning_rotor.units import format_bytes

_log = logging.getLogger(__name__)

_MAX_PLANS = 16
_MAX_CUTS = 8
_MANY_CUTS = 12


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a plan may use.

    Attributes:
        budget_bytes: Most that the chain may allocate in one step, beyond what is allocated when its forward begins.
        gradients_exist: As in :func:`~lightning_rotor.simulator.simulate`.
        lingering_bytes: As in :func:`~lightning_rotor.simulator.simulate`.
        reserved_bytes: The part of the user's limit that is not for the chain; only error messages need it.
        reserved_for: What that part is for.
        error: What to raise where the limit is too low.
    """

    budget_bytes: int
    gradients_exist: bool = False
    lingering_bytes: int = 0
    reserved_bytes: int = 0
    reserved_for: str = ""
    error: type[BudgetError] = BudgetError

    def fits(self, plan: Plan) -> bool:
        """Whether a plan is what would be planned with this allowance."""
        return (plan.budget_bytes, plan.gradients_exist, plan.lingering_bytes) == (
            max(self.budget_bytes, 1),
            self.gradients_exist,
            self.lingering_bytes,
        )

    def explain(self, error: BudgetError) -> BudgetError:
        """The planner's error in terms of the limit that the user set."""
        if not self.reserved_bytes:
            return error
        limit_bytes, minimum_bytes = self.budget_bytes + self.reserved_bytes, error.minimum_bytes + self.reserved_bytes
        return self.error(
            f"mem_limit {format_bytes(limit_bytes)} is below the minimum {format_bytes(minimum_bytes)} ({minimum_bytes:,} bytes) for this model "
            "and batch: "
            f"{format_bytes(self.reserved_bytes)} for {self.reserved_for}, and at least {format_bytes(error.minimum_bytes)} for activations "
            f"and new gradients (set by {error.stage!r}). Raise mem_limit or lower the batch size",
            budget_bytes=limit_bytes,
            minimum_bytes=minimum_bytes,
            stage=error.stage,
        )


class AllowanceSource(Protocol):
    """Says what a plan may use, once the chain has been measured."""

    def __call__(self, profile: Profile) -> Allowance:
        """Called before each plan."""


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """Everything that belongs to one input signature."""

    profile: Profile
    plan: Plan | None = None
    executor: Executor | None = None


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

    Outside training (``eval()``, ``no_grad``, inference mode) the module runs plainly. How it is cut into stages is found out at the first
    training call, again for a call whose arguments differ in more than their tensors, and again when the module has changed.

    Args:
        module: An ``nn.Sequential``, or any module that :func:`~lightning_rotor.cutting.sequentialize` can cut.
        allowance: Where the budget comes from.
        slots: Resolution of the dynamic program.
        show_progress: Show a progress bar when measuring takes longer than two seconds.
        on_measure: Called before measuring, which needs torch's profiler for itself.
        on_plan: Called after each plan, before it runs for the first time.
        on_unsupported: Called if the module turns out to be no chain; then it runs plainly. By default the error is raised.
        on_busy: Called if it cannot be measured in this call, because torch's profiler is recording; then it runs plainly this time. By
            default the error is raised.
    Raises:
        ModelError: The module can be no chain, whatever its input.
        UnitError: ``slots`` is no positive integer.
    """

    def __init__(
        self,
        module: nn.Module,
        allowance: AllowanceSource,
        *,
        slots: int = 500,
        show_progress: bool = True,
        on_measure: Callable[[], None] | None = None,
        on_plan: Callable[[Plan], None] | None = None,
        on_unsupported: Callable[[ModelError], None] | None = None,
        on_busy: Callable[[ProfilerBusyError], None] | None = None,
    ) -> None:
        if slots < 1:
            raise UnitError(f"slots is {slots!r}: expected a positive integer, such as the default 500")
        check_module(module)
        self._module = module
        self._prepared: OrderedDict[Any, _Prepared] = OrderedDict()
        self._cuts: list[SequentialCut | GraphCut] = []
        self._cuts_made = 0
        self._compiled = CompiledModules()
        self._submodules: tuple[nn.Module, ...] | None = None
        self._stock: tuple[bool, ...] = ()
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._allowance = allowance
        self._slots = slots
        self._show_progress = show_progress
        self._on_measure = on_measure
        self._on_plan = on_plan
        self._on_unsupported = on_unsupported
        self._on_busy = on_busy
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
        return self._latest().plan if self._prepared else None

    @property
    def profile(self) -> Profile | None:
        """What was measured for the input signature used last, or None."""
        return self._latest().profile if self._prepared else None

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
            cut, value = self._bind(args, kwargs)
            return self._measure(cut, value)

    def replan(self) -> Plan:
        """Plan for the signature used last, with the allowance of this moment. The others plan anew when they come again.

        Raises:
            ProfilingError: Nothing has been measured yet.
            BudgetError: No schedule fits.
        """
        if not self._prepared:
            raise ProfilingError("there is nothing to plan yet: measure a sample first, with measure(sample)")
        signature, latest = next(reversed(self._prepared.items()))
        solved = self._plan(signature, latest.profile)
        for other, prepared in self._prepared.items():
            if other != signature:
                self._prepared[other] = _Prepared(prepared.profile)
        return solved

    def records(self) -> list[dict[str, Any]]:
        """Everything measured and planned so far in plain types, for :meth:`recall`."""
        found = {
            call: record_of(call, signature[1][0].stages, prepared.profile, prepared.plan)
            for signature, prepared in self._prepared.items()
            for call in [self._call(signature)]
        }
        return list({**self._records, **found}.values())[-_MAX_PLANS:]

    def recall(self, records: Iterable[dict[str, Any]]) -> None:
        """Do not measure what an equal module has measured before on this machine, and plan it as before if the allowance is the same.

        Args:
            records: From :meth:`records`, perhaps of another process.
        """
        self._records = {record["call"]: record for record in records}

    def forget(self) -> None:
        """Drop every plan and measurement; the next training call starts afresh."""
        self._prepared.clear()
        self._cuts.clear()

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
        try:
            cut, value = self._bind(args, kwargs)
        except ModelError as error:
            if self._on_unsupported is None or self._cuts_made:
                raise
            self._on_unsupported(error)
            return type(module).forward(module, *args, **kwargs)
        try:
            prepared = self._prepare(cut, value)
        except ProfilerBusyError as error:
            if self._on_busy is None:
                raise
            self._on_busy(error)
            return type(module).forward(module, *args, **kwargs)
        assert prepared.executor is not None
        output = prepared.executor(value)
        guard_second_backward(output, value)
        return output

    # ---------------------------------------------------------------- planning

    def _latest(self) -> _Prepared:
        return next(reversed(self._prepared.values()))

    def _follow_changes(self) -> None:
        """Start afresh if a module was replaced at any depth, or if one got hooks."""
        submodules = tuple(self._module.modules())[1:]  # without the module itself, whose forward may be ours
        stock = tuple(map(is_plain_stock, submodules))
        if submodules != self._submodules or stock != self._stock:
            self._submodules, self._stock = submodules, stock
            self._parameters = tuple(self._module.parameters())
            self.forget()

    def _arguments(self, sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a sample stands for: as Lightning's ``example_input_array``, but an ``nn.Sequential`` takes one input, whatever it is."""
        if isinstance(self._module, nn.Sequential) and type(self._module).forward is nn.Sequential.forward:
            return (sample,), {}
        if isinstance(sample, dict):
            return (), sample
        return (sample if isinstance(sample, tuple) else (sample,)), {}

    def _is_prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        self._follow_changes()
        bound = ((cut, cut.bind(args, kwargs)) for cut in self._cuts)
        return any(value is not None and self._signature(cut, value) in self._prepared for cut, value in bound)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[SequentialCut | GraphCut, Any]:
        """The stages for a call and their input; the module is cut now if it must be."""
        _require_tensors(args[0] if len(args) == 1 and not kwargs else (args, kwargs))
        self._follow_changes()
        for index in reversed(range(len(self._cuts))):
            value = self._cuts[index].bind(args, kwargs)
            if value is not None:
                self._cuts.append(self._cuts.pop(index))
                return self._cuts[-1], value
        self._require_shapes()
        cut = self._renewed(sequentialize(self._module, args, kwargs))
        if cut not in self._cuts:
            if isinstance(cut, GraphCut):
                require_same(self._module, cut, args, kwargs)
            _log.info(
                "%s becomes %d stages %s%s",
                type(self._module).__name__,
                len(cut.stages),
                WAYS[cut.way],
                "".join(f"; not {WAYS[way]}: {reason}" for way, reason in getattr(cut, "reasons", {}).items()),
            )
            self._take(cut)
        value = cut.bind(args, kwargs)
        if value is None:
            raise ModelError(
                f"{type(self._module).__name__} changes whenever its forward runs, so no trace of it holds: expected attributes that stay the "
                "same from call to call"
            )
        return cut, value

    def _renewed(self, cut: SequentialCut | GraphCut) -> SequentialCut | GraphCut:
        """The known cut that runs the same operations, if there is one: what was changed made no difference."""
        if isinstance(cut, GraphCut):
            for known in self._cuts:
                if isinstance(known, GraphCut) and known.renewed_by(cut):
                    return known
        return cut

    def _take(self, cut: SequentialCut | GraphCut) -> None:
        """Remember a cut, and drop those of layers that are gone, with their plans."""
        present = set(self._module.modules())
        kept = [known for known in self._cuts if isinstance(known, GraphCut) and known.lives_in(present)]
        self._cuts = [*kept[1 - _MAX_CUTS :], cut]
        for signature in [signature for signature in self._prepared if signature[1][0] not in self._cuts]:
            del self._prepared[signature]
        self._cuts_made += 1
        if self._cuts_made == _MANY_CUTS:
            warnings.warn(
                f"{type(self._module).__name__} was traced and measured {_MANY_CUTS} times, because an argument that is no tensor, or an "
                "attribute that its forward could read, keeps changing: expected only tensors to differ from step to step",
                RotorWarning,
                stacklevel=2,
            )

    def _prepare(self, cut: SequentialCut | GraphCut, value: Any) -> _Prepared:
        signature = self._signature(cut, value)
        prepared = self._prepared.get(signature)
        if prepared is None:
            prepared = self._larger_batch(signature)
        if prepared is None:
            prepared = self._recalled(signature, cut)
        if prepared is None:
            self._measure(cut, value)
            prepared = self._prepared[signature]
        if prepared.executor is None:
            self._plan(signature, prepared.profile)
            prepared = self._prepared[signature]
        elif signature in self._prepared:
            self._prepared.move_to_end(signature)
        return prepared

    def _recalled(self, signature: Any, cut: SequentialCut | GraphCut) -> _Prepared | None:
        record = self._records.pop(self._call(signature), None) if self._records else None
        recalled = None if record is None else recall(record, cut.stages)
        if recalled is None:
            return None
        profile, solved = recalled.profile, recalled.plan
        self._remember(signature, _Prepared(profile))
        if solved is not None:
            allowance = self._allowance(profile)
            if allowance.fits(solved) and solved.slots >= self._slots:
                self._use(signature, profile, solved)
        return self._prepared[signature]

    def _call(self, signature: Any) -> str:
        shapes, (cut, *settings) = signature
        return call_fingerprint(cut.stages, (shapes, settings), shapes[0][2])

    def _require_shapes(self) -> None:
        lazy = [
            name for name, parameter in self._module.named_parameters() if isinstance(parameter, UninitializedParameter)
        ]
        if lazy:
            raise ModelError(
                f"parameter {lazy[0]!r} of a lazy module has no shape yet: expected an initialized model. Run a batch through it first"
            )

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

    def _measure(self, cut: SequentialCut | GraphCut, value: Any) -> Profile:
        if self._on_measure is not None:
            self._on_measure()
        with MeasuringProgress(enabled=self._show_progress) as progress:
            profile = profile_chain(cut.stages, value, progress=progress, compiled=self._compiled)
        self._remember(self._signature(cut, value), _Prepared(profile))
        return profile

    def _plan(self, signature: Any, profile: Profile) -> Plan:
        allowance = self._allowance(profile)
        try:
            solved = plan(
                profile.chain,
                max(allowance.budget_bytes, 1),
                slots=self._slots,
                gradients_exist=allowance.gradients_exist,
                lingering_bytes=allowance.lingering_bytes,
            )
        except BudgetError as error:
            raise allowance.explain(error) from None
        self._use(signature, profile, solved)
        return solved

    def _use(self, signature: Any, profile: Profile, solved: Plan) -> None:
        executor = Executor(profile.stages, profile.chain, solved.schedule, profile.states)
        self._remember(signature, _Prepared(profile, solved, executor))
        if self._on_plan is not None:
            self._on_plan(solved)

    def _remember(self, signature: Any, prepared: _Prepared) -> None:
        self._prepared[signature] = prepared
        self._prepared.move_to_end(signature)
        while len(self._prepared) > _MAX_PLANS:
            self._prepared.popitem(last=False)

    def _signature(self, cut: SequentialCut | GraphCut, value: Any) -> Any:
        """What a plan is made for: shapes, autocast, which parameters learn, and which modules train (dropout may be switched off)."""
        shapes = tuple(
            (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors_in(value)
        )
        settings = (
            cut,
            tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")),
            tuple(module.training for module in self._submodules or ()),
            tuple((parameter.requires_grad, parameter.dtype) for parameter in self._parameters),
        )
        return shapes, settings

    def _larger_batch(self, signature: Any) -> _Prepared | None:
        """The plan of a batch that is the same but longer: it serves a smaller last batch, whose every tensor is smaller."""
        shapes, settings = signature
        for (known_shapes, known_settings), prepared in reversed(self._prepared.items()):
            if known_settings == settings and prepared.executor is not None and _only_longer(known_shapes, shapes):
                return prepared
        return None


def _only_longer(known: Any, wanted: Any) -> bool:
    """Whether shapes differ in their first dimension alone, which is nowhere larger in ``wanted``."""
    return len(known) == len(wanted) and all(
        len(long[0]) == len(short[0]) > 0
        and long[0][0] >= short[0][0]
        and long[0][1:] == short[0][1:]
        and long[1:] == short[1:]
        for long, short in zip(known, wanted, strict=True)
    )


def _inactive() -> PlannedForward:
    planned = PlannedForward.__new__(PlannedForward)
    planned._active = False
    return planned


# -------------------------------------------------------------------- checks


def check_sample(sample: Any) -> None:
    """Check that a sample can be measured with.

    Raises:
        SampleError: It is missing, holds no tensor, or values that are not finite.
    """
    if sample is None:
        raise SampleError(
            "there is no sample: expected an input as in training, a tensor or tensors in tuples, lists or dicts"
        )
    _require_tensors(sample)
    for tensor in tensors_in(sample):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise SampleError(
                f"the sample of shape {tuple(tensor.shape)} holds values that are not finite (NaN or infinity): expected an input as in training"
            )


def _require_tensors(value: Any) -> None:
    if not tensors_in(value):
        raise SampleError(
            f"the input is {type(value).__name__} and holds no tensor: expected a tensor, or tensors in tuples, lists or dicts"
        )
