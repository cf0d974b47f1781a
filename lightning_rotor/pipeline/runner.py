"""Runs the pipeline stages of one process together with the others: training steps, and forwards alone.

The schedules are those of :mod:`torch.distributed.pipelining`; they get stages, shapes, random numbers and a loss::

    inputs ──split──► micro-batches ──► ScheduleGPipe │ Schedule1F1B │ ... ──► outputs on every process
                                        MicroBatchStage ─ Part ─ Executor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleLoopedBFS

from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.execution.options import kept_attributes, lent_buffers, undisturbed
from lightning_rotor.pipeline.micro_batches import BatchNorm, BatchStatistics
from lightning_rotor.pipeline.placement import PipelineProcesses, share
from lightning_rotor.pipeline.run_context import RunContext
from lightning_rotor.pipeline.schedule import PipelineError, PipelineScheduleName, check_numbers
from lightning_rotor.pipeline.stage_runner import Gradients, Layout, MicroBatchStage, Part
from lightning_rotor.stages.sequential import packed

Layouts: TypeAlias = tuple[tuple[Layout, ...], ...]
"""By micro-batch, what crosses each cut, the input and the output included."""
Inputs: TypeAlias = Sequence[Sequence[Any]]
"""By micro-batch, the values that the chain takes. Only their shapes matter where the first stage is not."""
Loss: TypeAlias = Callable[[Any, int], torch.Tensor]
"""The loss of a micro-batch, from its output and its number."""
Between: TypeAlias = Callable[[tuple[Any, ...], tuple[bool, ...]], Sequence[Sequence[torch.Tensor | None]]]
"""From outputs by micro-batch, and which of their tensors take gradients, to those gradients by micro-batch."""


class Shapes:
    """Finds out what crosses cuts, together with the other processes, before any kind of micro-batch runs."""

    def __init__(self, parts: Mapping[int, Part], stages: int, processes: PipelineProcesses) -> None:
        self._parts, self._stages, self._device, self._group = parts, stages, processes.device, processes.group
        self._size = processes.size
        self._known: dict[Any, tuple[Layout, ...]] = {}

    def of(self, inputs: Inputs, signature: Any, context: RunContext) -> Layouts:
        """Layouts of what crosses cuts; equal micro-batches are looked at once, when first seen."""
        found = []
        for values in inputs:
            layout = Layout.of(values, "the model's input")
            key = layout, signature, context.dtypes
            if key not in self._known:
                self._known[key] = (layout, *self._scouted(values, layout, context))
            found.append(self._known[key])
        return tuple(found)

    def _scouted(self, values: Sequence[Any], layout: Layout, context: RunContext) -> list[Layout]:
        """Layouts seen by running one micro-batch through all stages, without leaving a trace."""
        layouts: list[Layout] = []
        tensors = layout.flat(values)
        trained = torch.is_grad_enabled()
        for number in range(self._stages):
            answer: list[Any] = [None]
            made: list[torch.Tensor] = []
            if number in self._parts:
                with context.restored():
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
            context.enter_context(torch.set_grad_enabled(trained))
            made = part.run(layout.values(given))
            try:
                last = part.stages[-1]
                sizes = isinstance(last.modules[-1], GraphSlice)
                found = Layout.of(made, f"pipeline stage {number} (it ends with {last.name!r})", sizes=sizes)
            except PipelineError as error:
                return [error], []
            return [found], [tensor.detach().contiguous() for tensor in found.flat(made)]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a training step by micro-batch, the same on every process."""

    outputs: tuple[Any, ...]  # without a graph
    input_gradients: tuple[Gradients, ...]  # one for each tensor in the chain's input; None where it asks for none


