"""What there is to cut: the chain, the devices, how the pipeline runs; and what any run of stages would cost on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from lightning_rotor.chain import Chain, StageCost
from lightning_rotor.pipeline.batched_simulator import Waves
from lightning_rotor.pipeline.partition.in_flight import (
    InFlightPlanner,
    Moments,
    StagePlan,
    boundary_bytes,
    checkpoint_all,
    keep_all,
    sub_chain,
)
from lightning_rotor.pipeline.schedule import (
    Actions,
    PipelineError,
    PipelineScheduleName,
    actions,
    check_numbers,
    lingering,
    most_in_flight,
)
from lightning_rotor.pipeline.simulator import MicroBatchLoad, PipelineStageLoad, device_peak_bytes, step_seconds

# ----------------------------------------------------------------------------------------------------
# What follows from the order of a pipeline's actions alone, whatever is cut: shared by all problems with the same
# schedule.


@dataclass(frozen=True)
class Order:
    """Who does what in which order, and what is known of it before anything has a size.

    Attributes:
        schedule: Its name.
        devices: How many.
        micro_batches: Into how many parts a batch is split.
        stages_per_device: More than one with ``"interleaved"`` only.
        lingers: What is sent stays as long as in ``torch.distributed.pipelining``; else it goes as soon as it can.
        gradients_exist: Gradients of parameters are there before the step.
        outputs_linger: See :class:`.Problem`.
    """

    schedule: PipelineScheduleName
    devices: int
    micro_batches: int
    stages_per_device: int
    lingers: bool
    gradients_exist: bool
    outputs_linger: bool

    @property
    def stages(self) -> int:
        """How many pipeline stages there are."""
        return self.devices * self.stages_per_device

    @cached_property
    def actions(self) -> tuple[Actions, ...]:
        """What every device does."""
        return actions(
            self.schedule,
            self.devices,
            micro_batches=self.micro_batches,
            stages_per_device=self.stages_per_device,
        )

    @cached_property
    def waves(self) -> Waves:
        """Simulates a step on many devices."""
        return Waves(self.actions, stages=self.stages, micro_batches=self.micro_batches)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """By pipeline stage, the most micro-batches at once."""
        if self.schedule == "gpipe":
            return (self.micro_batches,) * self.stages
        if self.schedule == "1f1b":
            return tuple(min(self.micro_batches, self.stages - stage) for stage in range(self.stages))
        found: dict[int, int] = {}
        for device in self.actions:
            found |= most_in_flight(device)
        return tuple(found[stage] for stage in range(self.stages))

    @cached_property
    def lingering(self) -> tuple[tuple[int, ...], ...]:
        """By device, how long what its actions make stays; empty where each goes as soon as it can."""
        if not self.lingers:
            return ()
        return tuple(
            lingering(self.schedule, order, stages=self.stages, outputs_linger=self.outputs_linger)
            for order in self.actions
        )

    def moments(self, stage: int) -> Moments:
        """When a pipeline stage, alone on its device, may hold most."""
        if stage not in self._moments:
            device = stage % self.devices
            alone = self.stages_per_device == 1
            self._moments[stage] = Moments(
                [action for action in self.actions[device] if action.stage == stage],
                self.lingering[device] if self.lingering and alone else (),
                micro_batches=self.micro_batches,
                gradients_exist=self.gradients_exist,
            )
        return self._moments[stage]

    @cached_property
    def _moments(self) -> dict[int, Moments]:
        return {}


@lru_cache(maxsize=2)
def order_of(order: Order) -> Order:
    """The same, or an equal one that knows more already."""
    return order


# ----------------------------------------------------------------------------------------------------


RecomputeMode: TypeAlias = Literal["rotor", "always", "except_last", "never"]
RECOMPUTE_MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)
# From here on, all devices at once are simulated faster than one after the other.
_MANY_DEVICES = 12
# How often a plan is made with less memory because of what lingers.
_TRIES = 4
# How many plans it takes about to find the one with the least memory.
_PLANS_FOR_LEAST = 10
# How far the shares of stages on one device are stretched, at most, and in how many steps.
_MOST_STRETCH, _STRETCHES = 4.0, 5
Reals: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]
Cuts: TypeAlias = tuple[int, ...]
"""First stage of the chain in each pipeline stage."""


@dataclass(frozen=True, slots=True)
class PipelineDevice:
    """One device of a pipeline.

    Attributes:
        memory_bytes: What training may use of it, everything included; None if that is no concern.
        speed: How fast it is, compared with the device on which the chain was measured.
    """

    memory_bytes: int | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes < 0:
            raise PipelineError(f"memory_bytes is {self.memory_bytes}: expected a number that is not negative, or None")
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise PipelineError(f"speed is {self.speed}: expected a positive number, 1.0 for the measured device")


@dataclass(frozen=True, slots=True)
class Link:
    """What connects neighbouring devices, in either direction.

    Attributes:
        bytes_per_second: Bandwidth.
        latency_seconds: What every message takes besides.
    """

    bytes_per_second: float = math.inf
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or not 0 <= self.latency_seconds < math.inf:
            raise PipelineError(f"{self}: expected a positive bandwidth and a latency that is not negative")

    def seconds(self, size_bytes: int) -> float:
        """How long a message travels."""
        return self.latency_seconds + size_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Problem:
    """A chain to be cut.

    Attributes:
        chain: Costs of ``n`` stages for one micro-batch.
        devices: In the order of the pipeline.
        micro_batches: Into how many parts a batch is split.
        schedule: In which order devices work.
        stages_per_device: More than one with ``"interleaved"`` only.
        recompute: ``"rotor"`` plans every pipeline stage within what is left of its device's memory. ``"always"`` recomputes each stage as
            a whole, ``"except_last"`` for all micro-batches but the last, ``"never"`` recomputes nothing.
        state_bytes: By stage of the chain, what training keeps besides gradients: weights, buffers, optimizer state.
        link: Between neighbours; by default it takes no time.
        receive_buffers: How many there are for the input of a pipeline stage and for the gradient of its output: one per micro-batch, as
            ``torch.distributed.pipelining`` allocates them, or as many as are in flight and one.
        gradients_exist: Gradients of parameters are there before the step.
        outputs_linger: Torch holds on to outputs whose sending is done, as it does before 2.15.
    """

    chain: Chain
    devices: tuple[PipelineDevice, ...]
    micro_batches: int
    schedule: PipelineScheduleName = "1f1b"
    stages_per_device: int = 1
    recompute: RecomputeMode = "rotor"
    state_bytes: tuple[int, ...] = ()
    link: Link = Link()
    receive_buffers: Literal["micro_batches", "in_flight"] = "micro_batches"
    gradients_exist: bool = False
    outputs_linger: bool = True

    def __post_init__(self) -> None:
        check_numbers(self.schedule, len(self.devices), self.micro_batches, self.stages_per_device)
        if self.recompute not in RECOMPUTE_MODES:
            raise PipelineError(
                f"recompute is {self.recompute!r}: expected one of {', '.join(map(repr, RECOMPUTE_MODES))}"
            )
        if self.state_bytes and len(self.state_bytes) != len(self.chain):
            raise PipelineError(
                f"state_bytes has {len(self.state_bytes)} entries: expected one for each of the chain's {len(self.chain)} stages"
            )
        if self.stages > len(self.chain):
            where = f"{len(self.devices)} devices"
            where += f" with {self.stages_per_device} stages each" if self.stages_per_device > 1 else ""
            raise PipelineError(
                f"{where} need {self.stages} pipeline stages, but the chain has only {len(self.chain)} stages to share out: "
                "use fewer devices, or cut the model more finely"
            )

    @property
    def stages(self) -> int:
        """How many pipeline stages there are."""
        return len(self.devices) * self.stages_per_device

    def device_of(self, stage: int) -> PipelineDevice:
        """Where a pipeline stage runs."""
        return self.devices[stage % len(self.devices)]

    @property
    def order(self) -> tuple[Actions, ...]:
        """What every device does."""
        return self._order.actions

    @property
    def in_flight(self) -> tuple[int, ...]:
        """By pipeline stage, the most micro-batches at once."""
        return self._order.in_flight

    @property
    def lingering(self) -> tuple[tuple[int, ...], ...]:
        """By device, how long what its actions make stays; empty where each goes as soon as it can."""
        return self._order.lingering

    @cached_property
    def _order(self) -> Order:
        return order_of(
            Order(
                self.schedule,
                len(self.devices),
                self.micro_batches,
                self.stages_per_device,
                lingers=self.receive_buffers == "micro_batches",
                gradients_exist=self.gradients_exist,
                outputs_linger=self.outputs_linger,
            )
        )

    def step_seconds(self, loads: Sequence[PipelineStageLoad]) -> float:
        """How long a step takes with such pipeline stages."""
        if len(self.devices) < _MANY_DEVICES:
            return step_seconds(self.order, loads, micro_batches=self.micro_batches)
        return self._order.waves.step_seconds(loads)

    def simulated_at_once(self, seconds: Reals) -> list[float]:
        """The same for many partitions on three devices or more, see :meth:`.Waves.simulated`."""
        return self._order.waves.simulated(seconds)

    @cached_property
    def results_bytes(self) -> int:
        """What every device is given behind the step: all outputs, and the gradients of all inputs."""
        if self.receive_buffers == "in_flight":
            return 0
        return self.micro_batches * (self.chain.stages[-1].output_bytes + self.input_gradient_bytes)

    @property
    def input_gradient_bytes(self) -> int:
        """The gradient of the chain's input, for one micro-batch."""
        return self.chain.stages[0].keep.input_gradient_bytes

    def moments(self, stage: int) -> Moments:
        """When a pipeline stage, alone on its device, may hold most."""
        return self._order.moments(stage)

    @property
    def gradients_are_apart(self) -> bool:
        """Gradients of parameters are held beside micro-batches: from the second one on, or before the step."""
        return self.gradients_exist or self.micro_batches > 1

    def travel_seconds(self, boundary: int) -> float:
        """How long what crosses a cut travels, in either direction."""
        if len(self.devices) == 1 or not 0 < boundary < len(self.chain):
            return 0.0
        return self.link.seconds(boundary_bytes(self.chain, boundary))


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A run of stages as one pipeline stage.

    Attributes:
        first: Number of the chain's first stage in it.
        last: Number of the last one.
        plan: How a micro-batch runs.
        last_plan: How the last micro-batch runs, if otherwise.
        load: What the pipeline's simulator needs to know, at the speed of the device.
        bytes: Most that it takes on its device, with everything that is always there, if it is the only stage there.
    """

    first: int
    last: int
    plan: StagePlan
    last_plan: StagePlan | None
    load: PipelineStageLoad
    bytes: int


class Costs:
    """What runs of stages cost as pipeline stages. Each is planned when it is first asked for, and runs that are alike only once.

    Args:
        problem: What there is to cut.

    Attributes:
        work: What planning has taken: squared lengths of runs.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.work = 0
        chain = problem.chain
        kinds: dict[object, int] = {}
        self._kinds = [kinds.setdefault(_anonymous(stage), len(kinds)) for stage in chain]
        self._born = np.array([skip.born for skip in chain.skips], np.int64)
        self._last_use = np.array([skip.last_use for skip in chain.skips], np.int64)
        self._keys: dict[tuple[int, int], object] = {}
        state = problem.state_bytes or (0,) * len(chain)
        self._state_before = np.concatenate(([0], np.cumsum(state)))
        gradients = [stage.keep.parameter_gradient_bytes for stage in chain]
        self._gradients_before = np.concatenate(([0], np.cumsum(gradients)))
        self._boundary_bytes = np.array(
            [boundary_bytes(chain, boundary) for boundary in range(len(chain) + 1)], np.int64
        )
        self.travel_seconds = [problem.travel_seconds(boundary) for boundary in range(len(chain) + 1)]
        self._planners: dict[object, InFlightPlanner] = {}
        self._plans: dict[object, list[tuple[int, float, StagePlan | None]]] = {}
        self._least_plans: dict[object, StagePlan] = {}
        self._choices: dict[tuple[int, int, int, int | None], StageChoice | None] = {}

    @property
    def recomputes(self) -> bool:
        """True if some plan may be another one than the fastest."""
        limited = any(device.memory_bytes is not None for device in self.problem.devices)
        return self.problem.recompute in ("always", "except_last") or (self.problem.recompute == "rotor" and limited)

    def static_bytes(self, stage: int, first: int, last: int) -> int:
        """What pipeline stage ``stage`` always holds if it is ``first..last``; gradients of parameters are not in it."""
        return int(self.static_table(stage, np.array(first), np.array(last)))

    def static_table(self, stage: int, first: Integers, last: Integers) -> Integers:
        """The same for many runs at once."""
        problem = self.problem
        inputs = outputs = problem.micro_batches
        if problem.receive_buffers == "in_flight":
            inputs, outputs = problem.in_flight[stage], 1
        state = self._state_before[last + 1] - self._state_before[first]
        buffers = inputs * self._boundary_bytes[first] + outputs * self._boundary_bytes[last + 1]
        table: Integers = state + buffers
        return table

    def gradient_bytes(self, first: int, last: int) -> int:
        """Gradients of parameters that are held beside micro-batches."""
        return int(self.gradient_table(np.array(first), np.array(last)))

    def gradient_table(self, first: Integers, last: Integers) -> Integers:
        """The same for many runs at once."""
        table: Integers = self._gradients_before[last + 1] - self._gradients_before[first]
        return table * self.problem.gradients_are_apart

    def choice(
        self, stage: int, first: int, last: int, memory_bytes: int | Literal["device"] | None = "device"
    ) -> StageChoice | None:
        """The fastest way to run ``first..last`` as pipeline stage ``stage``, or None if none fits.

        Args:
            stage: Number of the pipeline stage, which says how many micro-batches are in flight, and on which device.
            first: First stage of the chain.
            last: Last one.
            memory_bytes: What it may use, static memory included; None if that is no concern. By default what its device has.
        """
        if memory_bytes == "device":
            memory_bytes = self.problem.device_of(stage).memory_bytes
        key = stage, first, last, memory_bytes
        if key not in self._choices:
            self._choices[key] = self._choose(*key)
        return self._choices[key]

    def least_bytes(self, stage: int, first: int, last: int) -> int:
        """The least memory with which ``first..last`` could be pipeline stage ``stage``."""
        if self.problem.recompute == "rotor":
            return self._with(stage, first, last, self._least(first, last, self.problem.in_flight[stage]), None).bytes
        found = self.choice(stage, first, last, None)
        assert found is not None, "without a limit everything fits"
        return found.bytes

    def segment_bytes(self, stage: int, first: int, last: int) -> int:
        """What it takes if all that may be recomputed is one segment."""
        part = sub_chain(self.problem.chain, first, last)
        plan = checkpoint_all(part, self.problem.in_flight[stage], received=self._receives(last))
        return self._with(stage, first, last, plan, None).bytes

    def _choose(self, stage: int, first: int, last: int, memory_bytes: int | None) -> StageChoice | None:
        in_flight, mode = self.problem.in_flight[stage], self.problem.recompute
        last_plan = None
        if mode == "rotor":
            return self._planned_within(stage, first, last, memory_bytes)
        if mode == "never" or (mode == "except_last" and self.problem.micro_batches == 1):
            plan = keep_all(sub_chain(self.problem.chain, first, last), in_flight)
        else:
            part = sub_chain(self.problem.chain, first, last)
            plan = checkpoint_all(part, in_flight, received=self._receives(last))
            last_plan = keep_all(part, in_flight) if mode == "except_last" else None
        found = self._with(stage, first, last, plan, last_plan)
        return found if memory_bytes is None or found.bytes <= memory_bytes else None

    def _planned_within(self, stage: int, first: int, last: int, memory_bytes: int | None) -> StageChoice | None:
        """The fastest plan that fits together with what lingers.

        That may be gone, or not there yet, when the plan is at its worst. So nothing is set aside for it, and what turns out to be too much is
        taken from the plan's budget, a few times.
        """
        in_flight = self.problem.in_flight[stage]
        if memory_bytes is None:
            plan = self._planned(first, last, in_flight, None)
            assert plan is not None, "without a limit everything fits"
            return self._with(stage, first, last, plan, None)
        budget = memory_bytes - self.static_bytes(stage, first, last) - self.gradient_bytes(first, last)
        for attempt in range(_TRIES):
            plan = self._planned(first, last, in_flight, budget)
            if plan is None and attempt == 0:
                return None
            if plan is None:
                break
            found = self._with(stage, first, last, plan, None)
            if found.bytes <= memory_bytes:
                return found
            budget -= found.bytes - memory_bytes
        found = self._with(stage, first, last, self._least(first, last, in_flight), None)
        return found if found.bytes <= memory_bytes else None

    def _with(self, stage: int, first: int, last: int, plan: StagePlan, last_plan: StagePlan | None) -> StageChoice:
        load = PipelineStageLoad(
            self._on_device(plan.load, stage),
            None if last_plan is None else self._on_device(last_plan.load, stage),
            self.static_bytes(stage, first, last),
            self.gradient_bytes(first, last),
            self.travel_seconds[last + 1],
            self.travel_seconds[first],
            self._sent_bytes(first, last),
            int(self._boundary_bytes[first]) if first else self.problem.input_gradient_bytes,
        )
        return StageChoice(first, last, plan, last_plan, load, self.problem.moments(stage).peak_bytes(load))

    def _on_device(self, load: MicroBatchLoad, stage: int) -> MicroBatchLoad:
        """At the speed of the stage's device, and beside the state of the generators that every forward puts back behind it."""
        speed = self.problem.device_of(stage).speed
        generators = self.problem.chain.rng_state_bytes if self.problem.lingering else 0
        if speed == 1.0 and not generators:
            return load
        return replace(
            load,
            forward_seconds=load.forward_seconds / speed,
            backward_seconds=load.backward_seconds / speed,
            recompute_seconds=load.recompute_seconds / speed,
            forward_peak_bytes=load.forward_peak_bytes + generators,
        )

    def _sent_bytes(self, first: int, last: int) -> int:
        """What a run makes and hands over. A skip that passes by stays in the buffer where it was received."""
        chain = self.problem.chain
        passing = sum(skip.size_bytes for skip in chain.skips if skip.born < first and skip.last_use > last)
        return int(self._boundary_bytes[last + 1]) - passing if last < len(chain) - 1 else chain.stages[-1].output_bytes

    def _planned(self, first: int, last: int, in_flight: int, budget_bytes: int | None) -> StagePlan | None:
        """The fastest plan of a run, perhaps one that is known: what is best with more room is best wherever it fits."""
        budget = math.inf if budget_bytes is None else budget_bytes
        known = self._plans.setdefault(self._key(first, last), [])
        for fewer, more, plan in known:
            if fewer <= in_flight and more >= budget:
                if plan is None:
                    return None
                same = plan.with_in_flight(in_flight)
                if self.problem.gradients_are_apart and same.bytes <= budget:
                    return same
                if (fewer, more) == (in_flight, budget):
                    return plan
        self.work += (last + 1 - first) ** 2
        if budget_bytes is None:
            found: StagePlan | None = keep_all(sub_chain(self.problem.chain, first, last), in_flight)
        else:
            found = self._planner(first, last).plan(in_flight, budget_bytes)
        known.append((in_flight, budget, found))
        return found

    def _least(self, first: int, last: int, in_flight: int) -> StagePlan:
        key = self._key(first, last), in_flight
        if key not in self._least_plans:
            self.work += _PLANS_FOR_LEAST * (last + 1 - first) ** 2
            self._least_plans[key] = self._planner(first, last).least(in_flight)
        return self._least_plans[key]

    def _planner(self, first: int, last: int) -> InFlightPlanner:
        key = self._key(first, last)
        if key not in self._planners:
            part = sub_chain(self.problem.chain, first, last)
            self._planners[key] = InFlightPlanner(
                part, gradients_exist=self.problem.gradients_are_apart, received=self._receives(last)
            )
        return self._planners[key]

    def _key(self, first: int, last: int) -> object:
        """What makes runs of stages alike: their costs, and the skips in them, wherever in the chain they are."""
        if (first, last) not in self._keys:
            numbers = np.flatnonzero((self._born <= last) & (self._last_use >= first)).tolist()
            skips = tuple(self._skip_in(number, first, last) for number in numbers)
            places = {number: place for place, number in enumerate(numbers)}
            saved = tuple(
                tuple(places[number] for number in option.saved_skips)
                for stage in self.problem.chain.stages[first : last + 1]
                for option in stage.options
                if skips
            )
            self._keys[first, last] = self._receives(last), tuple(self._kinds[first : last + 1]), skips, saved
        return self._keys[first, last]

    def _skip_in(self, number: int, first: int, last: int) -> object:
        """All of a skip that a run from ``first`` to ``last`` knows of, counted from its first stage."""
        skip = self.problem.chain.skips[number]
        read = [place for place, use in enumerate(skip.uses) if first <= use <= last]
        return (
            max(skip.born - first, -1),
            skip.size_bytes,
            tuple((skip.uses[place] - first, skip.gradient_bytes[place]) for place in read),
            skip.in_output or skip.last_use > last,
        )

    def _receives(self, last: int) -> bool:
        """The gradient of a run's output comes from another pipeline stage, into a buffer of :meth:`static_bytes`."""
        return last < len(self.problem.chain) - 1


