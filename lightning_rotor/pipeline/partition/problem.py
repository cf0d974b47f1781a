"""The problem of cutting: the chain, the devices, how the pipeline runs; and costs of runs of stages on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from lightning_rotor.chain import Chain, StageCost
from lightning_rotor.pipeline.partition.in_flight import (
    InFlightPlanner,
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
from lightning_rotor.pipeline.simulator import DeviceMemory, MicroBatchLoad, PipelineStageLoad, StepSimulator

RecomputeMode: TypeAlias = Literal["rotor", "always", "except_last", "never"]
RECOMPUTE_MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)
# Most tries to plan with less memory because of what lingers.
_TRIES = 4
# Plans made to find the one with the least memory.
_PLANS_FOR_LEAST = 10
# Largest stretch of the shares of stages on one device, and its steps.
_MOST_STRETCH, _STRETCHES = 4.0, 5


@dataclass(frozen=True, slots=True)
class PipelineDevice:
    """One device of a pipeline."""

    memory_bytes: int | None = None  # all that training may use of it; None for no limit
    speed: float = 1.0  # relative to the device on which the chain was measured

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes < 0:
            raise PipelineError(f"memory_bytes is {self.memory_bytes}: expected a number that is not negative, or None")
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise PipelineError(f"speed is {self.speed}: expected a positive number, 1.0 for the measured device")


def devices_of(devices: int | Sequence[PipelineDevice], memory_bytes: int | None = None) -> tuple[PipelineDevice, ...]:
    """A number of equal devices, or the given ones."""
    return (PipelineDevice(memory_bytes),) * devices if isinstance(devices, int) else tuple(devices)


@dataclass(frozen=True, slots=True)
class Link:
    """Bandwidth and latency of every message between neighbouring devices, in either direction."""

    bytes_per_second: float = math.inf
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or not 0 <= self.latency_seconds < math.inf:
            raise PipelineError(f"{self}: expected a positive bandwidth and a latency that is not negative")

    def seconds(self, size_bytes: int) -> float:
        """Travel time of a message."""
        return self.latency_seconds + size_bytes / self.bytes_per_second


@lru_cache(maxsize=2)
def _simulator(
    schedule: PipelineScheduleName, devices: int, micro_batches: int, stages_per_device: int
) -> StepSimulator:
    order = actions(schedule, devices, micro_batches=micro_batches, stages_per_device=stages_per_device)
    return StepSimulator(order, stages=devices * stages_per_device, micro_batches=micro_batches)


@dataclass(frozen=True)
class Problem:
    """A chain to be cut.

    ``recompute``: ``"rotor"`` plans every pipeline stage within what is left of its device's memory. ``"always"``
    recomputes each stage as a whole, ``"except_last"`` for all micro-batches but the last, ``"never"`` nothing. Receive
    buffers, of the input of a pipeline stage and of the gradient of its output, are one per micro-batch, as
    ``torch.distributed.pipelining`` allocates them, or as many as are in flight and one.
    """

    chain: Chain  # costs for one micro-batch
    devices: tuple[PipelineDevice, ...]  # in the order of the pipeline
    micro_batches: int
    schedule: PipelineScheduleName = "1f1b"
    stages_per_device: int = 1  # more than one with "interleaved" only
    recompute: RecomputeMode = "rotor"
    state_bytes: tuple[int, ...] = ()  # by stage of the chain, what training keeps besides gradients
    link: Link = Link()
    receive_buffers: Literal["micro_batches", "in_flight"] = "micro_batches"
    gradients_exist: bool = False  # of parameters, before the step
    outputs_linger: bool = True  # torch holds on to sent outputs, as it does before 2.15

    def __post_init__(self) -> None:
        check_numbers(self.schedule, len(self.devices), self.micro_batches, self.stages_per_device)
        if self.recompute not in RECOMPUTE_MODES:
            known = ", ".join(map(repr, RECOMPUTE_MODES))
            raise PipelineError(f"recompute is {self.recompute!r}: expected one of {known}")
        n = len(self.chain)
        if self.state_bytes and len(self.state_bytes) != n:
            raise PipelineError(
                f"state_bytes has {len(self.state_bytes)} entries: expected one for each of the chain's {n} stages"
            )
        if self.stages > n:
            each = f" with {self.stages_per_device} stages each" if self.stages_per_device > 1 else ""
            raise PipelineError(
                f"{len(self.devices)} devices{each} need {self.stages} pipeline stages, but the chain has only {n} "
                "stages to share out: use fewer devices, or cut the model more finely"
            )

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.devices) * self.stages_per_device

    def device_of(self, stage: int) -> PipelineDevice:
        """Device of a pipeline stage."""
        return self.devices[stage % len(self.devices)]

    @property
    def order(self) -> tuple[Actions, ...]:
        """Actions of every device; equal problems share them."""
        return actions(
            self.schedule,
            len(self.devices),
            micro_batches=self.micro_batches,
            stages_per_device=self.stages_per_device,
        )

    @property
    def simulator(self) -> StepSimulator:
        """Simulator of step durations."""
        return _simulator(self.schedule, len(self.devices), self.micro_batches, self.stages_per_device)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """By pipeline stage, the most micro-batches at once."""
        found = {stage: most for device in self.order for stage, most in most_in_flight(device).items()}
        return tuple(found[stage] for stage in range(self.stages))

    @cached_property
    def lingering(self) -> tuple[tuple[int, ...], ...]:
        """By device, how long the results of its actions stay; empty where each is freed as soon as it can."""
        if self.receive_buffers == "in_flight":
            return ()
        linger = partial(lingering, self.schedule, stages=self.stages, outputs_linger=self.outputs_linger)
        return tuple(linger(order) for order in self.order)

    @cached_property
    def results_bytes(self) -> int:
        """Bytes that every device is given behind the step: all outputs, and the gradients of all inputs."""
        if self.receive_buffers == "in_flight":
            return 0
        return self.micro_batches * (self.chain.stages[-1].output_bytes + self.input_gradient_bytes)

    @property
    def input_gradient_bytes(self) -> int:
        """Bytes of the gradient of the chain's input, for one micro-batch."""
        return self.chain.stages[0].keep.input_gradient_bytes

    @property
    def gradients_are_apart(self) -> bool:
        """True if parameter gradients are held beside micro-batches: from the second one on, or before the step."""
        return self.gradients_exist or self.micro_batches > 1

    def memory(self, device: int) -> DeviceMemory:
        """Memory model of a device."""
        return self._memory(self.order[device], self.lingering[device] if self.lingering else ())

    def memory_alone(self, stage: int) -> DeviceMemory:
        """Memory model of a device for one of its stages; with several, as if nothing lingered."""
        device = stage % len(self.devices)
        if self.stages_per_device == 1:
            return self.memory(device)
        return self._memory(tuple(action for action in self.order[device] if action.stage == stage), ())

    def _memory(self, order: Actions, until: Sequence[int]) -> DeviceMemory:
        return DeviceMemory(order, until, micro_batches=self.micro_batches, gradients_exist=self.gradients_exist)


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A run of stages ``first..last`` as one pipeline stage, with the load at its device's speed."""

    first: int
    last: int
    plan: StagePlan
    last_plan: StagePlan | None  # of the last micro-batch, if it is another
    load: PipelineStageLoad
    bytes: int  # most on its device, always-held memory included, if it is the only stage there


