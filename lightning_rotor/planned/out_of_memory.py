"""Out of memory inside a planned forward: how it can run a second time, and the message where it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter, is_, ne
from typing import Any

import torch

from lightning_rotor.capture.copies import version_of
from lightning_rotor.execution.lent_tensors import buffers_of
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.private.torch_names import any_hooks_of_all, copy_each, flattened, unflattened
from lightning_rotor.private.values import is_made_of_others, tree_leaves, uncounted_like
from lightning_rotor.profiling import Profile
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.snapshot import SMALL_BYTES, Snapshot
from lightning_rotor.units import format_bytes


def is_shortage(error: BaseException) -> bool:
    """True if an error means that the device has no memory left. The CPU's allocator raises no type of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)


_kind = attrgetter("shape", "dtype")


@dataclass(frozen=True, slots=True)
class _Copies:
    """Buffers as they were: some with a copy each, others of one type with a copy of all their values in a row."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    rows: list[tuple[list[torch.Tensor], torch.Tensor]]

    def restore(self) -> None:
        """Give the buffers their values of then."""
        with torch.no_grad():
            for buffer, copy in self.pairs:
                buffer.copy_(copy)
            for buffers, row in self.rows:
                copy_each(buffers, list(unflattened(row, buffers)))


class CopiedBuffers:
    """Copies of buffers, of which BatchNorm has many of a few bytes each. On the CPU their memory is kept."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._grouped: list[torch.Tensor] = []
        self._alone: list[torch.Tensor] = []
        self._alike: list[list[torch.Tensor]] = []

    def take(self, state: SegmentState) -> _Copies:
        """The buffers that a forward in training may update, as they are."""
        buffers = _buffers_that_may_change(state)
        # By identity, in C: it is asked at every forward, and buffers are rarely replaced.
        if len(buffers) != len(self._grouped) or not all(map(is_, buffers, self._grouped)):
            self._group(buffers)
        with torch.no_grad():
            rows = [(alike, flattened(alike)) for alike in self._alike]
        return _Copies(self._copied_one_by_one(self._alone), rows)

    def _group(self, buffers: list[torch.Tensor]) -> None:
        """Find those that can be copied in one go, for this call and for later ones."""
        by_type: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        self._alone = []
        for buffer in buffers:
            # Only plain numbers can be put in a row with others.
            is_plain = buffer.layout is torch.strided and not is_made_of_others(buffer)
            if buffer.device.type == "cpu" or not is_plain:
                self._alone.append(buffer)
            else:
                # A GPU takes 5 µs for each block and each kernel: 0.6 ms of a ResNet-18's step of 10 ms.
                by_type.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self._alike = list(by_type.values())
        self._grouped = buffers

    def _copied_one_by_one(self, buffers: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # Taken while it is in use: a forward inside this one makes copies of its own.
        pairs = self._kept
        self._kept = []
        copied = []
        copies = []
        for buffer, copy in pairs:
            copied.append(buffer)
            copies.append(copy)
        is_same = len(copied) == len(buffers) and all(map(is_, copied, buffers))
        # A buffer may have been given another shape in place.
        if not is_same or any(map(ne, map(_kind, copies), map(_kind, buffers))):
            copies = [uncounted_like(buffer) for buffer in buffers]
            pairs = list(zip(buffers, copies, strict=True))
        # One call of torch for each type, and not one for each buffer.
        by_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for buffer, copy in zip(buffers, copies, strict=True):
            sources, targets = by_type.setdefault(buffer.dtype, ([], []))
            sources.append(buffer)
            targets.append(copy)
        with torch.no_grad():
            for sources, targets in by_type.values():
                copy_each(targets, sources)
        return pairs

    def give_back(self, copies: _Copies) -> None:
        """Take the memory back when the forward is over."""
        # Large ones would stay for the backward, whose peak would feel them. Those in a row are on a GPU and go.
        for _, copy in copies.pairs:
            if copy.nbytes > SMALL_BYTES or copy.device.type != "cpu":
                return
        self._kept = copies.pairs


def _buffers_that_may_change(state: SegmentState) -> list[torch.Tensor]:
    """Statistics of normalizations in training, and the buffers of modules that remember something."""
    buffers = []
    for statistic in state.statistics:
        buffer = statistic.module._buffers[statistic.name]
        if statistic.module.training and buffer is not None:
            buffers.append(buffer)
    return buffers + [buffer for _, _, buffer in buffers_of(state.remembered)]


class BeforeForward:
    """The state that a forward may change, as it was before: of the modules which ``profile`` names, and of its input.

    It is noted at every forward, since a lack of memory is not announced. So it copies small buffers alone, into memory
    that is kept, and of large ones and of the input it notes the version.
    """

    __slots__ = ("_before", "_copies", "_generators", "_owner", "_versions", "_written")

    def __init__(self, profile: Profile, value: Any, buffers: CopiedBuffers) -> None:
        state = profile.state
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        self._generators: GeneratorStates | None = None
        if profile.draws_random:
            # torch's own layers never draw from the generators of Python and NumPy.
            host = bool(state.attributed)
            self._generators = GeneratorStates(tensors[0].device, counted=False, host=host)
            if self._generators.shared:
                self._generators.keep_only(state.drawn)
        # Torch's own layers have nothing that a forward could change, but for hooks on all modules.
        looks = state.attributed or any_hooks_of_all()
        self._before: Snapshot | None = None
        if looks:
            self._before = Snapshot(state.attributed, small_bytes=SMALL_BYTES)
        self._owner = buffers
        self._copies = buffers.take(state)
        self._written = state.written
        fixed = tensors + [buffer for _, _, buffer in buffers_of(state.watched)]
        self._versions = [(tensor, version_of(tensor)) for tensor in fixed]

    def restore(self) -> bool:
        """Set everything back; False if a parameter, an input or a large buffer changed, which nobody copied."""
        # Parameters are never copied, as that would be a second model.
        if self._written:
            return False
        # Before anything is put back: where this is refused, the error leaves all as it was.
        for tensor, version in self._versions:
            if version_of(tensor) != version:
                return False
        if self._before is not None:
            self._before.restore()
        self._copies.restore()
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
