r"""The part of a chain that one pipeline stage runs, and which tensors go in and out.

A cut may be crossed by several values: the link, and skip connections. What a stage only hands on never enters its schedule::

    values 4, 2 ──► ┌─ part ───────────────┐ ──► values 7, 2
                    │ 4 ─ executor ──► 7   │
                    │ 2 ───────────────────┼─ skip: read by a later part
                    └──────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from lightning_rotor.capture.cuts import GraphCut, SequentialCut, cut_graph, sequentialize
from lightning_rotor.chain import Chain
from lightning_rotor.errors import ModelError
from lightning_rotor.execution.executor import Executor
from lightning_rotor.execution.options import run_stage
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.pipeline.batch_statistics import BatchStatistics
from lightning_rotor.pipeline.micro_batches import join, rows_in, split
from lightning_rotor.pipeline.partition import Partition, StagePlan
from lightning_rotor.pipeline.partition.in_flight import END
from lightning_rotor.pipeline.placement import Ownership
from lightning_rotor.pipeline.schedule import PipelineError
from lightning_rotor.pipeline.surroundings import mixed, seeded, with_seeds
from lightning_rotor.private.values import TreeSpec, tree_flatten, tree_unflatten
from lightning_rotor.profiling import Profile
from lightning_rotor.stages.sequential import Stage, Wire, Wiring, packed, unpacked, wiring_of

ForwardContext: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a forward runs."""


def crossing(stages: Sequence[Stage], boundary: int) -> tuple[int, ...]:
    """Numbers of the values that cross a cut before stage ``boundary``: the input's before the first, the output's behind the last."""
    if boundary == 0:
        return wiring_of(stages).wire.reads
    if boundary == len(stages):
        return stages[-1].writes
    made_behind = {number for stage in stages[boundary:] for number in stage.writes}
    read_behind = {number for stage in stages[boundary:] for number in stage.reads}
    return tuple(sorted(read_behind - made_behind))


