"""From a module to a pipeline: cut, measured, agreed upon and planned, by all processes at once.

module, sample ──► chain (cut, measured) ──► Partition ──► parts of this process ──► PipelinedModule
                   the first process's counts    (rank 0's)
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_rotor.capture.graph_cut import GraphCut, cut_graph
from lightning_rotor.capture.sequentialize import SequentialCut, sequentialize
from lightning_rotor.chain import Chain
from lightning_rotor.errors import ModelError, PipelineError, RotorError, SampleError
from lightning_rotor.execution.isolated import kept_attributes
from lightning_rotor.memory.device_memory import resolve_limit
from lightning_rotor.pipeline.micro_batches import Call, join, largest_part, rows_in, split
from lightning_rotor.pipeline.partition import Partition, PipelineDevice, partition
from lightning_rotor.pipeline.partition.search import least_largest, stage_bytes, stage_seconds
from lightning_rotor.pipeline.partition.solve import counted_in_stages
from lightning_rotor.pipeline.placement import (
    PipelineProcesses,
    Placement,
    bytes_around,
    first,
    kept_bytes,
    processes_with,
    share_start,
    tensors_of,
)
from lightning_rotor.pipeline.runner import Cut, Part, PipelineRunner
from lightning_rotor.pipeline.step import PipelinedModule, PipelineOptions
from lightning_rotor.planned.agreement import told_by_all
from lightning_rotor.private.torch_names import sent_outputs_linger
from lightning_rotor.private.values import call_with, tensors_in, tree_map_only
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.same_results import require_same
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.user_code import code_of, globals_of
from lightning_rotor.units import parse_limit

_log = logging.getLogger(__name__)

# Ratio of durations up to which two devices count as equally fast.
_ALIKE = 1.15
# Least seconds of all stages: shorter ones end before a process is interrupted once.
_LEAST_SECONDS = 0.02


def pipelined(
    model: nn.Module,
    module: nn.Module,
    call: Call,
    *,
    options: PipelineOptions,
    memory_bytes: int | None = None,
    state_bytes: Callable[[Sequence[Stage]], Sequence[int]],
    processes: PipelineProcesses,
) -> PipelinedModule:
    """Cut a module into pipeline stages; every process of the pipeline does it at once, with the whole model.

    ``call`` is a micro-batch's, under settings as in training; ``memory_bytes`` is what the stages may take of this
    process's device; ``state_bytes`` says by stage what training keeps beside gradients.
    """
    if not tensors_in(call):
        raise PipelineError(
            f"{type(module).__name__} is called without any tensor, and cannot be measured or split: expected tensors "
            "with one row for each sample. Let module=... name a part that takes tensors"
        )
    training = cut_for_rows(module, *call)
    if isinstance(training, GraphCut):
        require_same(module, training, *call)
    profile = profile_chain(training.stages, training.bind(*call))
    chain: Chain = first(profile.chain, processes.group)  # with its measurements
    if odd := processes_with(chain.names != profile.chain.names, processes.group):
        raise PipelineError(
            f"processes cut the model into different stages (those that differ from the first: {odd}): expected the "
            "same model on every process"
        )
    if not isinstance(options.balance, str) and isinstance(training, SequentialCut):
        options = replace(options, balance=counted_in_stages(options.balance, chain.names, list(module._modules)))
    made = _partition(profile, chain, options, memory_bytes, state_bytes(profile.stages), processes)
    pieces = [profile.stages[choice.first : choice.last + 1] for choice in made.choices]
    _require_apart(pieces)
    placement = Placement(model, pieces, processes)
    mine = range(processes.rank, len(made.choices), processes.size)

    def trained(number: int) -> Part:
        choice = made.choices[number]
        lasts = (False,) if choice.last_plan is None else (False, True)
        plans = [made.plan(number, last_micro_batch=last) for last in lasts]
        run, defers = (choice.first, choice.last), options.deferred_batch_norm
        return Part(number, profile.stages, run, states=profile.states, plans=plans, chain=chain, defers=defers)

    runner = evaluation = PipelineRunner(module, training, list(map(trained, mine)), made, processes)
    if isinstance(training, GraphCut):
        cut = _evaluation_cut(module, call)
        runs = _shared_out(cut.stages, profile, made, placement)
        parts = [Part(number, cut.stages, runs[number]) for number in mine]
        evaluation = PipelineRunner(module, cut, parts, made, processes)
    _log.info("%s: %s", type(module).__name__, made.summary())
    runner.check(call)
    return PipelinedModule(model, module, placement, runner, evaluation)


def _require_apart(pieces: Sequence[Sequence[Stage]]) -> None:
    """``PipelineError`` if one part sets a global variable that another one reads: each process has its own."""
    codes = [list(code_of(each for stage in piece for _, each in stage.submodules())) for piece in pieces]
    for number, mine in enumerate(codes):
        others = [code for part, each in enumerate(codes) if part != number for code in each]
        read = {(id(code.__globals__), name) for code in others for name in globals_of(code.__code__)}
        for code in mine:
            for name in globals_of(code.__code__, only_set=True):
                if (id(code.__globals__), name) in read:
                    raise PipelineError(
                        f"{code.__qualname__} sets the global variable {name!r}, which layers on other devices read, "
                        "in processes of their own: expected values to go from layer to layer. Return it, or hand it "
                        "on with @lightning_rotor.skippable"
                    )


def cut_for_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cut:
    """Stages for micro-batches of any size if the module allows; now, since later no process has all layers."""
    cut = sequentialize(module, args, kwargs)
    if isinstance(cut, GraphCut):
        call = args, kwargs
        one_more = join([call, split(call, (1, rows_in(call) - 1))[0]])
        with suppress(ModelError):
            cut_graph(module, *one_more, known=[cut])
        if cut.bind(args, kwargs) is None:  # its code asks how many rows there are: each recording holds for one number
            return sequentialize(module, args, kwargs)
    return cut


def _partition(
    profile: Profile,
    chain: Chain,
    options: PipelineOptions,
    memory_bytes: int | None,
    state_bytes: Sequence[int],
    processes: PipelineProcesses,
) -> Partition:
    """The partition of the very first process, or its error on every process."""
    mine = [stage.keep.seconds for stage in profile.chain]
    if processes.replicas is not None:  # the slowest and the smallest count, since all wait for them
        mine = [max(each) for each in zip(*told_by_all(mine, processes.replicas), strict=True)]
        memory_bytes = None if memory_bytes is None else min(told_by_all(memory_bytes, processes.replicas))
    speeds = speeds_beside_first(told_by_all(mine, processes.group))
    memory = [None if each is None else max(each, 0) for each in told_by_all(memory_bytes, processes.group)]
    answer: Partition | RotorError | None = None
    if dist.get_rank() == 0:
        try:
            answer = partition(
                chain,
                list(map(PipelineDevice, memory, speeds)),
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
    # Also for copies of the pipeline, which have measured for themselves: gradients are averaged layer by layer.
    made: Partition = first(answer)
    return made


def speeds_beside_first(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Speeds relative to the first process, from durations."""
    if min(map(sum, seconds)) < _LEAST_SECONDS:
        return [1.0] * len(seconds)
    ratios = [_middle_ratio(each, seconds[0]) for each in seconds]
    return [1.0 if 1 / _ALIKE < ratio < _ALIKE else 1 / ratio for ratio in ratios]


