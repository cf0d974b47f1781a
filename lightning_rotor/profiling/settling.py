"""Measuring a stage again once it shows how the stages behind it leave its gradient.

A chain is measured from its first stage to its last, but how a gradient lies in memory comes from behind: as a slice, which ``torch.cat``
leaves, or with its entries in another order, as from convolutions that Inductor compiled. Some stages copy it, others hand the order on::

    stage      1 ◄── 2 ◄── 3      3 leaves its gradient in another order: 2 is measured again, and turns out to hand that order on,
                                  so 1 should be measured again, whose input is gone by then

What equal stages have shown is known. For the others the chain runs forward once more, which settles one more stage of every such row. The same
goes for skips: the stage that makes one, or reads it, gets the gradient that its later readers have added up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_rotor.capture.compiled import CompiledModules
from lightning_rotor.execution.inversion import Way
from lightning_rotor.execution.options import kept_attributes, kept_parameters, lent_buffers, run_stage
from lightning_rotor.profiling.gradients import NO_LAYOUTS, Layouts, SkipGradient
from lightning_rotor.profiling.inverted import with_inversion
from lightning_rotor.profiling.stage import StageProfiler
from lightning_rotor.profiling.storages import Boundary, UnmeasuredSkip
from lightning_rotor.profiling.variants import KnownSeconds, VariantsMeasurement, measure
from lightning_rotor.stages.sequential import Stage, unpacked, wiring_of
from lightning_rotor.stages.sharding import gathered, units_in

# Each takes a forward of the chain; longer rows of unlike stages that hand on an order are rare.
_MOST_FORWARDS = 4


class Bench:
    """Where stages are measured, those that look the same once.

    Args:
        compiled: Makes variants of stages that the user compiled.
    """

    def __init__(self, compiled: CompiledModules) -> None:
        self._compiled = compiled
        self._seconds = KnownSeconds()
        self._known: dict[Any, VariantsMeasurement] = {}

    def knows(self, stage: Measurable, layouts: Layouts) -> VariantsMeasurement | None:
        """What such a stage showed whose output's gradient lay like this; None if there was none."""
        return self._known.get(stage.key(layouts))

    def measured(self, stage: Measurable, boundary: Boundary, layouts: Layouts = NO_LAYOUTS) -> VariantsMeasurement:
        """What is known of such a stage, which is measured if it is the first."""
        key = stage.key(layouts)
        if key not in self._known:
            self._known[key] = stage.measured(
                replace(stage.profiler, boundary=boundary, layouts=layouts), self._compiled, self._seconds
            )
        return self._known[key]


@dataclass(frozen=True, slots=True, eq=False)
class Measurable:
    """A stage that can be measured wherever there is an input for it.

    Attributes:
        profiler: Measures it. Its boundary has no tensors.
        recomputable: Whether it may be in a segment.
        identity: Of the stage and its input: equal for those that cost the same.
        kin: Likewise, equal for those that should take the same time, for all that can be told before they run.
        way: To invert it, if there is one.
        not_fused: Why its own backward must not rebuild its input; empty if nothing speaks against it.
        written: Parameters that its forward changes.
    """

    profiler: StageProfiler
    recomputable: bool
    identity: tuple[Any, ...]
    kin: tuple[Any, ...]
    way: Way | None
    not_fused: str
    written: tuple[torch.nn.Parameter, ...] = ()

    def key(self, layouts: Layouts) -> tuple[Any, ...]:
        """All that its measurement depends on."""
        profiler = self.profiler
        about = profiler.last, self.recomputable, len(profiler.remembered), layouts, self.way is None, self.not_fused
        return self.identity, profiler.ends.signature, *about

    def measured(
        self, profiler: StageProfiler, compiled: CompiledModules, seconds: KnownSeconds
    ) -> VariantsMeasurement:
        """Costs of the stage with its variants and its inverse."""
        stage = profiler.stage
        units = units_in(stage.modules)
        with (
            gathered(units),
            kept_attributes(stage, keep_parameters=False) as before,
            lent_buffers(stage),
            kept_parameters(stage, self.written),
        ):
            profiler = replace(profiler, before=before)
            if units:  # a variant would be compiled together with what gathers the parameters
                found = VariantsMeasurement(profiler.measure(recomputable=self.recomputable))
            else:
                found = measure(profiler, compiled, recomputable=self.recomputable, kin=self.kin, seconds=seconds)
            if self.way is None:
                return found
            inverted, reason = with_inversion(profiler, self.way, found.stage, not_fused=self.not_fused)
            return replace(found, stage=inverted, not_inverted=reason)


