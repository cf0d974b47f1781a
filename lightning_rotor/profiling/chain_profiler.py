"""Measuring a whole chain while holding two boundaries at a time, so that it works when the model does not fit.

The first pass looks at behaviour (:mod:`lightning_rotor.profiling.scan`). A stage whose output is a view of its input,
or that changes its input in place, is merged with its neighbour; random numbers and updated buffers are noted. The
second pass measures, with a gradient of the output that fills its memory. Nothing is changed: generators are set back,
stages write to copies of buffers, ``.grad`` and modes stay. Users' own counters can ask ``is_recomputing()``.

The real layout of a gradient comes from behind: as a slice or expanded (after ``torch.cat`` or ``sum``), or in another
order (convolutions that Inductor compiled). Some stages copy it, others hand the order on::

    stage      1 ◄── 2 ◄── 3      3 leaves its gradient in another order: 2 is measured again, and turns out to hand
                                  that order on, so 1 should be measured again, whose input is gone by then

Measurements are kept by stage and layouts, so equal stages need no second one. For the others the chain runs forward
once more, which is enough for one more stage of every such row. Makers and readers of skips likewise get the gradient
that later readers add up. Without that, peaks were up to 10 % too low where only a concatenation reads a skip.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.capture.compiled import CompiledModules
from lightning_rotor.chain import Chain, Skip, StageCost
from lightning_rotor.errors import ModelError, RotorWarning
from lightning_rotor.execution.inversion import Way, can_be_fused
from lightning_rotor.execution.isolated import kept_attributes, kept_parameters, lent_buffers, undisturbed
from lightning_rotor.execution.segment_state import SegmentState, Statistic, state_of
from lightning_rotor.invertible.check import try_inverse
from lightning_rotor.planning.dynamic_program import prepare_for
from lightning_rotor.private.sharding import gathered, units_in
from lightning_rotor.private.torch_names import without_hooks_of_several
from lightning_rotor.private.values import require_tensors, tensors_in
from lightning_rotor.profiling.chain_profile import Profile
from lightning_rotor.profiling.complaints import stage_complaints, structure_complaints
from lightning_rotor.profiling.cpu_recording import require_free
from lightning_rotor.profiling.gradient_layouts import Layout, Layouts, layouts_from
from lightning_rotor.profiling.inverse_costs import with_inverse
from lightning_rotor.profiling.meters import Meter, meter_for
from lightning_rotor.profiling.ranks import ALONE, Ranks
from lightning_rotor.profiling.scan import Scan, merged, scan, walk
from lightning_rotor.profiling.segment_seconds import SAVED_TENSOR_SHARE, interlude, segment_seconds
from lightning_rotor.profiling.shared_parameters import added_gradient_bytes, shared_later, waiting_gradient_bytes
from lightning_rotor.profiling.stage_behaviour import Behaviour
from lightning_rotor.profiling.stage_ends import StageEnds
from lightning_rotor.profiling.stage_identity import stage_identity
from lightning_rotor.profiling.stage_input import Boundary
from lightning_rotor.profiling.stage_profiler import StageMeasurement, StageProfiler
from lightning_rotor.profiling.stage_seconds import StageSeconds, look_for_messages, measure
from lightning_rotor.profiling.unit_costs import cost_with_units
from lightning_rotor.profiling.variant_costs import with_variants
from lightning_rotor.profiling.workspaces import take_workspaces
from lightning_rotor.stages.draws import drawn_since
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.inverses import is_invertible
from lightning_rotor.stages.other_threads import leaving_alone
from lightning_rotor.stages.sequential import Stage, wiring_of
from lightning_rotor.stages.wiring import unpacked

Progress: TypeAlias = Callable[[int, int], None]


def profile_chain(
    stages: Sequence[Stage],
    sample: Any,
    *,
    repeats: int = 3,
    meter: Meter | None = None,
    progress: Progress | None = None,
    compiled: CompiledModules | None = None,
    ranks: Ranks = ALONE,
    accumulating: bool = True,
    unused_outputs: Collection[int] = (),
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
        ranks: Other processes that measure the same stages now, and wait for each other if those exchange messages.
        accumulating: Also measure backwards that add to gradients which are there. Else the peaks of those that make
            them anew stand for both, which are as high or higher.
        unused_outputs: Numbers of the tensors, among those that the last stage returns, that the caller lets go of at
            once and learns nothing from.
    Returns:
        The chain, for the mode, autocast context and shapes of this moment.
    Raises:
        ModelError: A stage returns no tensor, or calls torch's reentrant checkpoint.
        SampleError: The sample holds no tensor.
        ProfilingError: The device cannot be measured.
        MessageError: Those exchange messages, and their stages are not the same.
        ProfilerBusyError: It cannot now, here or on a process that measures together with this one.
    Warns:
        RotorWarning: A stage gives other bits when it runs again, pins memory that no checkpoint can free, or calls
            torch's checkpoint by itself.
    """
    _require_stages(stages)
    require_tensors(sample)
    # The planner may have to be compiled. It is, in another process, while this one measures.
    prepare_for(len(stages))
    device = tensors_in(sample)[0].device
    parameters = {parameter for stage in stages for parameter in stage.parameters()}
    drawn: set[str] = set()
    # ``torch.autograd.grad``, by which stages are measured, cannot call the hooks of several parameters.
    with undisturbed(device) as generators, without_hooks_of_several(parameters), _setting_back(drawn, generators):
        meter = meter or meter_for(device)
        if meter.needs_warm_up:
            # Taken inside of a run, they would be counted as that stage's, and be missing in the next.
            take_workspaces(device)
        inputs = _inputs_of(stages, sample)
        # All processes scan the same stages: a message in one of them must find its partner in the others.
        with ranks.alike([stage.name for stage in stages]):
            findings = scan(stages, inputs, device, block_bytes=meter.block_bytes, ranks=ranks, unused=unused_outputs)
            profiler = _ChainProfiler(
                stages,
                inputs,
                findings,
                device=device,
                meter=meter,
                compiled=compiled or CompiledModules(),
                drawn=drawn,
                repeats=repeats,
                ranks=ranks,
                accumulating=accumulating,
            )
        # Merging may have made other stages of them on another process.
        with ranks.alike([stage.name for stage in profiler.stages]):
            if ranks.watches:
                profiler.look_for_messages()
            # One process whose profiler is taken must not leave the others waiting for its messages.
            if ranks.together:
                require_free(meter.is_taken, ranks)
            profiler.measure(progress)
        profile = profiler.profile()
        complaints = [*stage_complaints(profile.chain, profiler.behaviours)]
        complaints += structure_complaints(len(stages), profiler.stages)
        for message in complaints:
            warnings.warn(message, RotorWarning, stacklevel=2)
    return profile


