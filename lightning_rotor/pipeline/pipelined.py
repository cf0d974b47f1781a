"""From a module to a pipeline: cut, measured, agreed upon and planned, by all processes at once.

module, sample ──► chain (cut, measured) ──► Partition ──► parts of this process ──► PipelinedModule
                   the first process's counts    (rank 0's)
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_rotor.capture.graph_cut import GraphCut, cut_graph
from lightning_rotor.capture.sequentialize import SequentialCut, sequentialize
from lightning_rotor.chain import Chain
from lightning_rotor.devices import block_bytes_of
from lightning_rotor.errors import ModelError, PipelineError, RotorError
from lightning_rotor.execution.isolated import kept_attributes, lent_buffers, undisturbed
from lightning_rotor.pipeline.device_speeds import speeds_beside_first
from lightning_rotor.pipeline.micro_batches import Call, join, rows_in, split
from lightning_rotor.pipeline.part import Part
from lightning_rotor.pipeline.partition import Partition, PipelineDevice, partition
from lightning_rotor.pipeline.partition.solve import counted_in_stages
from lightning_rotor.pipeline.pipeline_options import PipelineOptions
from lightning_rotor.pipeline.pipelined_module import PipelinedModule
from lightning_rotor.pipeline.placement import Placement, shared_tensors, tensors_of
from lightning_rotor.pipeline.processes import PipelineProcesses, first, processes_with
from lightning_rotor.pipeline.runner import Cut, PipelineRunner
from lightning_rotor.planned.agreement import answers_of_all
from lightning_rotor.private.torch_names import sent_outputs_linger, version_of
from lightning_rotor.private.values import tensors_in, tree_map_only
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.same_results import require_same
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.user_code import code_of, globals_of

_log = logging.getLogger(__name__)


def pipelined(
    model: nn.Module,
    module: nn.Module,
    call: Call,
    *,
    options: PipelineOptions,
    memory_bytes: int | None = None,
    kept: Callable[[Sequence[torch.Tensor]], int],
    processes: PipelineProcesses,
) -> PipelinedModule:
    """Cut a module into pipeline stages; every process of the pipeline does it at once, with the whole model.

    ``call`` is a micro-batch's, under settings as in training; ``memory_bytes`` is what the stages may take of this
    process's device; ``kept`` says what training keeps of some parameters and buffers beside gradients.
    """
    if not tensors_in(call):
        raise PipelineError(
            f"{type(module).__name__} is called without any tensor, and cannot be measured or split: expected tensors "
            "with one row for each sample. Let module=... name a part that takes tensors"
        )
    training = cut_for_rows(module, *call)
    if isinstance(training, GraphCut):
        # Now, while this process has all layers: later none can run the whole module to compare with.
        require_same(module, training, *call)
    profile = profile_chain(training.stages, training.bind(*call))
    # With its measurements: each process has measured others.
    chain: Chain = first(profile.chain, processes.group)
    others = processes_with(chain.names != profile.chain.names, processes.group)
    if others:
        raise PipelineError(
            f"processes cut the model into different stages (those that differ from the first: {others}): expected "
            "the same model on every process"
        )
    if not isinstance(options.balance, str) and isinstance(training, SequentialCut):
        # Users count the layers of their nn.Sequential, some of which are one stage together.
        stages = processes.size * options.stages_per_device
        balance = counted_in_stages(options.balance, chain.names, list(module._modules), stages)
        options = replace(options, balance=balance)

    plan = _partition(profile, chain, options, memory_bytes, kept, processes)
    pieces = [profile.stages[choice.first : choice.last + 1] for choice in plan.choices]
    _require_apart(pieces)
    placement = Placement(model, module, pieces, processes)
    _require_no_written_buffers(model, module, call, placement, processes.device)
    # Device d of D has the stages d, d + D, ...: those of ``interleaved`` go round.
    own_numbers = range(processes.rank, len(plan.choices), processes.size)
    parts = [_training_part(number, profile, chain, plan, options) for number in own_numbers]
    runner = evaluation = PipelineRunner(module, training, parts, plan, processes)
    if isinstance(training, GraphCut):
        # A recorded forward is that of training. Evaluation may run other operations.
        cut = _evaluation_cut(module, call)
        runs = _runs_in_evaluation(cut.stages, profile, plan, placement)
        parts = [Part(number, cut.stages, runs[number]) for number in own_numbers]
        # With parts of its own, for evaluation runs under no plan.
        evaluation = PipelineRunner(module, cut, parts, plan, processes)
    _log.info("%s: %s", type(module).__name__, plan.summary())
    # Now, before weights are given up: an error then leaves the module as it was.
    runner.check(call)
    return PipelinedModule(model, module, placement, runner, evaluation)


def _training_part(
    number: int,
    profile: Profile,
    chain: Chain,
    plan: Partition,
    options: PipelineOptions,
) -> Part:
    """A pipeline stage's part in training, under the plans of the partition."""
    choice = plan.choices[number]
    plans = [plan.plan(number, last_micro_batch=False)]
    if choice.last_plan is not None:
        plans.append(plan.plan(number, last_micro_batch=True))
    return Part(
        number,
        profile.stages,
        (choice.first, choice.last),
        states=profile.states,
        plans=plans,
        chain=chain,
        defers=options.deferred_batch_norm,
    )


