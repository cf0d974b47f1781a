r"""One pipeline stage on its process: what it runs, which tensors go in and out, and how torch's schedules drive it.

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
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from lightning_rotor.chain import Chain
from lightning_rotor.execution.executor import Executor
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.pipeline.micro_batches import BatchStatistics
from lightning_rotor.pipeline.partition.in_flight import END, StagePlan
from lightning_rotor.pipeline.placement import PipelineProcesses
from lightning_rotor.pipeline.run_context import mixed, with_seeds
from lightning_rotor.pipeline.schedule import PipelineError
from lightning_rotor.private.values import TreeSpec, tree_flatten, tree_unflatten
from lightning_rotor.stages.generators import seeded
from lightning_rotor.stages.sequential import Stage, Wire, Wiring, packed, unpacked, wiring_of

ForwardContext: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a forward runs."""
Tensors: TypeAlias = tuple[torch.Tensor, ...]
Gradients: TypeAlias = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, dtype and need of gradients of a tensor at a cut."""

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
    """What parts need to know of the micro-batches that run."""

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
    if boundary == 0:
        return wiring_of(stages).wire.reads
    if boundary == len(stages):
        return stages[-1].writes
    made_behind = {number for stage in stages[boundary:] for number in stage.writes}
    read_behind = {number for stage in stages[boundary:] for number in stage.reads}
    return tuple(sorted(read_behind - made_behind))


class Part(nn.Module):
    """One pipeline stage's part of a chain: a function of tensors, which :mod:`torch.distributed.pipelining` calls.

    ``stages`` and ``states`` (what recomputation must leave alone) are the whole chain's, ``run`` the part's first and
    last. User modules are no submodules. Without ``plans`` (of a micro-batch, of the last one) it gives no gradients;
    with ``chain``, stages draw random numbers each of its own. ``defers`` the running statistics of BatchNorm.
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
        self.output_gradients: dict[int, Gradients] = {}
        if trains and not self.is_last:
            gives = [layout[part.number + 1].gradient_buffers(device) for layout in layouts]
            self.output_gradients = dict(enumerate(gives))
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

    # ---------------------------------------------------------------- forward

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

    # ---------------------------------------------------------------- backward

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
