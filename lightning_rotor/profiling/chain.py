"""Measuring a whole chain while holding two boundaries at a time, so that it works when the model does not fit.

The first pass looks at behaviour. A stage whose output is a view of its input, or that changes its input in place, is
merged with its neighbour; random numbers and updated buffers are noted. The second pass measures, with a gradient of
the output that fills its memory. Nothing is changed: generators are set back, stages write to copies of buffers,
``.grad`` and modes stay. Users' own counters can ask ``is_recomputing()``.

How a gradient really lies comes from behind: as a slice or expanded (after ``torch.cat`` or ``sum``), or in another
order (convolutions that Inductor compiled). Some stages copy it, others hand the order on::

    stage      1 ◄── 2 ◄── 3      3 leaves its gradient in another order: 2 is measured again, and turns out to hand
                                  that order on, so 1 should be measured again, whose input is gone by then

What equal stages have shown is known. For the others the chain runs forward once more, which settles one more stage of
every such row. Makers and readers of skips likewise get the gradient that later readers add up.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.capture.compiled import CompiledModules
from lightning_rotor.capture.copies import Copies
from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.capture.sequentialize import NO_CHECKPOINTS
from lightning_rotor.chain import Chain, Skip, StageCost
from lightning_rotor.errors import RotorWarning
from lightning_rotor.execution.inversion import Way, can_be_fused
from lightning_rotor.execution.isolated import kept_attributes, kept_parameters, lent_buffers, undisturbed
from lightning_rotor.execution.segment_state import SegmentState, Statistic, state_of
from lightning_rotor.invertible.check import try_inverse
from lightning_rotor.private.autocast import autocast_enabled
from lightning_rotor.private.sharding import Unit, UnitSizes, gathered, units_in
from lightning_rotor.private.torch_names import HOOKS, STRUCTURE, is_compiled, without_hooks_of_several
from lightning_rotor.private.values import bytes_of, require_tensors, tensors_in
from lightning_rotor.profiling.meters import Meter, meter_for, require_free
from lightning_rotor.profiling.options import (
    SAVED_TENSOR,
    StageSeconds,
    interlude,
    look_for_messages,
    measure,
    segment_seconds,
    with_inverse,
    with_variants,
)
from lightning_rotor.profiling.ranks import ALONE, Ranks
from lightning_rotor.profiling.scan import Behaviour, Boundary, merged, scan, walk
from lightning_rotor.profiling.stage import (
    WORTH_MENTIONING_BYTES,
    Layouts,
    StageEnds,
    StageMeasurement,
    StageProfiler,
    layouts_from,
)
from lightning_rotor.profiling.workspaces import take_workspaces
from lightning_rotor.stages.draws import drawn_since
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.inverses import is_invertible
from lightning_rotor.stages.other_threads import leaving_alone
from lightning_rotor.stages.sequential import Stage, wiring_of
from lightning_rotor.stages.wiring import unpacked
from lightning_rotor.units import BLOCK_BYTES, in_blocks

# ----------------------- Parameters that several stages share: the engine sums their gradients before it hands them on.


def waiting_gradient_bytes(stages: Sequence[Stage], block_bytes: int) -> tuple[int, ...]:
    """For each stage, bytes of shared parameters' gradients that wait after its backward for an earlier stage's share.

    Autograd gives a parameter the sum of its gradients, once, and holds the first of them until the last is there::

        backward    stage 5 ───► 4 ───► 3 ───► 2 ───► 1          stages 1 and 5 share a weight
                    └──── its gradient waits ────────┘ then is added to the one that exists, and freed

    Where no gradient exists, the sum becomes it, so nothing extra waits, see ``_added_gradient_bytes``.
    """
    readers: dict[nn.Parameter, list[int]] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.learning():
            readers.setdefault(parameter, []).append(number)
    waiting = [0] * len(stages)
    for parameter, numbers in readers.items():
        for number in range(numbers[0] + 1, numbers[-1] + 1):
            waiting[number] += in_blocks(bytes_of(parameter), block_bytes)
    return tuple(waiting)


def _shared_later(stages: Sequence[Stage]) -> list[dict[int, bool]]:
    """For each stage, numbers of its parameters that later stages share, and whether one of them alone does."""
    found, later = list[dict[int, bool]](), Counter[nn.Parameter]()
    for stage in reversed(stages):
        learning = stage.learning() if not units_in(stage.modules) else ()  # FSDP hands on what a unit has gathered
        found.append({n: later[parameter] == 1 for n, parameter in enumerate(learning) if later[parameter]})
        later.update(learning)
    return found[::-1]


def _added_gradient_bytes(chain: Sequence[_MeasuredStage]) -> list[int]:
    """For each stage, bytes of gradients that do not stay, as they are added to those that later stages have left."""
    added, left = list[int](), set[nn.Parameter]()
    for stage in reversed(chain):
        profiler, sizes = stage.profiler, stage.found.gradients.parameters
        measured = dict(zip(profiler.stage.learning(), sizes, strict=False))  # no sizes if nothing learns
        added.append(sum(size for each, size in measured.items() if each in left) if profiler.shared else 0)
        # Sparse ones add up to larger ones.
        left |= {
            each for each, size in measured.items() if size == in_blocks(bytes_of(each), profiler.meter.block_bytes)
        }
    return added[::-1]


_log = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)  # no slots, for the cached properties
class Profile:
    """A measured chain and its stages.

    Attributes:
        chain: Costs, one entry a stage.
        stages: The stages to run, some of them merged.
        states: For each stage, what a recomputation must leave alone.
        group_sizes: For each stage, of how many stages of the cut it was merged.
    """

    chain: Chain
    stages: tuple[Stage, ...]
    states: tuple[SegmentState, ...]
    group_sizes: tuple[int, ...]

    def __repr__(self) -> str:
        return f"<Profile of {self.chain!r}>"

    @cached_property
    def state(self) -> SegmentState:
        """State that recomputations of all stages must leave alone."""
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

    @property
    def remembered(self) -> list[list[int]]:
        """For each stage, the places in it of the modules whose buffers a first pass remembers."""
        return [
            [place for place, (_, module) in enumerate(stage.submodules()) if module in state.remembered]
            for stage, state in zip(self.stages, self.states, strict=True)
        ]

    @property
    def drawn(self) -> list[list[str]]:
        """For each stage, the kinds of generators that it draws from."""
        return [list(state.drawn) for state in self.states]


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
    require_tensors(sample)
    device = tensors_in(sample)[0].device
    parameters = {parameter for stage in stages for parameter in stage.parameters()}
    drawn: set[str] = set()
    with undisturbed(device) as generators, without_hooks_of_several(parameters), _only(drawn, generators):
        meter, compiled = meter or meter_for(device), compiled or CompiledModules()
        how = {"repeats": repeats, "ranks": ranks, "accumulating": accumulating}
        if meter.needs_warm_up:
            take_workspaces(device)
        with ranks.alike([stage.name for stage in stages]):
            measuring = _Measuring(stages, sample, meter, compiled, drawn, **how)
        with ranks.alike([stage.name for stage in measuring.stages]):
            if ranks.watches:
                measuring.look_for_messages()
            if ranks.together:
                require_free(meter.is_taken, ranks)
            measuring.measure(progress)
        profile = measuring.profile()
        costs = _complaints(profile.chain, measuring.behaviours)
        for message in (*costs, *_complaints_about_structure(len(stages), measuring.stages)):
            warnings.warn(message, RotorWarning, stacklevel=2)
    return profile


@contextmanager
def _only(drawn: Collection[str], generators: GeneratorStates) -> Iterator[None]:
    """Context behind which only generators are set back that were drawn from, if another thread may use them."""
    try:
        yield
    finally:
        if generators.shared:
            generators.keep_only(drawn)


@dataclass(slots=True, eq=False)
class _MeasuredStage:
    """A stage in its chain, and what measuring has found with gradients that lay as ``layouts`` says."""

    profiler: StageProfiler  # it can measure wherever there is an input; its boundary is empty
    identity: tuple[Any, ...]  # equal ones cost the same, for all that can be told before a run
    way: Way | None  # how it is inverted; None if it cannot be
    objection: str  # why it cannot be, or not by its own backward
    found: StageMeasurement = field(init=False)
    layouts: Layouts = ()

    def key(self, layouts: Layouts) -> tuple[Any, ...]:
        """All that its measurement depends on, as a key."""
        profiler, way = self.profiler, self.way
        shared = tuple(profiler.shared.items())
        runs = profiler.last, profiler.recomputable, len(profiler.state.remembered), way and way.fused
        return self.identity, profiler.ends, layouts, shared, runs

    def cost(self, waiting_gradient_bytes: int, added_gradient_bytes: int) -> StageCost:
        """Its costs in the chain, with skips by their numbers there."""
        found, profiler, skips = self.found, self.profiler, self.profiler.ends.skips
        options = (
            replace(
                option,
                saved_skips=tuple(sorted(skips[place] for place in option.saved_skips)),
                parameter_gradient_bytes=option.parameter_gradient_bytes - added_gradient_bytes,
            )
            for option in found.cost.options
        )
        return replace(
            found.cost,
            name=profiler.stage.name,
            options=tuple(options),
            draws_random=profiler.generators is not None,
            state_bytes=profiler.state.remembered_bytes(profiler.meter.block_bytes),
            not_inverted=found.cost.not_inverted or self.objection,
            skip_gradient_bytes=found.gradients.given_bytes if skips else None,
            waiting_gradient_bytes=waiting_gradient_bytes,
        )


@contextmanager
def _alone(profiler: StageProfiler) -> Iterator[StageProfiler]:
    """Context in which a stage can run as often as one likes, and leaves everything as it was."""
    with (
        gathered(units_in(profiler.stage.modules)),
        kept_attributes(profiler.stage, keep_parameters=False) as before,
        lent_buffers(profiler.stage),
        kept_parameters(profiler.stage, profiler.state.written),
    ):
        yield replace(profiler, before=before)


class _Measuring:
    """A chain that is scanned, then measured stage by stage while two boundaries are held, then settled."""

    def __init__(
        self,
        stages: Sequence[Stage],
        sample: Any,
        meter: Meter,
        compiled: CompiledModules,
        drawn: set[str],
        **how: Any,
    ) -> None:
        self._meter, self._compiled, self._drawn, self._how = meter, compiled, drawn, how
        self._ranks: Ranks = how["ranks"]
        self._device = tensors_in(sample)[0].device
        reads = wiring_of(stages).wire.reads
        values = zip(reads, unpacked(sample, len(reads)), strict=True)
        self._inputs = {number: Boundary.of(value) for number, value in values}
        self._scan = scan(stages, self._inputs, self._device, block_bytes=meter.block_bytes, ranks=self._ranks)
        self._interlude = interlude(self._device)
        self._segment_seconds = segment_seconds(self._device, meter)
        self.stages = merged(stages, self._scan.groups)
        self._shared = _shared_later(self.stages)
        self._drawn.update(*(behaviour.drawn for behaviour in self._scan.behaviours))
        self.behaviours = [Behaviour.of_all(self._scan.behaviours[g.start : g.stop]) for g in self._scan.groups]
        self._skips = list(self._scan.skips.values())
        self._seconds: dict[Any, tuple[StageSeconds, ...]] = {}
        self._known: dict[Any, StageMeasurement] = {}
        self._scratch: dict[tuple[nn.Module, str], Statistic] = {}
        self._chain: list[_MeasuredStage] = []

    def look_for_messages(self) -> None:
        """Run all stages with their backwards, those that look the same once: the scan has seen forwards alone.

        That comes before anything that may end measuring on one process, as a profiler does that is taken there.
        """
        seen = set[Any]()
        for number, boundary in self._walk(self.stages):
            stage = self._unmeasured(number, boundary)
            key = stage.key(())
            if self._ranks.any(key not in seen):
                with _alone(replace(stage.profiler, boundary=boundary)) as profiler:
                    look_for_messages(profiler)
            seen.add(key)

    def _walk(self, stages: Sequence[Stage]) -> Iterator[tuple[int, Boundary]]:
        """The numbers of stages with their inputs. Each stage runs from where the scan ran it, and so draws alike."""
        for number, boundary in walk(stages, self._inputs):
            yield number, boundary
            for start in self.behaviours[number].starts[:1]:
                start.restore(self.behaviours[number].drawn)

    def measure(self, progress: Progress | None) -> None:
        """Measure all stages, and those again whose gradients other stages leave otherwise than supposed."""
        before: Boundary | None = None
        for number, boundary in self._walk(self.stages):
            stage = self._unmeasured(number, boundary)
            self._find(stage, (), boundary)
            self._chain.append(stage)
            if before is not None:
                self._settle(number - 1, before)
            before = boundary
            if progress is not None:
                progress(number + 1, len(self.stages))
        # What a stage is given depends on later ones alone, so each forward settles at least the last of these.
        while stale := [number for number in reversed(range(len(self._chain) - 1)) if not self._settle(number)]:
            for number, boundary in self._walk(self.stages[: stale[0] + 1]):
                if number in stale:
                    self._settle(number, boundary)

    def _settle(self, number: int, boundary: Boundary | None = None) -> bool:
        """Measure a stage as those behind it leave its gradients; False if it has to, and there is no boundary."""
        stage, layouts = self._chain[number], self._given(number)
        return not self._ranks.any(layouts != stage.layouts) or self._find(stage, layouts, boundary)

    def _find(self, stage: _MeasuredStage, layouts: Layouts, boundary: Boundary | None) -> bool:
        """Measure a stage, those that look the same once; False if it has to, and there is no boundary."""
        key = stage.key(layouts)
        if self._ranks.any(key not in self._known):
            if boundary is None:
                return False
            self._known[key] = self._measured(stage, replace(stage.profiler, boundary=boundary, layouts=layouts))
        stage.found, stage.layouts = self._known[key], layouts
        return True

    def _measured(self, stage: _MeasuredStage, profiler: StageProfiler) -> StageMeasurement:
        """Costs of a stage under all its options."""
        before = GeneratorStates(self._device)
        others = before.kinds - self._drawn if before.shared else frozenset()
        with leaving_alone(others):
            found = self._costs(stage, profiler)

        def run_again() -> None:
            with kept_attributes(profiler.stage), lent_buffers(profiler.stage):
                profiler.recorded_run(hold_input=False, hold_output=False)

        if before.shared and not self._ranks.together:  # a backward may draw, too
            self._drawn |= drawn_since(before, run_again, certain=self._drawn)
        return found

    def _costs(self, stage: _MeasuredStage, profiler: StageProfiler) -> StageMeasurement:
        with _alone(profiler) as profiler:
            found = measure(profiler)
            if units := units_in(
                profiler.stage.modules
            ):  # a variant would be compiled together with what gathers the parameters
                return replace(found, cost=_with_units(found.cost, units))
            if profiler.is_compiled:
                kin = _identity(profiler.stage, self._compiled, with_numbers=False), profiler.boundary.signature
                found = with_variants(profiler, found, self._compiled, kin, self._seconds)
            if stage.way is not None:
                found = with_inverse(replace(profiler, way=stage.way), found)
            packing_seconds = found.cost.keep.saved_tensors * SAVED_TENSOR * self._segment_seconds
            return replace(
                found, cost=replace(found.cost, discard_seconds=found.cost.discard_seconds + packing_seconds)
            )

    def _given(self, number: int) -> Layouts:
        """The layouts in which the stages behind leave a stage's gradients, as far as they are known."""
        behind, skips = self._chain[number + 1].found, self._chain[number].profiler.ends.skips
        left = {key: (number + 1, layout) for key, layout in behind.gradients.layouts.items() if key < 0}
        if any(option.fused for option in behind.cost.options):  # it may leave others: only their bytes count
            left.clear()
        for place, skip in enumerate(skips):
            reader = next((use for use in self._skips[skip].uses if use > number), len(self._chain))
            if reader < len(self._chain):
                other = self._chain[reader].profiler.ends.skips.index(skip)
                if (layout := self._chain[reader].found.gradients.layouts.get(other)) is not None:
                    left[place] = reader, layout
        return layouts_from(left)

    def _unmeasured(self, number: int, boundary: Boundary) -> _MeasuredStage:
        """All that is known of a stage before it is measured."""
        stage, behaviour = self.stages[number], self.behaviours[number]
        state = state_of(stage, behaviour.updating, self._scratch)
        state = replace(state, written=behaviour.written, drawn=behaviour.drawn)
        ends, generators = StageEnds.of(stage, number, self._scan), GeneratorStates(self._device)
        if generators.shared:
            # Where the scan has run it: from other numbers, code that skips layers could draw from other generators.
            generators = behaviour.starts[0] if behaviour.starts else generators
            generators.keep_only(behaviour.drawn)
        profiler = StageProfiler(
            stage,
            ends,
            state,
            meter=self._meter,
            interlude=self._interlude,
            last=number == len(self.stages) - 1,
            recomputable=behaviour.repeatable,
            generators=generators if behaviour.draws_random else None,
            shared=self._shared[number],
            **self._how,
        )
        return _MeasuredStage(
            profiler,
            (_identity(stage, self._compiled), boundary.signature),
            *_way(number, stage, boundary, draws_random=behaviour.draws_random, state=state),
        )

    def _with_gradients(self, number: int, skip: Skip) -> Skip:
        """A skip with the bytes that the gradients which its readers leave for it keep alive."""
        readers = [self._chain[use] for use in skip.uses]
        sizes = (each.found.gradients.skip_bytes.get(each.profiler.ends.skips.index(number), 0) for each in readers)
        return replace(skip, gradient_bytes=tuple(sizes))

    def profile(self) -> Profile:
        """The chain as measured, and what runs it."""
        waiting = waiting_gradient_bytes(self.stages, self._meter.block_bytes)
        chain = Chain(
            tuple(map(_MeasuredStage.cost, self._chain, waiting, _added_gradient_bytes(self._chain))),
            input_bytes=sum(value.size_bytes(self._meter.block_bytes) for value in self._inputs.values()),
            rng_state_bytes=torch.get_rng_state().nbytes if self._device.type == "cpu" else 0,
            segment_seconds=self._segment_seconds,
            device=str(self._device),
            skips=tuple(map(self._with_gradients, range(len(self._skips)), self._skips)),
        )
        variants = [[option.name for option in cost.options[1:] if not option.inverts] for cost in chain]
        running = [
            self._compiled.with_variants(stage, names) if names else stage
            for stage, names in zip(self.stages, variants, strict=True)
        ]
        states = tuple(each.profiler.state for each in self._chain)
        return Profile(chain, tuple(running), states, tuple(map(len, self._scan.groups)))