def _require_apart(pieces: Sequence[Sequence[Stage]]) -> None:
    """``PipelineError`` if one part sets a global variable that another one reads: each process has its own."""
    codes_by_part = []
    for piece in pieces:
        modules: list[nn.Module] = []
        for stage in piece:
            modules += [module for _, module in stage.submodules()]
        codes_by_part.append(list(code_of(modules)))
    for number, codes in enumerate(codes_by_part):
        others: list[FunctionType] = []
        for other, part in enumerate(codes_by_part):
            if other != number:
                others += part
        read_elsewhere = _globals_read(others)
        for code in codes:
            for name in globals_of(code.__code__, only_set=True):
                if (id(code.__globals__), name) in read_elsewhere:
                    raise PipelineError(
                        f"{code.__qualname__} sets the global variable {name!r}, which layers on other devices read, "
                        "in processes of their own: expected values to go from layer to layer. Return it, or hand it "
                        "on with @lightning_rotor.skippable"
                    )


def _require_no_written_buffers(
    model: nn.Module,
    module: nn.Module,
    call: Call,
    placement: Placement,
    device: torch.device,
) -> None:
    """``PipelineError`` if stages of two parts use a buffer that a forward writes: each device would have its own."""
    shared = {}
    for name, buffer in model.named_buffers():
        parts = placement.stages_of(buffer)
        if len(parts) > 1:
            shared[id(buffer)] = name, parts
    # Tables of angles, which blocks often share, are read alone. A forward shows which are written.
    if not shared:
        return
    for buffer in _written_buffers(module, call, device):
        if id(buffer) in shared:
            name, parts = shared[id(buffer)]
            raise PipelineError(
                f"pipeline stages {parts[0]} and {parts[1]} share the buffer {name!r}, which a forward writes: "
                "expected it in one stage, since every device has its own. Choose a balance that keeps its layers "
                "together, or give each a layer of its own"
            )


def _written_buffers(module: nn.Module, call: Call, device: torch.device) -> list[torch.Tensor]:
    """Buffers that a module writes or replaces in a call, which leaves no trace."""
    args, kwargs = call
    whole = Stage("", (module,))
    written = []
    with undisturbed(device), kept_attributes(whole), lent_buffers(whole) as originals, torch.no_grad():
        copies = []
        for owner, name, _ in originals:
            copy = owner._buffers[name]
            assert copy is not None
            copies.append(copy)
        versions = list(map(version_of, copies))
        module(*args, **kwargs)
        for (owner, name, original), copy, version in zip(originals, copies, versions, strict=True):
            is_kept = owner._buffers.get(name) is copy
            # Writes to ``.data`` leave the version as it was.
            if not is_kept or version_of(copy) != version or not torch.equal(copy, original):
                written.append(original)
    return written


def _globals_read(codes: Iterable[FunctionType]) -> set[tuple[int, str]]:
    """Global variables that functions use: the id of the module's namespace, and the name."""
    read = set()
    for code in codes:
        for name in globals_of(code.__code__):
            read.add((id(code.__globals__), name))
    return read


def cut_for_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cut:
    """Stages for micro-batches of any size if the module allows; now, since later no process has all layers."""
    cut = sequentialize(module, args, kwargs)
    if isinstance(cut, GraphCut):
        call = args, kwargs
        # A second recording, with one more row, tells which sizes follow from the number of rows.
        rows_behind = rows_in(call) - 1
        one_row, _ = split(call, (1, rows_behind))
        one_more = join([call, one_row])
        # If it is refused, the first one still holds for its own number of rows.
        with suppress(ModelError):
            cut_graph(module, *one_more, known=[cut])
        if cut.bind(args, kwargs) is None:
            # Its code asks how many rows there are, so each recording holds for one number.
            return sequentialize(module, args, kwargs)
    return cut


