"""A module that runs as a pipeline: cut, measured, planned, and attached in the place of the module's ``forward``.

module, sample ──► chain (cut, measured) ──► Partition ──► parts of this process ──► PipelineRunner
                   the first process's counts    (rank 0's)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from lightning_rotor.capture.cuts import GraphCut, SequentialCut
from lightning_rotor.chain import Chain
from lightning_rotor.errors import RotorError
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.pipeline.batch_statistics import values_per_row
from lightning_rotor.pipeline.micro_batches import join, rows_in, sizes_of, split
from lightning_rotor.pipeline.partition import Partition, PipelineDevice, RecomputeMode, partition
from lightning_rotor.pipeline.paused_step import suspended_call
from lightning_rotor.pipeline.placement import Ownership, first, gathered
from lightning_rotor.pipeline.runner import PipelineRunner
from lightning_rotor.pipeline.schedule import PipelineError, PipelineScheduleName
from lightning_rotor.pipeline.stage_runner import Part, PartPlan, cut_for_rows, evaluation_cut
from lightning_rotor.pipeline.surroundings import mixed
from lightning_rotor.private.torch_names import sent_outputs_linger
from lightning_rotor.private.values import tensors_in
from lightning_rotor.profiling import profile_chain
from lightning_rotor.profiling.reference import require_same
from lightning_rotor.stages.sequential import Stage, unpacked, wiring_of

# ----------------------------------------------------------------------------------------------------
# How fast the devices of a pipeline are beside each other: every process times the same stages.


# Two devices are as fast as each other up to this ratio of their durations.
_ALIKE = 1.15
# A model whose stages take less in all is over before a process has been interrupted once.
_LEAST_SECONDS = 0.02


def gathered_speeds(
    chain: Chain, group: dist.ProcessGroup | None = None, replicas: dist.ProcessGroup | None = None
) -> list[float]:
    """By process of the pipeline, its speed beside the first one's; every process calls it at once.

    Args:
        chain: As this process has measured it; the same stages everywhere.
        group: Processes of the pipeline.
        replicas: Processes with the same place in other pipelines: the slowest of them counts, for all wait for it.
    """
    mine = [stage.keep.forward_seconds + stage.keep.backward_seconds for stage in chain]
    if replicas is not None:
        mine = [max(each) for each in zip(*gathered(mine, replicas), strict=True)]
    return speeds_beside_first(gathered(mine, group))


def speeds_beside_first(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Speeds from durations.

    Args:
        seconds: By process, how long each stage takes it, the same stages everywhere.
    Returns:
        By process, its speed where the first one's is 1; alike ones have equal speeds.
    Example:
        >>> speeds_beside_first([[1.0, 2.0], [1.1, 2.0], [2.0, 4.0]])
        [1.0, 1.0, 0.5]
    """
    first = seconds[0]
    if min(map(sum, seconds)) < _LEAST_SECONDS:
        return [1.0] * len(seconds)
    ratios = [_middle_ratio(each, first) for each in seconds]
    found = [1.0] * len(ratios)
    for alike in _alike(ratios):
        ratio = 1.0 if 0 in alike else ratios[alike[len(alike) // 2]]
        for process in alike:
            found[process] = 1 / ratio
    return found


def _middle_ratio(seconds: Sequence[float], first: Sequence[float]) -> float:
    """The median of ``seconds / first`` over stages, each counted by how long it takes."""
    ratios = sorted((own / other, other) for own, other in zip(seconds, first, strict=True) if own > 0 and other > 0)
    half, passed = sum(weight for _, weight in ratios) / 2, 0.0
    for ratio, weight in ratios:
        passed += weight
        if passed >= half:
            return ratio
    return 1.0


def _alike(ratios: Sequence[float]) -> list[list[int]]:
    """Processes in groups: those that are like the first; of the others, by rising ratio, those that are like the fastest of their group."""
    order = sorted(range(len(ratios)), key=lambda process: ratios[process])
    with_first = [process for process in order if 1 / _ALIKE < ratios[process] < _ALIKE]
    groups = [with_first]
    for process in order:
        if process in with_first:
            continue
        last = groups[-1]
        if last is not with_first and ratios[process] < _ALIKE * ratios[last[0]]:
            last.append(process)
        else:
            groups.append([process])
    return groups


# ----------------------------------------------------------------------------------------------------
# How to pipeline, as users say it.


Balance: TypeAlias = Literal["auto"] | Sequence[int]


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How to pipeline.

    Attributes:
        micro_batches: Into how many parts a batch is split.
        schedule: In which order devices work.
        recompute: See :class:`lightning_rotor.pipeline.partition.Problem`.
        balance: ``"auto"``, or how many stages of the chain each pipeline stage gets.
        stages_per_device: More than one for ``"interleaved"``.
        deferred_batch_norm: Running statistics of BatchNorm are updated once for each batch, as if it had not been split.
    """

    micro_batches: int = 8
    schedule: PipelineScheduleName = "1f1b"
    recompute: RecomputeMode = "rotor"
    balance: Balance = "auto"
    stages_per_device: int = 1
    deferred_batch_norm: bool = False


# ----------------------------------------------------------------------------------------------------


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
        called: What a call does in the step that runs now, under manual optimization.
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
    called: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None

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
            if self.called is not None:
                return self.called(args, kwargs)
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
    cut = cut_for_rows(module, args, kwargs)
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
