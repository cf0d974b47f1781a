"""Out of memory inside a planned forward: how it can run a second time, and the message where it cannot."""

from __future__ import annotations

from operator import attrgetter, is_, ne
from typing import Any

import torch

from lightning_rotor.capture.guards import version_of
from lightning_rotor.execution.passes import buffers_of
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.private.torch_names import any_hooks_of_all, copy_each
from lightning_rotor.private.values import tree_leaves, uncounted_copy
from lightning_rotor.profiling import Profile
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.snapshot import SMALL_BYTES, Snapshot
from lightning_rotor.units import format_bytes


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
        copied, copies = zip(*pairs, strict=True) if pairs else ((), ())
        is_same = len(copied) == len(buffers) and all(map(is_, copied, buffers))
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
    """The message of an error, in terms of the user's limit. It contains torch's words, as tuners look for them.

    ``predicted_bytes`` is what the failed plan was to take.
    """
    return (
        f"out of memory inside mem_limit {format_bytes(limit_bytes)}: the plan was to peak at "
        f"{format_bytes(predicted_bytes)}. {reason}. Set mem_limit to less than what the device "
        f"really has for this process, lower the batch size, or free what others hold there. torch said: {failure}"
    )
