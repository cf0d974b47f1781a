r"""Runs the pipeline stages of one process together with the others: training steps, and forwards alone.

The schedules are those of :mod:`torch.distributed.pipelining`; they get stages, shapes, random numbers and a loss::

    inputs ──split──► micro-batches ──► ScheduleGPipe │ Schedule1F1B │ ... ──► outputs on every process
                                        MicroBatchStage ─ Part ─ Executor

A cut may be crossed by several values: the boundary activation, and skip connections. A value that a stage only hands
on never enters its schedule::

    values 4, 2 ──► ┌─ part ───────────────┐ ──► values 7, 2
                    │ 4 ─ executor ──► 7   │
                    │ 2 ───────────────────┼─ skip: read by a later part
                    └──────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.capture.sequentialize import SequentialCut
from lightning_rotor.chain import Chain
from lightning_rotor.errors import PipelineError
from lightning_rotor.execution.executor import Executor
from lightning_rotor.execution.isolated import kept_attributes, lent_buffers, undisturbed
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.execution.settings import Settings
from lightning_rotor.pipeline.micro_batches import BatchStatistics, Call, mixed, with_seeds
from lightning_rotor.pipeline.partition import Partition
from lightning_rotor.pipeline.partition.in_flight import END, StagePlan
from lightning_rotor.pipeline.pipeline_schedule import PipelineScheduleName
from lightning_rotor.pipeline.placement import PipelineProcesses, first, share
from lightning_rotor.private.values import TreeSpec, tree_flatten, tree_unflatten
from lightning_rotor.stages.generators import seeded
from lightning_rotor.stages.sequential import Stage, wiring_of
from lightning_rotor.stages.wiring import Wire, Wiring, packed, unpacked

Cut: TypeAlias = SequentialCut | GraphCut
Inputs: TypeAlias = Sequence[Sequence[Any]]  # by micro-batch, what the chain takes; elsewhere shapes alone matter
Loss: TypeAlias = Callable[[Any, int], torch.Tensor]  # of a micro-batch, from its output and its number
ForwardContext: TypeAlias = Callable[[], AbstractContextManager[Any]]  # makes that of a forward
Tensors: TypeAlias = tuple[torch.Tensor, ...]
Gradients: TypeAlias = tuple[torch.Tensor | None, ...]


class TensorMeta(NamedTuple):
    """A tensor at a cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def buffer(self, device: torch.device) -> torch.Tensor:
        """Uninitialized tensor for its values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Layout:
    """Nesting, sizes and tensor metadata of what crosses a cut for one micro-batch."""

    spec: TreeSpec
    leaves: tuple[Any, ...]  # True for a tensor; a size, which follows from the micro-batch's shapes, is in a tuple
    metas: tuple[TensorMeta, ...]

    @classmethod
    def of(cls, values: Sequence[Any], where: str, *, sizes: bool = False) -> Layout:
        """Layout of tensors, Nones and, with ``sizes``, sizes; refuses other values."""
        leaves, spec = tree_flatten(list(values))
        known = (torch.Tensor, int) if sizes else torch.Tensor
        odd = [type(leaf).__name__ for leaf in leaves if not (leaf is None or isinstance(leaf, known))]
        if odd:
            raise PipelineError(
                f"{where} hands over {', '.join(dict.fromkeys(odd))}: expected tensors, or tuples, lists and dicts of "
                "tensors, since nothing else can be sent between devices. Cut elsewhere (balance=[...]), or keep such "
                "values inside a layer"
            )
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        metas = (TensorMeta(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors)
        return cls(spec, tuple(map(_place, leaves)), tuple(metas))

    def flat(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Tensors in some values; refuses those that nest otherwise."""
        leaves, spec = tree_flatten(list(values))
        if spec != self.spec or tuple(map(_place, leaves)) != self.leaves:
            raise PipelineError(
                f"what a pipeline stage makes changed from {self.spec} to {spec}: expected outputs that nest alike in "
                "every micro-batch"
            )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def values(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Values that nest as the layout, from their tensors."""
        given = iter(tensors)
        leaves = [next(given) if leaf is True else leaf and leaf[0] for leaf in self.leaves]
        values: list[Any] = tree_unflatten(leaves, self.spec)
        return values

    def buffers(self, device: torch.device) -> Tensors:
        """Uninitialized tensors."""
        return tuple(meta.buffer(device) for meta in self.metas)

    def gradient_buffers(self, device: torch.device) -> Gradients:
        """Uninitialized gradients; None where there is none."""
        return tuple(meta.buffer(device) if meta.requires_grad else None for meta in self.metas)


def _place(leaf: Any) -> Any:
    return True if isinstance(leaf, torch.Tensor) else None if leaf is None else (leaf,)


@dataclass(frozen=True, slots=True)
class Step:
    """Facts that parts need of the micro-batches that run."""

    layouts: tuple[tuple[Layout, ...], ...] = ()  # by micro-batch, of each cut, input and output included
    seed: int = 0
    context: ForwardContext = nullcontext  # of forwards in training
    trains: bool = True


def run_backward(tensors: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Run the backward from some gradients. Frozen stages ask for none."""
    pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if t.requires_grad and g is not None]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def crossing(stages: Sequence[Stage], boundary: int) -> tuple[int, ...]:
    """Numbers of the values that cross a cut before a stage; of the chain's input and output at its ends."""
    return wiring_of(stages[boundary:]).wire.reads if boundary < len(stages) else stages[-1].writes