@dataclass(frozen=True, slots=True)
class PartPlan:
    """How one pipeline stage runs.

    Attributes:
        first: Its first stage of the chain.
        last: Its last one.
        plan: Of a micro-batch; None runs forwards without gradients alone.
        last_plan: Of the last micro-batch, if that is another.
    """

    first: int
    last: int
    plan: StagePlan | None
    last_plan: StagePlan | None = None


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What a tensor at a cut looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """Those of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def example(self) -> torch.Tensor:
        """A tensor that looks so, without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)

    def buffer(self, device: torch.device) -> torch.Tensor:
        """Room for its values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Layout:
    """What crosses a cut for one micro-batch: how values nest, and their tensors.

    Attributes:
        spec: The nesting; its leaves are tensors, sizes and Nones.
        leaves: A tensor's place is True; a size, which follows from the shapes of the micro-batch, is in a tuple.
        metas: Those tensors.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    metas: tuple[TensorMeta, ...]

    @classmethod
    def of(cls, values: Sequence[Any], where: str, *, sizes: bool = False) -> Layout:
        """That of some values, among which there may be sizes.

        Raises:
            PipelineError: Something else in them is neither a tensor nor None.
        """
        leaves, spec = tree_flatten(list(values))
        known = (torch.Tensor, int) if sizes else torch.Tensor
        odd = [type(leaf).__name__ for leaf in leaves if not (leaf is None or isinstance(leaf, known))]
        if odd:
            raise PipelineError(
                f"{where} hands over {', '.join(dict.fromkeys(odd))}: expected tensors, or tuples, lists and dicts of tensors, since nothing else "
                "can be sent between devices. Cut elsewhere (balance=[...]), or keep such values inside a layer"
            )
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return cls(spec, tuple(map(_place, leaves)), tuple(map(TensorMeta.of, tensors)))

    def flat(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors in some values.

        Raises:
            PipelineError: They are nested otherwise.
        """
        leaves, spec = tree_flatten(list(values))
        if spec != self.spec or tuple(map(_place, leaves)) != self.leaves:
            raise PipelineError(
                f"what a pipeline stage makes changed from {self.spec} to {spec}: expected outputs that nest alike in every micro-batch"
            )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def values(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The values with some tensors in them."""
        given = iter(tensors)
        leaves = [next(given) if leaf is True else leaf and leaf[0] for leaf in self.leaves]
        values: list[Any] = tree_unflatten(leaves, self.spec)
        return values


def _place(leaf: Any) -> Any:
    return True if isinstance(leaf, torch.Tensor) else None if leaf is None else (leaf,)


class _HandOver(nn.Module):
    """Does nothing at the end of a pipeline stage, so that everything before it may be a segment."""

    def forward(self, value: Any) -> Any:
        return value


class Part:
    """Runs one pipeline stage's part of a chain.

    Args:
        stages: Of the whole chain.
        states: What recomputation must leave alone, for each of them.
        plan: Which of them, and how.
        chain: Says which stages draw random numbers, each of its own. None: from the generator as it is.
    """

    def __init__(
        self, stages: Sequence[Stage], states: Sequence[SegmentState], plan: PartPlan, chain: Chain | None = None
    ) -> None:
        self.plan = plan
        self.takes = crossing(stages, plan.first)
        self.gives = crossing(stages, plan.last + 1)
        self._made = tuple(number for number in self.gives if number not in self.takes)
        own = slice(plan.first, plan.last + 1)
        self._stages, self._states = tuple(stages[own]), tuple(states[own])
        self._running = self._stages if chain is None else with_seeds(stages, chain)[own]
        self._plainly = Wiring.of((stage.wiring.wire for stage in self._stages), self._made)
        self._plain_steps = [partial(run_stage, stage) for stage in self._running]
        self._usual = None if plan.plan is None else self._executor(plan.plan)
        self._last = self._usual if plan.last_plan is None else self._executor(plan.last_plan)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Its stages of the chain, with the user's modules."""
        return self._stages

    def _executor(self, plan: StagePlan) -> Executor:
        stages, states, wanted = self._running, self._states, self._made
        if plan.chain.names[-1] == END:
            free = 1 + max(number for stage in stages for number in (*stage.reads, *stage.writes))
            wanted = tuple(range(free, free + len(self._made)))
            end = Stage(END, (_HandOver(),), Wiring.of([Wire(self._made, wanted)], wanted))
            stages, states = (*stages, end), (*states, SegmentState())
        return Executor(stages, plan.chain, plan.schedule, states, wanted=wanted)

    def __call__(self, values: Sequence[Any], *, last: bool = False) -> list[Any]:
        """Run a micro-batch.

        Args:
            values: What it takes, in order.
            last: It is the last micro-batch.
        Returns:
            What it gives, in order.
        """
        known = dict(zip(self.takes, values, strict=True))
        del values
        if not torch.is_grad_enabled():
            wire = self._plainly.wire
            made = self._plainly.run(packed([known[number] for number in wire.reads]), self._plain_steps)
            known.update(zip(wire.writes, unpacked(made, len(wire.writes)), strict=True))
            return [known[number] for number in self.gives]
        executor = self._last if last else self._usual
        assert executor is not None, "a part without a plan never runs with gradients"
        made = executor(packed([known[number] for number in executor.wire.reads]))
        # Behind a hand-over values have other numbers, but the same order.
        order = executor.wire.writes
        wanted = self._made if set(order) == set(self._made) else tuple(sorted(order))
        by_number = dict(zip(order, unpacked(made, len(order)), strict=True))
        known.update(zip(self._made, [by_number[number] for number in wanted], strict=True))
        return [known[number] for number in self.gives]


class PartModule(nn.Module):
    """What :mod:`torch.distributed.pipelining` calls: a part as a function of tensors.

    Args:
        part: The user's modules stay where they are: none of them is a submodule of this one.

    Attributes:
        context: Of each forward with gradients.
        takes: By micro-batch, what crosses the cut before it.
        gives: The same behind it.
        seed: Of the step.
        outputs: Where to keep what it made, by micro-batch; None does not.
        statistics: Of BatchNorm, if they are to be those of the whole batch.
        rows: By micro-batch.
    """

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.context: ForwardContext = nullcontext
        self.__dict__["part"] = part
        self.takes: Sequence[Layout] = ()
        self.gives: Sequence[Layout] = ()
        self.seed = 0
        self.outputs: dict[int, list[torch.Tensor]] | None = None
        self.statistics: BatchStatistics | None = None
        self.rows: Sequence[int] = ()

    def forward(self, *tensors: torch.Tensor, micro_batch: int) -> tuple[torch.Tensor, ...]:
        """Run one micro-batch, under random numbers of its own."""
        values = self.takes[micro_batch].values(tensors)
        del tensors
        last = micro_batch == len(self.takes) - 1
        with ExitStack() as contexts:
            contexts.enter_context(seeded(mixed(self.seed, micro_batch)))
            if torch.is_grad_enabled():
                contexts.enter_context(self.context())
                if self.statistics is not None:
                    contexts.enter_context(self.statistics.micro_batch(self.rows[micro_batch], last=last))
            values = self.__dict__["part"](values, last=last)
        made = tuple(tensor.contiguous() for tensor in self.gives[micro_batch].flat(values))
        if self.outputs is not None:
            self.outputs[micro_batch] = [tensor.detach() for tensor in made]
        return made


# ----------------------------------------------------------------------------------------------------
# A pipeline stage that torch's schedules drive: what it receives, runs and sends for each micro-batch, which need not
# be alike.


Tensors: TypeAlias = tuple[torch.Tensor, ...]
Gradients: TypeAlias = tuple[torch.Tensor | None, ...]


class MicroBatchStage(PipelineStage):
    """A pipeline stage whose buffers fit each micro-batch.

    For micro-batch ``k`` a schedule calls, in this order::

        get_fwd_recv_ops(k) → forward_one_chunk(k) → get_fwd_send_ops(k)
        get_bwd_recv_ops(k) → backward_one_chunk(k) → get_bwd_send_ops(k)

    and ``set_local_…`` and ``get_local_…`` in the place of sending where the next stage is on the same device.

    Args:
        module: What it runs.
        number: Of the pipeline stage.
        stages: How many there are.
        device: Where it runs.
        group: Processes of the pipeline.
        takes: By micro-batch, what it receives.
        gives: By micro-batch, what it sends.
        trains: Gradients come back.

    Attributes:
        inputs: By micro-batch, what the first stage takes; others receive it.
        in_flight: By micro-batch whose forward is done and whose backward is not, what it took and what it made.
        before_backwards: Called once, when the next backward is about to begin.
    """

    def __init__(
        self,
        module: PartModule,
        number: int,
        *,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        takes: Sequence[Layout],
        gives: Sequence[Layout],
        trains: bool,
    ) -> None:
        # Torch makes buffers of what it is told here: of nothing. Without being told it would run the user's modules on garbage.
        nothing = torch.empty(0, device="meta")
        super().__init__(module, number, stages, device, input_args=(nothing,), output_args=(nothing,), group=group)
        self._takes = tuple(takes)
        received = () if self.is_first else takes
        self.inputs: list[Tensors] = [tuple(meta.buffer(device) for meta in layout.metas) for layout in received]
        returned = gives if trains and not self.is_last else ()
        self._output_gradients: dict[int, Gradients] = {
            number: tuple(meta.buffer(device) if meta.requires_grad else None for meta in layout.metas)
            for number, layout in enumerate(returned)
        }
        self.in_flight: dict[int, tuple[Tensors, Tensors]] = {}
        self._input_gradients: dict[int, Gradients] = {}
        self._launched: list[dist.P2POp] = []
        self.before_backwards: Callable[[], None] | None = None

    @property
    def buffers(self) -> list[torch.Tensor]:
        """What is received lies in these."""
        inputs = [] if self.is_first else self.inputs
        received = (*inputs, *self._output_gradients.values())
        return [buffer for each in received for buffer in each if buffer is not None]

    def clear_runtime_states(self) -> None:
        """Forget what an interrupted step has left."""
        super().clear_runtime_states()
        self.in_flight.clear()
        self._input_gradients.clear()
        if self.is_last:
            self._output_gradients.clear()

    # ---------------------------------------------------------------- forward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that receive what a forward takes."""
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
        """Operations that send what a forward made."""
        if self.is_last:
            return []
        made = tuple(tensor.detach() for tensor in self.in_flight[fwd_chunk_id][1])
        return self._sending(made, self.stage_index + 1)

    # ---------------------------------------------------------------- backward

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that receive the gradients of what a forward made."""
        if self.before_backwards is not None:
            turn, self.before_backwards = self.before_backwards, None
            turn()
        if self.is_last or not self.has_backward:
            return []
        return self._operations(dist.irecv, self._output_gradients[bwd_chunk_id], self.stage_index + 1)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, *_: Any, **__: Any) -> None:
        """Run the backward of a micro-batch; nothing in it may ask for gradients: a stage that is frozen, behind others that are."""
        if not self.has_backward:  # torch's loops ask all the same
            return
        self._let_go()
        given, made = self.in_flight.pop(bwd_chunk_id)
        gradients = self._output_gradients.get(bwd_chunk_id)
        if gradients is None:
            torch.autograd.backward(loss)
        else:
            pairs = [(t, g) for t, g in zip(made, gradients, strict=True) if t.requires_grad and g is not None]
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        self._input_gradients[bwd_chunk_id] = tuple(tensor.grad for tensor in given)
        for tensor in given:
            tensor.grad = None

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that send the gradients of what a forward was given."""
        if self.is_first or not self.has_backward:
            return []
        return self._sending(self.input_gradients(bwd_chunk_id), self.stage_index - 1)

    def input_gradients(self, micro_batch: int) -> Gradients:
        """Gradients of what a forward took, once its backward is done; None for what asks for none."""
        found = self._input_gradients.pop(micro_batch)
        metas = self._takes[micro_batch].metas
        return tuple(
            meta.buffer(self.device).zero_() if meta.requires_grad and gradient is None else gradient
            for meta, gradient in zip(metas, found, strict=True)
        )

    # ---------------------------------------------------------------- between stages

    def set_local_fwd_input(self, prev_stage_outputs: Tensors, mb_index: int) -> None:
        """Take what the stage before made, on the same device."""
        self.inputs[mb_index] = tuple(tensor.detach() for tensor in prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> Gradients:
        """Gradients for the stage before, on the same device."""
        return self.input_gradients(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Gradients, mb_index: int) -> None:
        """Take the gradients of what a forward made, from the stage behind or, for the last one, from user code."""
        self._output_gradients[mb_index] = next_stage_bwd_outputs

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Called from torch 2.15 on, when what a forward made has been sent: it stays for the backward."""

    def _sending(self, tensors: Gradients, to: int) -> list[dist.P2POp]:
        # The loop of torch's 1F1B holds on to operations that are long done, and with them to a gradient or an output.
        operations = self._operations(dist.isend, tensors, to)
        self._launched += operations
        return operations

    def _let_go(self) -> None:
        """Of what was sent: an operation that runs is held by its work alone."""
        for operation in self._launched:
            operation.tensor = torch.empty(0)
        self._launched.clear()

    def _operations(self, what: Any, tensors: Gradients, stage: int) -> list[dist.P2POp]:
        rank = stage % dist.get_world_size(self.group)
        return [dist.P2POp(what, tensor, group=self.group, group_peer=rank) for tensor in tensors if tensor is not None]


# ----------------------------------------------------------------------------------------------------
# A module as pipeline stages in evaluation, where its code may go another way than in training.


def cut_for_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SequentialCut | GraphCut:
    """The module as stages, for micro-batches of any number of rows unless that decides what it does.

    A recording must have seen two numbers, and later no process has all layers.
    """
    cut = sequentialize(module, args, kwargs)
    if isinstance(cut, GraphCut):
        call = args, kwargs
        one_more = join([call, split(call, (1, rows_in(call) - 1))[0]])
        with suppress(ModelError):
            cut_graph(module, *one_more, known=[cut])
    return cut


def evaluation_cut(
    module: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    training: SequentialCut | GraphCut,
    profile: Profile,
    made: Partition,
    ownership: Ownership,
) -> tuple[SequentialCut | GraphCut, list[PartPlan] | None]:
    """The module as stages in evaluation, where its code may go another way, and which of them belong to which part; None: as in training."""
    if isinstance(training, SequentialCut):
        return training, None
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    # What layers before it make requires no gradients then.
    leaves, spec = tree_flatten(call)
    args, kwargs = tree_unflatten([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
    try:
        with torch.no_grad():
            cut = cut_for_rows(module, args, kwargs)
    except ModelError as error:
        raise PipelineError(f"{type(module).__name__} can be cut in training, but not in evaluation: {error}") from None
    finally:
        for each, mode in modes:
            each.training = mode
    return cut, _shared_out(cut.stages, profile, made, ownership)


def _shared_out(stages: Sequence[Stage], profile: Profile, made: Partition, ownership: Ownership) -> list[PartPlan]:
    """Stages where their weights are; those without weights where they are in training, or else as soon as their input is there."""
    owned = [_owners(stage, ownership) for stage in stages]
    by_name = {
        stage.name: number
        for number, choice in enumerate(made.choices)
        for stage in profile.stages[choice.first : choice.last + 1]
    }
    at, numbers = 0, []
    for place, (stage, owners) in enumerate(zip(stages, owned, strict=True)):
        if len(owners) > 1 or (owners and min(owners) < at):
            raise PipelineError(
                f"in evaluation the model runs {stage.name!r} together with what other pipeline stages hold: expected code that does the same in "
                "training and in evaluation but for its layers (nn.Dropout, not a branch on self.training), or another balance=[...]"
            )
        if not owners:
            behind = min((number for later in owned[place:] for number in later), default=len(made.choices) - 1)
            owners = {min(by_name.get(stage.name, at), behind)}
        at = max([at, *owners])
        numbers.append(at)
    missing = sorted(set(range(len(made.choices))) - set(numbers))
    if missing:
        raise PipelineError(
            f"in evaluation nothing is left for pipeline stages {missing}: expected a balance in which every stage has weights, such as "
            "one with fewer, larger stages"
        )
    firsts = [numbers.index(number) for number in range(len(made.choices))]
    return [
        PartPlan(first, (firsts[number + 1] if number + 1 < len(firsts) else len(stages)) - 1, None)
        for number, first in enumerate(firsts)
    ]


def _owners(stage: Stage, ownership: Ownership) -> set[int]:
    """Pipeline stages that hold its weights."""
    buffers = [b for _, module in stage.submodules() for b in module._buffers.values() if b is not None]
    return {owner for tensor in (*stage.parameters(), *buffers) if (owner := ownership.stage_of(tensor)) is not None}
