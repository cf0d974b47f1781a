"""Settings of torch and its layers that decide over the numbers of a forward. A recomputation runs under those of its forward.

A backward may run under others: outside of a ``with sdpa_kernel(...)``, after ``torch.set_default_dtype``, or in autograd's threads for
CUDA, where the default device is nobody's. Autocast and grad mode are not among them: torch's checkpoint holds those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.backends import cuda, cudnn, mkldnn

from lightning_rotor.private import torch_names as private

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
    """What torch's own layers have in attributes at the moment when it is made: their mode, a dropout's ``p``, a normalization's ``eps``.

    Args:
        layers: No hooks run around their forwards.
    """

    __slots__ = ("_all_hooked", "_now", "_then")

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._now = [layer.__dict__ for layer in layers]
        self._then = list(map(dict.copy, self._now))
        self._all_hooked = private.any_hooks_of_all()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which they are set again, and hooks that were registered since are not called."""
        changed = [(now, then) for now, then in zip(self._now, self._then, strict=True) if not _same(now, then)]
        before = [now.copy() for now, _ in changed]
        hooks = [now[name] for now in self._now for name in private.HOOKS[:2] if now[name]]
        if not self._all_hooked:
            hooks += filter(None, private.forward_hook_tables(None))
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
    """All but tensors: FSDP1 puts parameters there, and they come and go."""
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
    """Set all settings, and the older ones with them where torch tells them. Returns what they were, None where it does not.

    Args:
        values: From :func:`settings`.
        older: What an earlier change returned; by default, what the values amount to.
    """
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
# Names from before torch 2.9 for several of the above at once. torch refuses to read one if the newer names have set something else.
_OLDER: tuple[tuple[_Read, _Write, _Read], ...] = (
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, _products),
    (*_attribute(cudnn, "allow_tf32"), _convolutions),
)