class Part(nn.Module):
    """One pipeline stage's part of a chain: a function of tensors, which :mod:`torch.distributed.pipelining` calls.

    ``stages`` and ``states`` are the whole chain's, ``run`` the part's first and last. Without ``plans`` (of a
    micro-batch, of the last one) it gives no gradients; with ``chain``, stages draw random numbers each of its own.
    """

    def __init__(
        self,
        number: int,
        stages: Sequence[Stage],
        run: tuple[int, int],
        *,
        states: Sequence[SegmentState] = (),
        plans: Sequence[StagePlan] = (),
        chain: Chain | None = None,
        defers: bool = False,
    ) -> None:
        super().__init__()
        first, end = run[0], run[1] + 1
        self.number, self._takes, self._gives = number, crossing(stages, first), crossing(stages, end)
        self._made = tuple(value for value in self._gives if value not in self._takes)
        self.stages, self._states = tuple(stages[first:end]), tuple(states[first:end])
        self._running = self.stages if chain is None else with_seeds(stages, chain)[first:end]
        wiring = Wiring.of((stage.wiring.wire for stage in self.stages), self._made)
        # What runs without gradients, and under each plan, with the values that it takes and makes.
        self._plainly = wiring.wire, partial(wiring.run, functions=[partial(run_stage, each) for each in self._running])
        self._planned = [(executor.wire, executor) for executor in map(self._executor, plans)]
        inside = [module for stage in self.stages if defers for _, module in stage.submodules()]
        self._statistics = BatchStatistics(inside)
        self.step = Step()
        self.outputs: dict[int, list[torch.Tensor]] | None = None  # where to keep them, if anywhere

    def forward(self, *tensors: torch.Tensor, micro_batch: int) -> Tensors:
        """Run one micro-batch, under random numbers of its own."""
        layouts, last = self.step.layouts[micro_batch], micro_batch == len(self.step.layouts) - 1
        values = layouts[self.number].values(tensors)
        del tensors
        with ExitStack() as contexts:
            contexts.enter_context(seeded(mixed(self.step.seed, micro_batch), host=False))
            if torch.is_grad_enabled():
                contexts.enter_context(self.step.context())
                contexts.enter_context(self._statistics.micro_batch(last=last))
            values = self.run(values, last=last)
        made = tuple(tensor.contiguous() for tensor in layouts[self.number + 1].flat(values))
        if self.outputs is not None:
            self.outputs[micro_batch] = [tensor.detach() for tensor in made]
        return made

    def run(self, values: Sequence[Any], *, last: bool = False) -> list[Any]:
        """The part's outputs for its inputs, both in order; the last micro-batch may run under another plan."""
        known = dict(zip(self._takes, values, strict=True))
        del values
        wire, run = self._planned[-1 if last else 0] if torch.is_grad_enabled() else self._plainly
        made = run(packed([known[number] for number in wire.reads]))
        known.update(zip(wire.writes, unpacked(made, len(wire.writes)), strict=True))
        return [known[number] for number in self._gives]

    def _executor(self, plan: StagePlan) -> Executor:
        stages, states = self._running, self._states
        if plan.chain.names[-1] == END:
            handed_on = Wire(self._made, self._made)
            end = Stage(END, (nn.Identity(),), Wiring(handed_on, (handed_on,), ((),)))
            stages, states = (*stages, end), (*states, SegmentState())
        return Executor(stages, plan.chain, plan.schedule, states, wanted=self._made)