class Costs:
    """Costs of runs of stages as pipeline stages. Each is planned when first asked for, alike ones only once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.work = 0  # of planning: squared lengths of runs
        # By pipeline stage, first stage, last stage and memory.
        self.choices: dict[tuple[int, int, int, int | None], StageChoice | None] = {}
        chain = problem.chain
        kinds: dict[object, int] = {}
        self._kinds = [kinds.setdefault(_anonymous(stage), len(kinds)) for stage in chain]
        self._state_before = np.cumsum([0, *(problem.state_bytes or (0,) * len(chain))])
        self._gradients_before = np.cumsum([0, *(stage.keep.parameter_gradient_bytes for stage in chain)])
        self._boundary_bytes = np.array([boundary_bytes(chain, place) for place in range(len(chain) + 1)], np.int64)
        self.travel_seconds = [
            problem.link.seconds(size) if len(problem.devices) > 1 and 0 < place < len(chain) else 0.0
            for place, size in enumerate(self._boundary_bytes.tolist())
        ]
        self._memories: dict[int, DeviceMemory] = {}
        self._keys: dict[tuple[int, int], object] = {}
        self._planners: dict[object, InFlightPlanner] = {}
        self._plans: dict[object, list[tuple[int, float, StagePlan | None]]] = {}
        self._other_plans: dict[object, StagePlan] = {}

    @property
    def recomputes(self) -> bool:
        """True if some plan may be another one than the fastest."""
        limited = any(device.memory_bytes is not None for device in self.problem.devices)
        return self.problem.recompute in ("always", "except_last") or (self.problem.recompute == "rotor" and limited)

    def static_bytes(self, stage: int, first: Any, last: Any) -> Any:
        """Bytes that pipeline stage ``first..last`` always holds, without gradients; of one run or an array."""
        problem = self.problem
        inputs = outputs = problem.micro_batches
        if problem.receive_buffers == "in_flight":
            inputs, outputs = problem.in_flight[stage], 1
        state = self._state_before[last + 1] - self._state_before[first]
        return state + inputs * self._boundary_bytes[first] + outputs * self._boundary_bytes[last + 1]

    def gradient_bytes(self, first: Any, last: Any) -> Any:
        """Bytes of parameter gradients that are held beside micro-batches; of one run or an array."""
        return (self._gradients_before[last + 1] - self._gradients_before[first]) * self.problem.gradients_are_apart

    def fixed_bytes(self, stage: int, first: Any, last: Any) -> Any:
        """Static and gradient bytes together."""
        return self.static_bytes(stage, first, last) + self.gradient_bytes(first, last)

    def choice(
        self, stage: int, first: int, last: int, memory_bytes: int | Literal["device"] | None = "device"
    ) -> StageChoice | None:
        """The fastest way to run ``first..last`` as pipeline stage ``stage``, or None if none fits."""
        if memory_bytes == "device":
            memory_bytes = self.problem.device_of(stage).memory_bytes
        key = stage, first, last, memory_bytes
        if key not in self.choices:
            self.choices[key] = self._choose(*key)
        return self.choices[key]

    def least_bytes(self, stage: int, first: int, last: int) -> int:
        """The least memory with which ``first..last`` could be pipeline stage ``stage``."""
        if self.problem.recompute == "rotor":
            return self._with(stage, first, last, self._least(first, last, self.problem.in_flight[stage])).bytes
        found = self.choice(stage, first, last, None)
        assert found is not None, "without a limit everything fits"
        return found.bytes

    def segment_bytes(self, stage: int, first: int, last: int) -> int:
        """Bytes of a pipeline stage that recomputes all it may in one segment."""
        plan = self._plain(first, last, checkpointed=True).with_in_flight(self.problem.in_flight[stage])
        return self._with(stage, first, last, plan).bytes

    def _choose(self, stage: int, first: int, last: int, memory_bytes: int | None) -> StageChoice | None:
        problem, in_flight = self.problem, self.problem.in_flight[stage]
        if problem.recompute == "rotor" and memory_bytes is not None:
            return self._planned_within(stage, first, last, memory_bytes)
        except_last = problem.recompute == "except_last" and problem.micro_batches > 1
        checkpointed = problem.recompute == "always" or except_last
        plan = self._plain(first, last, checkpointed=checkpointed).with_in_flight(in_flight)
        last_plan = self._plain(first, last).with_in_flight(in_flight) if except_last else None
        found = self._with(stage, first, last, plan, last_plan)
        return found if memory_bytes is None or found.bytes <= memory_bytes else None

    def _planned_within(self, stage: int, first: int, last: int, memory_bytes: int) -> StageChoice | None:
        """The fastest plan that fits together with what lingers.

        What lingers may be absent at the plan's peak. So nothing is set aside; any excess is taken from the plan's
        budget, a few times.
        """
        in_flight = self.problem.in_flight[stage]
        budget = memory_bytes - int(self.fixed_bytes(stage, first, last))
        for attempt in range(_TRIES):
            plan = self._planned(first, last, in_flight, budget)
            if plan is None and attempt == 0:
                return None
            if plan is None:
                break
            found = self._with(stage, first, last, plan)
            if found.bytes <= memory_bytes:
                return found
            budget = min(budget, plan.bytes) - (found.bytes - memory_bytes)
        found = self._with(stage, first, last, self._least(first, last, in_flight))
        return found if found.bytes <= memory_bytes else None

    def _with(
        self, stage: int, first: int, last: int, plan: StagePlan, last_plan: StagePlan | None = None
    ) -> StageChoice:
        if stage not in self._memories:
            self._memories[stage] = self.problem.memory_alone(stage)
        load = PipelineStageLoad(
            self._on_device(plan.load, stage),
            None if last_plan is None else self._on_device(last_plan.load, stage),
            int(self.static_bytes(stage, first, last)),
            int(self.gradient_bytes(first, last)),
            self.travel_seconds[last + 1],
            self.travel_seconds[first],
            self._sent_bytes(first, last),
            int(self._boundary_bytes[first]) if first else self.problem.input_gradient_bytes,
        )
        return StageChoice(first, last, plan, last_plan, load, self._memories[stage].peak_bytes({stage: load}))

    def _on_device(self, load: MicroBatchLoad, stage: int) -> MicroBatchLoad:
        """A load at the speed of the device, with the generators' state that every forward restores."""
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
        """Bytes that a run makes and sends. A skip that passes by stays in its receive buffer."""
        chain = self.problem.chain
        if last == len(chain) - 1:
            return chain.stages[-1].output_bytes
        passing = sum(skip.size_bytes for skip in chain.skips if skip.born < first and skip.last_use > last)
        return int(self._boundary_bytes[last + 1]) - passing

    # ---------------------------------------------------------------- plans

    def _planned(self, first: int, last: int, in_flight: int, budget: int) -> StagePlan | None:
        """The fastest plan of a run, perhaps a known one: the best plan for more memory is best wherever it fits."""
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
        found = self._planner(first, last).plan(in_flight, budget)
        known.append((in_flight, budget, found))
        return found

    def _plain(self, first: int, last: int, *, checkpointed: bool = False) -> StagePlan:
        """Plan with everything kept, or recomputed as one segment."""
        key = self._key(first, last), checkpointed
        if key not in self._other_plans:
            self.work += (last + 1 - first) ** 2
            part = sub_chain(self.problem.chain, first, last)
            receives = self._receives(last)
            self._other_plans[key] = checkpoint_all(part, received=receives) if checkpointed else keep_all(part)
        return self._other_plans[key]

    def _least(self, first: int, last: int, in_flight: int) -> StagePlan:
        key = self._key(first, last), "least", in_flight
        if key not in self._other_plans:
            self.work += _PLANS_FOR_LEAST * (last + 1 - first) ** 2
            self._other_plans[key] = self._planner(first, last).least(in_flight)
        return self._other_plans[key]

    def _planner(self, first: int, last: int) -> InFlightPlanner:
        key = self._key(first, last)
        if key not in self._planners:
            self._planners[key] = InFlightPlanner(
                sub_chain(self.problem.chain, first, last),
                gradients_exist=self.problem.gradients_are_apart,
                received=self._receives(last),
            )
        return self._planners[key]

    def _key(self, first: int, last: int) -> object:
        """Key of alike runs: their stages' costs, and the skips in them, wherever in the chain they are."""
        if (first, last) not in self._keys:
            kinds, skips = tuple(self._kinds[first : last + 1]), tuple[object, ...]()
            if any(skip.born <= last and skip.last_use >= first for skip in self.problem.chain.skips):
                part = sub_chain(self.problem.chain, first, last)
                saved = tuple(option.saved_skips for stage in part for option in stage.options)
                skips = part.stages[-1].output_bytes, part.skips, saved
            self._keys[first, last] = self._receives(last), kinds, skips
        return self._keys[first, last]

    def _receives(self, last: int) -> bool:
        """True if the gradient of a run's output comes from another pipeline stage, into a buffer."""
        return last < len(self.problem.chain) - 1


