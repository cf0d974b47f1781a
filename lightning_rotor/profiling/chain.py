"""Measuring a whole chain while holding two boundaries at a time, so that it works when the model does not fit.

The first pass looks at behaviour. A stage whose output is a view of its input, or that changes its input in place, is
merged with its neighbour; random numbers and updated buffers are noted. The second pass measures, with a gradient of
the output that fills its memory. Stages whose real gradient is a slice or expanded (after ``torch.cat`` or ``sum``),
which kernels copy first, are measured again (:mod:`.settling`). Nothing is changed: generators are set back, stages
write to copies of buffers, ``.grad`` and modes stay. Users' own counters can ask ``is_recomputing()``.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.capture.compiled import CompiledModules
from lightning_rotor.capture.cuts import NO_CHECKPOINTS
from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.chain import Chain, StageCost
from lightning_rotor.errors import ModelError, RotorWarning
from lightning_rotor.execution.inversion import Way, can_be_fused
from lightning_rotor.execution.options import (
    autocast_enabled,
    kept_attributes,
    kept_parameters,
    lent_buffers,
    run_stage,
    undisturbed,
)
from lightning_rotor.execution.segment_state import SegmentState, Statistic, state_of
from lightning_rotor.invertible.check import Objections, try_inverse
from lightning_rotor.private.sharding import UnitSizes, gathered, units_in
from lightning_rotor.private.torch_names import HOOKS, STRUCTURE, noticed_checkpoints, version_of
from lightning_rotor.private.values import is_fake, require_tensors, same_bits, tensors_in
from lightning_rotor.profiling.gradients import StageEnds
from lightning_rotor.profiling.meters import Meter, meter_for
from lightning_rotor.profiling.settling import (
    Bench,
    Interlude,
    Measurable,
    Measured,
    given,
    outputs_of,
    segment_seconds,
    settle,
    unexpected,
    with_units,
)
from lightning_rotor.profiling.stage import WORTH_MENTIONING_BYTES, StageMeasurement, StageProfiler
from lightning_rotor.profiling.storages import Boundary, merged, scout
from lightning_rotor.stages.sequential import DROPOUTS, Stage, is_plain_stock, unpacked, wiring_of
from lightning_rotor.stages.state import GeneratorStates
from lightning_rotor.units import BLOCK_BYTES, in_blocks

# ----------------------------------------------------------------------------------------------------
# Parameters that several stages share: the engine sums their gradients before it hands them on.


def waiting_gradient_bytes(stages: Sequence[Stage], block_bytes: int) -> tuple[int, ...]:
    """For each stage, bytes of shared parameters' gradients that wait after its backward for an earlier stage's share.

    Autograd gives a parameter the sum of its gradients, once, and holds the first of them until the last is there::

        backward    stage 5 ───► 4 ───► 3 ───► 2 ───► 1          stages 1 and 5 share a weight
                    └──── its gradient waits ────────┘ then is added to the one that exists, and freed

    Where no gradient exists, the sum becomes it, so nothing extra waits.
    """
    readers: dict[int, list[int]] = {}
    parameters: dict[int, torch.Tensor] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.parameters():
            if parameter.requires_grad:
                parameters[id(parameter)] = parameter
                readers.setdefault(id(parameter), []).append(number)
    waiting = [0] * len(stages)
    for key, numbers in readers.items():
        for number in range(min(numbers) + 1, max(numbers) + 1):
            waiting[number] += in_blocks(parameters[key].nbytes, block_bytes)
    return tuple(waiting)


# ----------------------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)  # no slots, for the cached properties
class Profile:
    """A measured chain and its stages.

    Attributes:
        chain: Costs, one entry a stage.
        stages: The stages to run, some of them merged.
        states: For each stage, what a recomputation must leave alone.
    """

    chain: Chain
    stages: tuple[Stage, ...]
    states: tuple[SegmentState, ...]

    @cached_property
    def state(self) -> SegmentState:
        """What recomputations of all stages must leave alone."""
        return sum(self.states, SegmentState())

    @cached_property
    def copied_bytes(self) -> int:
        """Bytes of the buffer copies that a forward holds in case it must run again; 0 where torch counts none."""
        block_bytes = BLOCK_BYTES.get(torch.device(self.chain.device).type)
        return 0 if block_bytes is None else self.state.copied_bytes(block_bytes)

    @cached_property
    def draws_random(self) -> bool:
        """True if a forward may draw random numbers."""
        return bool(self.state.attributed) or any(stage.draws_random for stage in self.chain)


def profile_chain(
    stages: Sequence[Stage],
    sample: Any,
    *,
    repeats: int = 3,
    meter: Meter | None = None,
    progress: Progress | None = None,
    compiled: CompiledModules | None = None,
    in_lockstep: bool = False,
) -> Profile:
    """Measure bytes and seconds of every stage.

    Args:
        stages: What :func:`~lightning_rotor.stages.sequential.sequential_stages` returns.
        sample: Input of the first stage, on the device to measure: a tensor, or tensors in tuples, lists and dicts,
            which require gradients as in training.
        repeats: Timed runs of each stage, more of short ones and fewer of long ones.
        meter: By default the one of the sample's device.
        progress: Called with the number of stages done and their total.
        compiled: Variants of stages that the user compiled; given again, it knows those of earlier calls.
        in_lockstep: All processes of a distributed training measure the same stages now and wait for each other.
    Returns:
        The chain, for the mode, autocast context and shapes of this moment.
    Raises:
        ModelError: A stage returns no tensor, or calls torch's reentrant checkpoint.
        SampleError: The sample holds no tensor.
        ProfilingError: The device cannot be measured.
    Warns:
        RotorWarning: A stage gives other bits when it runs again, pins memory that no checkpoint can free, or calls
            torch's checkpoint by itself.
    """
    require_tensors(sample)
    device = tensors_in(sample)[0].device
    with undisturbed(device):
        measuring = _Measuring(
            stages,
            sample,
            meter or meter_for(device),
            compiled or CompiledModules(),
            repeats=repeats,
            in_lockstep=in_lockstep,
        )
        for number in range(len(measuring.stages)):
            measuring.measure(number)
            if progress is not None:
                progress(number + 1, len(measuring.stages))
        profile = measuring.settled()
        _warn(profile.chain.stages, measuring.collecting)
        if measuring.checkpointing:
            warnings.warn(
                f"{', '.join(map(repr, measuring.checkpointing))}: each is one stage. {NO_CHECKPOINTS}",
                RotorWarning,
                stacklevel=3,
            )
        _warn_of_structure(len(stages), measuring.stages)
    return profile


class _Measuring:
    """A chain that is measured stage by stage, while two boundaries are held."""

    def __init__(
        self,
        stages: Sequence[Stage],
        sample: Any,
        meter: Meter,
        compiled: CompiledModules,
        *,
        repeats: int,
        in_lockstep: bool,
    ) -> None:
        self._meter, self._compiled, self._repeats, self._in_lockstep = meter, compiled, repeats, in_lockstep
        tensor = tensors_in(sample)[0]
        self._device = tensor.device
        reads = wiring_of(stages).wire.reads
        values = zip(reads, unpacked(sample, len(reads)), strict=True)
        self._inputs = {number: Boundary.of(value) for number, value in values}
        began = time.perf_counter()
        self._seen = scout(stages, self._inputs, self._device, block_bytes=meter.block_bytes)
        stage_seconds = (time.perf_counter() - began) / len(stages) / 2  # without what else was done with them
        self._interlude = Interlude(self._device, 0.0 if is_fake(tensor) else stage_seconds)
        self.stages = merged(stages, self._seen.groups)
        self._wiring = wiring_of(self.stages)
        self._skips = {storage: (number, skip) for number, (storage, skip) in enumerate(self._seen.skips().items())}
        self._bench = Bench(compiled)
        self._scratch: dict[tuple[nn.Module, str], Statistic] = {}
        self._values = dict(self._inputs)
        self._before: Boundary | None = None
        self._measured: list[Measured] = []
        self._states: list[SegmentState] = []
        self._traits: list[dict[str, Any]] = []
        self._messages: list[tuple[UnitSizes, float]] = []
        self.collecting: set[int] = set()
        self.checkpointing: list[str] = []

    def measure(self, number: int) -> None:
        """Measure the next stage, and the one before again if this one leaves its gradient otherwise than supposed."""
        stage = self.stages[number]
        boundary = Boundary.packed([self._values[read] for read in stage.reads])
        units = units_in(stage.modules)
        with ExitStack() as stack:
            start = self._meter.now()
            stack.enter_context(gathered(units))
            gathering_seconds = self._meter.seconds_between(start, self._meter.now()) if units else 0.0
            stack.enter_context(kept_attributes(stage, keep_parameters=False))
            passed = self._passed(number, boundary)
            self._traits.append(self._stage(number, boundary, passed))
            sizes = sum((unit.sizes for unit in units), UnitSizes())
        self._messages.append((sizes, gathering_seconds))
        if self._before is not None:
            previous, this = self._measured[-2:]
            previous.expected_bytes = this.link_bytes
            layouts = given(self._measured, number - 1)
            if layouts != previous.layouts:
                previous.settle(layouts, this, self._bench, self._before)
        self._before = boundary
        self._values.update(zip(stage.writes, passed.outputs, strict=True))
        for dead in self._wiring.dead[number]:
            del self._values[dead]

    def _passed(self, number: int, boundary: Boundary) -> _Passed:
        """What one forward of a stage shows."""
        stage = self.stages[number]
        with noticed_checkpoints() as noticed:
            passed = _pass(stage, boundary, self._device)
        if True in noticed:
            raise ModelError(f"stage {stage.name!r} cannot be measured. {NO_CHECKPOINTS}")
        self.checkpointing += [stage.name] * bool(noticed)
        self._states.append(replace(state_of(stage, passed.updating, self._scratch), written=passed.written))
        if passed.leaves_traces:
            self.collecting.add(number)
        return passed

    def _stage(self, number: int, boundary: Boundary, passed: _Passed) -> dict[str, Any]:
        """Measure a stage that has run once; the fields of its costs that are not measured."""
        stage, state = self.stages[number], self._states[number]
        draws_random = any(self._seen.draws_random[index] for index in self._seen.groups[number]) or may_draw(stage)
        profiler = StageProfiler(
            stage,
            Boundary.of(()),
            StageEnds.of(stage, number, self._seen, self._skips),
            self._meter,
            number == len(self.stages) - 1,
            self._repeats,
            state.remembered,
            SegmentState(attributed=state.attributed),
            GeneratorStates(self._device) if draws_random else None,
            interlude=self._interlude,
            in_lockstep=self._in_lockstep,
        )
        tried, way = _objections(number, stage, boundary), None
        if stage.invertible is not None and stage.inverse is not None and not tried.inverse:
            way = Way(stage, can_be_fused(stage.invertible), draws_random, state)
        measurable = Measurable(
            profiler,
            passed.same_bits and not (number == 0 and self._seen.changes_input),
            (_identity(stage, self._compiled), boundary.signature),
            (_identity(stage, self._compiled, with_numbers=False), boundary.signature),
            way,
            tried.fused,
            passed.written,
        )
        found = self._bench.measured(measurable, boundary)
        self._measured.append(Measured.of(number, measurable, found, [skip for _, skip in self._skips.values()]))
        return {
            "draws_random": draws_random,
            "state_bytes": state.remembered_bytes(self._meter.block_bytes),
            "takes": boundary.tensors,
            "not_inverted": found.not_inverted or tried.inverse,
        }

    def settled(self) -> Profile:
        """The profile, once each stage is measured with gradients as the others leave them."""
        settle(self._measured, self._inputs, self._bench)
        for number, expected_bytes in unexpected(self._measured).items():
            self._traits[number]["output_gradient_bytes"] = expected_bytes
        sized = [
            (each.measurable.profiler.ends, with_units(each.found.stage, *message))
            for each, message in zip(self._measured, self._messages, strict=True)
        ]
        running = [
            self._compiled.with_variants(stage, each.found.names)
            for stage, each in zip(self.stages, self._measured, strict=True)
        ]
        waiting = waiting_gradient_bytes(self.stages, self._meter.block_bytes)
        costs = [
            replace(_cost(*sized[number]), name=stage.name, waiting_gradient_bytes=size_bytes, **self._traits[number])
            for number, (stage, size_bytes) in enumerate(zip(self.stages, waiting, strict=True))
        ]
        chain = Chain(
            tuple(costs),
            input_bytes=sum(value.size_bytes(self._meter.block_bytes) for value in self._inputs.values()),
            rng_state_bytes=torch.get_rng_state().nbytes if self._device.type == "cpu" else 0,
            segment_seconds=segment_seconds(self._device, self._meter, self._interlude),
            device=str(self._device),
            skips=tuple(
                skip.measured(self._measured[use].gradient_of(number).size_bytes for use in skip.uses)
                for number, skip in self._skips.values()
            ),
        )
        return Profile(chain, tuple(running), tuple(self._states))


def _objections(number: int, stage: Stage, boundary: Boundary) -> Objections:
    """Why a stage must not be inverted; empty for one that has no inverse."""
    module = stage.invertible
    if module is None or stage.inverse is None:
        return Objections()
    if units_in(stage.modules):
        return Objections("its parameters are gathered for its forward alone")
    if not number:
        return Objections("the chain's input belongs to the caller")
    return try_inverse(module, boundary.fresh(), name=stage.name)


def _cost(ends: StageEnds, measurement: StageMeasurement) -> StageCost:
    """The costs of a stage with skips by their numbers in the chain."""
    options = tuple(
        replace(option, saved_skips=tuple(sorted(ends.skips[place] for place in option.saved_skips)))
        for option in measurement.cost.options
    )
    given_bytes = measurement.given_bytes if ends.skips else None
    return replace(measurement.cost, options=options, skip_gradient_bytes=given_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Passed:
    """What one forward of a merged stage showed."""

    outputs: tuple[Boundary, ...]
    same_bits: bool
    leaves_traces: bool
    updating: tuple[torch.nn.Module, ...]
    written: tuple[torch.nn.Parameter, ...]


def _pass(stage: Stage, boundary: Boundary, device: torch.device) -> _Passed:
    """Run a stage; if it is not torch's own, run it again as a recomputation and compare the bits."""
    states = GeneratorStates(device)
    with ExitStack() as stack:
        before = stack.enter_context(kept_attributes(stage, keep_parameters=False))
        originals = stack.enter_context(lent_buffers(stage))
        written = stack.enter_context(kept_parameters(stage))
        output = run_stage(stage, boundary.fresh())
        updating = _updating(originals)
        leaves_traces = bool(before.changed())
        repeatable = before.is_undoable()
    outputs = tensors_in(output)
    # TorchScript changes the exceptions that pass through it, and a recomputation ends in one.
    scripted = any(isinstance(module, torch.jit.ScriptModule) for _, module in stage.submodules())
    repeatable = repeatable and not written and not scripted
    if repeatable and not is_stock(stage):
        states.restore()
        with kept_attributes(stage), lent_buffers(stage):
            again = tensors_in(run_stage(stage, boundary.fresh()))
        repeatable = len(again) == len(outputs) and all(map(same_bits, outputs, again))
    return _Passed(outputs_of(stage, output), repeatable, leaves_traces, updating, tuple(written))