def _partition(
    profile: Profile,
    chain: Chain,
    options: PipelineOptions,
    memory_bytes: int | None,
    kept: Callable[[Sequence[torch.Tensor]], int],
    processes: PipelineProcesses,
) -> Partition:
    """The partition of the very first process, or its error on every process."""
    own_seconds = [stage.keep.seconds for stage in profile.chain]
    if processes.replicas is not None:
        # All copies wait for the slowest, and have one partition, which must fit the smallest.
        told = answers_of_all(own_seconds, processes.replicas)
        own_seconds = [max(seconds) for seconds in zip(*told, strict=True)]
        if memory_bytes is not None:
            memory_bytes = min(answers_of_all(memory_bytes, processes.replicas))
    speeds = speeds_beside_first(answers_of_all(own_seconds, processes.group))
    # Each process knows its own limit, and only the first one searches.
    memories = answers_of_all(memory_bytes, processes.group)
    devices = []
    for memory, speed in zip(memories, speeds, strict=True):
        # What is around the stages may take more than the limit. Then nothing is left, and the search says so.
        left = None if memory is None else max(memory, 0)
        devices.append(PipelineDevice(left, speed))
    answer: Partition | RotorError | None = None
    if dist.get_rank() == 0:
        try:
            answer = partition(
                chain,
                devices,
                micro_batches=options.micro_batches,
                balance=options.balance,
                schedule=options.schedule,
                stages_per_device=options.stages_per_device,
                recompute=options.recompute,
                state_bytes=[kept(tensors_of(stage)) for stage in profile.stages],
                shared=shared_tensors(profile.stages, kept, block_bytes_of(processes.device.type)),
                outputs_linger=sent_outputs_linger(),
            )
        except RotorError as error:
            # For all processes, which wait for the answer.
            answer = error
    # Also for copies of the pipeline, which have measured for themselves: gradients are averaged layer by layer.
    plan: Partition = first(answer)
    return plan


def _evaluation_cut(module: nn.Module, call: Call) -> Cut:
    """Stages in evaluation, cut in a mode that is set back; what layers before make requires no gradients then."""
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, call)
    with kept_attributes(Stage("", (module,)), keep_parameters=False), torch.no_grad():
        module.eval()
        return cut_for_rows(module, args, kwargs)


def _runs_in_evaluation(
    stages: Sequence[Stage],
    profile: Profile,
    plan: Partition,
    placement: Placement,
) -> list[tuple[int, int]]:
    """Evaluation's first and last stage by pipeline stage.

    Stages with weights run where their weights are. Those without run where they do in training or, if training has no
    stage of the name, as early as they can.
    """
    homes_by_place = [_homes_of(stage, placement) for stage in stages]
    number_in_training = {}
    for number, choice in enumerate(plan.choices):
        for stage in profile.stages[choice.first : choice.last + 1]:
            # By name: evaluation has other stages, cut from another recording.
            number_in_training[stage.name] = number

    parts = len(plan.choices)
    # Values go from stage to stage in one direction only, so numbers never fall along the chain.
    at = 0
    numbers = []
    for place, (stage, homes) in enumerate(zip(stages, homes_by_place, strict=True)):
        wanted = number_in_training.get(stage.name, at)
        if homes is None:
            # Without weights it may run anywhere, but not behind the place of weights that come later in the chain.
            later = [min(later_homes) for later_homes in homes_by_place[place:] if later_homes]
            number = min(wanted, min(later, default=parts - 1))
            at = max(at, number)
        else:
            ahead = [number for number in homes if number >= at]
            if not ahead:
                raise PipelineError(
                    f"in evaluation the model runs {stage.name!r} together with what other pipeline stages hold: "
                    "expected code that does the same in training and in evaluation but for its layers (nn.Dropout, "
                    "not a branch on self.training), or another balance=[...]"
                )
            # Weights that several stages share are in several places.
            at = wanted if wanted in ahead else ahead[0]
        numbers.append(at)
    missing = sorted(set(range(parts)) - set(numbers))
    if missing:
        raise PipelineError(
            f"in evaluation nothing is left for pipeline stages {missing}: expected a balance in which every stage has "
            "weights, such as one with fewer, larger stages"
        )
    ends = [*map(numbers.index, range(1, parts)), len(stages)]
    firsts = [0, *ends[:-1]]
    return [(first_stage, end - 1) for first_stage, end in zip(firsts, ends, strict=True)]


def _homes_of(stage: Stage, placement: Placement) -> list[int] | None:
    """Pipeline stages that have all tensors of a stage, in order; None for a stage without tensors of the pipeline."""
    homes: list[int] | None = None
    for tensor in tensors_of(stage):
        numbers = placement.stages_of(tensor)
        if not numbers:
            continue
        if homes is None:
            homes = list(numbers)
        else:
            homes = [number for number in homes if number in numbers]
    return homes
