"""How a stage runs first, and again in a recomputation, which neither sees nor repeats what the first pass changed.

A second forward would count a batch twice in running statistics and start from other values than the first pass did:

==================================  ===================================================================================
torch's normalization, training     never reads its running statistics: a replay writes to scratch buffers, unless code
                                    around it may read them
other modules seen to update their  the first pass remembers the earlier values, and a replay works on a copy of them
buffers; small ones of user code
large buffers of user code          are watched: the first update in a segment is refused, for the earlier value is gone
attributes of user code, and what   are set to what the first pass saw, and back afterwards, with all that lists, dicts
its hooks can reach                 and objects hold (``stages.snapshot``)
generators of random numbers        those that the first pass has drawn from, likewise; others may be in use by threads
hooks that only look                are not called again (:class:`Observers`)
torch's settings, and those of its  are those of the first pass: default dtype, allowed kernels, modes, probabilities;
layers                              hooks that came later are not called
parameters, and buffers that the    are the first pass's own tensors, even under functional_call, unchanged and with
first pass does not update          their ``requires_grad``; those of FSDP units come and go with the units' hooks
==================================  ===================================================================================
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from itertools import product
from operator import attrgetter, is_
from typing import Any, TypeAlias
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.backends import cuda, cudnn, mkldnn

from lightning_rotor.errors import ExecutionError, InverseError
from lightning_rotor.execution.segment_state import Observers, SegmentState
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.undoing import undone
from lightning_rotor.stages.draws import drawn_since
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.known_layers import NORMALIZATIONS
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.snapshot import SMALL_BYTES, Snapshot


class _Flags(threading.local):
    """Flags of this thread: backward passes of CUDA graphs run in other threads than the forward."""

    recomputing = 0
    checkpointing = 0


_flags = _Flags()


def is_recomputing() -> bool:
    """True if the current forward repeats one that has already run, so that nothing should come of it."""
    return _flags.recomputing > 0


def is_checkpointing() -> bool:
    """True if the current forward drops its saved tensors because it will be recomputed."""
    return _flags.checkpointing > 0


@contextmanager
def repeating(repeats: bool = True) -> Iterator[None]:
    """Context in which :func:`is_recomputing` gives ``repeats``."""
    before = _flags.recomputing
    try:
        try:
            _flags.recomputing = before + 1 if repeats else 0
            yield
        finally:
            _flags.recomputing = before
    finally:  # an interrupt may have come before
        _flags.recomputing = before


@contextmanager
def passing_first(first_pass: FirstPass) -> Iterator[None]:
    """Context of a forward that drops its saved tensors."""
    before = _flags.checkpointing
    try:
        try:
            _flags.checkpointing = before + 1
            with first_pass.watching():
                yield
        finally:
            _flags.checkpointing = before
    finally:
        _flags.checkpointing = before


def run_stage(stage: Stage, value: Any, option: int = 0) -> Any:
    """Run a stage under an option: plainly under the first one, ``keep``, and else its variant.

    Autocast caches every weight that it casts until its context ends. That would pin a second copy of all weights, and
    let a recomputation save other tensors than the first pass, so the cache lives for one stage. Within a stage a
    weight is still cast once. Raises InverseError if a coupling cannot split its input.
    """
    try:
        return stage.variants[option - 1](value) if option else stage(value)
    except InverseError as error:  # modules know their type, not where they are
        raise error.located(stage.name) from error
    except (TypeError, AttributeError, KeyError) as error:
        if is_recomputing():
            error.args = (
                f"{error}. Stage {stage.name!r} ran again, or alone: if a layer before hands it something by a global "
                "variable or an attribute, declare that with @lightning_rotor.skippable",
            )
        raise
    finally:
        forget_casts()


def forget_casts() -> None:
    """Empty autocast's cache if it is in use."""
    if autocast_enabled() and torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