def _way(
    number: int, stage: Stage, boundary: Boundary, *, draws_random: bool, state: SegmentState
) -> tuple[Way | None, str]:
    """The way in which a stage is inverted, if it can be; and why it must not be, or not by its own backward."""
    module = stage.invertible
    if module is None:
        kinds = dict.fromkeys(type(inner).__name__ for _, inner in stage.submodules() if is_invertible(inner))
        return None, f"{', '.join(kinds)} is but a part of it" if kinds else ""
    if units_in(stage.modules):
        return None, "its parameters are gathered for its forward alone"
    if not number:
        return None, "the chain's input belongs to the caller"
    against_inverse, against_fused = try_inverse(module, boundary.fresh(), name=stage.name)
    if against_inverse:
        return None, against_inverse
    return Way(stage, can_be_fused(module) and not against_fused, draws_random, state), against_fused


# -------------------------------------------------------------------- What FSDP units in a stage cost beyond the stage.


def _with_units(cost: StageCost, units: Sequence[Unit]) -> StageCost:
    """Costs with what FSDP units take and leave. Those inside of one another count as if all were there at once."""
    sizes, option = sum((unit.sizes for unit in units), UnitSizes()), cost.keep
    if not (gathered := sizes.gathered_bytes):
        return cost
    left_bytes = option.parameter_gradient_bytes - min(option.parameter_gradient_bytes, sizes.gradient_bytes)
    # When the gradients are complete, parameters and saved tensors go, then the gradients are copied into a message,
    # whose shard comes back.
    sent_bytes = option.input_gradient_bytes + option.parameter_gradient_bytes + sizes.reduced_bytes
    sent_bytes += max(0, sizes.shard_bytes - sizes.gradient_bytes) - option.saved_bytes

    def backward(peak_bytes: int) -> int:
        return max(peak_bytes + gathered, sent_bytes)

    keep = replace(
        option,
        forward_peak_bytes=option.forward_peak_bytes + 2 * gathered,
        # The last stage of a segment is recomputed in its backward, which has gathered it already, so its replay takes
        # no more.
        unpack_peak_bytes=option.unpack_peak_bytes + 2 * gathered,
        unpack_bytes=option.unpack_bytes + gathered,
        backward_peak_bytes=backward(option.backward_peak_bytes),
        backward_segment_peak_bytes=backward(option.backward_segment_peak_bytes),
        backward_held_peak_bytes=backward(option.backward_held_peak_bytes),
        backward_replayed_peak_bytes=None,
        accumulating=None,  # gradients pile up until they are sent, whatever is there from before
        parameter_gradient_bytes=left_bytes + sizes.shard_bytes,
    )
    return replace(cost, discard_peak_bytes=cost.discard_peak_bytes + 2 * gathered, options=(keep,))