def _middle_ratio(seconds: Sequence[float], first: Sequence[float]) -> float:
    """Median of ``seconds / first`` over stages, weighted by duration."""
    ratios = sorted((own / other, other) for own, other in zip(seconds, first, strict=True) if own > 0 and other > 0)
    passed = list(accumulate(weight for _, weight in ratios))
    return ratios[bisect_left(passed, passed[-1] / 2)][0] if ratios else 1.0


def _evaluation_cut(module: nn.Module, call: Call) -> Cut:
    """Stages in evaluation, cut in a mode that is set back; what layers before make requires no gradients then."""
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, call)
    with kept_attributes(Stage("", (module,)), keep_parameters=False), torch.no_grad():
        module.eval()
        return cut_for_rows(module, args, kwargs)


def _shared_out(
    stages: Sequence[Stage], profile: Profile, made: Partition, placement: Placement
) -> list[tuple[int, int]]:
    """Evaluation's runs by pipeline stage: where weights are; those without weights as in training, or else early."""
    owned = [{owner for t in tensors_of(stage) if (owner := placement.stage_of(t)) is not None} for stage in stages]
    by_name = {
        stage.name: number
        for number, choice in enumerate(made.choices)
        for stage in profile.stages[choice.first : choice.last + 1]
    }
    at, numbers, parts = 0, [], len(made.choices)
    for place, (stage, owners) in enumerate(zip(stages, owned, strict=True)):
        if len(owners) > 1 or (owners and min(owners) < at):
            raise PipelineError(
                f"in evaluation the model runs {stage.name!r} together with what other pipeline stages hold: expected "
                "code that does the same in training and in evaluation but for its layers (nn.Dropout, not a branch "
                "on self.training), or another balance=[...]"
            )
        if not owners:
            behind = min((number for later in owned[place:] for number in later), default=parts - 1)
            owners = {min(by_name.get(stage.name, at), behind)}
        at = max([at, *owners])
        numbers.append(at)
    missing = sorted(set(range(parts)) - set(numbers))
    if missing:
        raise PipelineError(
            f"in evaluation nothing is left for pipeline stages {missing}: expected a balance in which every stage has "
            "weights, such as one with fewer, larger stages"
        )
    firsts = [*map(numbers.index, range(parts)), len(stages)]
    return [(firsts[number], firsts[number + 1] - 1) for number in range(parts)]


