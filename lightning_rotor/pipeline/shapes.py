"""What crosses the cuts of a pipeline: looked at once for every kind of micro-batch, before it runs.

Torch would infer shapes by running the user's modules on garbage, which BatchNorm would remember.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from lightning_rotor.pipeline.parts import Layout, Part
from lightning_rotor.pipeline.sharing import share
from lightning_rotor.pipeline.surroundings import Surroundings
from lightning_rotor.pipeline_schedule import PipelineError
from lightning_rotor.undisturbed import kept_attributes, lent_buffers, undisturbed

Cuts: TypeAlias = tuple[Layout, ...]
"""For one micro-batch, what crosses each cut, the input and the output included."""
Layouts: TypeAlias = tuple[Cuts, ...]
"""By micro-batch."""


class Shapes:
    """Finds out what crosses cuts, together with the other processes.

    Args:
        parts: This process's, by number.
        stages: How many there are on all processes.
        device: Where this process computes.
        group: Processes of the pipeline.
    """

    def __init__(
        self,
        parts: Mapping[int, Part],
        stages: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._parts, self._stages, self._device, self._group = parts, stages, device, group
        self._size = dist.get_world_size(group)
        self._known: dict[Any, Cuts] = {}

    def of(self, inputs: Sequence[Sequence[Any]], signature: Any, around: Surroundings) -> Layouts:
        """By micro-batch and cut, what crosses it. Equal micro-batches are looked at once, the first time that they are seen.

        Args:
            inputs: By micro-batch.
            signature: What shapes depend on besides.
            around: Of forwards.
        """
        found = []
        for number, values in enumerate(inputs):
            layout = Layout.of(values, "the model's input")
            key = layout, signature, around.dtypes
            if key not in self._known:
                self._known[key] = (layout, *self._scouted(values, layout, number, around))
            found.append(self._known[key])
        return tuple(found)

    def _scouted(self, values: Sequence[Any], layout: Layout, micro_batch: int, around: Surroundings) -> list[Layout]:
        """Run one micro-batch through all stages, one after the other, and leave no trace of it."""
        layouts: list[Layout] = []
        tensors = layout.flat(values)
        trained = torch.is_grad_enabled()
        for number in range(self._stages):
            answer: list[Any] = [None]
            made: list[torch.Tensor] = []
            if number in self._parts:
                with around.restored():
                    answer, made = self._looked_at(number, layout, tensors, trained)
            if self._size > 1:
                dist.broadcast_object_list(answer, group=self._group, group_src=number % self._size)
            if isinstance(answer[0], Exception):
                raise answer[0]
            layout = answer[0]
            layouts.append(layout)
            tensors = made or [meta.buffer(self._device) for meta in layout.metas]
            for tensor in tensors:
                share(tensor, self._group, source=number % self._size)
        return layouts

    def _looked_at(
        self, number: int, layout: Layout, tensors: Sequence[torch.Tensor], trained: bool
    ) -> tuple[list[Any], list[torch.Tensor]]:
        part = self._parts[number]
        given = [
            tensor.detach().requires_grad_(meta.requires_grad)
            for tensor, meta in zip(tensors, layout.metas, strict=True)
        ]
        with ExitStack() as context:
            context.enter_context(undisturbed(self._device))
            for stage in part.stages:
                context.enter_context(kept_attributes(stage))
                context.enter_context(lent_buffers(stage))
            if not trained:
                context.enter_context(torch.no_grad())
            made = part(layout.values(given))
            try:
                found = Layout.of(made, f"pipeline stage {number} (it ends with {part.stages[-1].name!r})")
            except PipelineError as error:
                return [error], []
            return [found], [tensor.detach().contiguous() for tensor in found.flat(made)]
