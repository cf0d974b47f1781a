"""A module that runs as a pipeline: cut, measured, planned, and attached in the place of the module's ``forward``.

module, sample ──► chain (cut, measured) ──► Partition ──► parts of this process ──► PipelineRunner
                   the first process's counts    (rank 0's)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from lightning_rotor.chain import Chain
from lightning_rotor.cutting import SequentialCut, sequentialize
from lightning_rotor.errors import RotorError
from lightning_rotor.pipeline.batch_statistics import values_per_row
from lightning_rotor.pipeline.evaluation import evaluation_cut
from lightning_rotor.pipeline.options import PipelineOptions
from lightning_rotor.pipeline.ownership import Ownership
from lightning_rotor.pipeline.parts import Part, PartPlan
from lightning_rotor.pipeline.runner import PipelineRunner
from lightning_rotor.pipeline.seeding import mixed
from lightning_rotor.pipeline.sharing import first, gathered
from lightning_rotor.pipeline.speeds import gathered_speeds
from lightning_rotor.pipeline.splitting import join, rows_in, sizes_of, split
from lightning_rotor.pipeline.suspended import suspended_call
from lightning_rotor.pipeline_schedule import PipelineError
from lightning_rotor.planning.partition import Partition, PipelineDevice, partition
from lightning_rotor.private.pipelining import sent_outputs_linger
from lightning_rotor.profiling import profile_chain
from lightning_rotor.profiling.reference import require_same
from lightning_rotor.sequential import Stage, wiring_of
from lightning_rotor.state import SegmentState
from lightning_rotor.tensors import tensors_in
from lightning_rotor.tracing import GraphCut
from lightning_rotor.wiring import unpacked

if TYPE_CHECKING:
    from lightning_rotor.pipeline.phases import Phases

_log = logging.getLogger(__name__)

StateBytes: TypeAlias = Callable[[Sequence[Stage]], Sequence[int]]
"""By stage of a chain, what training keeps of it besides gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """A module as stages in training, or in evaluation."""

    cut: SequentialCut | GraphCut
    runner: PipelineRunner
    reads: int

    def inputs(self, module: nn.Module, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Sequence[Any]]:
        """By micro-batch, the values that the chain takes."""
        found = []
        for args, kwargs in calls:
            value = self.cut.bind(args, kwargs)
            if value is None:
                raise PipelineError(
                    f"{type(module).__name__} was cut into pipeline stages for another kind of call: expected arguments that differ in their "
                    "tensors alone, and a module that has not changed since training began"
                )
            found.append(unpacked(value, self.reads))
        return found


@dataclass(eq=False)
class PipelinedModule:
    """Runs a module as a pipeline, in the place of its ``forward``.

    Attributes:
        module: The user's.
        partition: How it is cut, and how each part runs.
        ownership: Which process has which weights.
        options: How it was to be done.
        phases: Of the step that runs now, under manual optimization.
    """

    module: nn.Module
    partition: Partition
    ownership: Ownership
    options: PipelineOptions
    _training: _Way
    _evaluation: _Way
    _parameters: tuple[tuple[nn.Module, str], ...]
    _device: torch.device
    _seed: int
    _evaluations: int = 0
    phases: Phases | None = None

    # A copy of a live module computes with its own weights, plainly.
    def __deepcopy__(self, memo: dict[int, Any]) -> _Inactive:
        return _Inactive()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inactive, ()

    @property
    def active(self) -> bool:
        """It is no copy."""
        return True

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._device

    @property
    def runner(self) -> PipelineRunner:
        """Runs training steps."""
        return self._training.runner

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In a training step, wait for the pipeline; without gradients, run forward."""
        waiting = suspended_call()
        if waiting is not None:
            return waiting.call(args, kwargs)
        if torch.is_grad_enabled():
            if self.phases is not None:
                return self.phases.forward(args, kwargs)
            raise PipelineError(
                f"{type(module).__name__} is cut into pipeline stages and was called with gradients outside of training_step: expected calls in "
                "training_step, or under torch.no_grad()"
            )
        return self.evaluate(args, kwargs)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output for a whole batch, on every process, without gradients."""
        sizes = sizes_of(rows_in((args, kwargs)), self.options.micro_batches)
        way = self._training if self.module.training else self._evaluation
        calls = split((args, kwargs), sizes)
        self._evaluations += 1
        seed = mixed(self.seed(0), self._evaluations)  # for dropout that is on without gradients
        return join(way.runner.forward(way.inputs(self.module, calls), seed=seed, signature=self.signature()))

    def seed(self, step: int) -> int:
        """The seed of a step: of the seed that torch was given on the pipeline's first process, and of the step's number."""
        return mixed(self._seed, step)

    def inputs(self, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Sequence[Any]]:
        """By micro-batch, what the chain takes in training."""
        return self._training.inputs(self.module, calls)

    def signature(self) -> Any:
        """What shapes depend on besides inputs: which parameters learn."""
        return tuple(
            parameter.requires_grad
            for module, name in self._parameters
            if (parameter := module._parameters[name]) is not None
        )


