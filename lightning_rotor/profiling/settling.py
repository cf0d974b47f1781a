"""What a stage costs in its chain: what measuring it has found, FSDP units in it, and the rest of a step around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import Node

from lightning_rotor.chain import Option, StageCost
from lightning_rotor.execution.executor import NO_STATE, Stopwatch, recomputed
from lightning_rotor.execution.inversion import Way
from lightning_rotor.execution.passes import FirstPass, repeating
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.planning import Plan
from lightning_rotor.private.sharding import Unit, UnitSizes
from lightning_rotor.profiling.gradients import Layouts
from lightning_rotor.profiling.meters import CpuMeter, CudaMeter, Meter
from lightning_rotor.profiling.stage import StageMeasurement, StageProfiler, typical
from lightning_rotor.schedule import Segment, leaves, segments_in


@dataclass(slots=True, eq=False)
class MeasuredStage:
    """A stage in its chain, and what measuring has found with gradients that lay as ``layouts`` says."""

    profiler: StageProfiler  # it can measure wherever there is an input; its boundary is empty
    identity: tuple[Any, ...]  # equal ones cost the same, for all that can be told before a run
    kin: tuple[Any, ...]  # equal ones take the same time
    way: Way | None  # how it is inverted; None if it cannot be
    objection: str  # why it cannot be, or not by its own backward
    found: StageMeasurement = field(init=False)
    layouts: Layouts = ()

    def gradient_bytes(self, skip: int) -> int:
        """Bytes that the gradient which it leaves for a skip with this number keeps alive."""
        return self.found.gradients.skip_bytes.get(self.profiler.ends.skips.index(skip), 0)

    def key(self, layouts: Layouts) -> tuple[Any, ...]:
        """All that its measurement depends on, as a key."""
        profiler, way = self.profiler, self.way
        runs = profiler.last, profiler.recomputable, len(profiler.state.remembered), way and way.fused
        return self.identity, profiler.ends, layouts, runs

    def cost(self, waiting_gradient_bytes: int) -> StageCost:
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
            not_inverted=found.cost.not_inverted or self.objection,
            skip_gradient_bytes=found.gradients.given_bytes if skips else None,
            waiting_gradient_bytes=waiting_gradient_bytes,
        )


# -------------------------------------------------------------------- What FSDP units in a stage cost beyond the stage.


def with_units(found: StageMeasurement, units: Sequence[Unit], seconds: float) -> StageMeasurement:
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


# ----------- What the other stages of a step do to the one that is timed, and what a segment costs the host among them.


_MIB = 1024**2
_NEAR_BYTES, _AMONG_BYTES, _ALL_BYTES = 4 * _MIB, 16 * _MIB, 32 * _MIB
"""More than the caches of one processor core hold, what a few operations read and write, and as much as all of its
caches hold."""
_LINE_BYTES = 64
_ROUNDS, _TURNS = 5, 3
_OPERATIONS = 6


class Interlude:
    """Stands for what comes between two timed runs in a step: fills the processor's caches with something else.

    A run repeated at once finds its code and data there, which in a step it seldom does: a segment around next to
    nothing takes 0.16 ms of the host's time, and 0.65 ms behind another model's step, or a sweep through 32 MiB (one
    core of an EPYC). Plans would get too many short segments. Other devices queue kernels, so that caches matter less.
    """

    def __init__(self, device: torch.device, swept_bytes: int = _NEAR_BYTES) -> None:
        # NumPy's memory, so that torch's allocator does not count it; one number of each line.
        self._lines = np.ones(swept_bytes // 8 if device.type == "cpu" else 0)[:: _LINE_BYTES // 8]

    def __call__(self) -> None:
        """Flush caches between two timings."""
        self._lines.sum()


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """Time that segments take of the host beyond what runs in them, forward and recomputation together.

    Attributes:
        segment: Of one around next to nothing.
        saved_tensor: Of each tensor that autograd would save in it, which torch's checkpoint packs and unpacks.
        unwatched: What a :class:`.Stopwatch` does not see of these two, for torch does it around what it calls.
        nothing: Of remembering nothing.
    """

    segment: float
    saved_tensor: float
    unwatched: tuple[float, float]
    nothing: float

    @classmethod
    def on(cls, device: torch.device, meter: Meter) -> HostSeconds:
        """As measured first in this process: it takes a fifth of a second, and models do not matter."""
        if not isinstance(meter, (CpuMeter, CudaMeter)):
            return cls._measured(device, meter)
        key = type(meter), device
        if key not in _KNOWN:
            _KNOWN[key] = cls._measured(device, meter)
        return _KNOWN[key]

    @classmethod
    def _measured(cls, device: torch.device, meter: Meter) -> HostSeconds:
        """What a segment of small operations takes, far from each other, and what they take by themselves."""
        among, behind = Interlude(device, _AMONG_BYTES), Interlude(device, _ALL_BYTES)
        tensor = torch.zeros(1, device=device, requires_grad=True)
        runs = [_SmallRun(tensor, meter, among, behind, segmented=each) for each in (True, False)]
        with repeating(False), torch.enable_grad():  # as in a step
            # By turns, so that a disturbance of the machine meets all; the first time warms up.
            _, *times = [[run() for run in runs] for _ in range(1 + _ROUNDS)]
        segmented, plain = (_RunSeconds(*map(typical, zip(*each, strict=True))) for each in zip(*times, strict=True))
        nothing = typical([_remembering(NO_STATE, meter, behind) for _ in range(_ROUNDS)])
        unpacking = max(segmented.backward - plain.backward, 0.0)
        packing = max(segmented.passes - plain.passes, 0.0)
        unwatched = max(segmented.around - segmented.watched, 0.0), unpacking
        return cls(segmented.around, packing + unpacking, unwatched, nothing)

    def unwatched_in(self, plan: Plan) -> float:
        """Seconds of a plan's segments that a stopwatch does not see in a step."""
        segments, stages = list(segments_in(plan.schedule.items)), plan.chain.stages
        inside = [leaf for item in plan.schedule.items if isinstance(item, Segment) for leaf in leaves(item)]
        tensors = sum(stages[leaf.stage].options[leaf.option].saved_tensors for leaf in inside)
        return len(segments) * self.unwatched[0] + tensors * self.unwatched[1]

    def of(self, found: StageMeasurement, state: SegmentState, meter: Meter, interlude: Interlude) -> StageMeasurement:
        """The costs of a stage with what it adds to the host's time in a segment, each time that it is discarded."""
        cost = found.cost
        if not cost.recomputable:
            return found
        state_seconds = typical([_remembering(state, meter, interlude) for _ in range(_TURNS)]) - self.nothing
        seconds = max(state_seconds, 0.0) + cost.keep.saved_tensors * self.saved_tensor
        return replace(found, cost=replace(cost, discard_seconds=cost.discard_seconds + seconds))