class DeviceShares:
    """Plans for several pipeline stages on one device, which share its memory.

    How fast one of them is depends on what the others leave. Each gets what it always holds and a share of the rest, in proportion to what it would
    hold in all its micro-batches in flight if nothing were recomputed. The stages are never all at their worst at once, so shares are stretched as
    far as the device's simulated peak allows.

    Args:
        problem: With several pipeline stages per device.
        costs: Of the problem.
    """

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self._problem, self._costs = problem, costs
        self._known: dict[object, list[StageChoice] | None] = {}

    def choices(self, runs: Sequence[tuple[int, int]], *, thorough: bool) -> list[StageChoice | None]:
        """By pipeline stage, the fastest plans that were found to fit together; None for all stages of a device where none did.

        Args:
            runs: First and last stage of each.
            thorough: Where else nothing fits, try what takes the least memory, which takes long to find.
        """
        devices = len(self._problem.devices)
        found: list[StageChoice | None] = [None] * len(runs)
        for device in range(devices):
            stages = [(stage, *runs[stage]) for stage in range(device, len(runs), devices)]
            key = device, tuple(stages)
            if key not in self._known:
                self._known[key] = self._share_out(device, stages, thorough)
            for choice, (stage, _, _) in zip(self._known[key] or (), stages, strict=False):
                found[stage] = choice
        return found

    def _share_out(self, device: int, stages: list[tuple[int, int, int]], thorough: bool) -> list[StageChoice] | None:
        costs, memory = self._costs, self._problem.devices[device].memory_bytes
        if memory is None or self._problem.recompute != "rotor":
            return self._within(device, stages, [None] * len(stages))
        wants = [
            keep_all(sub_chain(self._problem.chain, first, last), self._problem.in_flight[stage]).bytes
            for stage, first, last in stages
        ]
        # Somebody may need more than in proportion, or what lingers needs room as well: then what plain segments take, or the least, is set aside.
        starts = (
            (1.0, lambda *run: costs.static_bytes(*run) + costs.gradient_bytes(*run[1:])),
            (0.0, costs.segment_bytes),
            (0.0, costs.least_bytes),
        )
        best, high = None, _MOST_STRETCH
        for low, always in starts if thorough else starts[:2]:
            least = [always(*each) for each in stages]
            best = self._within(device, stages, _shares(memory, least, wants, low))
            if best is not None:
                break
        for _ in range(_STRETCHES if best else 0):
            stretch = (low + high) / 2
            found = self._within(device, stages, _shares(memory, least, wants, stretch))
            low, high = (low, stretch) if found is None else (stretch, high)
            best = found or best
        return best

    def _within(
        self, device: int, stages: list[tuple[int, int, int]], shares: Sequence[int | None]
    ) -> list[StageChoice] | None:
        """The fastest plans within these shares, or None if there are none or they do not fit together."""
        found = []
        for each, share in zip(stages, shares, strict=True):
            choice = self._costs.choice(*each, share)
            if choice is None:
                return None
            found.append(choice)
        memory = self._problem.devices[device].memory_bytes
        if memory is None:
            return found
        peak = device_peak_bytes(
            self._problem.order[device],
            {stage: choice.load for (stage, _, _), choice in zip(stages, found, strict=True)},
            micro_batches=self._problem.micro_batches,
            gradients_exist=self._problem.gradients_exist,
            lingering=self._problem.lingering[device] if self._problem.lingering else (),
            results_bytes=self._problem.results_bytes,
        )
        return found if peak <= memory else None


def _shares(memory: int, least: list[int], wants: list[int], stretch: float) -> list[int]:
    """What each stage of a device may use: its least, and its part of the rest."""
    free = max(memory - sum(least), 0)
    return [own + int(stretch * free * want / max(sum(wants), 1)) for own, want in zip(least, wants, strict=True)]


def _anonymous(stage: StageCost) -> StageCost:
    """Its costs alone; which skips it saves is a matter of where it is."""
    options = tuple(replace(option, saved_skips=()) for option in stage.options)
    return replace(stage, name="", options=options)


def devices_of(devices: int | Sequence[PipelineDevice], memory_bytes: int | None = None) -> tuple[PipelineDevice, ...]:
    """So many equal devices, or those that are given."""
    if isinstance(devices, int):
        return (PipelineDevice(memory_bytes),) * devices
    return tuple(devices)
