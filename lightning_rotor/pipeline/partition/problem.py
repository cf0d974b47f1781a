"""The problem of cutting: the chain, the devices, how the pipeline runs; and costs of runs of stages on a device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from lightning_rotor.chain import Chain
from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.device_levels import DeviceLevels
from lightning_rotor.pipeline.partition.in_flight import InFlightPlanner, StagePlan, boundary_bytes, sub_chain
from lightning_rotor.pipeline.pipeline_schedule import (
    Integers,
    PipelineScheduleName,
    check_numbers,
    lingering,
    most_in_flight,
    orders,
)
from lightning_rotor.pipeline.stage_loads import MicroBatchLoad, PipelineStageLoad
from lightning_rotor.pipeline.step_times import StepSimulator

RecomputeMode: TypeAlias = Literal["rotor", "always", "except_last", "never"]
# Most tries to plan the stages of a device with less memory.
_TRIES = 8


def check_recompute(mode: str) -> None:
    """Refuse a mode of recomputation that there is not."""
    if mode not in get_args(RecomputeMode):
        known = ", ".join(map(repr, get_args(RecomputeMode)))
        raise PipelineError(f"recompute is {mode!r}: expected one of {known}")


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


@dataclass(frozen=True)
class Problem:
    """A chain to be cut.

    ``recompute``: ``"rotor"`` plans every pipeline stage within what is left of its device's memory. ``"always"``
    recomputes each stage as a whole, ``"except_last"`` for all micro-batches but the last, ``"never"`` nothing. Receive
    buffers, of the input of a pipeline stage and of the gradient of its output, are one per micro-batch.
    """

    chain: Chain  # costs for one micro-batch
    devices: tuple[PipelineDevice, ...]  # in the order of the pipeline
    micro_batches: int
    schedule: PipelineScheduleName = "1f1b"
    stages_per_device: int = 1  # more than one with "interleaved" only
    recompute: RecomputeMode = "rotor"
    state_bytes: tuple[int, ...] = ()  # by stage of the chain, what training keeps besides gradients
    link: Link = Link()
    outputs_linger: bool = True  # torch holds on to sent outputs, as it does before 2.15

    def __post_init__(self) -> None:
        check_numbers(self.schedule, len(self.devices), self.micro_batches, self.stages_per_device)
        check_recompute(self.recompute)
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
    def order(self) -> Integers:
        """Actions of every device; equal problems share them."""
        return orders(
            self.schedule, len(self.devices), micro_batches=self.micro_batches, stages_per_device=self.stages_per_device
        )

    @cached_property
    def simulator(self) -> StepSimulator:
        """Simulator of step durations."""
        return StepSimulator(self.order, stages=self.stages, micro_batches=self.micro_batches)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """By pipeline stage, the most micro-batches at once."""
        found = {stage: most for device in self.order for stage, most in most_in_flight(device).items()}
        return tuple(found[stage] for stage in range(self.stages))

    def lingering(self, device: int) -> Integers:
        """Actions for which the results of a device's actions stay."""
        order = self.order[device]
        return lingering(self.schedule, order, stages=self.stages, outputs_linger=self.outputs_linger)

    @property
    def results_bytes(self) -> int:
        """Bytes that every device is given behind the step: all outputs, and the gradients of all inputs."""
        return self.micro_batches * (self.chain.stages[-1].output_bytes + self.input_gradient_bytes)

    @property
    def input_gradient_bytes(self) -> int:
        """Bytes of the gradient of the chain's input, for one micro-batch."""
        return self.chain.stages[0].keep.input_gradient_bytes

    def memory(self, device: int) -> DeviceLevels:
        """Memory model of a device."""
        return DeviceLevels(self.order[device], self.lingering(device), micro_batches=self.micro_batches)

    def memory_alone(self, stage: int) -> DeviceLevels:
        """Memory model of a device for one of its stages; with several, as if nothing lingered."""
        device = stage % len(self.devices)
        if self.stages_per_device == 1:
            return self.memory(device)
        order = self.order[device]
        return DeviceLevels(order[order[:, 0] == stage], micro_batches=self.micro_batches)


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
        chain = problem.chain
        self._state_before = np.cumsum([0, *(problem.state_bytes or (0,) * len(chain))])
        self._gradients_before = np.cumsum([0, *(stage.keep.parameter_gradient_bytes for stage in chain)])
        self._boundary_bytes = np.array([boundary_bytes(chain, place) for place in range(len(chain) + 1)], np.int64)
        self.travel_seconds = [
            problem.link.seconds(size) if len(problem.devices) > 1 and 0 < place < len(chain) else 0.0
            for place, size in enumerate(self._boundary_bytes.tolist())
        ]
        self._memory, self._memory_alone = cache(problem.memory), cache(problem.memory_alone)
        self._planner = cache(self._made_planner)
        self._planners: dict[tuple[Chain, bool], InFlightPlanner] = {}
        self._fitting = cache(self._fit)

    @property
    def recomputes(self) -> bool:
        """True if some plan may be another one than the fastest."""
        limited = any(device.memory_bytes is not None for device in self.problem.devices)
        return self.problem.recompute in ("always", "except_last") or (self.problem.recompute == "rotor" and limited)

    @property
    def planning_work(self) -> int:
        """Work that plans have cost so far."""
        return sum(planner.work for planner in self._planners.values())

    def fixed_bytes(self, first: Any, last: Any) -> Any:
        """Bytes that a pipeline stage ``first..last`` holds beside micro-batches; of one run or an array."""
        return self._static_bytes(first, last) + self.gradient_bytes(first, last)

    def gradient_bytes(self, first: Any, last: Any) -> Any:
        """Bytes of parameter gradients that are held beside micro-batches; of one run or an array."""
        apart = self.problem.micro_batches > 1  # the first one's own peak counts them
        return (self._gradients_before[last + 1] - self._gradients_before[first]) * apart

    def _static_bytes(self, first: Any, last: Any) -> Any:
        state = self._state_before[last + 1] - self._state_before[first]
        return state + self.problem.micro_batches * (self._boundary_bytes[first] + self._boundary_bytes[last + 1])

    def together(self, runs: Sequence[tuple[int, int]]) -> list[StageChoice | None]:
        """By pipeline stage, the fastest plans found that fit together; None for all stages of a device without any."""
        devices = len(self.problem.devices)
        found: list[StageChoice | None] = [None] * len(runs)
        for device in range(devices):
            stages = tuple((stage, *runs[stage]) for stage in range(device, len(runs), devices))
            found[device::devices] = self._fitting(stages) or found[device::devices]
        return found

    def least_bytes(self, stage: int, first: int, last: int) -> int:
        """The least memory with which ``first..last`` could be pipeline stage ``stage``."""
        if self.problem.recompute != "rotor":
            return self._unlimited(stage, first, last).bytes
        plan = self._planner(first, last).least(self.problem.in_flight[stage])
        return self._with(stage, first, last, plan).bytes

    def _unlimited(self, stage: int, first: int, last: int) -> StageChoice:
        """The way that the mode of recomputation demands, for "rotor" the fastest."""
        mode, planner = self.problem.recompute, self._planner(first, last)
        except_last = mode == "except_last" and self.problem.micro_batches > 1
        plan = planner.checkpointed if mode == "always" or except_last else planner.kept
        return self._with(stage, first, last, plan, planner.kept if except_last else None)

    def _fit(self, stages: tuple[tuple[int, int, int], ...]) -> list[StageChoice] | None:
        """The fastest plans found of stages on one device that fit it together, or None.

        Peaks of stages never coincide, and what lingers may be absent at them. So each stage may use what is left of
        the memory in proportion to what it takes without recomputation, as if it were alone; any excess of the device's
        simulated peak is taken from that, a few times.
        """
        memory, in_flight = self.problem.device_of(stages[0][0]).memory_bytes, self.problem.in_flight
        if memory is None or self.problem.recompute != "rotor":
            found = [self._unlimited(*each) for each in stages]
            return found if memory is None or self._peak_bytes(stages, found) <= memory else None
        planners = [(self._planner(first, last), in_flight[stage]) for stage, first, last in stages]
        wants = [planner.kept.bytes(most) for planner, most in planners]
        free = len(stages) * (memory - sum(int(self.fixed_bytes(*run)) for _, *run in stages))
        for attempt in range(_TRIES):
            plans = [
                planner.plan(most, free * want // max(sum(wants), 1))
                for (planner, most), want in zip(planners, wants, strict=True)
            ]
            if plans == [None] and not attempt:
                return None  # not even without what lingers
            chosen = [plan or planner.least(most) for plan, (planner, most) in zip(plans, planners, strict=True)]
            found = [self._with(*each, plan) for each, plan in zip(stages, chosen, strict=True)]
            excess = self._peak_bytes(stages, found) - memory
            if excess <= 0:
                return found
            free = min(free, sum(plan.bytes(most) for plan, (_, most) in zip(chosen, planners, strict=True))) - excess
        return None

    def _peak_bytes(self, stages: tuple[tuple[int, int, int], ...], choices: Sequence[StageChoice]) -> int:
        """Most bytes on the device of some stages, all of it or one."""
        if len(stages) == 1:
            return choices[0].bytes
        loads = {stage: choice.load for (stage, _, _), choice in zip(stages, choices, strict=True)}
        return self._memory(stages[0][0] % len(self.problem.devices)).peak_bytes(loads, self.problem.results_bytes)

    def _with(
        self, stage: int, first: int, last: int, plan: StagePlan, last_plan: StagePlan | None = None
    ) -> StageChoice:
        load = PipelineStageLoad(
            self._on_device(plan.load, stage),
            None if last_plan is None else self._on_device(last_plan.load, stage),
            int(self._static_bytes(first, last)),
            int(self.gradient_bytes(first, last)),
            self.travel_seconds[last + 1],
            self.travel_seconds[first],
            self._sent_bytes(first, last),
            int(self._boundary_bytes[first]) if first else self.problem.input_gradient_bytes,
        )
        # What every device is given behind the step comes once.
        results_bytes = self.problem.results_bytes if self.problem.stages_per_device == 1 else 0
        bytes_alone = self._memory_alone(stage).peak_bytes({stage: load}, results_bytes)
        return StageChoice(first, last, plan, last_plan, load, bytes_alone)

    def _on_device(self, load: MicroBatchLoad, stage: int) -> MicroBatchLoad:
        """A load at the speed of the device, with the generators' state that every forward restores."""
        speed = self.problem.device_of(stage).speed
        return replace(
            load,
            forward_seconds=load.forward_seconds / speed,
            backward_seconds=load.backward_seconds / speed,
            recompute_seconds=load.recompute_seconds / speed,
            forward_peak_bytes=load.forward_peak_bytes + self.problem.chain.rng_state_bytes,
        )

    def _sent_bytes(self, first: int, last: int) -> int:
        """Bytes that a run makes and sends. A skip that passes by stays in its receive buffer."""
        chain = self.problem.chain
        if last == len(chain) - 1:
            return chain.stages[-1].output_bytes
        passing = sum(skip.size_bytes for skip in chain.skips if skip.born < first and skip.last_use > last)
        return int(self._boundary_bytes[last + 1]) - passing

    def _made_planner(self, first: int, last: int) -> InFlightPlanner:
        """Planner of a run; alike ones, wherever in the chain they are, share it."""
        part = sub_chain(self.problem.chain, first, last)
        alike = replace(part, stages=tuple(replace(stage, name="") for stage in part))
        received = last < len(self.problem.chain) - 1  # the gradient of the output comes into a buffer
        several = self.problem.micro_batches > 1
        made = InFlightPlanner(alike, gradients_exist=several, received=received)
        return self._planners.setdefault((alike, received), made)