@dataclass(slots=True, eq=False)
class Measured:
    """A stage in its chain.

    Attributes:
        measurable: The stage.
        found: What it showed.
        readers: By the place of each skip that it makes or passes on, the number of the next stage that reads it.
        layouts: How the gradients lay that it was given meanwhile.
        expected_bytes: What the stage behind it left for it then.
    """

    measurable: Measurable
    found: VariantsMeasurement
    readers: Mapping[int, int]
    layouts: Layouts = NO_LAYOUTS
    expected_bytes: int = 0

    @classmethod
    def of(
        cls, number: int, measurable: Measurable, found: VariantsMeasurement, skips: Sequence[UnmeasuredSkip]
    ) -> Measured:
        """The stage with this number among these skips of the chain."""
        readers = {
            place: next(use for use in skips[skip].uses if use > number)
            for place, skip in enumerate(measurable.profiler.ends.skips)
            if skips[skip].uses[-1] > number
        }
        return cls(measurable, found, readers)

    @property
    def link_bytes(self) -> int:
        """Gradient that it leaves for the stage before."""
        return self.found.stage.cost.keep.input_gradient_bytes

    def gradient_of(self, skip: int) -> SkipGradient:
        """What it leaves for a skip with this number, which it reads."""
        place = self.measurable.profiler.ends.skips.index(skip)
        return self.found.stage.skip_gradients.get(place, SkipGradient(0))

    def settle(self, layouts: Layouts, behind: Measured, bench: Bench, boundary: Boundary | None = None) -> bool:
        """Take over what is measured with such gradients; whether that is known, or there is a boundary to measure it."""
        if boundary is not None:
            found: VariantsMeasurement | None = bench.measured(self.measurable, boundary, layouts)
        else:
            found = bench.knows(self.measurable, layouts)
        if found is None:
            return False
        self.found, self.layouts, self.expected_bytes = found, layouts, behind.link_bytes
        return True


def given(chain: Sequence[Measured], number: int) -> Layouts:
    """What the stages behind leave for one of a chain, as far as that is one thing and they are there already.

    A stage that may rebuild its input in a backward of its own leaves other gradients then. For both ways to be right it counts how many bytes
    they are, see :func:`unexpected`, and not how they lie.
    """
    behind, stage = chain[number + 1].found.stage, chain[number]
    is_one = not any(option.fused for option in behind.cost.options)
    skips = stage.measurable.profiler.ends.skips
    found = {
        place: (reader, layout)
        for place, reader in stage.readers.items()
        if reader < len(chain) and (layout := chain[reader].gradient_of(skips[place]).layout) is not None
    }
    return Layouts.of(behind.link_layouts if is_one else (), number + 1, found)


def settle(chain: Sequence[Measured], inputs: Mapping[int, Boundary], bench: Bench) -> None:
    """Measure stages again whose gradient turned out to lie otherwise.

    Args:
        chain: All stages; they change.
        inputs: Of the first one, by the numbers of the values.
        bench: Knows what was measured.
    """
    for _ in range(_MOST_FORWARDS):
        stale = _stale(chain, bench)
        if not stale:
            return
        _measure_again(chain, stale, inputs, bench)
    _stale(chain, bench)


def unexpected(chain: Sequence[Measured]) -> dict[int, int]:
    """Stages that are given larger gradients than they were measured with, and the size of those: slices keep alive what they are slices of."""
    found: dict[int, int] = {}
    more = False
    for number in reversed(range(len(chain) - 1)):
        behind = chain[number + 1]
        more = behind.link_bytes > chain[number].expected_bytes or (more and behind.found.stage.passes_on)
        if more:
            found[number] = chain[number].expected_bytes
    return found


def _stale(chain: Sequence[Measured], bench: Bench) -> list[int]:
    """Numbers of the stages that should be measured again, now that whatever is known is taken over."""
    stale = []
    for number in reversed(range(len(chain) - 1)):
        layouts = given(chain, number)
        if layouts != chain[number].layouts and not chain[number].settle(layouts, chain[number + 1], bench):
            stale.append(number)
    return stale


def _measure_again(
    chain: Sequence[Measured], stale: Collection[int], inputs: Mapping[int, Boundary], bench: Bench
) -> None:
    stages = [each.measurable.profiler.stage for each in chain]
    dead = wiring_of(stages).dead
    values = dict(inputs)
    for number, stage in enumerate(stages[: max(stale) + 1]):
        boundary = Boundary.packed([values[read] for read in stage.reads])
        if number in stale:
            chain[number].settle(given(chain, number), chain[number + 1], bench, boundary)
        if number < max(stale):
            with gathered(units_in(stage.modules)), kept_attributes(stage), lent_buffers(stage):
                output = run_stage(stage, boundary.fresh())
            values.update(zip(stage.writes, outputs_of(stage, output), strict=True))
            for value in dead[number]:
                del values[value]


def outputs_of(stage: Stage, output: Any) -> tuple[Boundary, ...]:
    """What a stage made, value by value."""
    return tuple(Boundary.of(part, whole_storages=True) for part in unpacked(output, len(stage.writes)))