class DeviceShares:
    """Plans for several pipeline stages on one device, which share its memory.

    Each gets what it always holds and a share of the rest, in proportion to its memory without recomputation. Their
    peaks never coincide, so shares are stretched as far as the device's simulated peak allows.
    """

    def __init__(self, costs: Costs) -> None:
        self._problem, self._costs = costs.problem, costs
        self._memories: dict[int, DeviceMemory] = {}
        self._known: dict[object, list[StageChoice] | None] = {}

    def choices(self, runs: Sequence[tuple[int, int]], *, thorough: bool) -> list[StageChoice | None]:
        """By pipeline stage, the fastest plans found that fit together; None for all stages of a device without any."""
        devices = len(self._problem.devices)
        found: list[StageChoice | None] = [None] * len(runs)
        for device in range(devices):
            stages = tuple((stage, *runs[stage]) for stage in range(device, len(runs), devices))
            if stages not in self._known:
                self._known[stages] = self._share_out(stages, thorough)
            for choice, (stage, _, _) in zip(self._known[stages] or (), stages, strict=False):
                found[stage] = choice
        return found

    def _share_out(self, stages: tuple[tuple[int, int, int], ...], thorough: bool) -> list[StageChoice] | None:
        costs, memory = self._costs, self._problem.device_of(stages[0][0]).memory_bytes
        if memory is None or self._problem.recompute != "rotor":
            return self._within(stages, [None] * len(stages))
        chain, in_flight = self._problem.chain, self._problem.in_flight
        wants = [keep_all(sub_chain(chain, *run), in_flight[stage]).bytes for stage, *run in stages]
        # A stage may need more than its proportion, or what lingers needs room: then the bytes of plain segments, or
        # the least, are set aside.
        starts = ((1.0, costs.fixed_bytes), (0.0, costs.segment_bytes), (0.0, costs.least_bytes))
        best, high = None, _MOST_STRETCH
        for low, always in starts if thorough else starts[:2]:
            least = [int(always(*each)) for each in stages]
            best = self._within(stages, _shares(memory, least, wants, low))
            if best is not None:
                break
        for _ in range(_STRETCHES if best else 0):
            stretch = (low + high) / 2
            found = self._within(stages, _shares(memory, least, wants, stretch))
            low, high = (low, stretch) if found is None else (stretch, high)
            best = found or best
        return best

    def _within(
        self, stages: tuple[tuple[int, int, int], ...], shares: Sequence[int | None]
    ) -> list[StageChoice] | None:
        """The fastest plans within these shares, or None if there are none or they do not fit together."""
        found = []
        for each, share in zip(stages, shares, strict=True):
            choice = self._costs.choice(*each, share)
            if choice is None:
                return None
            found.append(choice)
        device = stages[0][0] % len(self._problem.devices)
        memory = self._problem.devices[device].memory_bytes
        if memory is None:
            return found
        if device not in self._memories:
            self._memories[device] = self._problem.memory(device)
        loads = {stage: choice.load for (stage, _, _), choice in zip(stages, found, strict=True)}
        return found if self._memories[device].peak_bytes(loads, self._problem.results_bytes) <= memory else None


def _shares(memory: int, least: list[int], wants: list[int], stretch: float) -> list[int]:
    """Bytes that each stage of a device may use: its least, and its part of the rest."""
    free = max(memory - sum(least), 0)
    return [own + int(stretch * free * want / max(sum(wants), 1)) for own, want in zip(least, wants, strict=True)]


def _anonymous(stage: StageCost) -> StageCost:
    """The stage's costs alone; which skips it saves depends on its place."""
    options = tuple(replace(option, saved_skips=()) for option in stage.options)
    return replace(stage, name="", options=options)
