"""The facade without Lightning: rotor's ``Checkpointable``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_rotor.capture.compiled import Variants, objection_to_planning_inside, uncompiled_warning
from lightning_rotor.chain import Chain
from lightning_rotor.errors import ModelError, ProfilingError, RotorWarning
from lightning_rotor.memory.budget import Budget
from lightning_rotor.memory.device_memory import resolve_limit
from lightning_rotor.offload import Offload, parse_offload
from lightning_rotor.planned.agreement import Agreement
from lightning_rotor.planned.attachment import attach, detach
from lightning_rotor.planned.budget_source import BudgetSource
from lightning_rotor.planned.forward import PlannedForward
from lightning_rotor.planned.plan_settings import PlanSettings
from lightning_rotor.planned.prepared import Costs, Prepared
from lightning_rotor.planning import Frontier, Plan, frontier
from lightning_rotor.private.lightning_packages import lightning_module_class
from lightning_rotor.private.sharding import units_below
from lightning_rotor.private.torch_names import (
    compiled_call_of,
    has_compiled_method,
    is_compiled,
    is_compiler_wrapper,
    module_inside,
    settings_told_by,
)
from lightning_rotor.profiling import Profile
from lightning_rotor.schedule import Schedule
from lightning_rotor.units import MemoryLimit, parse_limit

if TYPE_CHECKING:
    from lightning_rotor.report.drawing import Drawing

_WRAPPED = "module"
_OWN = frozenset((_WRAPPED, "_limit", "_settings", "_planned", *vars(nn.Module())))
"""Attributes of the wrapper itself; all others are the module's."""
_SHARED = (
    *("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", "_state_dict_hooks"),
    *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Attributes that are the module's own objects, so that whatever walks over them finds the module's names."""
_DELEGATED = (
    *("add_module", "register_module", "register_buffer", "register_parameter"),
    *("get_submodule", "set_submodule", "get_parameter", "get_buffer", "get_extra_state", "set_extra_state"),
    *("parameters", "named_parameters", "buffers", "named_buffers", "children", "named_children"),
    *("state_dict", "load_state_dict", "_load_from_state_dict"),
    *("register_state_dict_pre_hook", "register_state_dict_post_hook"),
    *("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
    *("apply", "_apply", "to", "to_empty", "type", "float", "double", "half", "bfloat16"),
    *("cpu", "cuda", "ipu", "xpu", "mtia", "share_memory"),
    *("train", "eval", "requires_grad_", "zero_grad", "extra_repr"),
)
"""Methods of all modules that ask or change what the module holds: its class may have its own."""


def _on_module(name: str) -> Any:
    """A method that calls the module's own. In the place of the module it returns the wrapper, for chained calls."""

    @wraps(getattr(nn.Module, name))
    def method(self: Checkpointable, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.module, name)(*args, **kwargs)
        return self if result is self.module else result

    return method


class _Forward:
    """``forward`` with the signature of the module's, by which the Hugging Face Trainer chooses columns of the data."""

    def __get__(self, net: Checkpointable | None, kind: type) -> Any:
        if net is None:
            return Checkpointable._run
        module = net.module
        kind = type(module_inside(module) if is_compiler_wrapper(module) else module)
        # The class of a scripted module has no forward.
        return MethodType(_run_with_signature_of(getattr(kind, "forward", None)), net)


# Kept by class: ``forward`` is looked up at every call, and ``inspect.signature`` takes its time.
@lru_cache(128)
def _run_with_signature_of(forward: Callable[..., Any] | None) -> Callable[..., Any]:
    def run(self: Checkpointable, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    run.__name__, run.__doc__ = "forward", forward.__doc__
    # Not __wrapped__: accelerate puts the innermost such function in the place of ``forward``.
    # Code that is not Python's may have no signature.
    with suppress(TypeError, ValueError):
        run.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined, arg-type]
    return run


def _blank(kind: type[Checkpointable]) -> Checkpointable:
    return kind.__new__(kind)


class Checkpointable(nn.Module):
    """Runs a module within a memory limit, recomputing as little as possible in the backward.

    Call it like the module. Measuring and planning happen by themselves at the first training call, or earlier on
    request. Parameters, gradients and outputs in evaluation are those of the module. So are the names of all that it
    holds, the signature of ``forward``, attributes, and what ``isinstance`` says.

    Under autocast, a weight that is used more than once in a step (shared by stages, or in two calls) is cast for each
    use, where plain training casts it once; its gradient then differs in the last bits.

    Args:
        module: An ``nn.Sequential``, nested ones are flattened; or any module whose forward can be recorded.
            What was compiled as a whole stays compiled, and is planned inside of its graph.
        sample: An input as in training. If given, the module is measured at once. An ``nn.Sequential`` takes one input,
            which may be a tuple; for other modules a tuple holds positional arguments and a dict keyword arguments, as
            in Lightning's ``example_input_array`` (so a single argument that is a tuple is ``((a, b),)``).
        mem_limit: What the chain's activations and new parameter gradients may take on the device: bytes, ``"700MiB"``,
            ``"10GB"``, a fraction of the device such as ``0.8`` or ``"80%"``, or None for what is free when it is
            planned. Parameters, buffers, the input, and optimizer state are not in it. With a sample, the module is
            planned at once unless this is None.
        slots: Resolution of the planner: more finds better schedules in long chains, and takes longer.
        compiled_variants: Under which other activation memory budgets blocks that you compiled may run: ``"exact"``,
            those that compute the bits of your compiled block; ``"close"``, also those that differ from it by rounding;
            ``"off"``, none, and nothing is compiled again.
        show_progress: Show a progress bar when measuring or planning takes longer than two seconds.
        offload: Where a plan may move what stages hold between their forward and their backward, beside keeping and
            recomputing it: ``"host"`` or ``"host:20GiB"``, pinned memory of the host, for a module on a GPU;
            ``"disk:/a/folder"``, a file, for one on the CPU; an :class:`~lightning_rotor.Offload`; or None, nowhere.
    Raises:
        ModelError: The module is not supported, or empty, or holds FSDP units.
        UnitError: ``mem_limit`` is not positive, or cannot be read.
        OptionError: ``compiled_variants`` is none of the three, ``offload`` none of the forms above, ``slots`` no
            positive integer.
        OffloadError: There is no such memory for the module's device, or it does not give what a plan needs.
        SampleError: The sample is no tensor, or not finite.
        BudgetError: No schedule fits the limit.
    Example:
        >>> net = Checkpointable(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), mem_limit="1MiB")
        >>> net(torch.randn(4, 8)).sum().backward()
    """

    module: nn.Module
    _planned: PlannedForward

    def __init__(
        self,
        module: nn.Module,
        sample: Any = None,
        mem_limit: int | float | str | None = None,
        *,
        slots: int = 500,
        compiled_variants: Variants = "exact",
        show_progress: bool = True,
        offload: str | Offload | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ModelError(
                f"module is a {type(module).__name__}: expected an nn.Module, such as an nn.Sequential of layers. "
                "Give a function its parameters as a module whose forward calls it"
            )
        self._limit = _ActivationLimit(parse_limit(mem_limit))
        self._settings = PlanSettings(
            slots,
            compiled_variants=compiled_variants,
            show_progress=show_progress,
            offload=parse_offload(offload),
        )
        if units := units_below(module):
            raise ModelError(
                f"{type(module).__name__} holds {len(units)} FSDP unit{'s' * (len(units) > 1)} (the first is "
                f"{units[0]!r}), which only all processes together can measure: expected RotorCallback, under which "
                "they agree, or a module without units"
            )
        # Past ``nn.Module.__setattr__``: as a child it would put "module." in front of all names.
        self.__dict__[_WRAPPED] = module
        self._prepare()
        # It was compiled, and its graph cannot be planned inside.
        if self._planned.compiled is None and (is_compiled(module) or has_compiled_method(module, "forward")):
            message = uncompiled_warning(f"this {type(module).__name__}")
            remedy = f"{message}; or Checkpointable(torch.compile(net)), which stays compiled as one stage"
            warnings.warn(remedy, RotorWarning, stacklevel=2)
        if sample is not None:
            self.measure(sample)
            if mem_limit is not None:
                self.compute_sequence(mem_limit)

    def measure(self, sample: Any) -> Chain:
        """Measure bytes and seconds of every stage; nothing of the module changes.

        Args:
            sample: As in the constructor; its shape, dtype, device, and whether it requires a gradient matter.
        Returns:
            The measured chain.
        Raises:
            ModelError: The module is not supported.
            SampleError: The sample is missing, holds no tensor, or values that are not finite.
            ProfilingError: There is no meter for its device.
        """
        return self._planned.measure(sample).chain

    def compute_sequence(self, mem_limit: int | float | str | None = None) -> Plan:
        """Plan for a limit, for the input signature used last.

        Args:
            mem_limit: As in the constructor; None keeps the limit given there, or takes what is free now.
        Returns:
            The plan that the next training call runs.
        Raises:
            ProfilingError: Nothing has been measured yet.
            BudgetError: No schedule fits; says the least limit that does. The plan from before stays.
            UnitError: The limit is not positive, or cannot be read.
        """
        before = self._limit.limit
        if mem_limit is not None:
            self._limit.limit = parse_limit(mem_limit)
        try:
            return self._planned.plans.replan()
        except Exception:
            # The plan from before stays, and with it the limit that it was made for.
            self._limit.limit = before
            raise

    def use(self, plan: Plan | Schedule | str) -> Plan:
        """Run a plan that was made before, for the input signature used last; others are planned for the limit.

        Args:
            plan: Made for this module and input, perhaps in another process; or a schedule, whatever it takes, or its
                text.
        Returns:
            The plan that the next training call runs: the same schedule with the costs that were measured here.
        Raises:
            ProfilingError: Nothing has been measured yet.
            PlanError: The plan was made for another model, shape, dtype or device, or takes more than its budget here;
                or it is no plan. The plan from before stays.
            ScheduleError: The text is no schedule, or the schedule does not belong to the chain. The plan from before
                stays.
        Example:
            >>> net = Checkpointable(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 8))
            >>> plan = net.use(net.frontier().knee.schedule)
        """
        return self._planned.plans.use(plan)

    def frontier(self) -> Frontier:
        """The time that every limit would cost, for the input signature used last.

        Returns:
            The curve; sizes are limits as in the constructor.
        Raises:
            ProfilingError: Nothing has been measured yet.
        """
        chain = self._latest().profile.chain
        return frontier(chain, slots=self._settings.slots) if self.plan is None else self.plan.frontier()

    def draw(self, *, backward: bool = False, fold: bool = True) -> Drawing:
        """Draw what was measured for the input signature used last, as its plan runs it.

        Args:
            backward: Draw the backward instead of the stages with their operators.
            fold: Draw what repeats once.
        Returns:
            SVG, which notebooks show; ``save(path)`` writes it.
        Raises:
            ProfilingError: Nothing has been measured yet.
        """
        # Here, since rich is slow to import, and a drawing seldom wanted.
        from lightning_rotor.report.drawing import draw_chain

        prepared, title = self._latest(), type(self.module).__name__
        profile = prepared.profile
        schedule = prepared.schedule if isinstance(prepared, Prepared) else None
        return draw_chain(profile.chain, profile.stages, schedule=schedule, backward=backward, title=title, fold=fold)

    def _latest(self) -> Costs | Prepared:
        if not len(cache := self._planned.plans.cache):
            raise ProfilingError("nothing has been measured yet: give a sample first, with measure(sample)")
        return cache.latest[1]

    @property
    def plan(self) -> Plan | None:
        """The plan in use, or None before the first one."""
        return self._planned.plans.plan

    @property
    def chain(self) -> Chain | None:
        """The measured costs for the input signature used last, or None."""
        return self._latest().profile.chain if len(self._planned.plans.cache) else None

    forward = _Forward()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Output of the module; in training, under the plan for this input's signature."""
        # Through the module's own call, so that its hooks fire as they would without this wrapper.
        try:
            attach(self.module, self._planned)
            return self.module(*args, **kwargs)
        finally:
            try:
                detach(self.module, self._planned)
            finally:
                # Once more, as an interrupt (Ctrl+C) may have come in the middle of the first. Twice does no harm.
                detach(self.module, self._planned)

    # ---------------------------------------------------------------- looking like the module

    @property
    def __class__(self) -> Any:
        """The module's class, to whoever asks what may be done with it; ``type`` tells them apart."""
        # A Trainer calls the training_step of a LightningModule, which calls the module, where there is no plan.
        return type(self.module) if lightning_module_class(self.module) is None else type(self)

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        # torch's parametrizations set it: they give a module a class with properties.
        self.module.__class__ = kind

    @property
    def training(self) -> bool:
        """The module's mode."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        # nn.Module's constructor sets it before there is a module.
        if _WRAPPED in self.__dict__:
            self.module.training = mode

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look for methods of that kind, also before an object has its attributes.
        if name.startswith("__") or _WRAPPED not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == _WRAPPED:
            self.__dict__[_WRAPPED] = value
            self._prepare()
        elif name in _OWN or hasattr(type(self), name) or getattr(value, "__self__", None) is self:
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.module)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r})"

    def __bool__(self) -> bool:
        # A module with a length, such as an nn.Sequential, is False if it is empty, and so is its wrapper.
        return bool(self.module)

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper in the place of the module, and what is in the module."""
        for name, module in self.module.named_modules(memo, prefix, remove_duplicate):
            yield name, self if module is self.module else module

    def __reduce__(self) -> Any:
        return _blank, (type(self),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        # Plans speak of this very module's stages; a copy measures for itself.
        made_anew = ("_planned", *_SHARED)
        return {key: value for key, value in self.__dict__.items() if key not in made_anew}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare()

    def _prepare(self) -> None:
        module = self.module
        self.__dict__.update({name: getattr(module, name) for name in _SHARED})
        compiled = compiled_call_of(module)
        # What the compiler returned has no code of its own that could be planned without it.
        if compiled is not None and not is_compiler_wrapper(module):
            if objection_to_planning_inside(settings_told_by(compiled), module):
                compiled = None
        planned = PlannedForward(module, self._limit, self._settings, compiled=compiled)
        self.__dict__["_planned"] = planned


for _name in _DELEGATED:
    # torch 2.11 does not have all of them.
    if hasattr(nn.Module, _name):
        setattr(Checkpointable, _name, _on_module(_name))


class _ActivationLimit(BudgetSource):
    """The limit of a :class:`Checkpointable` as a budget."""

    # The limit is for new gradients, so whether there were others before does not count.
    accumulates = False

    def __init__(self, limit: MemoryLimit | None) -> None:
        self.limit, self.ranks = limit, Agreement()

    def budget(self, name: str, profile: Profile) -> Budget:
        """All of the limit is for the chain."""
        return Budget(resolve_limit(self.limit, profile.chain.device))