def autocast_enabled() -> bool:
    """True if any autocast context is active."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


# ------------------------------------------ Settings of torch and its layers that decide over the numbers of a forward.


_Read: TypeAlias = Callable[[], Any]
_Write: TypeAlias = Callable[[Any], None]


class Settings:
    """The settings at the moment when it is made: the process's, and the thread's autocast and default device."""

    __slots__ = ("_autocast", "_device", "_values")

    def __init__(self) -> None:
        self._values, self._autocast = settings(), _autocast()
        self._device = private.default_device()

    @property
    def dtypes(self) -> tuple[torch.dtype, tuple[Any, ...]]:
        """Types of numbers that a forward makes by itself."""
        return self._values[0], self._autocast

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which they are set again. What the code in it sets is undone at the end."""
        before, older, autocast = settings(), None, _autocast()
        device = None if self._device == private.default_device() else self._device or torch.device("cpu")
        try:
            if before != self._values:
                older = _change(self._values)
            if autocast != self._autocast:
                _write(self._autocast, _AUTOCAST)
            with nullcontext() if device is None else device:
                yield
        finally:
            if _autocast() != autocast:
                torch.clear_autocast_cache()  # as the end of the context does: weights may change before the next one
                _write(autocast, _AUTOCAST)
            if settings() != before:
                _change(before, older)


class LayerSettings:
    """What torch's own layers have in attributes when it is made: a mode, a dropout's ``p``, an ``eps``."""

    __slots__ = ("_all_hooked", "_now", "_then")

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._now = [layer.__dict__ for layer in layers]
        self._then = list(map(dict.copy, self._now))
        self._all_hooked = private.any_hooks_of_all()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which they are set again, without the hooks that were registered since."""
        changed = [(now, then) for now, then in zip(self._now, self._then, strict=True) if not _same(now, then)]
        before = [now.copy() for now, _ in changed]
        hooks = [now[name] for now in self._now for name in private.HOOKS[:2] if now[name]]
        if not self._all_hooked:
            hooks += filter(None, private.hook_tables(None, private.HOOKS[:2]))
        hooked = [table.copy() for table in hooks]
        try:
            for now, then in changed:
                _set_attributes(now, then)
            for table in hooks:
                table.clear()
            yield
        finally:
            for (now, _), attributes in zip(changed, before, strict=True):
                _set_attributes(now, attributes)
            for table, entries in zip(hooks, hooked, strict=True):
                table.update(entries)


def _same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now.values(), then.values()))


def _set_attributes(now: dict[str, Any], then: dict[str, Any]) -> None:
    """Set all but tensors: FSDP1 puts parameters there, and they come and go."""
    for name in now.keys() | then.keys():
        if name not in then:
            if not isinstance(now[name], torch.Tensor):
                del now[name]
        elif not isinstance(then[name], torch.Tensor):
            now[name] = then[name]


def settings() -> tuple[Any, ...]:
    """The settings that count for a whole process, comparable. It takes a few microseconds."""
    return tuple([read() for read in _READS])


def _change(values: tuple[Any, ...], older: list[Any] | None = None) -> list[Any]:
    """Set the process's settings, and ``older`` ones, by default as the new ones imply. Returns what these were."""
    told = [_told(read) for read, _, _ in _OLDER]
    _write(values, _SETTINGS)
    for (_, write, implied), value in zip(_OLDER, told if older is None else older, strict=True):
        if value is not None:
            write(implied() if older is None else value)
    _write(values, _SETTINGS)
    return told


def _told(read: _Read) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


def _autocast() -> tuple[Any, ...]:
    return tuple([read() for read, _ in _AUTOCAST])


def _write(values: tuple[Any, ...], table: tuple[tuple[_Read, _Write], ...]) -> None:
    # In order, and looking again: operations without a precision of their own follow that of their backend.
    for (read, write), value in zip(table, values, strict=True):
        if read() != value:
            write(value)


def _attribute(owner: Any, name: str) -> tuple[_Read, _Write]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _precision(backend: str, operation: str) -> tuple[_Read, _Write]:
    read = partial(private.float32_precision, backend, operation)
    return read, partial(private.set_float32_precision, backend, operation)


def _products() -> str:
    """What the older setting for products amounts to."""
    if private.float32_precision("cuda", "matmul") != "tf32":
        return "highest"
    return "medium" if private.float32_precision("mkldnn", "matmul") == "bf16" else "high"


def _convolutions() -> bool:
    return private.float32_precision("cuda", "conv") == private.float32_precision("cuda", "rnn") == "tf32"


