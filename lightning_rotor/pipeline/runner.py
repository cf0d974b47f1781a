"""Runs the pipeline stages of one process together with the others: training steps, and forwards alone.

The schedules are those of :mod:`torch.distributed.pipelining`; they get stages, shapes, random numbers and a loss::

    inputs ──split──► micro-batches ──► ScheduleGPipe │ Schedule1F1B │ ... ──► outputs on every process
                                        MicroBatchStage ─ Part ─ Executor
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleLoopedBFS

from lightning_rotor.capture.cuts import GraphCut, SequentialCut
from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.execution.options import kept_attributes, lent_buffers, undisturbed
from lightning_rotor.pipeline.partition import Partition
from lightning_rotor.pipeline.placement import PipelineProcesses, first, share
from lightning_rotor.pipeline.run_context import Call, RunContext
from lightning_rotor.pipeline.schedule import PipelineError, PipelineScheduleName
from lightning_rotor.pipeline.stage_runner import Gradients, Layout, MicroBatchStage, Part, Step
from lightning_rotor.stages.sequential import packed, unpacked, wiring_of

Cut: TypeAlias = SequentialCut | GraphCut
Inputs: TypeAlias = Sequence[Sequence[Any]]
"""By micro-batch, the values that the chain takes. Only their shapes matter where the first stage is not."""
Loss: TypeAlias = Callable[[Any, int], torch.Tensor]
"""The loss of a micro-batch, from its output and its number."""


class PipelineRunner:
    """Runs a cut module; process ``d`` of ``D`` has the pipeline stages numbered ``d``, ``d + D``, ..."""

    def __init__(
        self, module: nn.Module, cut: Cut, parts: Sequence[Part], partition: Partition, processes: PipelineProcesses
    ) -> None:
        self._module, self._cut, self._parts = module, cut, {part.number: part for part in parts}
        self.partition, self.processes, self._stages = partition, processes, partition.problem.stages
        self._device, self._group = processes.device, processes.group
        self._slots = [(each._parameters, name) for each in module.modules() for name in each._parameters]
        self._known: dict[Any, tuple[Layout, ...]] = {}
        # One at a time, for its buffers take memory: what is received, once for each micro-batch.
        self._ready: tuple[Any, Any, list[MicroBatchStage]] | None = None
        self._loss: Loss | None = None
        self._outputs: dict[int, list[torch.Tensor]] = {}
        self._has_first = 0 in self._parts
        if self._stages - 1 in self._parts:
            self._parts[self._stages - 1].outputs = self._outputs

    @property
    def stages(self) -> Sequence[MicroBatchStage]:
        """Torch's stages of this process, as they ran last."""
        return () if self._ready is None else self._ready[2]

    def inputs(self, calls: Sequence[Call]) -> list[Sequence[Any]]:
        """By micro-batch, the values that the chain takes."""
        found = []
        for args, kwargs in calls:
            value = self._cut.bind(args, kwargs)
            if value is None:
                raise PipelineError(
                    f"{type(self._module).__name__} was cut into pipeline stages for another kind of call: expected "
                    "arguments that differ in their tensors alone, and a module that has not changed since training "
                    "began"
                )
            found.append(unpacked(value, len(wiring_of(self._cut.stages).wire.reads)))
        return found

    def train(
        self, inputs: Inputs, loss: Loss, *, seed: int, context: RunContext | None = None
    ) -> tuple[tuple[Any, ...], tuple[Gradients, ...]]:
        """Run forward and backward of all micro-batches; parameter gradients are added to existing ones.

        ``loss`` is called on the last stage's process, in the order of the schedule. ``seed`` is the same on all
        processes. ``context`` holds in forwards only; by default that of this call. Returns, by micro-batch and on
        every process, outputs without a graph, and gradients of the tensors in the chain's input (None where it asks
        for none).
        """
        step = self._step(inputs, seed, context)
        self._loss = loss
        try:
            schedule, stages = self._prepared(step, inputs)
            schedule()
        finally:
            self._loss = None
        gradients = self._shared_input_gradients(step, stages)
        return self._shared_outputs(step), gradients

    def forward(self, inputs: Inputs, *, seed: int) -> tuple[Any, ...]:
        """By micro-batch, the chain's output without gradients, on every process."""
        with torch.no_grad():
            step = self._step(inputs, seed)
            schedule, stages = self._prepared(step, inputs)
            schedule()
            for stage in stages:
                stage.clear_runtime_states()
            return self._shared_outputs(step)

    def check(self, call: Call) -> None:
        """Refuse, on every process, a micro-batch that training cannot hand from stage to stage."""
        self._step(self.inputs([call]), 0)

    def release(self) -> None:
        """Free the memory of buffers."""
        self._ready = None

    # ---------------------------------------------------------------- shapes

    def _step(self, inputs: Inputs, seed: int, context: RunContext | None = None) -> Step:
        """A step with layouts of what crosses cuts; equal micro-batches are looked at once, when first seen."""
        layouts, trains, context = [], torch.is_grad_enabled(), context or RunContext()
        learns = tuple(each.requires_grad for table, name in self._slots if (each := table[name]) is not None)
        for values in inputs:
            layout = Layout.of(values, "the model's input")
            key = layout, trains, learns, context.dtypes
            if key not in self._known:
                self._known[key] = (layout, *self._scouted(layout, layout.flat(values), context))
            layouts.append(self._known[key])
        return Step(tuple(layouts), seed, context.restored, trains)

    def _scouted(self, layout: Layout, tensors: Sequence[torch.Tensor], context: RunContext) -> list[Layout]:
        """Layouts seen by running one micro-batch through all stages, without leaving a trace."""
        layouts: list[Layout] = []
        for number in range(self._stages):
            answer, made, source = None, list[torch.Tensor](), number % self.processes.size
            if number in self._parts:
                answer, made = self._looked_at(number, layout, tensors, context)
            layout = first(answer, self._group, source=source)
            layouts.append(layout)
            tensors = self._shared(made or layout.buffers(self._device), source)
        return layouts

    def _looked_at(
        self, number: int, layout: Layout, tensors: Sequence[torch.Tensor], settings: RunContext
    ) -> tuple[Any, list[torch.Tensor]]:
        """What a stage makes: its layout or what is wrong with it, and the tensors."""
        part, trained = self._parts[number], torch.is_grad_enabled()
        given = [
            tensor.detach().requires_grad_(meta.requires_grad)
            for tensor, meta in zip(tensors, layout.metas, strict=True)
        ]
        with ExitStack() as context:
            context.enter_context(settings.restored())
            context.enter_context(undisturbed(self._device))
            for stage in part.stages:
                context.enter_context(kept_attributes(stage))
                context.enter_context(lent_buffers(stage))
            context.enter_context(torch.set_grad_enabled(trained))
            made, last = part.run(layout.values(given)), part.stages[-1]
            try:
                sizes = isinstance(last.modules[-1], GraphSlice)
                found = Layout.of(made, f"pipeline stage {number} (it ends with {last.name!r})", sizes=sizes)
            except PipelineError as error:
                return error, []
            return found, [tensor.detach().contiguous() for tensor in found.flat(made)]

    # ---------------------------------------------------------------- a step

    def _prepared(self, step: Step, inputs: Inputs) -> tuple[Callable[[], Any], list[MicroBatchStage]]:
        """What runs a schedule of torch for a step, and its stages; those of the last one if it was alike."""
        for part in self._parts.values():
            part.step = step
        key = step.layouts, step.trains
        if self._ready is None or self._ready[0] != key:
            self._ready = None
            stages = [MicroBatchStage(part, self._stages, self.processes) for part in self._parts.values()]
            loss = self._loss_of if step.trains else None
            schedule = _torch_schedule(self.partition.problem.schedule, stages, len(step.layouts), loss)
            # Torch cuts what it is given as targets: each micro-batch's is its number.
            numbers = torch.arange(len(step.layouts))
            self._ready = key, partial(schedule.step, target=numbers, return_outputs=False), stages
        _, schedule, stages = self._ready
        if self._has_first:
            stages[0].inputs = [
                tuple(tensor.detach() for tensor in layout[0].flat(values))
                for layout, values in zip(step.layouts, inputs, strict=True)
            ]
        return schedule, stages

    def _loss_of(self, output: Any, micro_batch: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch; torch calls this behind the last stage's forward."""
        assert self._loss is not None
        number = int(micro_batch)
        layout = self._parts[self._stages - 1].step.layouts[number][-1]
        return self._loss(packed(layout.values(output)), number)

    def _shared_outputs(self, step: Step) -> tuple[Any, ...]:
        shared, last = [], (self._stages - 1) % self.processes.size
        for number, (*_, layout) in enumerate(step.layouts):
            tensors = self._shared(self._outputs.pop(number, None) or layout.buffers(self._device), last)
            shared.append(packed(layout.values(tensors)))
        return tuple(shared)

    def _shared_input_gradients(self, step: Step, stages: Sequence[MicroBatchStage]) -> tuple[Gradients, ...]:
        shared = []
        for number, (layout, *_) in enumerate(step.layouts):
            found = stages[0].get_local_bwd_output(number) if self._has_first else layout.gradient_buffers(self._device)
            shared.append(self._shared(found))
        return tuple(shared)

    def _shared(self, tensors: Any, source: int = 0) -> Any:
        """Tensors, or Nones, with the values of one process on all."""
        for tensor in tensors:
            if tensor is not None:
                share(tensor, self._group, source=source)
        return tensors


def _torch_schedule(name: PipelineScheduleName, stages: list[Any], micro_batches: int, loss: Any) -> Any:
    """A schedule of torch; GPipe's for a small last batch or a forward alone."""
    options = {"n_microbatches": micro_batches, "loss_fn": loss, "scale_grads": False}
    devices, trains = stages[0].group_size, loss is not None
    if name == "interleaved":
        rounds = max(1, micro_batches // devices)
        looped = ScheduleInterleaved1F1B if trains and not micro_batches % rounds else ScheduleLoopedBFS
        return looped(stages, **options)
    plain = Schedule1F1B if name == "1f1b" and trains and micro_batches >= devices else ScheduleGPipe
    return plain(stages[0], **options)
