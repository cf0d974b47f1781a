"""One recomputed segment: the single place where this package touches ``torch.utils.checkpoint``.

torch's non-reentrant checkpoint builds the original graph, drops every tensor that it saves, and runs the function again when
the backward first asks for one. What this module adds is what that function must not do twice: update buffers, draw other
random numbers, count calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_rotor.errors import ExecutionError


class _Flags(threading.local):
    """Backward passes of CUDA graphs run in other threads than the forward, each with its own flags."""

    recomputing = 0
    checkpointing = 0


_flags = _Flags()


def is_recomputing() -> bool:
    """Whether the current forward repeats one that has already run, so that counters and logs should ignore it.

    True while a segment is recomputed in the backward, and while costs are measured.
    """
    return _flags.recomputing > 0


def is_checkpointing() -> bool:
    """Whether the current forward drops its saved tensors because it will be recomputed."""
    return _flags.checkpointing > 0


@dataclass(frozen=True, slots=True, eq=False)
class MutableBuffer:
    """A buffer that the forward updates, such as the running mean of a BatchNorm, and the scratch that replays write to.

    Attributes:
        module: The module that owns the buffer.
        name: Its name there.
        scratch: Same shape, dtype and device; replays update it instead of the buffer.
    """

    module: nn.Module
    name: str
    scratch: torch.Tensor


class Replay:
    """Context of a forward that repeats an earlier one: flags it, and lends it scratch buffers.

    The scratch is persistent, so that recomputation allocates nothing for it. Normalization in training mode does not read its
    running statistics; any other buffer is copied first, so that the replay sees its value.
    """

    def __init__(self, buffers: Iterable[MutableBuffer] = ()) -> None:
        self._buffers = tuple(buffers)
        self._originals: list[tuple[MutableBuffer, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        _flags.recomputing += 1
        for buffer in self._buffers:
            original = buffer.module._buffers[buffer.name]
            if original is None or original is buffer.scratch:  # an enclosing replay has swapped it already
                continue
            if not _only_writes_statistics(buffer.module):
                buffer.scratch.copy_(original)
            self._originals.append((buffer, original))
            buffer.module._buffers[buffer.name] = buffer.scratch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for buffer, original in self._originals:
            buffer.module._buffers[buffer.name] = original
        self._originals.clear()
        _flags.recomputing -= 1


class _FirstPass:
    """Context of the forward whose saved tensors are dropped."""

    def __enter__(self) -> None:
        _flags.checkpointing += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _flags.checkpointing -= 1


def recomputed(
    function: Callable[..., Any],
    *inputs: Any,
    name: str = "segment",
    draws_random: bool = True,
    buffers: tuple[MutableBuffer, ...] = (),
) -> Any:
    """Run a function without keeping what its backward needs; the backward runs it again.

    Args:
        function: Maps the inputs to its output, the same bits every time.
        inputs: Tensors and other objects, held until the backward is done.
        name: For error messages.
        draws_random: Remember the random number generators and set them back for the recomputation. Costs 5 kB on the host.
        buffers: Buffers that the function updates.
    Raises:
        ExecutionError: The function changes one of its inputs in place, which would silently spoil the recomputation.
    """
    versions = _versions(inputs)
    output = checkpoint(
        function,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=draws_random,
        context_fn=partial(_contexts, buffers),
    )
    if versions != _versions(inputs):
        raise ExecutionError(
            f"{name} changes its input in place, so it cannot be recomputed from it: expected an untouched input. "
            "Use an operation that is not in place there, or measure again if the model has changed since"
        )
    return output


def _versions(inputs: tuple[Any, ...]) -> list[int]:
    return [value._version for value in inputs if isinstance(value, torch.Tensor)]


def _contexts(buffers: tuple[MutableBuffer, ...]) -> tuple[_FirstPass, Replay]:
    return _FirstPass(), Replay(buffers)


def _only_writes_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.training