_SETTINGS: tuple[tuple[_Read, _Write], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _precision("generic", "all"),
    _precision("cuda", "all"),
    _precision("mkldnn", "all"),
    *(_precision(*names) for names in product(("cuda", "mkldnn"), ("matmul", "conv", "rnn"))),
    *(_attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    *(_attribute(mkldnn, name) for name in ("enabled", "deterministic")),
    _attribute(cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    _attribute(cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    _attribute(cuda.matmul, "allow_fp16_accumulation"),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp),
    (private.attention_order, private.set_attention_order),
)
_READS = tuple(read for read, _ in _SETTINGS)
_KINDS = ("cpu", "cuda")
# Those of the thread. A step's forward is often under autocast and its backward is not, so they are apart.
_AUTOCAST: tuple[tuple[_Read, _Write], ...] = (
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    *((partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)) for kind in _KINDS),
    *((partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)) for kind in _KINDS),
)
# Names from before torch 2.9 for several of the above at once, which torch does not tell if newer names say otherwise.
_OLDER: tuple[tuple[_Read, _Write, _Read], ...] = (
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, _products),
    (*_attribute(cudnn, "allow_tf32"), _convolutions),
)


# --------------------------------------------------- Whether tensors are still what they were when a forward read them.

# torch counts writes in place to a tensor and its views, and ``data`` that is set has another storage. It does not
# count what is written through ``tensor.data``, through NumPy, or by fused optimizers.


Slot: TypeAlias = tuple[dict[str, Any], str, Any]
"""A module's table of parameters or buffers, a name in it, and what is there."""
_requires_grad = attrgetter("requires_grad")


def first_changed(before: Sequence[int], tensors: Sequence[torch.Tensor], *, or_copies: bool = False) -> int | None:
    """Number of the first tensor that has changed, or None. ``before`` are its stamps or the first of these."""
    now = private.stamps(tensors)[: len(before)]
    if now == before:
        return None
    if or_copies:
        count = len(tensors)
        changed = (now[n + count] == before[n + count] and now[n] > before[n] for n in range(count))
        return next((number for number, has_changed in enumerate(changed) if has_changed), None)
    return min(place % len(tensors) for place in range(len(now)) if now[place] != before[place])


