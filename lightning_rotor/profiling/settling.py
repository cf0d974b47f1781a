"""Measuring a stage again once it shows how the stages behind it leave its gradient.

How a gradient lies comes from behind: as a slice (``torch.cat``), or in another order (convolutions that Inductor
compiled). Some stages copy it, others hand the order on::

    stage      1 ◄── 2 ◄── 3      3 leaves its gradient in another order: 2 is measured again, and turns out to hand
                                  that order on, so 1 should be measured again, whose input is gone by then

What equal stages have shown is known. For the others the chain runs forward once more, which settles one more stage of
every such row. Makers and readers of skips likewise get the gradient that later readers add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_rotor.capture.compiled import CompiledModules
from lightning_rotor.chain import Option, StageCost
from lightning_rotor.execution.inversion import Way
from lightning_rotor.execution.options import kept_attributes, kept_parameters, lent_buffers
from lightning_rotor.execution.recomputation import recomputed
from lightning_rotor.private.sharding import Unit, UnitSizes, gathered, units_in
from lightning_rotor.profiling.gradients import Layouts, layouts_from
from lightning_rotor.profiling.meters import Meter
from lightning_rotor.profiling.scan import Boundary, walk
from lightning_rotor.profiling.stage import StageMeasurement, StageProfiler, typical
from lightning_rotor.profiling.variants import KnownSeconds, measure

# Each takes a forward of the chain; longer rows of unlike stages that hand on an order are rare.
_MOST_FORWARDS = 4


@dataclass(slots=True, eq=False)
class MeasuredStage:
    """A stage in its chain, and what measuring has found with gradients that lay as ``layouts`` says.

    Attributes:
        profiler: It can measure wherever there is an input; its boundary is empty.
        identity: Equal ones cost the same, for all that can be told before a run; equal ``kin`` take the same time.
        way: How it is inverted, None if it cannot be; ``objection`` says why, or why not by its own backward.
        readers: By place of a skip, the next stage that reads it.
        expected_bytes: What the stage behind left of the link's gradient when it was measured.
    """

    profiler: StageProfiler
    identity: tuple[Any, ...]
    kin: tuple[Any, ...]
    way: Way | None
    objection: str
    readers: Mapping[int, int]
    takes: tuple[str, ...]
    found: StageMeasurement = field(init=False)
    layouts: Layouts = ()
    expected_bytes: int = 0

    @property
    def link_bytes(self) -> int:
        """Bytes of the gradient that it leaves for the stage before."""
        return self.found.cost.keep.input_gradient_bytes

    def gradient_bytes(self, skip: int) -> int:
        """Bytes that the gradient which it leaves for a skip with this number keeps alive."""
        return self.found.gradients.skip_bytes.get(self.profiler.ends.skips.index(skip), 0)

    def key(self, layouts: Layouts) -> tuple[Any, ...]:
        """All that its measurement depends on, as a key."""
        profiler, way = self.profiler, self.way
        about = (
            profiler.last,
            profiler.recomputable,
            len(profiler.state.remembered),
            layouts,
            None if way is None else way.fused,
        )
        return self.identity, profiler.ends.signature, *about

    def cost(self, waiting_gradient_bytes: int, output_gradient_bytes: int | None) -> StageCost:
        """Its costs in the chain, with skips by their numbers there."""
        found, profiler, skips = self.found, self.profiler, self.profiler.ends.skips
        options = (
            replace(option, saved_skips=tuple(sorted(skips[place] for place in option.saved_skips)))
            for option in found.cost.options
        )
        return replace(
            found.cost,
            name=profiler.stage.name,
            options=tuple(options),
            draws_random=profiler.generators is not None,
            state_bytes=profiler.state.remembered_bytes(profiler.meter.block_bytes),
            takes=self.takes,
            not_inverted=found.not_inverted or self.objection,
            skip_gradient_bytes=found.gradients.given_bytes if skips else None,
            waiting_gradient_bytes=waiting_gradient_bytes,
            output_gradient_bytes=output_gradient_bytes,
        )


class Bench:
    """Measures stages, those that look the same once."""

    def __init__(self, compiled: CompiledModules) -> None:
        self._compiled = compiled
        self._seconds = KnownSeconds()
        self._known: dict[Any, StageMeasurement] = {}

    def measure(self, stage: MeasuredStage, boundary: Boundary | None = None, layouts: Layouts = ()) -> bool:
        """Measure a stage with gradients that lie like this; False if it has to, and there is no boundary."""
        key = stage.key(layouts)
        if key not in self._known:
            if boundary is None:
                return False
            self._known[key] = self._measured(stage, replace(stage.profiler, boundary=boundary, layouts=layouts))
        stage.found, stage.layouts = self._known[key], layouts
        return True

    def settle(self, chain: Sequence[MeasuredStage], number: int, boundary: Boundary | None = None) -> bool:
        """Measure a stage as those behind it leave its gradients; False if it has to, and there is no boundary."""
        stage, layouts = chain[number], _given(chain, number)
        if layouts != stage.layouts:
            if not self.measure(stage, boundary, layouts):
                return False
            stage.expected_bytes = chain[number + 1].link_bytes
        return True

    def _measured(self, stage: MeasuredStage, profiler: StageProfiler) -> StageMeasurement:
        """Costs of a stage with its variants and its inverse."""
        units, meter = units_in(profiler.stage.modules), profiler.meter
        with ExitStack() as stack:
            start = meter.now()
            stack.enter_context(gathered(units))
            gathering_seconds = meter.seconds_between(start, meter.now()) if units else 0.0
            before = stack.enter_context(kept_attributes(profiler.stage, keep_parameters=False))
            stack.enter_context(lent_buffers(profiler.stage))
            stack.enter_context(kept_parameters(profiler.stage, profiler.state.written))
            profiler = replace(profiler, before=before)
            if units:  # a variant would be compiled together with what gathers the parameters
                return _with_units(profiler.measure(), units, gathering_seconds)
            return measure(profiler, self._compiled, stage.way, kin=stage.kin, seconds=self._seconds)


def settle(chain: Sequence[MeasuredStage], inputs: Mapping[int, Boundary], bench: Bench) -> None:
    """Measure stages of a chain again, in place, whose gradients turned out to lie otherwise."""
    stages = [each.profiler.stage for each in chain]
    for _ in range(_MOST_FORWARDS):
        stale = _stale(chain, bench)
        if not stale:
            return
        for number, boundary in walk(stages[: max(stale) + 1], inputs):
            if number in stale:
                bench.settle(chain, number, boundary)
    _stale(chain, bench)


def _stale(chain: Sequence[MeasuredStage], bench: Bench) -> list[int]:
    """Numbers of the stages to be measured again, once everything known is taken over."""
    return [number for number in reversed(range(len(chain) - 1)) if not bench.settle(chain, number)]


def unexpected(chain: Sequence[MeasuredStage]) -> dict[int, int]:
    """Bytes by stage of gradients larger than it was measured with: slices keep alive what they are slices of."""
    found: dict[int, int] = {}
    more = False
    for number in reversed(range(len(chain) - 1)):
        behind = chain[number + 1]
        more = behind.link_bytes > chain[number].expected_bytes or (more and behind.found.gradients.passes_on)
        if more:
            found[number] = chain[number].expected_bytes
    return found


def _given(chain: Sequence[MeasuredStage], number: int) -> Layouts:
    """The layouts in which the stages behind leave a stage's gradients, as far as they are unambiguous and known.

    A stage that may rebuild its input leaves other gradients then: only their bytes count, see :func:`unexpected`.
    """
    behind, stage = chain[number + 1].found, chain[number]
    rebuilds = any(option.fused for option in behind.cost.options)
    left = {key: (number + 1, layout) for key, layout in behind.gradients.layouts.items() if key < 0 and not rebuilds}
    for place, reader in stage.readers.items():
        if reader < len(chain):
            other = chain[reader].profiler.ends.skips.index(stage.profiler.ends.skips[place])
            if (layout := chain[reader].found.gradients.layouts.get(other)) is not None:
                left[place] = reader, layout
    return layouts_from(left)


# ----------------------------------------------------------------------------------------------------
# What FSDP units in a stage cost beyond the stage.


def _with_units(found: StageMeasurement, units: Sequence[Unit], seconds: float) -> StageMeasurement:
    """The measurement with what FSDP units take and leave, whose parameters arrive in so many seconds.

    Units inside of one unit count as if all were there at once.
    """
    cost, sizes = found.cost, sum((unit.sizes for unit in units), UnitSizes())
    if not sizes.gathered_bytes:
        return found
    cost = replace(
        cost,
        discard_peak_bytes=cost.discard_peak_bytes + 2 * sizes.gathered_bytes,
        discard_seconds=cost.discard_seconds + seconds,
        options=tuple(_option(option, sizes, seconds) for option in cost.options),
    )
    return replace(found, cost=cost)


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
