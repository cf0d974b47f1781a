r"""Runs the pipeline stages of one process together with the others: training steps, and forwards alone.

The schedules are those of :mod:`torch.distributed.pipelining`; they get stages, shapes, random numbers and a loss::

    inputs ──split──► micro-batches ──► ScheduleGPipe │ Schedule1F1B │ ... ──► outputs on every process
                                        MicroBatchStage ─ Part ─ Executor
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.capture.sequentialize import SequentialCut
from lightning_rotor.errors import PipelineError
from lightning_rotor.execution.isolated import kept_attributes, lent_buffers, undisturbed
from lightning_rotor.execution.settings import Settings
from lightning_rotor.pipeline.layouts import Gradients, Layout, Tensors
from lightning_rotor.pipeline.micro_batch_stage import MicroBatchStage
from lightning_rotor.pipeline.micro_batches import Call
from lightning_rotor.pipeline.part import Part, PipelineStep
from lightning_rotor.pipeline.partition import Partition
from lightning_rotor.pipeline.pipeline_schedule import PipelineScheduleName, unknown_schedule
from lightning_rotor.pipeline.processes import PipelineProcesses, first, share
from lightning_rotor.stages.sequential import wiring_of
from lightning_rotor.stages.wiring import packed, unpacked

Cut: TypeAlias = SequentialCut | GraphCut
Inputs: TypeAlias = Sequence[Sequence[Any]]
"""By micro-batch, values that the chain takes. Where the first stage is elsewhere, their shapes alone matter."""
Loss: TypeAlias = Callable[[Any, int], torch.Tensor]
"""The loss of a micro-batch, from its output and its number."""


class _Prepared(NamedTuple):
    """A schedule for steps of certain layouts, with its buffers.

    Attributes:
        layouts: See :class:`.PipelineStep`.
        trains: The schedule has backwards.
        run: Runs torch's schedule.
        stages: Those of this process.
    """

    layouts: tuple[tuple[Layout, ...], ...]
    trains: bool
    run: Callable[[], Any]
    stages: list[MicroBatchStage]


class PipelineRunner:
    """Runs a cut module; process ``d`` of ``D`` has the pipeline stages numbered ``d``, ``d + D``, ..."""

    def __init__(
        self,
        module: nn.Module,
        cut: Cut,
        parts: Sequence[Part],
        partition: Partition,
        processes: PipelineProcesses,
    ) -> None:
        self.partition, self.processes = partition, processes
        self._module, self._cut = module, cut
        self._parts = {part.number: part for part in parts}
        self._stages = partition.problem.stages
        self._device, self._group = processes.device, processes.group
        # Places, and not parameters: a fit replaces those of other processes, and freezing may happen at any time.
        self._parameter_slots: list[tuple[dict[str, Any], str]] = []
        for table in _parameter_tables(module):
            self._parameter_slots += [(table, name) for name in table]
        # By the input's layout and the settings, the layouts of all cuts.
        self._seen_layouts: dict[Any, tuple[Layout, ...]] = {}
        # One at a time, for its buffers take memory: what is received, once for each micro-batch.
        self._prepared: _Prepared | None = None
        self._loss: Loss | None = None
        self._outputs: dict[int, list[torch.Tensor]] = {}
        last_part = self._parts.get(self._stages - 1)
        if last_part is not None:
            last_part.outputs = self._outputs
        # By micro-batch, what this process's last stage has made; parts write it, and a step takes it.

    def inputs(self, calls: Sequence[Call]) -> list[Sequence[Any]]:
        """By micro-batch, the values that the chain takes."""
        count = len(wiring_of(self._cut.stages).wire.reads)
        inputs = []
        for args, kwargs in calls:
            value = self._cut.bind(args, kwargs)
            if value is None:
                raise PipelineError(
                    f"{type(self._module).__name__} was cut into pipeline stages for another kind of call: expected "
                    "arguments that differ in their tensors alone, and a module that has not changed since training "
                    "began"
                )
            inputs.append(unpacked(value, count))
        return inputs

    def run(
        self,
        inputs: Inputs,
        loss: Loss | None,
        *,
        seed: int,
        context: Settings | None = None,
    ) -> tuple[tuple[Any, ...], tuple[Gradients, ...]]:
        """Run forward and backward of all micro-batches or, without a loss, forwards without gradients.

        The last stage's process calls ``loss``. Forwards of training run in ``context``. Returns, by micro-batch and on
        every process, outputs without a graph, and gradients of the tensors in the chain's input, if any.
        """
        with torch.set_grad_enabled(loss is not None):
            step = self._step(inputs, seed, context)
            self._loss = loss
            prepared = self._prepare(step, inputs)
            prepared.run()
            self._loss = None
        gradients: tuple[Gradients, ...] = ()
        if step.trains:
            # Gradients go to all, since each process runs the user's code before the module, and learns from it.
            gradients = self._shared_input_gradients(step, prepared.stages)
        else:
            # A schedule without backwards leaves forwards in flight.
            for stage in prepared.stages:
                stage.clear_runtime_states()
        return self._shared_outputs(step), gradients

    def check(self, call: Call) -> None:
        """Refuse, on every process, a micro-batch that training cannot hand from stage to stage."""
        self._step(self.inputs([call]), 0)

    def release(self) -> None:
        """Free the memory of buffers."""
        self._prepared = None

    # ---------------------------------------------------------------- shapes

    def _step(self, inputs: Inputs, seed: int, context: Settings | None = None) -> PipelineStep:
        """A step with layouts of what crosses cuts; equal micro-batches are looked at once, when first seen."""
        trains = torch.is_grad_enabled()
        # What is frozen decides which gradients are sent.
        learning = self._learning()
        context = context or Settings()
        layouts = []
        for values in inputs:
            layout = Layout.of(values, "the model's input")
            key = layout, trains, learning, context.dtypes
            if key not in self._seen_layouts:
                seen = self._scouted(layout, layout.flat(values), context)
                self._seen_layouts[key] = (layout, *seen)
            layouts.append(self._seen_layouts[key])
        return PipelineStep(tuple(layouts), seed, context.restored, trains)

    def _learning(self) -> tuple[bool, ...]:
        """``requires_grad`` of all parameters of the module."""
        parameters = [table[name] for table, name in self._parameter_slots]
        return tuple(parameter.requires_grad for parameter in parameters if parameter is not None)

    def _scouted(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        context: Settings,
    ) -> list[Layout]:
        """Layouts seen by running one micro-batch through all stages, without leaving a trace."""
        layouts: list[Layout] = []
        for number in range(self._stages):
            source = number % self.processes.size
            if number in self._parts:
                answer, made = self._looked_at(number, layout, tensors, context)
            else:
                answer, made = None, []
            # One process looks, and all are told its answer: each must prepare buffers for what it is sent.
            layout = first(answer, self._group, source=source)
            layouts.append(layout)
            tensors = self._shared(made or layout.buffers(self._device), source)
        return layouts

    def _looked_at(
        self,
        number: int,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        settings: Settings,
    ) -> tuple[Layout | PipelineError, list[torch.Tensor]]:
        """The layout of what a stage makes, and the tensors; or what is wrong with it, for all processes to hear."""
        part = self._parts[number]
        trains = torch.is_grad_enabled()
        given = []
        for tensor, meta in zip(tensors, layout.metas, strict=True):
            given.append(tensor.detach().requires_grad_(meta.requires_grad))
        with ExitStack() as context:
            context.enter_context(settings.restored())
            context.enter_context(undisturbed(self._device))
            for stage in part.stages:
                context.enter_context(kept_attributes(stage))
                context.enter_context(lent_buffers(stage))
            context.enter_context(torch.set_grad_enabled(trains))
            made = part.run(layout.values(given))
            last = part.stages[-1]
            # A recorded forward hands on sizes that its code has asked for.
            may_give_sizes = isinstance(last.modules[-1], GraphSlice)
            where = f"pipeline stage {number} (it ends with {last.name!r})"
            try:
                made_layout = Layout.of(made, where, sizes=may_give_sizes)
            except PipelineError as error:
                return error, []
            # Without the graph, which would hold the activations of a whole stage.
            tensors_made = made_layout.flat(made)
            return made_layout, [tensor.detach().contiguous() for tensor in tensors_made]

    # ---------------------------------------------------------------- a step

    def _prepare(self, step: PipelineStep, inputs: Inputs) -> _Prepared:
        """The schedule for a step: that of the last one if it was alike."""
        for part in self._parts.values():
            part.step = step
        prepared = self._prepared
        wanted = step.layouts, step.trains
        if prepared is None or (prepared.layouts, prepared.trains) != wanted:
            # Before new buffers are made, for both at once may not fit.
            self._prepared = prepared = None
            self._prepared = prepared = self._prepared_anew(step)
        if 0 in self._parts:
            # Detached: the gradient of the input is handed to the user's graph behind the schedule.
            first_inputs: list[Tensors] = []
            for layouts, values in zip(step.layouts, inputs, strict=True):
                tensors = layouts[0].flat(values)
                first_inputs.append(tuple(tensor.detach() for tensor in tensors))
            prepared.stages[0].inputs = first_inputs
        return prepared

    def _prepared_anew(self, step: PipelineStep) -> _Prepared:
        parts = self._parts.values()
        stages = [MicroBatchStage(part, self._stages, self.processes) for part in parts]
        loss = self._loss_of if step.trains else None
        name = self.partition.problem.schedule
        schedule = _torch_schedule(name, stages, len(step.layouts), loss)
        # Torch cuts what it is given as targets: each micro-batch's is its number.
        numbers = torch.arange(len(step.layouts))
        run = partial(schedule.step, target=numbers, return_outputs=False)
        return _Prepared(step.layouts, step.trains, run, stages)

    def _loss_of(self, output: Any, micro_batch: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch; torch calls this behind the last stage's forward."""
        assert self._loss is not None
        number = int(micro_batch)
        layout = self._parts[self._stages - 1].step.layouts[number][-1]
        return self._loss(packed(layout.values(output)), number)

    def _shared_outputs(self, step: PipelineStep) -> tuple[Any, ...]:
        """By micro-batch, the chain's output, on every process."""
        last_process = (self._stages - 1) % self.processes.size
        outputs = []
        for number, layouts in enumerate(step.layouts):
            layout = layouts[-1]
            tensors = self._outputs.pop(number, None)
            if tensors is None:
                tensors = list(layout.buffers(self._device))
            shared = self._shared(tensors, last_process)
            outputs.append(packed(layout.values(shared)))
        return tuple(outputs)

    def _shared_input_gradients(
        self,
        step: PipelineStep,
        stages: Sequence[MicroBatchStage],
    ) -> tuple[Gradients, ...]:
        """By micro-batch, gradients of the chain's inputs, on every process."""
        shared = []
        for number, layouts in enumerate(step.layouts):
            if 0 in self._parts:
                gradients = stages[0].get_local_bwd_output(number)
            else:
                gradients = layouts[0].gradient_buffers(self._device)
            shared.append(self._shared(gradients))
        return tuple(shared)

    def _shared(self, tensors: Any, source: int = 0) -> Any:
        """Tensors, or Nones, with the values of one process on all."""
        for tensor in tensors:
            if tensor is not None:
                share(tensor, self._group, source=source)
        return tensors


