"""The problem of cutting: the chain, the devices, and how the pipeline runs."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from lightning_rotor.chain import Chain
from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.device_levels import DeviceLevels
from lightning_rotor.pipeline.pipeline_schedule import (
    Integers,
    PipelineScheduleName,
    check_numbers,
    lingering,
    most_in_flight,
    orders,
)
from lightning_rotor.pipeline.step_times import StepSimulator

RecomputeMode: TypeAlias = Literal["rotor", "always", "except_last", "never"]


def check_recompute(mode: str) -> None:
    """Refuse a mode of recomputation that there is not."""
    modes = get_args(RecomputeMode)
    if mode not in modes:
        raise PipelineError(f"recompute is {mode!r}: expected one of {', '.join(map(repr, modes))}")


@dataclass(frozen=True, slots=True)
class PipelineDevice:
    """One device of a pipeline.

    Attributes:
        memory_bytes: All that training may use of it; None for no limit.
        speed: Relative to the device on which the chain was measured.
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
    """Bandwidth and latency of every message between neighbouring devices, in either direction."""

    bytes_per_second: float = math.inf
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        # "not … > 0" refuses NaN as well, for which every comparison is False.
        if not self.bytes_per_second > 0 or not 0 <= self.latency_seconds < math.inf:
            raise PipelineError(f"{self}: expected a positive bandwidth and a latency that is not negative")

    def seconds(self, size_bytes: int) -> float:
        """Travel time of a message."""
        return self.latency_seconds + size_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Parameters and buffers that the same stages of a chain use, such as an embedding and the head tied to it.

    Each device that runs some of these stages holds one copy, and adds up one gradient.

    Attributes:
        stages: Numbers of the stages, in order; two at least.
        state_bytes: What training keeps besides gradients. ``Problem.state_bytes`` has it once for each stage.
        gradient_bytes: Of those that learn. The chain has it as the last stage's, whose backward comes first.
        message_bytes: What a device receives at once, if others hold copies: see :mod:`..shared_gradients`.
    """

    stages: tuple[int, ...]
    state_bytes: int
    gradient_bytes: int
    message_bytes: int = 0


@dataclass(frozen=True)
class Problem:
    """A chain to be cut.

    Receive buffers, of the input of a pipeline stage and of the gradient of its output, are one per micro-batch.

    Attributes:
        chain: Costs for one micro-batch.
        devices: In the order of the pipeline.
        micro_batches: Their number.
        schedule: See ``pipeline_schedule``.
        stages_per_device: More than one with ``"interleaved"`` only.
        recompute: ``"rotor"`` plans every pipeline stage within what is left of its device's memory. ``"always"``
            recomputes each stage as a whole, ``"except_last"`` for all micro-batches but the last, ``"never"`` nothing.
        state_bytes: By stage of the chain, what training keeps besides gradients.
        shared: Tensors that several stages of the chain use.
        link: Between neighbouring devices.
        outputs_linger: torch holds on to sent outputs, as it does before 2.15.
    """

    chain: Chain
    devices: tuple[PipelineDevice, ...]
    micro_batches: int
    schedule: PipelineScheduleName = "1f1b"
    stages_per_device: int = 1
    recompute: RecomputeMode = "rotor"
    state_bytes: tuple[int, ...] = ()
    shared: tuple[SharedTensors, ...] = ()
    link: Link = Link()
    outputs_linger: bool = True

    def __post_init__(self) -> None:
        check_numbers(self.schedule, len(self.devices), self.micro_batches, self.stages_per_device)
        check_recompute(self.recompute)
        length = len(self.chain)
        if self.state_bytes and len(self.state_bytes) != length:
            raise PipelineError(
                f"state_bytes has {len(self.state_bytes)} entries: expected one for each of the chain's {length} stages"
            )
        # Every pipeline stage has a stage of the chain at least: torch's schedules have no room for an empty one.
        if self.stages > length:
            with_stages = ""
            if self.stages_per_device > 1:
                with_stages = f" with {self.stages_per_device} stages each"
            raise PipelineError(
                f"{len(self.devices)} devices{with_stages} need {self.stages} pipeline stages, but the chain has only "
                f"{length} stages to share out: use fewer devices, or cut the model more finely"
            )

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.devices) * self.stages_per_device

    def device_of(self, stage: int) -> PipelineDevice:
        """Device of a pipeline stage."""
        # As torch's interleaved schedules share them out: round and round.
        return self.devices[stage % len(self.devices)]

    @property
    def order(self) -> Integers:
        """Actions of every device; equal problems share them."""
        return orders(
            self.schedule,
            len(self.devices),
            micro_batches=self.micro_batches,
            stages_per_device=self.stages_per_device,
        )

    @cached_property
    def simulator(self) -> StepSimulator:
        """Simulator of step durations."""
        # Made once: it is asked for every cut that is tried.
        return StepSimulator(self.order, stages=self.stages, micro_batches=self.micro_batches)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """By pipeline stage, the most micro-batches at once."""
        most_by_stage: dict[int, int] = {}
        for device_order in self.order:
            # Each stage is on one device, whose order has all its actions.
            most_by_stage.update(most_in_flight(device_order))
        return tuple(most_by_stage[stage] for stage in range(self.stages))

    def lingering(self, device: int) -> Integers:
        """Actions for which the results of a device's actions stay."""
        order = self.order[device]
        return lingering(self.schedule, order, stages=self.stages, outputs_linger=self.outputs_linger)

    @property
    def results_bytes(self) -> int:
        """Bytes that every device is given behind the step: all outputs, and the gradients of all inputs."""
        # torch hands them to whoever called the schedule, so they live until that one lets go.
        last_output_bytes = self.chain.stages[-1].output_bytes
        return self.micro_batches * (last_output_bytes + self.input_gradient_bytes)

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
        # With rows left out, the numbers of actions up to which results linger would point at others.
        device_order = self.order[device]
        own_rows = device_order[device_order[:, 0] == stage]
        return DeviceLevels(own_rows, micro_batches=self.micro_batches)
