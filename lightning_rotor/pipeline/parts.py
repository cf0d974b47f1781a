r"""The part of a chain that one pipeline stage runs, and which tensors go in and out.

A cut may be crossed by several values: the link, and skip connections. What a stage only hands on never enters its schedule::

    values 4, 2 ──► ┌─ part ───────────────┐ ──► values 7, 2
                    │ 4 ─ executor ──► 7   │
                    │ 2 ───────────────────┼─ skip: read by a later part
                    └──────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.chain import Chain
from lightning_rotor.execution import Executor
from lightning_rotor.options import run_stage
from lightning_rotor.pipeline.batch_statistics import BatchStatistics
from lightning_rotor.pipeline.seeding import mixed, seeded, with_seeds
from lightning_rotor.pipeline_schedule import PipelineError
from lightning_rotor.planning.partition import StagePlan
from lightning_rotor.planning.partition.sub_chains import END
from lightning_rotor.private.pytree import TreeSpec, tree_flatten, tree_unflatten
from lightning_rotor.sequential import Stage, wiring_of
from lightning_rotor.state import SegmentState
from lightning_rotor.wiring import Wire, Wiring, packed, unpacked

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
        spec: The nesting; its leaves are tensors and Nones.
        present: Which leaves are tensors.
        metas: Those tensors.
    """

    spec: TreeSpec
    present: tuple[bool, ...]
    metas: tuple[TensorMeta, ...]

    @classmethod
    def of(cls, values: Sequence[Any], where: str) -> Layout:
        """That of some values.

        Raises:
            PipelineError: Something in them is neither a tensor nor None.
        """
        leaves, spec = tree_flatten(list(values))
        odd = [type(leaf).__name__ for leaf in leaves if not (leaf is None or isinstance(leaf, torch.Tensor))]
        if odd:
            raise PipelineError(
                f"{where} hands over {', '.join(dict.fromkeys(odd))}: expected tensors, or tuples, lists and dicts of tensors, since nothing else "
                "can be sent between devices. Cut elsewhere (balance=[...]), or keep such values inside a layer"
            )
        tensors = [leaf for leaf in leaves if leaf is not None]
        return cls(spec, tuple(leaf is not None for leaf in leaves), tuple(map(TensorMeta.of, tensors)))

    def flat(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors in some values.

        Raises:
            PipelineError: They are nested otherwise.
        """
        leaves, spec = tree_flatten(list(values))
        if spec != self.spec or tuple(leaf is not None for leaf in leaves) != self.present:
            raise PipelineError(
                f"what a pipeline stage makes changed from {self.spec} to {spec}: expected outputs that nest alike in every micro-batch"
            )
        return [leaf for leaf in leaves if leaf is not None]

    def values(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The values with some tensors in them."""
        given = iter(tensors)
        values: list[Any] = tree_unflatten([next(given) if here else None for here in self.present], self.spec)
        return values


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
