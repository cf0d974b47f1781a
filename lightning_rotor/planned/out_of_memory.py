"""A device that runs out of memory inside a planned forward: what to say, and how the forward can run a second time."""

from __future__ import annotations

import platform
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from lightning_rotor.errors import ShortageError
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.private.torch_names import copy_each, version_of
from lightning_rotor.private.values import tensors_in, uncounted_copy
from lightning_rotor.profiling import Profile
from lightning_rotor.stages.snapshot import SMALL_BYTES, Snapshot
from lightning_rotor.stages.state import GeneratorStates
from lightning_rotor.units import format_bytes

_RSS_UNIT = 1 if platform.system() == "Darwin" else 1024


def is_shortage(error: BaseException) -> bool:
    """Whether an error means that the device has no memory left. The CPU's allocator raises no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)
    )


class CopiedStatistics:
    """Copies of BatchNorm's statistics.

    There are many, of a few bytes each, so their memory is kept from forward to forward.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def take(self, state: SegmentState) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The statistics that a forward in training will update, each with a copy."""
        found = (each.module._buffers[each.name] for each in state.statistics if each.module.training)
        buffers = [buffer for buffer in found if buffer is not None]
        # Taken while it is in use: a forward inside this one makes copies of its own.
        pairs, self._kept = self._kept, None
        if pairs is None or len(pairs) != len(buffers) or not all(map(is_, buffers, map(itemgetter(0), pairs))):
            return [(buffer, uncounted_copy(buffer)) for buffer in buffers]
        if pairs:
            with torch.no_grad():
                copy_each([copy for _, copy in pairs], buffers)
        return pairs

    def give_back(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The forward is over."""
        if all(
            copy.device.type == "cpu" for _, copy in pairs
        ):  # elsewhere the allocator would count them in the backward
            self._kept = pairs


class BeforeForward:
    """What a forward may change, as it was before.

    Args:
        profile: Of the chain that is about to run; says which state its modules have.
        value: Its input.
        statistics: Makes copies of statistics.
    """

    __slots__ = ("_before", "_copies", "_generators", "_owner", "_statistics", "_versions", "_written")

    def __init__(self, profile: Profile, value: Any, statistics: CopiedStatistics) -> None:
        state, tensors = profile.state, tensors_in(value)
        self._generators = (
            GeneratorStates(tensors[0].device, counted=False, host=bool(state.attributed))
            if profile.draws_random
            else None
        )
        self._before = Snapshot(state.attributed, small_bytes=SMALL_BYTES)
        self._owner, self._statistics = statistics, statistics.take(state)
        self._copies = [(buffer, uncounted_copy(buffer)) for buffer in _buffers(state.remembered)]
        self._written = state.written
        self._versions = [(tensor, version_of(tensor)) for tensor in (*tensors, *_buffers(state.watched))]

    def restore(self) -> bool:
        """Set everything back.

        Whether that was possible: a parameter, an input or a large buffer that changes is not remembered.
        """
        if self._written or any(version_of(tensor) != version for tensor, version in self._versions):
            return False
        self._before.restore()
        with torch.no_grad():
            for buffer, copy in (*self._statistics, *self._copies):
                buffer.copy_(copy)
        if self._generators is not None:
            self._generators.restore()
        return True

    def forget(self) -> None:
        """The forward has come to its end."""
        self._owner.give_back(self._statistics)


def _buffers(modules: tuple[nn.Module, ...]) -> list[torch.Tensor]:
    return [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]


def shortage_error(failure: BaseException, reason: str, *, limit_bytes: int, predicted_bytes: int) -> ShortageError:
    """The typed error for a failure.

    Args:
        failure: What torch raised.
        reason: Why no other plan is tried.
        limit_bytes: As the user set it.
        predicted_bytes: What the plan that failed was to take.
    """
    return ShortageError(
        shortage_message(failure, reason, limit_bytes=limit_bytes, predicted_bytes=predicted_bytes),
        limit_bytes=limit_bytes,
        predicted_bytes=predicted_bytes,
    )


def shortage_message(failure: BaseException, reason: str, *, limit_bytes: int, predicted_bytes: int) -> str:
    """What happened, in terms of the user's limit, and what to set.

    Torch's own words are in it: tuners look for them.
    """
    return (
        f"out of memory inside mem_limit {format_bytes(limit_bytes)}: the plan was to peak at "
        f"{format_bytes(predicted_bytes)}; "
        f"{_actual_peak()}. {reason}. Set mem_limit to less than what the device really has for this process, lower "
        "the batch size, or free "
        f"what others hold there. torch said: {failure}"
    )


def _actual_peak() -> str:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return f"the allocator has given out {format_bytes(torch.cuda.max_memory_allocated())} at most"
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return "the actual peak is not known here"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
    return f"the whole process has had {format_bytes(resident)} in memory at most"
