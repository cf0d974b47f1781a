"""A forward that measures and plans itself on its first training call, and runs inside its budget.

:class:`PlannedForward` stands in the place of a module's ``forward``::

    call ──► plans: cut, measured, planned ──► run under the plan, or a smaller one ──► output
                    ▲
                    └── what a plan may use: a Checkpointable's limit, or the step's planner
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from operator import attrgetter, is_, ne
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from lightning_rotor.capture.copies import version_of
from lightning_rotor.errors import ModelError, ProfilerBusyError, ProfilingError, SampleError, ShortageError
from lightning_rotor.execution.lent_tensors import buffers_of
from lightning_rotor.execution.passes import is_recomputing
from lightning_rotor.execution.pending import await_backward
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.planned.cache import Prepared
from lightning_rotor.planned.cuts import Signature
from lightning_rotor.planned.plans import BudgetSource, Plans, PlanSettings
from lightning_rotor.private.autocast import autocast_state
from lightning_rotor.private.torch_names import (
    any_hooks_of_all,
    copy_each,
    is_captured,
    is_transformed,
    outside_of_graphs,
    shares_weights,
)
from lightning_rotor.private.undoing import undone
from lightning_rotor.private.values import attribute_of, call_with, check_sample, tree_leaves, uncounted_copy
from lightning_rotor.profiling import Profile
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.snapshot import SMALL_BYTES, Snapshot
from lightning_rotor.units import format_bytes

# ------------------------------ Out of memory inside a planned forward: what to say, and how it can run a second time.

_log = logging.getLogger(__name__)


def is_shortage(error: BaseException) -> bool:
    """True if an error means that the device has no memory left. The CPU's allocator raises no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)
    )


_kind = attrgetter("shape", "dtype")


