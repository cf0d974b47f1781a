"""What a recomputation must find as its forward did: random generators, settings of torch and its layers, tensors."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from itertools import product
from operator import attrgetter, is_
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.backends import cuda, cudnn, mkldnn

from lightning_rotor.errors import ExecutionError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import uncounted_copy


class GeneratorStates:
    """The state of all global generators at one moment: Python's, NumPy's, torch's on the host and on the CUDA device.

    With ``counted``, torch's allocator counts the remembered bytes, as plans do. torch's own layers never use Python's
    and NumPy's generators (``host``); torch's checkpoint remembers torch's own (``torchs``).
    """

    __slots__ = ("_host", "_torch", "device")

    def __init__(
        self, device: torch.device | None = None, *, counted: bool = True, host: bool = True, torchs: bool = True
    ) -> None:
        if torchs and device is None and torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device if device is not None and device.type == "cuda" else None
        # NumPy's is the one that users' code shares, of whatever kind.
        self._host: Any = (random.getstate(), np.random.get_state(legacy=False)) if host else None  # noqa: NPY002
        self._torch: list[torch.Tensor] = []
        if torchs:
            with private.no_dispatch():  # a state is a tensor, and real even among fake ones
                self._torch.append(torch.get_rng_state() if counted else uncounted_copy(torch.get_rng_state()))
                if self.device is not None:
                    self._torch.append(torch.cuda.get_rng_state(self.device))

    def restore(self) -> None:
        """Set the generators back to this state."""
        if self._host is not None:
            random.setstate(self._host[0])
            np.random.set_state(self._host[1])  # noqa: NPY002
        if self._torch:
            torch.set_rng_state(self._torch[0])
        if self.device is not None:
            torch.cuda.set_rng_state(self._torch[1], self.device)

    def equals(self, other: GeneratorStates) -> bool:
        """True if no generator was used in between."""
        if self._host is not None and other._host is not None and pickle.dumps(self._host) != pickle.dumps(other._host):
            return False
        with private.no_dispatch():
            return len(self._torch) == len(other._torch) and all(map(torch.equal, self._torch, other._torch))


@contextmanager
def seeded(seed: int, device: torch.device | None = None, *, host: bool = True) -> Iterator[None]:
    """Context with all global generators under a seed; their states are restored behind it."""
    before = GeneratorStates(device, host=host)
    if host:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  (the one that users' code shares)
    torch.default_generator.manual_seed(seed)
    if before.device is not None:
        with torch.cuda.device(before.device):
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        before.restore()


def generator_state(value: Any) -> Any:
    """The state of a random generator, comparable; None for anything else."""
    access = _access_to(value)
    return None if access is None else pickle.dumps(access[0]())


def rewinding(generator: Any) -> Callable[[], object] | None:
    """A function that sets a random generator back to its present state; None if it has none."""
    access = _access_to(generator)
    return None if access is None else partial(access[1], access[0]())


def _access_to(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """What reads and what sets the state of a random generator; None for anything else."""
    match value:
        case random.SystemRandom():
            return None
        case random.Random():
            return value.getstate, value.setstate
        case np.random.Generator():
            return partial(getattr, value.bit_generator, "state"), partial(setattr, value.bit_generator, "state")
        case np.random.RandomState():
            return partial(value.get_state, legacy=False), value.set_state
        case torch.Generator():
            return lambda: value.get_state().numpy(), lambda state: value.set_state(torch.from_numpy(state))
    return None


# ------------------------------------------ Settings of torch and its layers that decide over the numbers of a forward.


_Read: TypeAlias = Callable[[], Any]
_Write: TypeAlias = Callable[[Any], None]


class Settings:
    """The settings at the moment when it is made."""

    __slots__ = ("_device", "_values")

    def __init__(self) -> None:
        self._values = settings()
        self._device = private.default_device()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which they are set again. What the code in it sets is undone at the end."""
        before, older = settings(), None
        device = None if self._device == private.default_device() else self._device or torch.device("cpu")
        try:
            if before != self._values:
                older = _change(self._values)
            with nullcontext() if device is None else device:
                yield
        finally:
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
    """Set all settings, and the ``older`` ones, by default as the new ones imply. Returns what the older ones were."""
    told = [_told(read) for read, _, _ in _OLDER]
    _write(values)
    for (_, write, implied), value in zip(_OLDER, told if older is None else older, strict=True):
        if value is not None:
            write(implied() if older is None else value)
    _write(values)
    return told


def _told(read: _Read) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


def _write(values: tuple[Any, ...]) -> None:
    # In order, and looking again: operations without a precision of their own follow that of their backend.
    for (read, write), value in zip(_SETTINGS, values, strict=True):
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
