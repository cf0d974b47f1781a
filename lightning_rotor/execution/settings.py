"""Settings of torch and of its layers that decide over the numbers of a forward (rule 9 of ``passes``).

Autocast's cache of casts is none of them: ``passes`` (``run_stage``, ``forget_casts``) sees to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.backends import cuda, cudnn, mkldnn

from lightning_rotor.devices import CUDA, HOST, PRECISION_BACKENDS
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.autocast import autocast_state, set_autocast_state

# The older settings of torch are made of the newer ones of these two.
_CPU, _GPU = HOST.precision_backend, CUDA.precision_backend
_Read: TypeAlias = Callable[[], Any]
_Write: TypeAlias = Callable[[Any], None]


class Settings:
    """The settings at the moment when it is made: the process's, and the thread's autocast and default device."""

    # Autocast stands apart: a step's forward is often under it, and its backward is not.
    __slots__ = ("_autocast", "_device", "_values")

    def __init__(self) -> None:
        self._values = settings()
        self._autocast = _autocast()
        self._device = private.default_device()

    @property
    def dtypes(self) -> tuple[torch.dtype, tuple[Any, ...]]:
        """Types of numbers that a forward makes by itself."""
        return self._values[0], self._autocast

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which they are set again. What the code in it sets is undone at the end."""
        before = settings()
        autocast = _autocast()
        # What older names said, if they are changed.
        older = None
        device: AbstractContextManager[Any] = nullcontext()
        if self._device != private.default_device():
            # None is torch's own default, the host.
            device = self._device or torch.device("cpu")
        try:
            if before != self._values:
                older = _change(self._values)
            if autocast != self._autocast:
                _set_autocast(self._autocast)
            with device:
                yield
        finally:
            if _autocast() != autocast:
                # As the end of the context does: weights may change before the next one.
                torch.clear_autocast_cache()
                _set_autocast(autocast)
            if settings() != before:
                _change(before, older)


class LayerSettings:
    """The attributes that torch's own layers have when it is made: a mode, a dropout's ``p``, an ``eps``."""

    __slots__ = ("_all_hooked", "_now", "_then")

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._now = [layer.__dict__ for layer in layers]
        self._then = list(map(dict.copy, self._now))
        self._all_hooked = private.any_hooks_of_all()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which they are set again, without the hooks that were registered since."""
        # Each with what it is put back to.
        changed: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        tables: list[dict[int, Any]] = []
        for now, then in zip(self._now, self._then, strict=True):
            if not _same(now, then):
                changed.append((now, then, now.copy()))
            # Torch's layers had no hooks in the first pass, or they would not be among these.
            tables += map(now.__getitem__, private.HOOKS[:2])
        if not self._all_hooked:
            tables += private.hook_tables(None, private.HOOKS[:2])
        entries = list(map(dict.copy, tables))
        try:
            for now, then, _ in changed:
                _set_attributes(now, then)
            for table in tables:
                table.clear()
            yield
        finally:
            for now, _, before in changed:
                _set_attributes(now, before)
            for table, hooks in zip(tables, entries, strict=True):
                table.update(hooks)


def _same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    # By identity, in C: it is asked for each layer before each recomputation, and tensors compare entry by entry.
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


def _autocast() -> tuple[Any, ...]:
    return torch.is_autocast_cache_enabled(), autocast_state()


def _set_autocast(values: tuple[Any, ...]) -> None:
    is_cache_enabled, state = values
    if torch.is_autocast_cache_enabled() is not is_cache_enabled:
        torch.set_autocast_cache_enabled(is_cache_enabled)
    set_autocast_state(state)


def _change(values: tuple[Any, ...], older: list[Any] | None = None) -> list[Any]:
    """Set the process's settings, and ``older`` ones, by default as the new ones imply. Returns what these were."""
    told = [_told(read) for read, _, _ in _OLDER]
    # First, as the older ones follow from them.
    _write(values)
    for (_, write, implied), value in zip(_OLDER, older or told, strict=True):
        # What the older name could not say, it need not say again.
        if value is not None:
            write(value if older else implied())
    # Older names set several of the newer ones.
    _write(values)
    return told


def _told(read: _Read) -> Any:
    try:
        return read()
    except RuntimeError:
        # The newer names say what no older one can.
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
    """The older setting for products that the newer ones amount to."""
    if private.float32_precision(_GPU, "matmul") != "tf32":
        return "highest"
    return "medium" if private.float32_precision(_CPU, "matmul") == "bf16" else "high"


def _convolutions() -> bool:
    """The older setting for convolutions that the newer ones amount to."""
    return private.float32_precision(_GPU, "conv") == private.float32_precision(_GPU, "rnn") == "tf32"


_SETTINGS: tuple[tuple[_Read, _Write], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _precision("generic", "all"),
    *(_precision(backend, "all") for backend in PRECISION_BACKENDS),
    *(_precision(*names) for names in product(PRECISION_BACKENDS, ("matmul", "conv", "rnn"))),
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
"""Settings of the process: what reads, and what sets each. A backend stands before its operations."""
_READS = tuple(read for read, _ in _SETTINGS)
_OLDER: tuple[tuple[_Read, _Write, _Read], ...] = (
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, _products),
    (*_attribute(cudnn, "allow_tf32"), _convolutions),
)
"""Names from before torch 2.9 for several of the above at once, which torch does not tell if newer names say otherwise:
what reads, what sets, and what gives the value that the newer ones imply."""
