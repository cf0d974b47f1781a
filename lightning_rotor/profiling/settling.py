"""Measuring a stage again once it shows how the stages behind it leave its gradient.

How a gradient lies comes from behind: as a slice (``torch.cat``), or in another order (convolutions that Inductor
compiled). Some stages copy it, others hand the order on::

    stage      1 ◄── 2 ◄── 3      3 leaves its gradient in another order: 2 is measured again, and turns out to hand
                                  that order on, so 1 should be measured again, whose input is gone by then

What equal stages have shown is known. For the others the chain runs forward once more, which settles one more stage of
every such row. Makers and readers of skips likewise get the gradient that later readers add up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_rotor.capture.compiled import CompiledModules
from lightning_rotor.chain import Option, StageCost
from lightning_rotor.execution.inversion import Way
from lightning_rotor.execution.options import kept_attributes, kept_parameters, lent_buffers, run_stage
from lightning_rotor.execution.recomputation import recomputed
from lightning_rotor.private.sharding import UnitSizes, gathered, units_in
from lightning_rotor.profiling.gradients import NO_LAYOUTS, Layouts, SkipGradient
from lightning_rotor.profiling.inverted import with_inversion
from lightning_rotor.profiling.meters import Meter
from lightning_rotor.profiling.stage import StageMeasurement, StageProfiler, typical
from lightning_rotor.profiling.storages import Boundary, UnmeasuredSkip
from lightning_rotor.profiling.variants import KnownSeconds, VariantsMeasurement, measure
from lightning_rotor.stages.sequential import Stage, unpacked, wiring_of

# Each takes a forward of the chain; longer rows of unlike stages that hand on an order are rare.
_MOST_FORWARDS = 4


class Bench:
    """Measures stages, those that look the same once."""

    def __init__(self, compiled: CompiledModules) -> None:
        self._compiled = compiled
        self._seconds = KnownSeconds()
        self._known: dict[Any, VariantsMeasurement] = {}

    def knows(self, stage: Measurable, layouts: Layouts) -> VariantsMeasurement | None:
        """The measurement of an equal stage whose output's gradient lay like this, or None."""
        return self._known.get(stage.key(layouts))

    def measured(self, stage: Measurable, boundary: Boundary, layouts: Layouts = NO_LAYOUTS) -> VariantsMeasurement:
        """The measurement of such a stage, made if it is the first."""
        key = stage.key(layouts)
        if key not in self._known:
            self._known[key] = stage.measured(
                replace(stage.profiler, boundary=boundary, layouts=layouts), self._compiled, self._seconds
            )
        return self._known[key]


@dataclass(frozen=True, slots=True, eq=False)
class Measurable:
    """A stage that can be measured wherever there is an input for it; its profiler's boundary has no tensors.

    Equal ``identity`` means equal costs, equal ``kin`` equal times, for all that can be told before a run;
    ``not_fused`` says why its own backward must not rebuild its input, if anything; its forward changes the parameters
    ``written``.
    """

    profiler: StageProfiler
    recomputable: bool
    identity: tuple[Any, ...]
    kin: tuple[Any, ...]
    way: Way | None
    not_fused: str
    written: tuple[torch.nn.Parameter, ...] = ()

    def key(self, layouts: Layouts) -> tuple[Any, ...]:
        """All that its measurement depends on, as a key."""
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
    """A stage in its chain, measured with gradients that lay as ``layouts`` says.

    ``readers`` has by place of a skip the next stage that reads it, ``expected_bytes`` what the stage behind left then.
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
        """Bytes of the gradient that it leaves for the stage before."""
        return self.found.stage.cost.keep.input_gradient_bytes

    def gradient_of(self, skip: int) -> SkipGradient:
        """The gradient that it leaves for a skip with this number, which it reads."""
        place = self.measurable.profiler.ends.skips.index(skip)
        return self.found.stage.skip_gradients.get(place, SkipGradient(0))

    def settle(self, layouts: Layouts, behind: Measured, bench: Bench, boundary: Boundary | None = None) -> bool:
        """Take over the measurement with these layouts; False if it is unknown and there is no boundary."""
        if boundary is not None:
            found: VariantsMeasurement | None = bench.measured(self.measurable, boundary, layouts)
        else:
            found = bench.knows(self.measurable, layouts)
        if found is None:
            return False
        self.found, self.layouts, self.expected_bytes = found, layouts, behind.link_bytes
        return True


def given(chain: Sequence[Measured], number: int) -> Layouts:
    """The layouts in which the stages behind leave a stage's gradients, as far as they are unambiguous and known.

    A stage that may rebuild its input leaves other gradients then: only their bytes count, see :func:`unexpected`.
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
    """Measure stages of a chain again, in place, whose gradients turned out to lie otherwise."""
    for _ in range(_MOST_FORWARDS):
        stale = _stale(chain, bench)
        if not stale:
            return
        _measure_again(chain, stale, inputs, bench)
    _stale(chain, bench)