class CopiedBuffers:
    """Copies of buffers, in memory kept from forward to forward: BatchNorm has many, of a few bytes each."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(self, state: SegmentState) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The buffers that a forward in training may update, each with a copy."""
        statistics = [each.module._buffers[each.name] for each in state.statistics if each.module.training]
        buffers = [buffer for buffer in statistics if buffer is not None]
        buffers += [buffer for _, _, buffer in buffers_of(state.remembered)]
        # Taken while it is in use: a forward inside this one makes copies of its own.
        pairs, self._kept = self._kept, []
        known, copies = zip(*pairs, strict=True) if pairs else ((), ())
        is_same = len(known) == len(buffers) and all(map(is_, known, buffers))
        if not is_same or any(map(ne, map(_kind, copies), map(_kind, buffers))):  # given another shape in place
            return [(buffer, uncounted_copy(buffer)) for buffer in buffers]
        if pairs:
            with torch.no_grad():
                copy_each(list(copies), buffers)
        return pairs

    def give_back(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take the memory back when the forward is over."""
        # Elsewhere, and in large ones, the backward's peak would feel them.
        if pairs and all(copy.device.type == "cpu" and copy.nbytes <= SMALL_BYTES for _, copy in pairs):
            self._kept = pairs


class BeforeForward:
    """What a forward may change, as it was before: the state of the modules that ``profile`` names, and its input."""

    __slots__ = ("_before", "_copies", "_generators", "_owner", "_versions", "_written")

    def __init__(self, profile: Profile, value: Any, buffers: CopiedBuffers) -> None:
        state = profile.state
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        self._generators: GeneratorStates | None = None
        if profile.draws_random:
            self._generators = GeneratorStates(tensors[0].device, counted=False, host=bool(state.attributed))
            if self._generators.shared:
                self._generators.keep_only(state.drawn)
        # Torch's own layers have nothing that a forward could change, but for hooks on all modules.
        looks = state.attributed or any_hooks_of_all()
        self._before = Snapshot(state.attributed, small_bytes=SMALL_BYTES) if looks else None
        self._owner, self._copies = buffers, buffers.take(state)
        self._written = state.written
        fixed = [*tensors, *(buffer for _, _, buffer in buffers_of(state.watched))]
        self._versions = [(tensor, version_of(tensor)) for tensor in fixed]

    def restore(self) -> bool:
        """Set everything back; False if a parameter, an input or a large buffer changed, which nobody copied."""
        if self._written or any(version_of(tensor) != version for tensor, version in self._versions):
            return False
        if self._before is not None:
            self._before.restore()
        with torch.no_grad():
            for buffer, copy in self._copies:
                buffer.copy_(copy)
        if self._generators is not None:
            self._generators.restore()
        return True

    def forget(self) -> None:
        """Drop the copies when the forward has come to its end."""
        self._owner.give_back(self._copies)


def shortage_message(failure: BaseException, reason: str, *, limit_bytes: int, predicted_bytes: int) -> str:
    """What happened, in terms of the user's limit, and what to set. Contains torch's words, as tuners look for them.

    ``predicted_bytes`` is what the failed plan was to take.
    """
    return (
        f"out of memory inside mem_limit {format_bytes(limit_bytes)}: the plan was to peak at "
        f"{format_bytes(predicted_bytes)}. {reason}. Set mem_limit to less than what the device "
        f"really has for this process, lower the batch size, or free what others hold there. torch said: {failure}"
    )


# -------------------------------------------------------------------- The forward.


class KeyValueCaches:
    """Caches for generating text, which models of transformers fill in training, too, unless told not to.

    They keep keys and values of all layers, which nobody reads in training. transformers leaves them out under its own
    checkpointing as well.
    """

    def __init__(self, module: nn.Module) -> None:
        known = (attribute_of(each, "config") for each in module.modules())
        configs = {id(config): config for config in known if _is_of_transformers(type(config))}
        # Set in their namespaces, as their classes take microseconds to set an attribute.
        self._configs = [vars(each) for each in configs.values() if vars(each).get("use_cache") is True]
        self._has_told = False

    def __bool__(self) -> bool:
        return bool(self._configs)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which they are left out, unless a call asks for them."""
        if self._configs and not self._has_told:
            self._has_told = True
            _log.info("it trains with use_cache=False, without past_key_values in its output, as nobody reads them")
        with undone(self._switch_on):
            for config in self._configs:
                config["use_cache"] = False
            yield

    def _switch_on(self) -> None:
        for config in self._configs:
            config["use_cache"] = True


def _is_of_transformers(kind: type) -> bool:
    return any(base.__module__.startswith("transformers.") for base in kind.__mro__)


NO_GRAPH = (
    "lightning-rotor runs this module under a recomputation plan, which cannot be one graph: expected torch.compile "
    "without fullgraph=True, or torch.compile of the layers inside the planned module"
)
# Out of memory so many times, a forward gets the plan that takes the least.
_CAUTIOUS_ATTEMPTS = 2


class PlannedForward:
    """Runs a module under a recomputation plan, one plan for each input signature.

    Outside training (``eval()``, ``no_grad``, inference mode) the module runs plainly. So it does under a plan that
    recomputes nothing, if that has room for what its code holds longer than stages would. If the device runs out of
    memory, the forward runs again under a smaller plan, to the same bits. A module that can be no chain raises
    ``ModelError``.

    ``active`` is True for the original; a copy (an averaged model, a pickled checkpoint) runs its own weights plainly.
    """

    active = True

    def __init__(self, module: nn.Module, source: BudgetSource, settings: PlanSettings, name: str = "") -> None:
        self.plans = Plans(module, source, settings, name)
        self._module, self._source = module, source
        self._buffers = CopiedBuffers()
        self.caches = KeyValueCaches(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return inactive, ()

    # dynamo would flatten nested checkpoints into one
    @partial(outside_of_graphs, reason=NO_GRAPH)
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of a module or its copy; in training, under the plan for this input's signature, made now if missing.

        Raises ``ModelError`` (no chain), ``SampleError`` (no tensor), ``BudgetError`` (no schedule fits) or
        ``ShortageError`` (the device has no memory left, whatever the plan).
        """
        plainly = partial(type(module).forward, module, *args, **kwargs)
        if not self._plans_for(module, args, kwargs):
            return plainly()
        with self.caches.off():
            call = self._settled(args, kwargs) or self._prepared(args, kwargs)
            if call is None:
                return plainly()
            signature, value, prepared = call
            self._source.on_start(value)
            output, prepared = self._run(signature, prepared, value, plainly if prepared.runs_plainly else None)
            pending = await_backward(output, value, once=not prepared.runs_plainly)
            self._source.on_run(self.plans, signature, prepared, pending)
            return output

    def _plans_for(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if this call trains, and is not part of something that takes the module as it is."""
        if not (self.active and module.training and torch.is_grad_enabled()) or torch.is_inference_mode_enabled():
            return False
        if is_transformed():  # checkpoints do not work under torch.func's transforms
            return False
        # Inside a stage that is being measured there is no plan of its own.
        return not is_recomputing() or self.plans.is_prepared(args, kwargs)

    def _settled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, Any, Prepared] | None:
        """The entry of the call that came last, if this one is like it and nothing has changed; else None."""
        settled = self.plans.cache.settled
        if settled is None or settled.prepared.turn != self._source.turn:
            return None
        if shares_weights(self._module) or not settled.facts.holds():
            return None
        value = settled.signature.cut.bind(args, kwargs)
        is_like = value is not None and _is_like(value, settled.signature)
        return (settled.signature, value, settled.prepared) if is_like else None

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Signature, Any, Prepared] | None:
        """The entry that a call runs with, or None if it runs plainly."""
        together = self.plans.together
        if together:
            self.plans.follow_others(args, kwargs)
        made = self.plans.cuts_made
        try:
            signature, value = self.plans.bind(args, kwargs)
            if self.plans.together and not together:  # it has exchanged its first message now
                self.plans.follow_others(args, kwargs)
                signature, value = self.plans.bind(args, kwargs)
        except (ModelError, SampleError) as error:  # no chain, or a call without tensors
            if made:
                raise
            self._source.on_unsupported(self.plans, error)
            return None
        objection = None if made else self._source.objection(self.plans, signature.cut)
        if objection is not None:
            self._source.on_unsupported(self.plans, objection)
            return None
        try:
            return signature, value, self.plans.prepare(signature, value)
        except ProfilerBusyError as error:
            self._source.on_busy(error)
            return None

    # ---------------------------------------------------------------- out of memory

    def _run(
        self, signature: Signature, prepared: Prepared, value: Any, plainly: Callable[[], Any] | None
    ) -> tuple[Any, Prepared]:
        """Output of a call and what it ran with: if the device has no memory left, a smaller plan, and so on."""
        before = BeforeForward(prepared.profile, value, self._buffers)
        for attempt in itertools.count():
            try:
                assert prepared.executor is not None
                output = prepared.executor(value) if plainly is None or attempt else plainly()
                before.forget()
                return output, prepared
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
        """The next smaller plan for a failed forward; ``ShortageError`` if there is none, or it cannot run again."""
        plans, failed = self.plans, prepared.plan
        assert failed is not None
        if plans.together:
            reason = "The forward communicates with other processes, so it cannot run again here alone"
        elif not restored:
            reason = "The forward has changed its input or a large buffer, so it cannot run again with a smaller plan"
        elif plans.ceiling.lower(failed, to_the_least=attempt >= _CAUTIOUS_ATTEMPTS):
            if signature.device.type == "cuda":
                torch.cuda.empty_cache()
            ceiling_bytes = plans.ceiling.size_bytes or 0
            plans.cache.unplan(lambda plan: plan.peak_bytes <= ceiling_bytes)
            smaller = plans.plan_again(signature, prepared)
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
        sizes = {"limit_bytes": budget.limit_bytes, "predicted_bytes": budget.reserved_bytes + failed.peak_bytes}
        raise ShortageError(shortage_message(failure, reason, **sizes), **sizes) from failure

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
        if not self._module.training:
            self._module.train()
        try:
            with self.caches.off():
                return self.plans.measure(*self.plans.bind(args, kwargs)).profile
        finally:
            for module, mode in modes:
                module.training = mode


