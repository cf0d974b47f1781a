"""Gradients of parameters that pipeline stages on several devices use, such as an embedding and the head tied to it.

Each of these devices holds a copy of the parameter, and its backwards give a part of the gradient. Behind the last
micro-batch the parts travel up the pipeline, each device adding its own, as autograd adds what later layers give first.
The sum travels down again, so that all optimizers take the same step and copies stay equal to the bit::

    device 3 ── its part ──► device 1 ── both ──► device 0 (owner)
             ◄── the sum ──           ◄── the sum ──
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.processes import PipelineProcesses

PIECE_BYTES = 4 * 2**20
"""Bytes of a message. Gradients are sent piece by piece, so that nobody needs room for a second one."""


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter and the processes that hold a copy of it, in the order of the pipeline: the first one owns it."""

    name: str
    parameter: nn.Parameter
    holders: tuple[int, ...]


class SharedGradients:
    """Lets all copies of each shared parameter have the sum of its gradients."""

    def __init__(self, shared: Sequence[SharedParameter], processes: PipelineProcesses) -> None:
        self._shared = tuple(shared)
        self._group, self._device = processes.group, processes.device
        # Without any there may be no process group to ask.
        self._rank = processes.rank if self._shared else 0

    def begin(self) -> None:
        """Before a step: what earlier steps have left, all copies have, and the owner's alone is added to."""
        for shared in self._shared:
            if self._rank in shared.holders[1:]:
                shared.parameter.grad = None

    def add_up(self) -> None:
        """Behind a step's backwards, on all processes at once: give every copy the sum."""
        if not self._shared:
            return
        for shared, has_gradient in zip(self._shared, self._with_gradients(), strict=True):
            # Of a frozen parameter, or one that the step has not used, nobody has a gradient: it stays None.
            if has_gradient and self._rank in shared.holders:
                self._add_up(shared)

    def _with_gradients(self) -> list[bool]:
        """By parameter, True if some process has a gradient of it."""
        counts = torch.zeros(len(self._shared), dtype=torch.int64, device=self._device)
        for place, shared in enumerate(self._shared):
            if self._rank in shared.holders and shared.parameter.grad is not None:
                counts[place] = 1
        # All must agree: whoever waits for a gradient that nobody sends waits without an end.
        dist.all_reduce(counts, group=self._group)
        return [count > 0 for count in counts.tolist()]

    def _add_up(self, shared: SharedParameter) -> None:
        gradient = self._dense_gradient(shared)
        place = shared.holders.index(self._rank)
        before = shared.holders[place - 1] if place > 0 else None
        behind = shared.holders[place + 1] if place + 1 < len(shared.holders) else None
        flat = gradient.view(-1)
        for piece in flat.split(max(1, PIECE_BYTES // flat.element_size())):
            if behind is not None:
                received = torch.empty_like(piece)
                dist.recv(received, group=self._group, group_src=behind)
                # In place: the sum needs no third tensor, and the piece is a view of the gradient itself.
                piece.add_(received)
            if before is not None:
                dist.send(piece, group=self._group, group_dst=before)
                dist.recv(piece, group=self._group, group_src=before)
            if behind is not None:
                dist.send(piece, group=self._group, group_dst=behind)

    def _dense_gradient(self, shared: SharedParameter) -> torch.Tensor:
        """This process's gradient, contiguous, as messages must be; zeros where it has none."""
        parameter = shared.parameter
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        if gradient.layout is not torch.strided:
            raise PipelineError(
                f"the gradient of {shared.name!r} is {gradient.layout}, and layers on {len(shared.holders)} devices "
                "share it: expected a dense one, to be added up. Use nn.Embedding(sparse=False), or untie the weights"
            )
        parameter.grad = gradient.contiguous()
        return parameter.grad
