"""Runs the pipeline stages of one process together with those of the others: training steps, and forwards alone.

The schedules are those of :mod:`torch.distributed.pipelining`; this module gives them stages, shapes, random numbers and a loss::

    inputs ──split──► micro-batches ──► ScheduleGPipe │ Schedule1F1B │ ScheduleInterleaved1F1B ──► outputs on every process
                                        MicroBatchStage ─ PartModule ─ Part ─ Executor
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
from lightning_rotor.pipeline.batch_statistics import BatchNorm, BatchStatistics
from lightning_rotor.pipeline.placement import share
from lightning_rotor.pipeline.schedule import PipelineError, PipelineScheduleName, check_numbers
from lightning_rotor.pipeline.stage_runner import Layout, MicroBatchStage, Part, PartModule
from lightning_rotor.pipeline.surroundings import Surroundings
from lightning_rotor.stages.sequential import packed

# ----------------------------------------------------------------------------------------------------
# What crosses the cuts of a pipeline: looked at once for every kind of micro-batch, before it runs.


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
                last = part.stages[-1]
                sizes = isinstance(last.modules[-1], GraphSlice)
                found = Layout.of(made, f"pipeline stage {number} (it ends with {last.name!r})", sizes=sizes)
            except PipelineError as error:
                return [error], []
            return [found], [tensor.detach().contiguous() for tensor in found.flat(made)]


# ----------------------------------------------------------------------------------------------------


Loss: TypeAlias = Callable[[Any, int], torch.Tensor]
"""The loss of a micro-batch, from its output and its number."""
Between: TypeAlias = Callable[[tuple[Any, ...], tuple[bool, ...]], Sequence[Sequence[torch.Tensor | None]]]
"""From outputs by micro-batch, and which of their tensors take gradients, to those gradients by micro-batch."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a training step showed, the same on every process.

    Attributes:
        outputs: By micro-batch, without a graph.
        input_gradients: By micro-batch, one for each tensor in the chain's input; None where it asks for none.
    """

    outputs: tuple[Any, ...]
    input_gradients: tuple[tuple[torch.Tensor | None, ...], ...]


class PipelineRunner:
    """The stages of a pipeline that belong to this process.

    Args:
        parts: This process's, by number: process ``d`` of ``D`` has those numbered ``d``, ``d + D``, ...
        stages: How many there are on all processes.
        schedule: In which order devices work.
        device: Where this process computes.
        group: Processes of the pipeline, in its order; None are all.
        batch_norms: Layers whose running statistics are to be those of whole batches, and how many values of a channel a row has.
    """

    def __init__(
        self,
        parts: Mapping[int, Part],
        stages: int,
        *,
        schedule: PipelineScheduleName,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        batch_norms: Mapping[BatchNorm, float] | None = None,
    ) -> None:
        self._modules = {number: PartModule(parts[number]) for number in sorted(parts)}
        for module in self._modules.values():
            if batch_norms is not None:
                part: Part = module.__dict__["part"]
                inside = [each for stage in part.stages for _, each in stage.submodules()]
                module.statistics = BatchStatistics.of(inside, batch_norms)
        self._stages, self._schedule, self._device, self._group = stages, schedule, device, group
        self._size = dist.get_world_size(group)
        self._shapes = Shapes(parts, stages, device=device, group=group)
        # One at a time, for its buffers take memory: what is received, once for each micro-batch.
        self._ready: tuple[Any, Any, list[MicroBatchStage]] | None = None
        # Torch cuts what it is given as targets: each micro-batch's is its number.
        self._numbers = torch.arange(0)
        self._loss: Loss | None = None
        self._outputs: dict[int, list[torch.Tensor]] = {}
        if self.has_last:
            self._modules[stages - 1].outputs = self._outputs

    @property
    def has_first(self) -> bool:
        """Whether the first stage is here."""
        return 0 in self._modules

    @property
    def has_last(self) -> bool:
        """Whether the last stage is here."""
        return self._stages - 1 in self._modules

    @property
    def stages(self) -> Sequence[MicroBatchStage]:
        """Torch's stages of this process, as they ran last."""
        return () if self._ready is None else self._ready[2]

    def train(
        self,
        inputs: Sequence[Sequence[Any]],
        loss: Loss,
        *,
        seed: int,
        signature: Any = None,
        around: Surroundings | None = None,
    ) -> StepResult:
        """Run forward and backward of all micro-batches; gradients of parameters are added to those that are there.

        Args:
            inputs: By micro-batch, the values that the chain takes. Only their shapes matter where the first stage is not.
            loss: Called where the last stage is, in the order of the schedule.
            seed: Of the random numbers, the same on all processes.
            signature: What shapes depend on besides the inputs, the same on all processes: which parameters learn.
            around: Of each forward, autocast for one; by default those of this call. Backwards run outside of them.
        """
        layouts = self._seen(inputs, signature, around)
        schedule, stages = self._prepared(layouts, training=True)
        self._loss = loss
        try:
            self._run(schedule, stages, layouts, inputs, seed)
        finally:
            self._loss = None
        gradients = self._shared_input_gradients([each[0] for each in layouts], stages)
        return StepResult(self._shared_outputs(layouts), gradients)

    def train_in_phases(
        self,
        inputs: Sequence[Sequence[Any]],
        between: Between,
        *,
        seed: int,
        signature: Any = None,
        around: Surroundings | None = None,
    ) -> StepResult:
        """The same with the gradients of outputs in the place of losses, under the schedule ``"gpipe"``.

        Args:
            inputs: By micro-batch, the values that the chain takes.
            between: Called on every process when all forwards are done.
            seed: Of the random numbers, the same on all processes.
            signature: What shapes depend on besides the inputs.
            around: Of each forward.
        Returns:
            Gradients of inputs alone.
        """
        layouts = self._seen(inputs, signature, around)
        schedule, stages = self._prepared(layouts, training=True)
        asking = tuple(meta.requires_grad for meta in layouts[0][-1].metas)
        (stage,) = stages

        def turn() -> None:
            for number, gradients in enumerate(between(self._shared_outputs(layouts), asking)):
                if stage.is_last:
                    stage.set_local_bwd_input(tuple(gradients), number)

        stage.before_backwards = turn
        try:
            self._run(schedule, stages, layouts, inputs, seed)
        finally:
            stage.before_backwards = None
        return StepResult((), self._shared_input_gradients([each[0] for each in layouts], stages))

    def forward(self, inputs: Sequence[Sequence[Any]], *, seed: int, signature: Any = None) -> tuple[Any, ...]:
        """Run the forward of all micro-batches without gradients.

        Returns:
            By micro-batch, the chain's output, on every process.
        """
        with torch.no_grad():
            layouts = self._shapes.of(inputs, (False, signature), Surroundings())
            schedule, stages = self._prepared(layouts, training=False)
            self._run(schedule, stages, layouts, inputs, seed)
            for stage in stages:
                stage.clear_runtime_states()
            return self._shared_outputs(layouts)

    def check(self, values: Sequence[Any], *, signature: Any = None) -> None:
        """Find out whether a micro-batch can be handed from stage to stage in training.

        Raises:
            PipelineError: It cannot; on every process.
        """
        self._seen([values], signature, None)

    def release(self) -> None:
        """Give back the memory of buffers."""
        self._ready = None

    # ---------------------------------------------------------------- a step

    def _seen(self, inputs: Sequence[Sequence[Any]], signature: Any, around: Surroundings | None) -> Layouts:
        """What crosses cuts in training."""
        around = around or Surroundings()
        for module in self._modules.values():
            module.context = around.restored
        return self._shapes.of(inputs, (True, signature), around)

    def _run(
        self,
        schedule: Any,
        stages: Sequence[MicroBatchStage],
        layouts: Layouts,
        inputs: Sequence[Sequence[Any]],
        seed: int,
    ) -> None:
        for number, module in self._modules.items():
            module.takes = tuple(layout[number] for layout in layouts)
            module.gives = tuple(layout[number + 1] for layout in layouts)
            module.seed = seed
            module.rows = tuple(next((m.shape[0] for m in layout[0].metas if m.shape), 1) for layout in layouts)
        if self.has_first:
            stages[0].inputs = [
                tuple(tensor.detach() for tensor in layout[0].flat(values))
                for layout, values in zip(layouts, inputs, strict=True)
            ]
        schedule.step(target=self._numbers, return_outputs=False)

    def _loss_of(self, output: Any, micro_batch: torch.Tensor) -> torch.Tensor:
        """Torch calls this behind the last stage's forward."""
        if self._loss is None:
            return torch.zeros(())  # gradients of the output come by themselves
        number = int(micro_batch)
        return self._loss(packed(self._modules[self._stages - 1].gives[number].values(output)), number)

    def _prepared(self, layouts: Layouts, *, training: bool) -> tuple[Any, list[MicroBatchStage]]:
        key = layouts, training
        if self._ready is None or self._ready[0] != key:
            self._ready = None
            stages = [
                MicroBatchStage(
                    module,
                    number,
                    stages=self._stages,
                    device=self._device,
                    group=self._group,
                    takes=[layout[number] for layout in layouts],
                    gives=[layout[number + 1] for layout in layouts],
                    trains=training,
                )
                for number, module in self._modules.items()
            ]
            loss = self._loss_of if training else None
            self._numbers = torch.arange(len(layouts))
            self._ready = key, _torch_schedule(self._schedule, stages, len(layouts), loss), stages
        return self._ready[1], self._ready[2]

    def _shared_outputs(self, layouts: Layouts) -> tuple[Any, ...]:
        shared = []
        for number, layout in enumerate(layouts):
            tensors = (
                self._outputs.pop(number) if self.has_last else [meta.buffer(self._device) for meta in layout[-1].metas]
            )
            for tensor in tensors:
                share(tensor, self._group, source=(self._stages - 1) % self._size)
            shared.append(packed(layout[-1].values(tensors)))
        return tuple(shared)

    def _shared_input_gradients(
        self, layouts: Sequence[Layout], stages: Sequence[MicroBatchStage]
    ) -> tuple[tuple[torch.Tensor | None, ...], ...]:
        shared = []
        for number, layout in enumerate(layouts):
            found = stages[0].input_gradients(number) if self.has_first else (None,) * len(layout.metas)
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
    """A schedule of torch. Where a small last batch, or a forward alone, is nothing for the one by name: all forwards, then all backwards."""
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
