"""One pipeline stage's part of a chain: stages in a row, run under the plan that the partition has made for them.

A cut may be crossed by several values: the boundary activation, and skip connections. A value that a stage only hands
on never enters its schedule::

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
from lightning_rotor.execution.executor import Executor
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.pipeline.batch_statistics import BatchStatistics
from lightning_rotor.pipeline.layouts import Layout, Tensors
from lightning_rotor.pipeline.micro_batch_seeds import mixed, with_seeds
from lightning_rotor.pipeline.partition.in_flight import StagePlan
from lightning_rotor.pipeline.partition.sub_chains import END
from lightning_rotor.stages.generators import seeded
from lightning_rotor.stages.sequential import Stage, wiring_of
from lightning_rotor.stages.wiring import Wire, Wiring, packed, unpacked

ForwardContext: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""Makes the context of a forward."""


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """Facts that parts need of the micro-batches that run.

    Attributes:
        layouts: By micro-batch, of each cut, input and output included.
        seed: Of the step's random numbers.
        context: Of forwards in training.
        trains: Backwards come behind the forwards.
    """

    layouts: tuple[tuple[Layout, ...], ...] = ()
    seed: int = 0
    context: ForwardContext = nullcontext
    trains: bool = True


def crossing(stages: Sequence[Stage], boundary: int) -> tuple[int, ...]:
    """Numbers of the values that cross a cut before a stage; of the chain's input and output at its ends."""
    if boundary == len(stages):
        return stages[-1].writes
    return wiring_of(stages[boundary:]).wire.reads


class Part(nn.Module):
    """One pipeline stage's part of a chain: a function of tensors, which :mod:`torch.distributed.pipelining` calls.

    Args:
        number: Of the pipeline stage.
        stages: Of the whole chain.
        run: Numbers of the part's first and last stage.
        states: Of the whole chain's stages.
        plans: For a micro-batch, and for the last one if that has another. Without any, the part gives no gradients.
        chain: Costs of the whole chain. With it, stages that may draw random numbers draw each of its own.
        defers: Running statistics of batch normalization change once for each batch.
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
        first, last = run
        end = last + 1
        self.number = number
        # The runner sets it before each step.
        self.step = PipelineStep()
        # By micro-batch, the outputs; None where nobody asks for them.
        self.outputs: dict[int, list[torch.Tensor]] | None = None
        self.stages = tuple(stages[first:end])
        self._states = tuple(states[first:end])
        self._running = self.stages
        if chain is not None:
            # Seeds count places in the whole chain, so that another partition draws the same numbers.
            self._running = with_seeds(stages, chain)[first:end]

        self._takes = crossing(stages, first)
        self._gives = crossing(stages, end)
        # What only passes by is no result: schedules would hold it, and it lies in its receive buffer anyway.
        self._made = tuple(value for value in self._gives if value not in self._takes)
        wires = [stage.wiring.wire for stage in self.stages]
        wiring = Wiring.of(wires, self._made)
        functions = [partial(run_stage, stage) for stage in self._running]
        # A wire names the values that a function takes and makes.
        self._plainly = wiring.wire, partial(wiring.run, functions=functions)
        # For usual micro-batches, and for the last one: of one plan, both are it.
        executors = [self._executor(plan) for plan in plans]
        self._planned = [(executor.wire, executor) for executor in executors]
        # Without layers to look after, the context of a micro-batch does nothing.
        deferring: list[nn.Module] = []
        if defers:
            deferring = self._modules_inside()
        self._statistics = BatchStatistics(deferring)

    def _modules_inside(self) -> list[nn.Module]:
        modules = []
        for stage in self.stages:
            modules += [module for _, module in stage.submodules()]
        return modules

    def _executor(self, plan: StagePlan) -> Executor:
        stages, states = self._running, self._states
        if plan.chain.names[-1] == END:
            # A stage that makes nothing stands for the outputs, which lie there until they have been sent.
            handed_on = Wire(self._made, self._made)
            end = Stage(END, (nn.Identity(),), Wiring(handed_on, (handed_on,), ((),)))
            stages, states = (*stages, end), (*states, SegmentState())
        return Executor(stages, plan.chain, plan.schedule, states, wanted=self._made)

    def forward(self, *tensors: torch.Tensor, micro_batch: int) -> Tensors:
        """Run one micro-batch, under random numbers of its own."""
        layouts = self.step.layouts[micro_batch]
        last = micro_batch == len(self.step.layouts) - 1
        values = layouts[self.number].values(tensors)
        # The executor decides how long the inputs live.
        del tensors
        with ExitStack() as contexts:
            # Draws of the host's generators, such as NumPy's, stay the user's: the other processes do not share them.
            contexts.enter_context(seeded(mixed(self.step.seed, micro_batch), host=False))
            if torch.is_grad_enabled():
                contexts.enter_context(self.step.context())
                contexts.enter_context(self._statistics.micro_batch(last=last))
            values = self.run(values, last=last)
        # Messages are sent from contiguous memory.
        flat_values = layouts[self.number + 1].flat(values)
        made = tuple(tensor.contiguous() for tensor in flat_values)
        if self.outputs is not None:
            # Detached: the graph is the schedule's, and everybody is given outputs behind the backward.
            self.outputs[micro_batch] = [tensor.detach() for tensor in made]
        return made

    def _way(self, *, last: bool) -> tuple[Wire, Callable[[Any], Any]]:
        """The values that the stages take and make, and what runs them."""
        if torch.is_grad_enabled():
            return self._planned[-1 if last else 0]
        return self._plainly

    def run(self, values: Sequence[Any], *, last: bool = False) -> list[Any]:
        """The part's outputs for its inputs, both in order; the last micro-batch may run under another plan."""
        value_of = dict(zip(self._takes, values, strict=True))
        del values
        wire, run = self._way(last=last)
        inputs = [value_of[number] for number in wire.reads]
        outputs = unpacked(run(packed(inputs)), len(wire.writes))
        value_of.update(zip(wire.writes, outputs, strict=True))
        return [value_of[number] for number in self._gives]