def unexpected(chain: Sequence[Measured]) -> dict[int, int]:
    """Bytes by stage of gradients larger than it was measured with: slices keep alive what they are slices of."""
    found: dict[int, int] = {}
    more = False
    for number in reversed(range(len(chain) - 1)):
        behind = chain[number + 1]
        more = behind.link_bytes > chain[number].expected_bytes or (more and behind.found.stage.passes_on)
        if more:
            found[number] = chain[number].expected_bytes
    return found


def _stale(chain: Sequence[Measured], bench: Bench) -> list[int]:
    """Numbers of the stages to be measured again, once everything known is taken over."""
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


# ----------------------------------------------------------------------------------------------------
# What FSDP units in a stage cost beyond the stage.


def with_units(measurement: StageMeasurement, sizes: UnitSizes, gathering_seconds: float) -> StageMeasurement:
    """The measurement with what FSDP units take and leave, whose parameters arrive in ``gathering_seconds``.

    Units inside of one unit count as if all were there at once.
    """
    if not sizes.gathered_bytes:
        return measurement
    return replace(
        measurement,
        cost=_with_units(measurement.cost, sizes, gathering_seconds),
    )


def _with_units(cost: StageCost, sizes: UnitSizes, seconds: float) -> StageCost:
    return replace(
        cost,
        discard_peak_bytes=cost.discard_peak_bytes + 2 * sizes.gathered_bytes,
        discard_seconds=cost.discard_seconds + seconds,
        options=tuple(_option(option, sizes, seconds) for option in cost.options),
    )


def _option(option: Option, sizes: UnitSizes, seconds: float) -> Option:
    gathered = sizes.gathered_bytes
    left_bytes = option.parameter_gradient_bytes - min(option.parameter_gradient_bytes, sizes.gradient_bytes)
    # When the gradients are complete, parameters and saved tensors go, then the gradients are copied into a message,
    # whose shard comes back.
    sent_bytes = option.input_gradient_bytes + option.parameter_gradient_bytes + sizes.reduced_bytes
    sent_bytes += max(0, sizes.shard_bytes - sizes.gradient_bytes) - option.saved_bytes

    def backward(peak_bytes: int) -> int:
        return max(peak_bytes + gathered, sent_bytes)

    return replace(
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
        forward_seconds=option.forward_seconds + seconds,
        backward_seconds=option.backward_seconds + seconds,
    )


# ----------------------------------------------------------------------------------------------------
# What the other stages of a step do to the one that is timed, and what a segment costs the host among them.


_OPERATIONS_PER_SECOND = 1e11
"""Roughly those of one processor core."""
_SMALLEST, _LARGEST = 200, 512
_ROUNDS, _RUNS = 9, 2


class Interlude:
    """Stands for the rest of a step, ``seconds`` long, between two timed runs.

    A run repeated at once finds its code and data in the processor's caches, which in a step it seldom does: a segment
    around next to nothing takes 0.3 ms of the host's time, and 0.7 ms after 1.2 ms of matrix products (one core of an
    EPYC). Plans would get too many short stages and segments. Other devices queue kernels, so that caches matter less.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        size = min(int((seconds * _OPERATIONS_PER_SECOND / 2) ** (1 / 3)), _LARGEST)
        runs = device.type == "cpu" and size >= _SMALLEST
        # NumPy's memory, so that torch's allocator does not count it.
        arrays = np.ones((2 if runs else 0, size, size), np.float32)
        self._matrices = [*torch.from_numpy(arrays)]

    def __call__(self) -> None:
        """Flush caches between two timings."""
        if self._matrices:
            matrix, product = self._matrices
            torch.mm(matrix, matrix, out=product)


def segment_seconds(device: torch.device, meter: Meter, interlude: Interlude) -> float:
    """Host seconds of one segment around next to nothing, forward and backward, beyond what it runs."""
    tensor = torch.zeros(1, device=device, requires_grad=True)

    def inside(value: torch.Tensor) -> torch.Tensor:
        return value.tanh().tanh().tanh().tanh()

    def plain() -> torch.Tensor:
        with torch.no_grad():
            inside(tensor)
        return torch.tanh(inside(tensor))

    def run(forward: Callable[[], torch.Tensor]) -> float:
        seconds = 0.0
        for _ in range(_RUNS):
            interlude()
            start = meter.now()
            output = forward()
            seconds += meter.seconds_between(start, meter.now())
            interlude()
            start = meter.now()
            torch.autograd.grad(output, tensor)
            seconds += meter.seconds_between(start, meter.now())
        return seconds / _RUNS

    segmented = partial(recomputed, inside, draws_random=False)

    def with_segment() -> torch.Tensor:
        return torch.tanh(segmented(tensor))

    run(plain), run(with_segment)
    # By turns, so that a disturbance of the machine meets both.
    runs = [(run(with_segment), run(plain)) for _ in range(_ROUNDS)]
    with_it, without = map(typical, zip(*runs, strict=True))
    return max(with_it - without, 0.0)