def _parameter_tables(module: nn.Module) -> list[dict[str, Any]]:
    """The tables in which the parameters stand. Other processes' parameters are replaced there when a fit begins."""
    return [submodule._parameters for submodule in module.modules()]


def _torch_schedule(
    name: PipelineScheduleName,
    stages: list[Any],
    micro_batches: int,
    loss: Any,
) -> Any:
    """A schedule of torch; GPipe's for a small last batch or a forward alone."""
    # torch would divide gradients by the number of micro-batches. Losses are weighted by rows before, since a small
    # last micro-batch counts less.
    options = {
        "n_microbatches": micro_batches,
        "loss_fn": loss,
        "scale_grads": False,
    }
    devices = stages[0].group_size
    trains = loss is not None
    if name == "interleaved":
        # torch's interleaved schedule refuses numbers of micro-batches that make no whole rounds.
        rounds = max(1, micro_batches // devices)
        if trains and micro_batches % rounds == 0:
            return ScheduleInterleaved1F1B(stages, **options)
        return ScheduleLoopedBFS(stages, **options)
    # 1F1B needs a micro-batch for each device before the first one comes back.
    if name == "1f1b" and trains and micro_batches >= devices:
        return Schedule1F1B(stages[0], **options)
    if name in ("gpipe", "1f1b"):
        return ScheduleGPipe(stages[0], **options)
    raise unknown_schedule(name)