class TensorsRead:
    """Parameters and buffers that a forward reads. A slot may hold None; ``spell`` names it in messages."""

    def __init__(self, slots: Iterable[Slot], spell: Callable[[dict[str, Any], str], str]) -> None:
        self.slots = list(slots)
        self._spell = spell
        self._read = [slot for slot in self.slots if isinstance(slot[2], torch.Tensor)]
        self._tensors = [tensor for _, _, tensor in self._read]
        self._stamps = private.stamps(self._tensors)
        self._learning = list(map(_requires_grad, self._tensors))

    def require_untouched(self) -> None:
        """Raise ``ExecutionError`` if the forward itself has changed them."""
        for table, name, tensor in self._read:
            if table.get(name) is not tensor:
                raise self._changed_inside(table, name)
        number = first_changed(self._stamps, self._tensors)
        if number is not None:
            raise self._changed_inside(*self._read[number][:2])

    def require_unchanged(self) -> None:
        """Raise ``ExecutionError``, before the forward is repeated, if somebody else has changed them."""
        number = first_changed(self._stamps, self._tensors)
        if number is not None:
            raise changed_meanwhile(
                self._spell(*self._read[number][:2]), "Step optimizers, average weights and update buffers behind it"
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which those that were frozen, or set free, since the forward read them are what they were."""
        now = list(map(_requires_grad, self._tensors))
        frozen = [] if now == self._learning else list(zip(self._tensors, now, self._learning, strict=True))
        try:
            for tensor, _, then in frozen:
                tensor.requires_grad_(then)
            yield
        finally:
            for tensor, after, _ in frozen:
                tensor.requires_grad_(after)

    def standing_in(self, substitutes: Mapping[int, torch.Tensor]) -> TensorsRead:
        """Like :meth:`restored`, with others in the slots of some tensors, by the ``id`` of each."""
        other = copy(self)
        other.slots = [(table, name, substitutes.get(id(tensor), tensor)) for table, name, tensor in self.slots]
        return other

    def _changed_inside(self, table: dict[str, Any], name: str) -> ExecutionError:
        return ExecutionError(
            f"the {self._spell(table, name)} changed in a segment that is to be recomputed, but did not while it was "
            "measured, so its earlier value is gone: expected a forward that leaves parameters and large "
            "buffers alone, or updates them every time. Measure again with the module in its present state"
        )


def changed_meanwhile(what: str, remedy: str) -> ExecutionError:
    """The error for what has changed between the forward that read it and the backward that recomputes with it."""
    return ExecutionError(
        f"the {what} has changed since the forward read it, and the backward would recompute with another "
        f"value: expected it unchanged until the backward is over. {remedy}, or run the forward again"
    )


# ----------------------------------------------------------------------------------------------------
# A first pass and its repetitions.


class FirstPass:
    """A forward that will be repeated: what it must remember for that, and what it could not undo, which it refuses.

    ``device`` is the one whose generators of torch it may use, besides the host's. ``known_draws`` are kinds that it
    is known to draw from, and grow.
    """

    def __init__(
        self, state: SegmentState, device: torch.device | None = None, known_draws: set[str] | None = None
    ) -> None:
        self.state, self._device = state, device
        self._known_draws = set(state.drawn) if known_draws is None else known_draws
        self.values: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.generators: GeneratorStates | None = None
        self.drawn: frozenset[str] = frozenset()  # kinds of generators that it has moved
        self._watched: tuple[Snapshot, Observers] | None = None  # where there are attributes of users, or hooks
        self._settings = Settings()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the forward."""
        copies: dict[int, torch.Tensor] = {}
        self.values = [
            (module, name, copies.setdefault(id(buffer), buffer.detach().clone()))
            for module, name, buffer in buffers_of(self.state.remembered)
        ]
        if self.state.attributed or private.any_hooks_of_all():
            observers = Observers(self.state.attributed)
            self._watched = Snapshot(self.state.attributed, small_bytes=SMALL_BYTES), observers
            observers.watch()
        if self.state.attributed or self._device is not None:
            own, torchs = bool(self.state.attributed), self._device is not None
            self.generators = GeneratorStates(self._device, host=own, torchs=torchs)
        self._layers = LayerSettings(self.state.layers)
        self.read = TensorsRead(slots_read(self.state), self.state.spell)
        try:
            yield
        finally:
            if self._watched is not None:
                before, observers = self._watched
                observers.settle(before)
        if self.generators is not None:
            self.drawn = self.generators.changed() if self.generators.shared else self.generators.kinds
        if self._watched is not None:
            self._watched[0].require_undoable()
        self.read.require_untouched()

    def tell_draws(self, again: Callable[[], object]) -> None:
        """Tell its own random numbers from those of other threads; ``again`` runs the forward once more if need be.

        A repetition sets back the generators that the forward has drawn from, and no others.
        """
        if self.generators is None or self.drawn <= self._known_draws or not self.generators.shared:
            return

        def repeat() -> None:
            with self.replayed(()), repeating(), dropping_saved():
                again()

        behind = self.generators.now()
        self.drawn = drawn_since(self.generators, repeat, certain=self._known_draws)
        behind.restore(self.drawn)  # its own numbers were drawn again
        self._known_draws |= self.drawn

    @contextmanager
    def replayed(self, kinds: Collection[str] | None = None) -> Iterator[None]:
        """Context of a forward that repeats this one: it sees the state that this one saw, and changes none.

        Of generators, those of these kinds, by default the ones that this one has drawn from.
        """
        kinds = self.drawn if kinds is None else kinds
        self.read.require_unchanged()
        with ExitStack() as stack:
            for settings in (self._settings, self._layers, self.read):
                stack.enter_context(settings.restored())
            if self.generators is not None:
                stack.callback(self.generators.now().restore, kinds)
                self.generators.restore(kinds)
            if self._watched is not None:
                before, observers = self._watched
                stack.callback(before.again().restore)
                before.lend()
                observers.leave_out()
            stack.enter_context(standing_in(self._loans()))
            yield

    def _loans(self) -> Iterator[Slot]:
        """What stands in tables of parameters and buffers during a replay."""
        # FSDP1 has moved its own out of the way, and into plain attributes.
        yield from (slot for slot in self.read.slots if slot[1] in slot[0])
        for statistic in self.state.statistics:
            if statistic.module.training:
                yield statistic.module._buffers, statistic.name, statistic.scratch
        copies: dict[int, torch.Tensor] = {}
        for module, name, value in self.values:
            # A copy of the copy: with retain_graph there is another replay after this one.
            yield module._buffers, name, copies.setdefault(id(value), value.clone())


def dropping_saved() -> saved_tensors_hooks:
    """Context of a forward that has no backward: nothing is kept of what autograd saves."""
    return saved_tensors_hooks(lambda _: None, lambda nothing: nothing)


@contextmanager
def standing_in(loans: Iterable[Slot]) -> Iterator[None]:
    """Context in which other tensors stand in tables of parameters and buffers."""
    owners: list[Slot] = []

    def put_back() -> None:
        # Last in, first out: what was lent twice gets its first owner back.
        for table, name, owner in reversed(owners):
            table[name] = owner

    with undone(put_back):
        for table, name, loan in loans:
            if table[name] is not loan:
                owners.append((table, name, table[name]))
                table[name] = loan
        yield


def buffers_of(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """The modules' own buffers, with who has them and the names."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


def slots_read(state: SegmentState) -> Iterator[Slot]:
    """Parameters and buffers that a repetition reads as they are now."""
    for module in state.parametrized:
        for name, parameter in module._parameters.items():
            yield module._parameters, name, parameter
    for module in state.buffered:
        # In training, normalization does not read its statistics.
        if not (module.training and isinstance(module, NORMALIZATIONS)):
            for name, buffer in module._buffers.items():
                yield module._buffers, name, buffer
    for module, name in state.direct_reads:
        for table in (module._parameters, module._buffers):  # attributes are not followed
            if name in table:
                yield table, name, table[name]


# -------------------------------- What autograd would save in a forward is dropped, and made again by a second forward.

# torch's non-reentrant checkpoint does so for any function. Where what runs again is known, half of its time is enough:
#
#     forward             saves 1   2   3         leaves places 1 2 3
#     backward            asks for 3, 2, 1        the first time, runs again up to the third save, which fills 1 2 3
#
# The places die with the graph: what a first backward has freed is not filled again for a second one.


class _Enough(BaseException):  # no user code that survives errors shall survive this
    """All places are filled, so the rest of the forward need not run."""


class _Place:
    """Where autograd would have saved a tensor: what fills it, by the number of the backward that asked."""

    __slots__ = ("__weakref__", "filled")

    def __init__(self) -> None:
        self.filled: dict[int | None, torch.Tensor] = {}


class Recomputation:
    """What a forward saves while it runs in :meth:`dropping`, by running again in each backward.

    Args:
        name: Of the forward, in messages.
        again: Runs the forward again, with gradients.
    """

    __slots__ = ("_again", "_asked", "_kinds", "_name", "_places")

    def __init__(self, name: str, again: Callable[[], object]) -> None:
        self._name, self._again = name, again
        self._places: list[ReferenceType[_Place]] = []
        self._kinds: list[tuple[torch.dtype, torch.Size, torch.device]] = []
        self._asked: set[int] = set()

    def dropping(self) -> saved_tensors_hooks:
        """Context of the forward."""
        return saved_tensors_hooks(self._drop, self._get)

    def _drop(self, tensor: torch.Tensor) -> _Place:
        place = _Place()
        self._places.append(ref(place))
        self._kinds.append((tensor.dtype, tensor.shape, tensor.device))
        return place

    def _get(self, place: _Place) -> torch.Tensor:
        backward = private.backward_number()
        if backward not in place.filled:
            if backward in self._asked:
                raise ExecutionError(
                    f"a backward asked {self._name} twice for the same saved tensor: expected once. "
                    "Read ctx.saved_tensors once in the backward of a torch.autograd.Function"
                )
            if backward is not None:
                self._asked.add(backward)
            self._fill(backward)
        return place.filled.pop(backward)

    def _fill(self, backward: int | None) -> None:
        """Run again until all places that are there now have been saved to."""
        number = 0

        def save(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal number
            if tensor.requires_grad:
                tensor = tensor.detach()  # its node would hold it, and it holds its node
            if number < len(self._places):
                place = self._places[number]()
                if place is not None:
                    if self._kinds[number] != (tensor.dtype, tensor.shape, tensor.device):
                        raise self._differs(f"{tensor.dtype} of shape {tuple(tensor.shape)}", self._kinds[number])
                    place.filled[backward] = tensor
                number += 1
            if number == len(self._places):
                raise _Enough
            return tensor

        try:
            with saved_tensors_hooks(save, lambda tensor: tensor), torch.enable_grad():
                self._again()
        except _Enough:
            pass
        if number < len(self._places):
            raise self._differs("none", self._kinds[number])

    def _differs(self, received: str, kind: tuple[torch.dtype, torch.Size, torch.device]) -> ExecutionError:
        return ExecutionError(
            f"{self._name} ran again in the backward and saved other tensors than before: expected {kind[0]} of shape "
            f"{tuple(kind[1])} on {kind[2]}, received {received}. Its forward depends on what a recomputation does "
            "not see again: move that into its arguments, or out of the module"
        )