# -------------------------------------------------------------------- equal stages, overhead, warnings


def _identity(stage: Stage, compiled: CompiledModules, *, with_numbers: bool = True) -> tuple[Any, ...]:
    """A key that is equal for stages that cost the same; ``with_numbers=False``: layers often know their own number."""
    wires = [numbers for wire in (*stage.wiring.steps, stage.wiring.wire) for numbers in (wire.reads, wire.writes)]
    places = {number: place for place, number in enumerate(dict.fromkeys(sum(wires, ())))}
    identity: list[Any] = [tuple(places[number] for number in numbers) for numbers in wires]
    identity += [module.identity for module in stage.modules if isinstance(module, GraphSlice)]
    copies = Copies()
    for name, module in stage.submodules():
        if isinstance(module, GraphSlice):
            continue
        compiler, told = compiled.identity(module) if is_compiled(module) else (None, ())
        attributes = frozenset(
            (key, copies.of(value))
            for key, value in module.__dict__.items()
            if key not in STRUCTURE and key not in told and (with_numbers or type(value) is not int)
        )
        hooks = tuple(tuple(map(id, getattr(module, key).values())) for key in HOOKS)
        tensors = tuple(
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        )
        identity.append((name, type(module), compiler, attributes, hooks, tensors))
    return tuple(identity)