def _is_like(value: Any, signature: Signature) -> bool:
    """True if a call with this input has the signature, as far as the module's facts do not say."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return (
        tuple([tuple(tensor.shape) for tensor in tensors]) == signature.shapes
        and tuple([(tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors]) == signature.kinds
        and autocast_state() == signature.autocast
    )


class ForwardWithoutCaches:
    """Runs a module whose parts are planned, and which would ask them for caches that nobody reads in training."""

    active = False  # a plan for the module, or for what is inside of it, is not in its way

    def __init__(self, caches: KeyValueCaches) -> None:
        self._caches = caches

    def __reduce__(self) -> tuple[Any, ...]:
        return inactive, ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of the module."""
        if not (module.training and torch.is_grad_enabled()):
            return type(module).forward(module, *args, **kwargs)
        with self._caches.off():
            return type(module).forward(module, *args, **kwargs)


def inactive() -> PlannedForward:
    """What stands in a copied module: it runs the copy plainly."""
    planned = PlannedForward.__new__(PlannedForward)
    planned.active = False
    return planned


# ---------------------------------------------------- A :class:`PlannedForward` in the place of a module's ``forward``.


_KEY = "_lightning_rotor"


class ForwardInPlace(Protocol):
    """What runs instead of a module's ``forward``. A copy of it, in a copied module, runs the module plainly."""

    @property
    def active(self) -> bool:
        """True if it is more than a copy."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module."""


@lru_cache(128)
def _in_place_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for a class's ``forward``, and says that it has the same arguments.

    As a bound method in the instance's ``__dict__``, named like the one it replaces: ``copy`` and ``pickle`` then bind
    it to the copy, which a closure over the module would not survive.
    """

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Whoever takes the computation down for another runtime wants the module as the user wrote it.
        if is_captured():
            return type(self).forward(self, *args, **kwargs)
        return self.__dict__[_KEY](self, args, kwargs)

    forward.__name__ = "forward"
    return forward


def attach(module: nn.Module, planned: ForwardInPlace) -> None:
    """Run a module through a planned forward from now on; ``ModelError`` if its ``forward`` is already replaced."""
    if "forward" in module.__dict__ and (_KEY not in module.__dict__ or is_attached(module)):
        raise ModelError(
            f"the forward of this {type(module).__name__} has been replaced already: expected a module that only one "
            "callback or patch works on. torch.compile of a whole LightningModule replaces its forward too: name one "
            "of its submodules"
        )
    module.__dict__[_KEY] = planned
    module.__dict__["forward"] = MethodType(_in_place_of(type(module).forward), module)


def detach(module: nn.Module, planned: ForwardInPlace | None = None) -> None:
    """Undo :func:`attach`, of ``planned`` if given. Does nothing if it was undone before."""
    attached = module.__dict__.get(_KEY)
    if attached is not None and planned in (None, attached):
        module.__dict__.pop("forward", None)
        del module.__dict__[_KEY]  # last, so that it can be done again after an interrupt in between


def is_attached(module: nn.Module) -> bool:
    """True if a module runs through a planned forward."""
    planned: ForwardInPlace | None = module.__dict__.get(_KEY)
    return planned is not None and planned.active