class _Inactive:
    """In the place of a pipeline in a copied module."""

    active = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return type(module).forward(module, *args, **kwargs)


def pipelined(
    model: nn.Module,
    module: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    options: PipelineOptions,
    devices: Sequence[PipelineDevice],
    state_bytes: StateBytes,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    replicas: dist.ProcessGroup | None = None,
) -> PipelinedModule:
    """Cut a module into pipeline stages. Every process of the pipeline does it at once, with the whole model, under settings as in training.

    Args:
        model: Whatever the weights belong to.
        module: Part of it, or itself.
        call: Arguments of a micro-batch's call as in training.
        options: How to pipeline.
        devices: In the order of the pipeline; how fast they are is measured.
        state_bytes: What training keeps, by stage.
        device: Where this process computes.
        group: Processes of the pipeline.
        replicas: Processes with the same place in other pipelines of the same model, which are cut alike.
    Raises:
        PipelineError: It cannot be cut so; on every process.
        PartitionError: There is too little memory; says how much would do.
        ModelError: The module is no chain.
    """
    args, kwargs = call
    if not tensors_in(call):
        raise PipelineError(
            f"{type(module).__name__} is called without any tensor, and cannot be measured or split: expected tensors with one row for each sample. "
            "Let module=... name a part that takes tensors"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    training = _cut(module, args, kwargs)
    profile = profile_chain(training.stages, training.bind(args, kwargs))
    chain = _agreed(profile.chain, group)
    speeds = gathered_speeds(profile.chain, group, replicas)
    devices = [replace(each, speed=speed) for each, speed in zip(devices, speeds, strict=True)]
    made = _partition(chain, devices, options, state_bytes(profile.stages), group, replicas)
    pieces = [profile.stages[choice.first : choice.last + 1] for choice in made.choices]
    ownership = Ownership(model, pieces, group)
    evaluation, plain = evaluation_cut(module, call, training, profile, made, ownership)

    norms = values_per_row(module, args, kwargs, rows_in(call)) if options.deferred_batch_norm else None

    def runner(
        stages: Sequence[Stage], states: Sequence[SegmentState], plans: Sequence[PartPlan], seeds: Chain | None = None
    ) -> PipelineRunner:
        parts = {
            number: Part(stages, states, plan, seeds) for number, plan in enumerate(plans) if number % size == rank
        }
        return PipelineRunner(
            parts, len(plans), schedule=options.schedule, device=device, group=group, batch_norms=norms
        )

    trained = runner(profile.stages, profile.states, _plans(made), chain)
    reads = len(wiring_of(profile.stages).wire.reads)
    evaluated = trained if plain is None else runner(evaluation.stages, (), plain)
    _log.info("%s: %s", type(module).__name__, made.summary())
    whole = PipelinedModule(
        module,
        made,
        ownership,
        options,
        _Way(training, trained, reads),
        _Way(evaluation, evaluated, len(wiring_of(evaluation.stages).wire.reads)),
        tuple((owner, name) for owner in module.modules() for name in owner._parameters),
        device,
        first(torch.initial_seed(), group),
    )
    trained.check(whole.inputs([call])[0], signature=whole.signature())
    return whole


def _cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SequentialCut | GraphCut:
    cut = sequentialize(module, args, kwargs)
    if isinstance(cut, GraphCut):
        require_same(module, cut, args, kwargs)
    return cut


def _agreed(chain: Chain, group: dist.ProcessGroup | None) -> Chain:
    """The first process's measurements, if all have cut alike."""
    if dist.get_world_size(group) == 1:
        return chain
    whose: Chain = first(chain, group)
    odd = [process for process, alike in enumerate(gathered(whose.names == chain.names, group)) if not alike]
    if odd:
        raise PipelineError(
            f"processes cut the model into different stages (those that differ from the first: {odd}): expected the same model on every process"
        )
    return whose


def _partition(
    chain: Chain,
    devices: Sequence[PipelineDevice],
    options: PipelineOptions,
    state_bytes: Sequence[int],
    group: dist.ProcessGroup | None,
    replicas: dist.ProcessGroup | None,
) -> Partition:
    """The first process's partition, or its error on every process."""
    answer: Partition | RotorError | None = None
    if dist.get_rank(group) == 0:
        try:
            answer = partition(
                chain,
                devices,
                micro_batches=options.micro_batches,
                balance=options.balance,
                schedule=options.schedule,
                stages_per_device=options.stages_per_device,
                recompute=options.recompute,
                state_bytes=state_bytes,
                outputs_linger=sent_outputs_linger(),
            )
        except RotorError as error:
            answer = error
    made: Partition | RotorError = first(answer, group)
    if replicas is not None:
        made = first(made, replicas)  # each has measured for itself, but gradients are averaged layer by layer
    if isinstance(made, RotorError):
        raise made
    return made


def _plans(made: Partition) -> list[PartPlan]:
    """How each part runs."""
    return [
        PartPlan(
            choice.first,
            choice.last,
            made.plan(number),
            made.plan(number, last_micro_batch=True) if choice.last_plan is not None else None,
        )
        for number, choice in enumerate(made.choices)
    ]