def _complaints(costs: Iterable[StageCost], behaviours: Sequence[Behaviour]) -> Iterator[str]:
    """Warnings about single stages."""
    for cost, behaviour in zip(costs, behaviours, strict=True):
        if cost.not_inverted:
            _log.info("%r is not inverted: %s", cost.name, cost.not_inverted)
        if not cost.recomputable:
            yield (
                f"stage {cost.name!r} gives other bits when it runs again, so it is kept and never recomputed. "
                "Typical reasons are state outside of buffers, spectral_norm, parameters that the forward itself "
                "changes (an embedding's max_norm), RReLU, scripted modules, operations in place on the chain's input. "
                "State in an iterator, a generator, a queue or a file cannot be put back: measuring has moved it on, "
                "so training is not what it was. Keep it in attributes, buffers or random generators"
            )
        if cost.pinned_bytes >= WORTH_MENTIONING_BYTES and not behaviour.leaves_traces:  # those are the user's wish
            yield (
                f"stage {cost.name!r} keeps {cost.pinned_bytes} bytes in its graph that no checkpoint can free "
                "(tensors stored on an autograd context rather than saved by save_for_backward); the plan counts them"
            )
    if checkpointing := [cost.name for cost, seen in zip(costs, behaviours, strict=True) if seen.calls_checkpoint]:
        yield f"{', '.join(map(repr, checkpointing))}: each is one stage. {NO_CHECKPOINTS}"