class MicroBatchStage(PipelineStage):
    """A pipeline stage whose buffers fit each micro-batch.

    For micro-batch ``k`` a schedule calls, in this order::

        get_fwd_recv_ops(k) → forward_one_chunk(k) → get_fwd_send_ops(k)
        get_bwd_recv_ops(k) → backward_one_chunk(k) → get_bwd_send_ops(k)

    and ``set_local_…`` and ``get_local_…`` in the place of sending where the next stage is on the same device.
    """

    def __init__(self, part: Part, stages: int, processes: PipelineProcesses) -> None:
        # No metadata, so torch makes no buffers. Without the argument it would run the user's modules on garbage.
        nothing, device = (torch.empty(0, device="meta"),), processes.device
        super().__init__(
            part, part.number, stages, device, input_args=nothing, output_args=nothing, group=processes.group
        )
        self.has_backward = trains = part.step.trains
        layouts = part.step.layouts
        self._takes = [layout[part.number] for layout in layouts]
        self.inputs: list[Tensors] = [] if self.is_first else [layout.buffers(device) for layout in self._takes]
        gives = [layout[part.number + 1] for layout in layouts] if trains and not self.is_last else ()
        self.output_gradients = {place: layout.gradient_buffers(device) for place, layout in enumerate(gives)}
        self.in_flight: dict[int, tuple[Tensors, Tensors]] = {}
        self._input_gradients: dict[int, Gradients] = {}
        self._launched: list[dist.P2POp] = []

    def clear_runtime_states(self) -> None:
        """Forget what an interrupted step has left."""
        super().clear_runtime_states()
        self.in_flight.clear()
        self._input_gradients.clear()
        if self.is_last:
            self.output_gradients.clear()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that receive a forward's inputs."""
        return [] if self.is_first else self._operations(dist.irecv, self.inputs[fwd_chunk_id], self.stage_index - 1)

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Tensors:
        """Run the forward of a micro-batch."""
        self._let_go()
        trains = self.has_backward and torch.is_grad_enabled()
        given = self.inputs[fwd_chunk_id]
        for tensor, meta in zip(given, self._takes[fwd_chunk_id].metas, strict=True):
            tensor.requires_grad_(meta.requires_grad and trains)
        made: Tensors = self.submod(*given, micro_batch=fwd_chunk_id)
        self.in_flight[fwd_chunk_id] = given, made
        return made

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that send a forward's outputs."""
        if self.is_last:
            return []
        made = tuple(tensor.detach() for tensor in self.in_flight[fwd_chunk_id][1])
        return self._sending(made, self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that receive the gradients of a forward's outputs."""
        if self.is_last or not self.has_backward:
            return []
        return self._operations(dist.irecv, self.output_gradients[bwd_chunk_id], self.stage_index + 1)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, *_: Any, **__: Any) -> None:
        """Run the backward of a micro-batch."""
        if not self.has_backward:  # torch's loops ask all the same
            return
        self._let_go()
        given, made = self.in_flight.pop(bwd_chunk_id)
        gradients = self.output_gradients.get(bwd_chunk_id)
        if gradients is None:
            torch.autograd.backward(loss)
        else:
            run_backward(made, gradients)
        self._input_gradients[bwd_chunk_id] = tuple(tensor.grad for tensor in given)
        for tensor in given:
            tensor.grad = None

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that send the gradients of a forward's inputs."""
        if self.is_first or not self.has_backward:
            return []
        return self._sending(self.get_local_bwd_output(bwd_chunk_id), self.stage_index - 1)

    def get_local_bwd_output(self, mb_index: int) -> Gradients:
        """Gradients of a forward's inputs, once its backward is done; None for inputs without one."""
        found = self._input_gradients.pop(mb_index)
        metas = self._takes[mb_index].metas
        return tuple(
            meta.buffer(self.device).zero_() if meta.requires_grad and gradient is None else gradient
            for meta, gradient in zip(metas, found, strict=True)
        )

    # ---------------------------------------------------------------- between stages

    def set_local_fwd_input(self, prev_stage_outputs: Tensors, mb_index: int) -> None:
        """Take the outputs of the stage before, on the same device."""
        self.inputs[mb_index] = tuple(tensor.detach() for tensor in prev_stage_outputs)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Gradients, mb_index: int) -> None:
        """Take the gradients of a forward's outputs, from the stage behind or, for the last one, from user code."""
        self.output_gradients[mb_index] = next_stage_bwd_outputs

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Keep a forward's outputs for the backward; torch calls this from 2.15 on when they have been sent."""

    def _sending(self, tensors: Gradients, to: int) -> list[dist.P2POp]:
        # Torch's 1F1B loop holds on to finished operations, and with them to a gradient or an output.
        operations = self._operations(dist.isend, tensors, to)
        self._launched += operations
        return operations

    def _let_go(self) -> None:
        """Drop what was sent: a running operation is held by its work alone."""
        for operation in self._launched:
            operation.tensor = torch.empty(0)
        self._launched.clear()

    def _operations(self, what: Any, tensors: Gradients, stage: int) -> list[dist.P2POp]:
        rank = stage % dist.get_world_size(self.group)
        return [dist.P2POp(what, tensor, group=self.group, group_peer=rank) for tensor in tensors if tensor is not None]


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
        if self._stages - 1 in self._parts:
            self._parts[self._stages - 1].outputs = self._outputs

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

    def run(
        self, inputs: Inputs, loss: Loss | None, *, seed: int, context: Settings | None = None
    ) -> tuple[tuple[Any, ...], tuple[Gradients, ...]]:
        """Run forward and backward of all micro-batches or, without a loss, forwards without gradients.

        The last stage's process calls ``loss``. Forwards of training run in ``context``. Returns, by micro-batch and on
        every process, outputs without a graph, and gradients of the tensors in the chain's input, if any.
        """
        with torch.set_grad_enabled(loss is not None):
            step = self._step(inputs, seed, context)
            self._loss = loss
            schedule, stages = self._prepared(step, inputs)
            schedule()
            self._loss = None
        gradients: tuple[Gradients, ...] = ()
        if step.trains:
            gradients = self._shared_input_gradients(step, stages)
        else:
            for stage in stages:
                stage.clear_runtime_states()
        return self._shared_outputs(step), gradients

    def check(self, call: Call) -> None:
        """Refuse, on every process, a micro-batch that training cannot hand from stage to stage."""
        self._step(self.inputs([call]), 0)

    def release(self) -> None:
        """Free the memory of buffers."""
        self._ready = None

    # ---------------------------------------------------------------- shapes

    def _step(self, inputs: Inputs, seed: int, context: Settings | None = None) -> Step:
        """A step with layouts of what crosses cuts; equal micro-batches are looked at once, when first seen."""
        layouts, trains, context = [], torch.is_grad_enabled(), context or Settings()
        learns = tuple(each.requires_grad for table, name in self._slots if (each := table[name]) is not None)
        for values in inputs:
            layout = Layout.of(values, "the model's input")
            key = layout, trains, learns, context.dtypes
            if key not in self._known:
                self._known[key] = (layout, *self._scouted(layout, layout.flat(values), context))
            layouts.append(self._known[key])
        return Step(tuple(layouts), seed, context.restored, trains)

    def _scouted(self, layout: Layout, tensors: Sequence[torch.Tensor], context: Settings) -> list[Layout]:
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
        self, number: int, layout: Layout, tensors: Sequence[torch.Tensor], settings: Settings
    ) -> tuple[Any, list[torch.Tensor]]:
        """The result of a stage: its layout or what is wrong with it, and the tensors."""
        part, trained = self._parts[number], torch.is_grad_enabled()
        given = [t.detach().requires_grad_(meta.requires_grad) for t, meta in zip(tensors, layout.metas, strict=True)]
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
        """The runner of a schedule of torch for a step, and its stages; those of the last one if it was alike."""
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
        if 0 in self._parts:
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
            found = (
                stages[0].get_local_bwd_output(number) if 0 in self._parts else layout.gradient_buffers(self._device)
            )
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