_KNOWN: dict[tuple[type[Meter], torch.device], HostSeconds] = {}


class _RunSeconds(NamedTuple):
    """Seconds of a run of a few small operations.

    Attributes:
        around: Beyond the operations.
        watched: Of that, what a stopwatch has seen.
        passes: Of one operation in both passes.
        backward: Of its backward.
    """

    around: float
    watched: float
    passes: float
    backward: float


@dataclass(eq=False)
class _SmallRun:
    """Forward and backward of a few small operations, each of which saves a tensor, in a segment or not."""

    tensor: torch.Tensor
    meter: Meter
    among: Interlude
    behind: Interlude
    segmented: bool

    def __call__(self) -> _RunSeconds:
        self._passes: list[tuple[float, list[float]]] = []
        self._nodes: list[Node] = []
        watch = Stopwatch(self.meter)
        watch.calls = 2  # the first that it times
        self.behind()
        start = self.meter.now()
        if self.segmented:
            output = recomputed(self._operations, self.tensor, draws_random=False, watch=watch)
        else:
            with torch.no_grad():
                self._operations(self.tensor)
            output = self._operations(self.tensor)
        forward = self.meter.seconds_between(start, self.meter.now())
        backwards = self._backwards(output)
        inside = sum(seconds for seconds, _ in self._passes)
        first, again = (typical(spent) for _, spent in self._passes)
        # The last operation's backward comes first, and asks for the recomputation.
        around = forward + backwards[0] - typical(backwards[1:]) - inside
        return _RunSeconds(around, (watch.seconds or inside) - inside, first + again, typical(backwards[1:]))

    def _operations(self, value: torch.Tensor) -> torch.Tensor:
        """Run the operations, and note what each takes, and all of them."""
        spent: list[float] = []
        begin = self.meter.now()
        try:
            for _ in range(_OPERATIONS):
                self.among()
                start = self.meter.now()
                value = value.tanh()
                spent.append(self.meter.seconds_between(start, self.meter.now()))
                if value.grad_fn is not None and len(self._nodes) < _OPERATIONS:
                    self._nodes.append(value.grad_fn)
        finally:  # a recomputation ends with the last saved tensor
            self._passes.append((self.meter.seconds_between(begin, self.meter.now()), spent))
        return value

    def _backwards(self, output: torch.Tensor) -> list[float]:
        """Seconds of each operation's backward, the last one's first."""
        spent: list[float] = []
        starts: list[Any] = []

        def before(*_: Any) -> None:
            (self.among if starts else self.behind)()
            starts.append(self.meter.now())

        def after(*_: Any) -> None:
            spent.append(self.meter.seconds_between(starts[-1], self.meter.now()))

        for node in self._nodes:
            node.register_prehook(before)
            node.register_hook(after)
        torch.autograd.grad(output, self.tensor)
        return spent


def _remembering(state: SegmentState, meter: Meter, interlude: Interlude) -> float:
    """Seconds for what a segment notes in its first pass, and puts back in its recomputation."""
    interlude()
    start = meter.now()
    first_pass = FirstPass(state)
    with first_pass.watching():
        pass
    with first_pass.replayed():
        pass
    return meter.seconds_between(start, meter.now())