# -------------------------------------------------------------------- what stages show about themselves


def _updating(originals: Sequence[tuple[torch.nn.Module, str, torch.Tensor]]) -> tuple[torch.nn.Module, ...]:
    """Modules whose lent buffers differ from the originals. Kernels (BatchNorm's) may write without a new version."""
    return tuple(
        module
        for module, name, original in originals
        if (current := module._buffers[name]) is None
        or not same_bits(current, original)
        or (is_fake(current) and version_of(current) > 0)  # a copy that was lent begins at 0
    )


def may_draw(stage: Stage) -> bool:
    """True if a stage could draw random numbers in some step, since a dropout probability may be raised.

    User code may do anything. Restoring a generator for nothing costs microseconds; not restoring one gives wrong
    gradients in silence.
    """
    return not is_stock(stage) or any(isinstance(module, _DRAWING) for _, module in stage.submodules())


def is_stock(stage: Stage) -> bool:
    """True if a stage is made of torch's own layers alone."""
    return all(is_plain_stock(module) for _, module in stage.submodules())


_DRAWING = (
    *DROPOUTS,
    torch.nn.MultiheadAttention,
    torch.nn.RNNBase,
    torch.nn.RReLU,
    torch.nn.FractionalMaxPool2d,
    torch.nn.FractionalMaxPool3d,
)