class Pipeline:
    """Trains a module as a pipeline in a plain loop: the same script in every process, as ``torchrun`` starts it.

    The module is cut in its place. Every process keeps the weights of its own stages, and computes what is outside.

    Args:
        module: To cut, with all its weights in every process, on the process's device. The first one's values count.
        sample: Its input for a batch; a tuple for several arguments, a dict for keywords.
        model: What the module is a part of, if more of it learns.
        mem_limit: What training may take of each device, as for :class:`~lightning_rotor.RotorCallback`; but None does
            not limit it, and then ``recompute="rotor"`` recomputes nothing.
        optimizer_scale: Bytes of optimizer state for each byte of trained weights, within ``mem_limit``: 2 for Adam.
        options: Fields of :class:`.PipelineOptions`, such as ``micro_batches=8`` or ``balance=[3, 4, 2]``.
    Attributes:
        partition: How the module is cut.
    Raises:
        PipelineError: There is no process group, or something speaks against a pipeline; on every process.
        PartitionError: No partition fits ``mem_limit``; says the least memory per device that would.
    Example:
        >>> torch.distributed.init_process_group("gloo")  # doctest: +SKIP
        >>> pipeline = Pipeline(net, images, micro_batches=8)  # doctest: +SKIP
        >>> optimizer = torch.optim.SGD(pipeline.parameters(), 0.1)  # doctest: +SKIP
        >>> loss = pipeline.step(lambda x, y: F.cross_entropy(net(x), y), images, labels)  # doctest: +SKIP
    """

    def __init__(
        self,
        module: nn.Module,
        sample: Any,
        *,
        model: nn.Module | None = None,
        mem_limit: int | float | str | None = None,
        optimizer_scale: float = 2.0,
        **options: Any,
    ) -> None:
        if not dist.is_initialized():
            raise PipelineError(
                "there is no process group: expected torch.distributed.init_process_group() before, in a script that "
                "torchrun --nproc-per-node=N starts"
            )
        self._model, self._steps = model or module, 0
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        processes, chosen, limit = PipelineProcesses(device), PipelineOptions(**options), parse_limit(mem_limit)
        share_start(self._model, processes)
        call, memory_bytes = call_with(sample), None
        if limit is not None:
            around = bytes_around(self._model, module, call, optimizer_scale)
            memory_bytes = resolve_limit(limit, device) - around
        self._cut = pipelined(
            self._model,
            module,
            largest_part(call, chosen.micro_batches),
            options=chosen,
            memory_bytes=memory_bytes,
            state_bytes=lambda stages: [kept_bytes(tensors_of(stage), optimizer_scale) for stage in stages],
            processes=processes,
        )
        self.partition, self._cut.caller = self._cut.partition, "the function given to Pipeline.step"
        self._cut.start()

    def parameters(self) -> list[nn.Parameter]:
        """Parameters that this process trains, for its optimizer."""
        return [parameter for parameter in self._model.parameters() if not parameter.is_meta]

    def step(self, run: Callable[..., torch.Tensor], *batch: Any) -> torch.Tensor:
        """Forward and backward of a batch; gradients are added to existing ones.

        Args:
            run: Takes a part of the batch, calls the module once, and returns the part's loss, a mean over its rows. It
                runs once for each micro-batch, in every process.
            batch: What ``run`` takes. The first process's counts.
        Returns:
            The loss of the batch, in every process, detached.
        Raises:
            PipelineError: ``run`` does not return a loss, or does not call the module once.
        """
        self._steps += 1
        batch = first(batch)
        return self._cut.train(lambda part: run(*part), batch, number=self._steps - 1)[1]

    def clip_by_norm(self, limit: float) -> torch.Tensor:
        """Clip gradients by the norm that they have over all processes, and return that norm."""
        return self._cut.placement.clip_by_norm(self._model.parameters(), limit)

    def state_dict(self) -> dict[str, Any]:
        """The whole model's state in the first process; all processes must ask. Elsewhere the local part."""
        return self._cut.placement.whole_state_dict(self._model.state_dict())

    def close(self) -> None:
        """Give every process all weights again, and the module its own forward."""
        self._cut.stop()


