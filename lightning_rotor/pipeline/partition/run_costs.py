"""Costs of runs of stages as pipeline stages on their devices, each planned when a partition asks for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from lightning_rotor.chain import Chain
from lightning_rotor.pipeline.partition.in_flight import InFlightPlanner, StagePlan
from lightning_rotor.pipeline.partition.problem import Problem
from lightning_rotor.pipeline.partition.sub_chains import boundary_bytes, sub_chain
from lightning_rotor.pipeline.stage_loads import MicroBatchLoad, PipelineStageLoad

# Most tries to plan the stages of a device with less memory: each is a plan for every stage.
_TRIES = 8


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A run of stages ``first..last`` as one pipeline stage.

    Attributes:
        first: Number of its first stage in the chain.
        last: Number of its last one.
        plan: Of a micro-batch.
        last_plan: Of the last micro-batch, if it is another.
        load: At its device's speed.
        bytes: Most on its device, always-held memory included, if it is the only stage there.
    """

    first: int
    last: int
    plan: StagePlan
    last_plan: StagePlan | None
    load: PipelineStageLoad
    bytes: int


class _Placed(NamedTuple):
    """A run of stages ``first..last`` of the chain as pipeline stage ``stage``."""

    stage: int
    first: int
    last: int


class Costs:
    """Costs of runs of stages as pipeline stages. Each is planned when first asked for, alike ones only once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        chain = problem.chain
        # Sums up to each boundary, so that those of a run are a difference.
        state_bytes = problem.state_bytes or (0,) * len(chain)
        gradient_bytes = [cost.keep.parameter_gradient_bytes for cost in chain]
        self._state_before = np.cumsum([0, *state_bytes])
        self._gradients_before = np.cumsum([0, *gradient_bytes])
        # By shared tensors, how many of their stages come before each boundary.
        self._readers_before = []
        for shared in problem.shared:
            reads = np.zeros(len(chain) + 1, np.int64)
            reads[np.array(shared.stages) + 1] = 1
            self._readers_before.append(np.cumsum(reads))
        boundaries = range(len(chain) + 1)
        self._boundary_bytes = np.array([boundary_bytes(chain, place) for place in boundaries], np.int64)
        # By boundary; nothing travels at the chain's ends, and on a single device.
        self.travel_seconds = [0.0] * (len(chain) + 1)
        if len(problem.devices) > 1:
            for place in range(1, len(chain)):
                message_bytes = int(self._boundary_bytes[place])
                self.travel_seconds[place] = problem.link.seconds(message_bytes)
        self._memory = cache(problem.memory)
        self._memory_alone = cache(problem.memory_alone)
        # Searches ask for the same runs again and again.
        self._planner = cache(self._made_planner)
        # By the run's costs, and whether it receives a gradient.
        self._planners: dict[tuple[Chain, bool], InFlightPlanner] = {}
        self._fitting = cache(self._fit)

    @property
    def recomputes(self) -> bool:
        """True if some plan may be another one than the fastest."""
        if self.problem.recompute == "rotor":
            # Without a limit, the fastest plan recomputes nothing.
            return any(device.memory_bytes is not None for device in self.problem.devices)
        return self.problem.recompute != "never"

    @property
    def planning_work(self) -> int:
        """Work that plans have cost so far."""
        return sum(planner.work for planner in self._planners.values())

    def fixed_bytes(self, first: Any, last: Any) -> Any:
        """Bytes that a pipeline stage ``first..last`` holds beside micro-batches; of one run or an array."""
        return self._static_bytes(first, last) + self.gradient_bytes(first, last)

    def gradient_bytes(self, first: Any, last: Any) -> Any:
        """Bytes of parameter gradients that are held beside micro-batches; of one run or an array."""
        # Of a single micro-batch, its own peak counts them.
        apart = self.problem.micro_batches > 1
        gradients = self._gradients_before[last + 1] - self._gradients_before[first]
        for shared, before in zip(self.problem.shared, self._readers_before, strict=True):
            # The chain counts it for the last of these stages, which may be on another device.
            is_counted = (first <= shared.stages[-1]) & (shared.stages[-1] <= last)
            is_held = before[last + 1] > before[first]
            gradients = gradients + (is_held & ~np.asarray(is_counted)) * shared.gradient_bytes
        return gradients * apart

    def state_bytes(self, first: Any, last: Any) -> Any:
        """Bytes that training keeps for a run besides gradients; of one run or an array."""
        state = self._state_before[last + 1] - self._state_before[first]
        for shared, before in zip(self.problem.shared, self._readers_before, strict=True):
            readers = before[last + 1] - before[first]
            # One copy for all stages of a device.
            state = state - np.maximum(readers - 1, 0) * shared.state_bytes
            # Where other devices hold copies, too, gradients are sent.
            is_divided = (readers > 0) & (readers < len(shared.stages))
            state = state + is_divided * shared.message_bytes
        return state

    def _static_bytes(self, first: Any, last: Any) -> Any:
        # Receive buffers: of the input, and of the output's gradient, for each micro-batch.
        received = self._boundary_bytes[first] + self._boundary_bytes[last + 1]
        return self.state_bytes(first, last) + self.problem.micro_batches * received

    def together(self, runs: Sequence[tuple[int, int]]) -> list[StageChoice | None]:
        """By pipeline stage, the fastest plans found that fit together; None for all stages of a device without any."""
        devices = len(self.problem.devices)
        choices: list[StageChoice | None] = [None] * len(runs)
        for device in range(devices):
            own_stages = range(device, len(runs), devices)
            placed = tuple(_Placed(stage, *runs[stage]) for stage in own_stages)
            fitting = self._fitting(placed)
            if fitting is not None:
                choices[device::devices] = fitting
        return choices

    def least_bytes(self, stage: int, first: int, last: int) -> int:
        """The least memory with which ``first..last`` could be pipeline stage ``stage``."""
        if self.problem.recompute != "rotor":
            return self._unlimited(stage, first, last).bytes
        plan = self._planner(first, last).least(self.problem.in_flight[stage])
        return self._with(stage, first, last, plan).bytes

    def _unlimited(self, stage: int, first: int, last: int) -> StageChoice:
        """The way that the mode of recomputation demands, for "rotor" the fastest."""
        mode = self.problem.recompute
        planner = self._planner(first, last)
        if mode == "always":
            return self._with(stage, first, last, planner.checkpointed)
        if mode == "except_last" and self.problem.micro_batches > 1:
            return self._with(stage, first, last, planner.checkpointed, planner.kept)
        return self._with(stage, first, last, planner.kept)

    def _fit(self, placed: tuple[_Placed, ...]) -> list[StageChoice] | None:
        """The fastest plans found of stages on one device that fit it together, or None.

        Peaks of stages never coincide, and what lingers may be absent at them. So each stage may use what is left of
        the memory in proportion to what it takes without recomputation, as if it were alone; any excess of the device's
        simulated peak is taken from that, a few times.
        """
        limit = self.problem.device_of(placed[0].stage).memory_bytes
        if limit is None or self.problem.recompute != "rotor":
            # There is one way to run each, so it fits or does not.
            choices = [self._unlimited(*run) for run in placed]
            if limit is None or self._peak_bytes(placed, choices) <= limit:
                return choices
            return None
        planners = [self._planner(run.first, run.last) for run in placed]
        in_flight = [self.problem.in_flight[run.stage] for run in placed]
        wants = []
        for planner, most in zip(planners, in_flight, strict=True):
            wants.append(planner.kept.bytes(most))
        all_wants = max(sum(wants), 1)
        fixed = sum(int(self.fixed_bytes(run.first, run.last)) for run in placed)
        # Each stage's share of it is what the stage may use as if it were alone.
        free = len(placed) * (limit - fixed)
        for attempt in range(_TRIES):
            plans = []
            used = 0
            for planner, most, want in zip(planners, in_flight, wants, strict=True):
                plan = planner.plan(most, free * want // all_wants)
                if plan is None and len(placed) == 1 and attempt == 0:
                    # Not even without what lingers.
                    return None
                if plan is None:
                    plan = planner.least(most)
                plans.append(plan)
                used += plan.bytes(most)
            choices = [self._with(*run, plan) for run, plan in zip(placed, plans, strict=True)]
            excess = self._peak_bytes(placed, choices) - limit
            if excess <= 0:
                return choices
            # Plans often use less than they may. What they do not use would hide the excess from the next try.
            free = min(free, used) - excess
        return None

    def _peak_bytes(self, placed: tuple[_Placed, ...], choices: Sequence[StageChoice]) -> int:
        """Most bytes on the device of some stages, all of it or one."""
        if len(placed) == 1:
            return choices[0].bytes
        loads = {}
        for run, choice in zip(placed, choices, strict=True):
            loads[run.stage] = choice.load
        device = placed[0].stage % len(self.problem.devices)
        return self._memory(device).peak_bytes(loads, self.problem.results_bytes)

    def _with(
        self,
        stage: int,
        first: int,
        last: int,
        plan: StagePlan,
        last_plan: StagePlan | None = None,
    ) -> StageChoice:
        """A run under its plans, as a pipeline stage."""
        input_gradient_bytes = self.problem.input_gradient_bytes
        if first > 0:
            input_gradient_bytes = int(self._boundary_bytes[first])
        last_load = None
        if last_plan is not None:
            last_load = self._on_device(last_plan.load, stage)
        load = PipelineStageLoad(
            micro_batch=self._on_device(plan.load, stage),
            last=last_load,
            static_bytes=int(self._static_bytes(first, last)),
            gradient_bytes=int(self.gradient_bytes(first, last)),
            send_forward_seconds=self.travel_seconds[last + 1],
            send_backward_seconds=self.travel_seconds[first],
            output_bytes=self._sent_bytes(first, last),
            input_gradient_bytes=input_gradient_bytes,
        )
        # What every device is given behind the step comes once, and not with each of its stages.
        results_bytes = 0
        if self.problem.stages_per_device == 1:
            results_bytes = self.problem.results_bytes
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
        passing_bytes = 0
        for skip in chain.skips:
            if skip.born < first and skip.last_use > last:
                passing_bytes += skip.size_bytes
        return int(self._boundary_bytes[last + 1]) - passing_bytes

    def _made_planner(self, first: int, last: int) -> InFlightPlanner:
        """Planner of a run; alike ones, wherever in the chain they are, share it."""
        part = sub_chain(self.problem.chain, first, last, shared=self.problem.shared)
        # Names say nothing about costs, and equal blocks of a transformer differ in nothing else. So one plan serves
        # all of them: chains are keys, compared by value.
        nameless_stages = tuple(replace(cost, name="") for cost in part)
        nameless = replace(part, stages=nameless_stages)
        # The gradient of the output comes into a buffer, but for the last stage's.
        received = last < len(self.problem.chain) - 1
        gradients_exist = self.problem.micro_batches > 1
        planner = InFlightPlanner(nameless, gradients_exist=gradients_exist, received=received)
        return self._planners.setdefault((nameless, received), planner)