# -------------------------------------------------------------------- equal stages, overhead, warnings


def _identity(stage: Stage, compiled: CompiledModules, *, with_numbers: bool = True) -> tuple[Any, ...]:
    """A key that is equal for stages that cost the same: same classes, settings, parameter shapes and hooks.

    Attributes that are no plain values count by identity, so that unlike stages never look alike.
    ``with_numbers=False`` leaves out integers, for layers often know their own number.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device)):
            return value
        if isinstance(value, (tuple, list)):
            return tuple(plain(entry) for entry in value)
        return "empty" if isinstance(value, (dict, set)) and not value else id(value)

    places = {number: place for place, number in enumerate(dict.fromkeys((*stage.reads, *_numbers(stage))))}
    identity: list[Any] = [
        tuple(
            (tuple(places[n] for n in wire.reads), tuple(places[n] for n in wire.writes)) for wire in stage.wiring.steps
        ),
        tuple(places[n] for n in stage.writes),
    ]
    identity += [module.identity for module in stage.modules if isinstance(module, GraphSlice)]
    for name, module in stage.submodules():
        if isinstance(module, GraphSlice):
            continue
        compiler, told = compiled.identity(module)
        attributes = {
            key: plain(value)
            for key, value in module.__dict__.items()
            if key not in STRUCTURE and key not in told and (with_numbers or type(value) is not int)
        }
        hooks = [tuple(map(id, getattr(module, key).values())) for key in HOOKS]
        tensors = [
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        identity.append(
            (
                name,
                type(module),
                compiler,
                tuple(sorted(attributes.items(), key=lambda entry: entry[0])),
                tuple(hooks),
                tuple(tensors),
            )
        )
    return tuple(identity)


def _numbers(stage: Stage) -> list[int]:
    return [number for wire in stage.wiring.steps for number in (*wire.reads, *wire.writes)]


def _warn(costs: Sequence[StageCost], collecting: Collection[int]) -> None:
    for number, cost in enumerate(costs):
        if cost.not_inverted:
            _log.info("%r is not inverted: %s", cost.name, cost.not_inverted)
        if not cost.recomputable:
            warnings.warn(
                f"stage {cost.name!r} gives other bits when it runs again, so it is kept and never recomputed. "
                "Typical reasons are state outside of buffers, spectral_norm, parameters that the forward itself "
                "changes (an embedding's max_norm), scripted modules, and operations in place on the chain's own "
                "input",
                RotorWarning,
                stacklevel=4,
            )
        if cost.pinned_bytes >= WORTH_MENTIONING_BYTES and number in collecting:
            _log.info(
                "%r or its hooks keep %d bytes of activations, which the plan counts", cost.name, cost.pinned_bytes
            )
        elif cost.pinned_bytes >= WORTH_MENTIONING_BYTES:
            warnings.warn(
                f"stage {cost.name!r} keeps {cost.pinned_bytes} bytes in its graph that no checkpoint can free "
                "(tensors stored on an autograd context rather than saved by save_for_backward); the plan counts them",
                RotorWarning,
                stacklevel=4,
            )


def _warn_of_structure(layers: int, merged: Sequence[Stage]) -> None:
    if len(merged) == 1 < layers:
        warnings.warn(
            f"all {layers} layers were merged into one stage, so there is nothing to plan: the last of them change in "
            "place, or show as views, what the first has made. Use operations that are not in place",
            RotorWarning,
            stacklevel=4,
        )
    owners: dict[int, int] = {}
    shared = any(
        owners.setdefault(id(parameter), number) != number
        for number, stage in enumerate(merged)
        for parameter in stage.parameters()
    )
    if shared and autocast_enabled():
        warnings.warn(
            "stages share parameters under autocast. Without this package a shared weight is cast once and its "
            "gradients are summed in the lower precision; here each stage casts it for itself and they are summed in "
            "full, so the results differ in the last bits",
            RotorWarning,
            stacklevel=4,
        )


# ----------------------------------------------------------------------------------------------------
# A profile over the stages of another cut, or of another process: costs are numbers, stages are live modules.


def group_sizes(stages: Sequence[Stage], together: Iterable[Stage]) -> list[int]:
    """How many stages of a cut each stage of its profile was merged from."""
    sizes, rest = [], iter(stages)
    for stage in together:
        modules = len(stage.modules)
        sizes.append(0)
        while modules > 0:
            modules -= len(next(rest).modules)
            sizes[-1] += 1
    return sizes


def remembered_places(profile: Profile) -> list[list[int]]:
    """For each stage, the places in it of the modules whose buffers a first pass remembers."""
    return [
        [place for place, (_, module) in enumerate(stage.submodules()) if module in state.remembered]
        for stage, state in zip(profile.stages, profile.states, strict=True)
    ]


def profile_over(
    stages: Sequence[Stage], chain: Chain, *, group_sizes: Sequence[int], remembered: Sequence[Sequence[int]]
) -> Profile:
    """Known costs over the unmerged stages of a cut; raises ValueError if others were measured."""
    starts = [0]
    for size in group_sizes:
        starts.append(starts[-1] + size)
    if starts[-1] != len(stages) or len(chain) != len(starts) - 1:
        raise ValueError("the costs are of other stages than the model has")
    if any(len(cost.options) > 1 for cost in chain):
        raise ValueError("a compiled stage was measured with variants, which only measuring compiles")
    together = merged(stages, [range(start, end) for start, end in pairwise(starts)])
    if chain.names != tuple(stage.name for stage in together):
        raise ValueError("the costs name other stages than the model has")
    scratch: dict[tuple[nn.Module, str], Statistic] = {}
    states = []
    for stage, places in zip(together, remembered, strict=True):
        modules = [module for _, module in stage.submodules()]
        states.append(state_of(stage, [modules[place] for place in places], scratch))
    return Profile(chain, together, tuple(states))