def _complaints_about_structure(layers: int, merged: Sequence[Stage]) -> Iterator[str]:
    """Warnings about all stages together."""
    if len(merged) == 1 < layers:
        yield (
            f"all {layers} layers were merged into one stage, so there is nothing to plan: the last of them change in "
            "place, or show as views, what the first has made. Use operations that are not in place"
        )
    parameters = [parameter for stage in merged for parameter in stage.parameters()]
    if len(parameters) > len(set(parameters)) and autocast_enabled():
        yield (
            "stages share parameters under autocast. Without this package a shared weight is cast once and its "
            "gradients are summed in the lower precision; here each stage casts it for itself and they are summed in "
            "full, so the results differ in the last bits"
        )


# --------- A profile over the stages of another cut, or of another process: costs are numbers, stages are live modules.


def profile_over(
    stages: Sequence[Stage],
    chain: Chain,
    *,
    group_sizes: Sequence[int],
    remembered: Sequence[Sequence[int]],
    drawn: Sequence[Sequence[str]],
) -> Profile:
    """Known costs over the unmerged stages of a cut; raises ValueError if others were measured."""
    starts = [0, *accumulate(group_sizes)]
    if starts[-1] != len(stages) or len(chain) != len(starts) - 1:
        raise ValueError("the costs are of other stages than the model has")
    if any(len(cost.options) > 1 for cost in chain):
        raise ValueError("a compiled stage was measured with variants, which only measuring compiles")
    together = merged(stages, [range(start, end) for start, end in pairwise(starts)])
    if chain.names != tuple(stage.name for stage in together):
        raise ValueError("the costs name other stages than the model has")
    scratch: dict[tuple[nn.Module, str], Statistic] = {}
    states = []
    for stage, places, kinds in zip(together, remembered, drawn, strict=True):
        modules = [module for _, module in stage.submodules()]
        state = state_of(stage, [modules[place] for place in places], scratch)
        states.append(replace(state, drawn=tuple(map(str, kinds))))
    return Profile(chain, together, tuple(states), tuple(group_sizes))