def _require_stages(stages: Iterable[object]) -> None:
    """``ModelError`` if one is a layer, as of an ``nn.Sequential`` in the place of its stages."""
    for stage in stages:
        if not isinstance(stage, Stage):
            raise ModelError(
                f"a stage is a {type(stage).__name__}: expected stages, such as sequential_stages(net) or "
                "sequentialize(net, (x,)).stages"
            )


def _inputs_of(stages: Sequence[Stage], sample: Any) -> dict[int, Boundary]:
    """The values that a chain takes from its caller, by number."""
    reads = wiring_of(stages).wire.reads
    return {number: Boundary.of(value) for number, value in zip(reads, unpacked(sample, len(reads)), strict=True)}


@contextmanager
def _setting_back(drawn: Collection[str], generators: GeneratorStates) -> Iterator[None]:
    """Context behind which ``generators`` are only those that were drawn from, if another thread may use the others."""
    try:
        yield
    finally:
        if generators.shared:
            generators.keep_only(drawn)


@dataclass(frozen=True, slots=True, eq=False)
class _ChainStage:
    """A stage in its chain, before it is measured.

    Attributes:
        profiler: Measures the stage where there is an input; its boundary is empty here.
        identity: A key; stages with equal ones cost the same, for all that can be told before a run.
        way: In which the stage is inverted; None if it cannot be.
        objection: The reason why it cannot be inverted, or not by its own backward; may be empty.
    """

    profiler: StageProfiler
    identity: tuple[Any, ...]
    way: Way | None
    objection: str

    def key(self, layouts: Layouts) -> tuple[Any, ...]:
        """All that a measurement with gradients in these layouts depends on."""
        profiler = self.profiler
        return (
            self.identity,
            profiler.ends,
            layouts,
            tuple(profiler.shared.items()),
            profiler.last,
            profiler.recomputable,
            len(profiler.state.remembered),
            None if self.way is None else self.way.fused,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _MeasuredStage:
    """A stage with its measurement under gradients that lay as ``layouts`` says."""

    stage: _ChainStage
    measurement: StageMeasurement
    layouts: Layouts

    def cost(self, *, waiting_gradient_bytes: int, added_gradient_bytes: int) -> StageCost:
        """Its costs in the chain, with skips by their numbers there."""
        profiler = self.stage.profiler
        cost = self.measurement.cost
        skips = profiler.ends.skips
        options = []
        for option in cost.options:
            saved_skips = sorted(skips[place] for place in option.saved_skips)
            staying_bytes = option.parameter_gradient_bytes - added_gradient_bytes
            options.append(replace(option, saved_skips=tuple(saved_skips), parameter_gradient_bytes=staying_bytes))
        # Equal stages share a measurement, so what tells them apart in the chain is set here.
        return replace(
            cost,
            name=profiler.stage.name,
            options=tuple(options),
            draws_random=profiler.generators is not None,
            state_bytes=profiler.state.remembered_bytes(profiler.meter.block_bytes),
            not_inverted=cost.not_inverted or self.stage.objection,
            skip_gradient_bytes=self.measurement.gradients.given_bytes if skips else None,
            waiting_gradient_bytes=waiting_gradient_bytes,
        )


@contextmanager
def _alone(profiler: StageProfiler) -> Iterator[StageProfiler]:
    """Context in which a stage can run as often as one likes, and leaves everything as it was."""
    with (
        # All the time: a message in the middle of a measured run would wait for other processes.
        gathered(units_in(profiler.stage.modules)),
        kept_attributes(profiler.stage, keep_parameters=False) as before,
        lent_buffers(profiler.stage),
        kept_parameters(profiler.stage, profiler.state.written),
    ):
        yield replace(profiler, before=before)


def _run_again(profiler: StageProfiler) -> None:
    """Run a stage and its backward for the random numbers that they draw."""
    with kept_attributes(profiler.stage), lent_buffers(profiler.stage):
        profiler.recorded_run(hold_input=False, hold_output=False)


class _ChainProfiler:
    """Measures a scanned chain stage by stage, and again where gradients lie otherwise than supposed.

    Attributes:
        stages: The merged stages.
        behaviours: For each of them, what the scan has seen.

    Args:
        drawn: Kinds of generators that the stages have drawn from; what measuring finds is added to it.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        inputs: Mapping[int, Boundary],
        findings: Scan,
        *,
        device: torch.device,
        meter: Meter,
        compiled: CompiledModules,
        drawn: set[str],
        repeats: int,
        ranks: Ranks,
        accumulating: bool,
    ) -> None:
        self._inputs = inputs
        self._scan = findings
        self._device = device
        self._meter = meter
        self._compiled = compiled
        self._drawn = drawn
        self._repeats = repeats
        self._ranks = ranks
        self._accumulating = accumulating
        self._interlude = interlude(device, meter)
        self._segment_seconds = segment_seconds(device, meter)
        self.stages = merged(stages, findings.groups)
        self.behaviours = []
        for group in findings.groups:
            self.behaviours.append(Behaviour.of_all(findings.behaviours[group.start : group.stop]))
        for behaviour in findings.behaviours:
            self._drawn.update(behaviour.drawn)
        self._shared = shared_later(self.stages)
        self._skips = list(findings.skips.values())
        # Compiled stages that look alike share their seconds, so that plans do not mix their options by chance.
        # Seconds of compiled stages by kin and sizes, and measurements by the key of a stage.
        self._variant_seconds: dict[Any, tuple[StageSeconds, ...]] = {}
        self._measurements: dict[Any, StageMeasurement] = {}
        # Scratch statistics that equal normalization layers write to in turn.
        self._scratch: dict[tuple[nn.Module, str], Statistic] = {}
        self._chain: list[_MeasuredStage] = []

    def look_for_messages(self) -> None:
        """Run all stages with their backwards, those that look the same once."""
        # The scan has seen forwards alone. This comes before anything that may end measuring on one process, as a
        # profiler does that is taken there.
        seen = set[Any]()
        for number, boundary in self._walk(self.stages):
            stage = self._chain_stage(number, boundary)
            key = stage.key(())
            # A stage that one process has seen before must run all the same if another has not.
            if self._ranks.any(key not in seen):
                with _alone(replace(stage.profiler, boundary=boundary)) as profiler:
                    look_for_messages(profiler)
            seen.add(key)

    def _walk(self, stages: Sequence[Stage]) -> Iterator[tuple[int, Boundary]]:
        """The numbers of stages with their inputs. Each stage runs from where the scan ran it, and so draws alike."""
        for number, boundary in walk(stages, self._inputs):
            yield number, boundary
            for start in self.behaviours[number].starts[:1]:
                # Only those that the stage draws from: another thread may draw from the others.
                start.restore(self.behaviours[number].drawn)

    def measure(self, progress: Progress | None) -> None:
        """Measure all stages, and those again whose gradients other stages leave otherwise than supposed."""
        previous: Boundary | None = None
        for number, boundary in self._walk(self.stages):
            stage = self._chain_stage(number, boundary)
            measurement = self._measurement(stage, (), boundary)
            assert measurement is not None
            self._chain.append(_MeasuredStage(stage, measurement, ()))
            if previous is not None:
                # At once, while its input is there: later the chain would have to run up to it again.
                self._measure_as_given(number - 1, previous)
            previous = boundary
            if progress is not None:
                progress(number + 1, len(self.stages))
        # What a stage is given depends on later ones alone, so each forward is enough for at least the last of these.
        # Longer rows of unlike stages that hand on an order are rare, so there are few rounds.
        while stale := self._stale_stages():
            for number, boundary in self._walk(self.stages[: stale[0] + 1]):
                if number in stale:
                    self._measure_as_given(number, boundary)

    def _stale_stages(self) -> list[int]:
        """Stages that must be measured again, and need their input for that; last ones first."""
        stale = []
        # All but the last stage, whose output's gradient is the caller's.
        for number in reversed(range(len(self._chain) - 1)):
            if not self._measure_as_given(number, None):
                stale.append(number)
        return stale

    def _measure_as_given(self, number: int, boundary: Boundary | None) -> bool:
        """Measure a stage with its gradients as the stages behind leave them, if that is not done yet.

        False if it has to be measured, and there is no boundary.
        """
        measured = self._chain[number]
        layouts = self._given_layouts(number)
        if not self._ranks.any(layouts != measured.layouts):
            return True
        measurement = self._measurement(measured.stage, layouts, boundary)
        if measurement is None:
            return False
        self._chain[number] = _MeasuredStage(measured.stage, measurement, layouts)
        return True

    def _measurement(
        self,
        stage: _ChainStage,
        layouts: Layouts,
        boundary: Boundary | None,
    ) -> StageMeasurement | None:
        """The measurement of a stage, made once for all that look the same; None if it needs a boundary to be made."""
        # Equal stages share a measurement, whatever layer of the model they are.
        key = stage.key(layouts)
        # Where processes run together, one that knows a stage must run it all the same if another does not.
        if self._ranks.any(key not in self._measurements):
            if boundary is None:
                return None
            profiler = replace(stage.profiler, boundary=boundary, layouts=layouts)
            self._measurements[key] = self._measured(stage, profiler)
        return self._measurements[key]

    def _measured(self, stage: _ChainStage, profiler: StageProfiler) -> StageMeasurement:
        """A stage's measurement, made now; notes from which generators its backward draws."""
        # Another thread may draw from those that no stage is known to draw from, so they are left alone.
        before = GeneratorStates(self._device)
        others = before.kinds - self._drawn if before.shared else frozenset()
        with leaving_alone(others):
            measurement = self._under_all_options(stage, profiler)
        # The scan has seen forwards alone, and a backward may draw, too. Several processes must run equally often.
        if before.shared and not self._ranks.together:
            self._drawn |= drawn_since(before, partial(_run_again, profiler), certain=self._drawn)
        return measurement

    def _under_all_options(
        self,
        stage: _ChainStage,
        profiler: StageProfiler,
    ) -> StageMeasurement:
        """Costs of a stage: kept, under the budgets of a compiler, and inverted."""
        with _alone(profiler) as profiler:
            measurement = measure(profiler)
            units = units_in(profiler.stage.modules)
            # A variant would be compiled together with what gathers the parameters.
            if units:
                return replace(measurement, cost=cost_with_units(measurement.cost, units))
            if profiler.is_compiled:
                identity = stage_identity(profiler.stage, self._compiled, with_numbers=False)
                kin = identity, profiler.boundary.signature
                measurement = with_variants(profiler, measurement, self._compiled, kin, self._variant_seconds)
            if stage.way is not None:
                # Last, since an inverse is judged against the stage as it is kept.
                measurement = with_inverse(replace(profiler, way=stage.way), measurement)
            cost = measurement.cost
            # A discarded forward packs each tensor that autograd would save, only to drop it.
            packing_seconds = cost.keep.saved_tensors * SAVED_TENSOR_SHARE * self._segment_seconds
            return replace(measurement, cost=replace(cost, discard_seconds=cost.discard_seconds + packing_seconds))

    def _given_layouts(self, number: int) -> Layouts:
        """Layouts in which the stages behind leave a stage's gradients, as far as these were measured."""
        left: dict[int, tuple[int, Layout]] = {}
        next_stage = self._chain[number + 1].measurement
        # An inverted stage that is fused may leave other layouts. Only their bytes count, which were compared.
        if not any(option.fused for option in next_stage.cost.options):
            for key, layout in next_stage.gradients.layouts.items():
                if key < 0:
                    left[key] = number + 1, layout
        for place, skip in enumerate(self._chain[number].stage.profiler.ends.skips):
            reader = self._next_reader(skip, number)
            # Nobody behind has been measured that reads it. So its gradient lies like its tensor, as far as is known.
            if reader is None:
                continue
            measured = self._chain[reader]
            its_place = measured.stage.profiler.ends.skips.index(skip)
            # A reader knows a skip by a place of its own.
            its_layout = measured.measurement.gradients.layouts.get(its_place)
            if its_layout is not None:
                left[place] = reader, its_layout
        return layouts_from(left)

    def _next_reader(self, skip: int, number: int) -> int | None:
        """The first stage behind this one that reads a skip; None if there is none, or it was not measured yet."""
        for use in self._skips[skip].uses:
            if use > number:
                return use if use < len(self._chain) else None
        return None

    def _chain_stage(self, number: int, boundary: Boundary) -> _ChainStage:
        """A stage with all that is known before it is measured."""
        stage = self.stages[number]
        behaviour = self.behaviours[number]
        state = state_of(stage, behaviour.updating, self._scratch)
        state = replace(state, written=behaviour.written, drawn=behaviour.drawn)
        generators = GeneratorStates(self._device)
        if generators.shared:
            # Where the scan has run it: from other numbers, code that skips layers could draw from other generators.
            if behaviour.starts:
                generators = behaviour.starts[0]
            generators.keep_only(behaviour.drawn)
        profiler = StageProfiler(
            stage,
            StageEnds.of(stage, number, self._scan),
            state,
            last=number == len(self.stages) - 1,
            recomputable=behaviour.repeatable,
            generators=generators if behaviour.draws_random else None,
            meter=self._meter,
            repeats=self._repeats,
            interlude=self._interlude,
            ranks=self._ranks,
            accumulating=self._accumulating,
            shared=self._shared[number],
        )
        identity = stage_identity(stage, self._compiled), boundary.signature
        # Here, where there is an input to try the inverse on.
        way, objection = _way(number, stage, boundary, draws_random=behaviour.draws_random, state=state)
        return _ChainStage(profiler, identity, way, objection)

    def _with_gradients(self, number: int) -> Skip:
        """A skip with the bytes that the gradients which its readers leave for it keep alive."""
        skip = self._skips[number]
        sizes = []
        for use in skip.uses:
            reader = self._chain[use]
            place = reader.stage.profiler.ends.skips.index(number)
            # A reader that makes no gradient for it leaves nothing.
            sizes.append(reader.measurement.gradients.skip_bytes.get(place, 0))
        return replace(skip, gradient_bytes=tuple(sizes))

    def profile(self) -> Profile:
        """The chain as measured, and what runs it."""
        states = tuple(measured.stage.profiler.state for measured in self._chain)
        chain = self._costs()
        return Profile(chain, self._running_stages(chain), states, tuple(map(len, self._scan.groups)))

    def _costs(self) -> Chain:
        """The chain as measured."""
        block_bytes = self._meter.block_bytes
        gradient_sizes = [measured.measurement.gradients.parameters for measured in self._chain]
        waiting_bytes = waiting_gradient_bytes(self.stages, block_bytes)
        added_bytes = added_gradient_bytes(self.stages, self._shared, gradient_sizes, block_bytes)
        costs = []
        for measured, waiting, added in zip(self._chain, waiting_bytes, added_bytes, strict=True):
            costs.append(measured.cost(waiting_gradient_bytes=waiting, added_gradient_bytes=added))
        return Chain(
            tuple(costs),
            input_bytes=sum(value.size_bytes(block_bytes) for value in self._inputs.values()),
            # A segment remembers a generator in 5 kB of the host's memory, which counts where the host is the device.
            rng_state_bytes=torch.get_rng_state().nbytes if self._device.type == "cpu" else 0,
            segment_seconds=self._segment_seconds,
            device=str(self._device),
            skips=tuple(self._with_gradients(number) for number in range(len(self._skips))),
        )

    def _running_stages(self, chain: Chain) -> tuple[Stage, ...]:
        """The stages with the variants that their costs have."""
        stages = []
        for stage, cost in zip(self.stages, chain, strict=True):
            variants = [option.name for option in cost.options[1:] if not option.inverts]
            # Only the variants that an option stands for: others would be compiled for nothing.
            stages.append(self._compiled.with_variants(stage, variants) if variants else stage)
        return tuple(stages)


def _way(
    number: int,
    stage: Stage,
    boundary: Boundary,
    *,
    draws_random: bool,
    state: SegmentState,
) -> tuple[Way | None, str]:
    """The way in which a stage is inverted, if it can be; and why it must not be, or not by its own backward."""
    module = stage.invertible
    if module is None:
        # Whoever wrote a layer with an inverse wants to know why no plan uses it.
        kinds = dict.fromkeys(type(inner).__name__ for _, inner in stage.submodules() if is_invertible(inner))
        return None, f"{', '.join(kinds)} is but a part of it" if kinds else ""
    if units_in(stage.modules):
        return None, "its parameters are gathered for its forward alone"
    if number == 0:
        return None, "the chain's input belongs to the caller"
    # With a copy of its real input: an inverse may hold for some numbers and not for others.
    against_inverse, against_fused = try_inverse(module, boundary.fresh(), name=stage.name)
    if against_inverse:
        return None, against_inverse
    is_fused = can_be_fused(module) and not against_fused
    return Way(stage, is_fused, draws_random, state), against_fused