# -------------------------------------------------------------------- balances for torchgpipe's users


def balance_by_time(module: nn.Module | Chain, sample: Any = None, *, partitions: int) -> list[int]:
    """Balance a module by how long its stages take; :func:`.partition` also knows of memory and recomputation.

    Args:
        module: To be cut, in the mode and on the device of training, or a chain that has been measured.
        sample: Its input, the size of a micro-batch; a tuple for several arguments. None with a chain.
        partitions: How many parts.
    Returns:
        How many stages of :func:`lightning_rotor.sequentialize` are in each part, so that the slowest one is as fast as
        can be.
    Raises:
        ModelError: The module is no chain of stages.
        PipelineError: There are fewer stages than parts.
        SampleError: The sample is missing.
    Example:
        >>> balance_by_time(model, torch.rand(16, 3, 224, 224), partitions=4)  # doctest: +SKIP
        [21, 18, 18, 16]
    """
    return least_largest(stage_seconds(_chain_of(module, sample)), partitions)


def balance_by_size(
    module: nn.Module | Chain, sample: Any = None, *, partitions: int, param_scale: float = 2.0
) -> list[int]:
    """Balance a module by the memory that its stages take: what plain training saves, and parameters.

    Other arguments, result and errors are those of :func:`balance_by_time`.

    Args:
        module: To be cut.
        sample: Its input.
        partitions: How many parts.
        param_scale: Bytes for each byte of trained parameters: 2 with its gradient (SGD), 3 with momentum, 4 for Adam.
    """
    return least_largest(stage_bytes(_chain_of(module, sample), param_scale), partitions)


def _chain_of(module: nn.Module | Chain, sample: Any) -> Chain:
    if isinstance(module, Chain):
        return module
    if sample is None:
        raise SampleError("the sample is missing: expected an input of the module, such as a micro-batch")
    args = sample if isinstance(sample, tuple) and not isinstance(module, nn.Sequential) else (sample,)
    cut = sequentialize(module, args)
    return profile_chain(cut.stages, cut.bind(args, {})).chain