class PipelineRunner:
    """The pipeline stages of this process: process ``d`` of ``D`` has those numbered ``d``, ``d + D``, ...

    ``batch_norms`` are the layers with deferred statistics; it says how many values of a channel a row has.
    """

    def __init__(
        self,
        parts: Mapping[int, Part],
        stages: int,
        *,
        schedule: PipelineScheduleName,
        processes: PipelineProcesses,
        batch_norms: Mapping[BatchNorm, float] | None = None,
    ) -> None:
        self._parts = dict(sorted(parts.items()))
        for part in self._parts.values() if batch_norms else ():
            inside = [each for stage in part.stages for _, each in stage.submodules()]
            part.statistics = BatchStatistics(inside, batch_norms or {})
        self._stages, self._schedule, self._processes = stages, schedule, processes
        self._device, self._group = processes.device, processes.group
        self._shapes = Shapes(parts, stages, processes)
        # One at a time, for its buffers take memory: what is received, once for each micro-batch.
        self._ready: tuple[Any, Any, list[MicroBatchStage]] | None = None
        # Torch cuts what it is given as targets: each micro-batch's is its number.
        self._numbers = torch.arange(0)
        self._loss: Loss | None = None
        self._outputs: dict[int, list[torch.Tensor]] = {}
        self._has_first, self._has_last = 0 in parts, stages - 1 in parts
        if self._has_last:
            parts[stages - 1].outputs = self._outputs

    @property
    def stages(self) -> Sequence[MicroBatchStage]:
        """Torch's stages of this process, as they ran last."""
        return () if self._ready is None else self._ready[2]

    def train(
        self, inputs: Inputs, loss: Loss, *, seed: int, signature: Any = None, context: RunContext | None = None
    ) -> StepResult:
        """Run forward and backward of all micro-batches; parameter gradients are added to existing ones.

        ``loss`` is called on the last stage's process, in the order of the schedule. ``seed`` and ``signature`` (which
        parameters learn) are the same on all processes. ``context`` holds in forwards only; by default that of this
        call.
        """
        layouts = self._seen(inputs, signature, context)
        self._loss = loss
        try:
            stages = self._run(layouts, inputs, seed, training=True)
        finally:
            self._loss = None
        gradients = self._shared_input_gradients(layouts, stages)
        return StepResult(self._shared_outputs(layouts), gradients)

    def train_in_phases(
        self, inputs: Inputs, between: Between, *, seed: int, signature: Any = None, context: RunContext | None = None
    ) -> StepResult:
        """:meth:`train` under ``"gpipe"``; every process calls ``between`` after all forwards for output gradients."""
        layouts = self._seen(inputs, signature, context)
        asking = tuple(meta.requires_grad for meta in layouts[0][-1].metas)

        def turn(stage: MicroBatchStage) -> None:
            for number, gradients in enumerate(between(self._shared_outputs(layouts), asking)):
                if stage.is_last:
                    stage.set_local_bwd_input(tuple(gradients), number)

        stages = self._run(layouts, inputs, seed, training=True, before_backwards=turn)
        return StepResult((), self._shared_input_gradients(layouts, stages))

    def forward(self, inputs: Inputs, *, seed: int, signature: Any = None) -> tuple[Any, ...]:
        """By micro-batch, the chain's output without gradients, on every process."""
        with torch.no_grad():
            layouts = self._shapes.of(inputs, (False, signature), RunContext())
            for stage in self._run(layouts, inputs, seed, training=False):
                stage.clear_runtime_states()
            return self._shared_outputs(layouts)

    def check(self, values: Sequence[Any], *, signature: Any = None) -> None:
        """Refuse, on every process, a micro-batch that training cannot hand from stage to stage."""
        self._seen([values], signature, None)

    def release(self) -> None:
        """Free the memory of buffers."""
        self._ready = None

    # ---------------------------------------------------------------- a step

    def _seen(self, inputs: Inputs, signature: Any, context: RunContext | None) -> Layouts:
        """Layouts of what crosses cuts in training."""
        context = context or RunContext()
        for part in self._parts.values():
            part.context = context.restored
        return self._shapes.of(inputs, (True, signature), context)

    def _run(
        self,
        layouts: Layouts,
        inputs: Inputs,
        seed: int,
        *,
        training: bool,
        before_backwards: Callable[[MicroBatchStage], None] | None = None,
    ) -> Sequence[MicroBatchStage]:
        for number, part in self._parts.items():
            part.takes = tuple(layout[number] for layout in layouts)
            part.gives = tuple(layout[number + 1] for layout in layouts)
            part.seed = seed
            part.rows = tuple(next((m.shape[0] for m in layout[0].metas if m.shape), 1) for layout in layouts)
        schedule, stages = self._prepared(layouts, training=training)
        if self._has_first:
            stages[0].inputs = [
                tuple(tensor.detach() for tensor in layout[0].flat(values))
                for layout, values in zip(layouts, inputs, strict=True)
            ]
        stages[0].before_backwards = before_backwards
        try:
            schedule.step(target=self._numbers, return_outputs=False)
        finally:
            stages[0].before_backwards = None
        return stages

    def _loss_of(self, output: Any, micro_batch: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch; torch calls this behind the last stage's forward."""
        if self._loss is None:
            return torch.zeros(())  # gradients of the output come by themselves
        number = int(micro_batch)
        return self._loss(packed(self._parts[self._stages - 1].gives[number].values(output)), number)

    def _prepared(self, layouts: Layouts, *, training: bool) -> tuple[Any, list[MicroBatchStage]]:
        """Torch's schedule and stages for these layouts."""
        key = layouts, training
        if self._ready is None or self._ready[0] != key:
            self._ready = None
            stages = [
                MicroBatchStage(part, number, self._stages, self._processes, trains=training)
                for number, part in self._parts.items()
            ]
            loss = self._loss_of if training else None
            self._numbers = torch.arange(len(layouts))
            self._ready = key, _torch_schedule(self._schedule, stages, len(layouts), loss), stages
        return self._ready[1], self._ready[2]

    def _shared_outputs(self, layouts: Layouts) -> tuple[Any, ...]:
        shared = []
        for number, layout in enumerate(layouts):
            tensors = self._outputs.pop(number, None) or [meta.buffer(self._device) for meta in layout[-1].metas]
            for tensor in tensors:
                share(tensor, self._group, source=(self._stages - 1) % self._processes.size)
            shared.append(packed(layout[-1].values(tensors)))
        return tuple(shared)

    def _shared_input_gradients(self, layouts: Layouts, stages: Sequence[MicroBatchStage]) -> tuple[Gradients, ...]:
        shared = []
        for number, (layout, *_) in enumerate(layouts):
            found = stages[0].input_gradients(number) if self._has_first else (None,) * len(layout.metas)
            tensors: list[torch.Tensor | None] = []
            for meta, gradient in zip(layout.metas, found, strict=True):
                tensor = None
                if meta.requires_grad:
                    tensor = meta.buffer(self._device) if gradient is None else gradient
                    share(tensor, self._group)
                tensors.append(tensor)
            shared.append(tuple(tensors))
        return tuple(shared)


def _torch_schedule(name: PipelineScheduleName, stages: list[Any], micro_batches: int, loss: Any) -> Any:
    """A schedule of torch; GPipe's for a small last batch or a forward alone."""
    options = {"n_microbatches": micro_batches, "loss_fn": loss, "scale_grads": False}
    devices = stages[0].group_size
    if name == "interleaved":
        try:
            check_numbers(name, devices, micro_batches, len(stages))
        except PipelineError:
            return ScheduleLoopedBFS(stages, **options)
        return ScheduleInterleaved1F1B(stages, **options) if loss is not None else ScheduleLoopedBFS(stages, **options)
    if name == "1f1b" and loss is not None and micro_batches >= devices:
        return Schedule1F1B(stages[0], **options)
    return ScheduleGPipe(stages[0], **options)
