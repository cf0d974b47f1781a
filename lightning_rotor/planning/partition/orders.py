"""What follows from the order of a pipeline's actions alone, whatever is cut: shared by all problems with the same schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_rotor.pipeline_lingering import lingering
from lightning_rotor.pipeline_schedule import Actions, PipelineScheduleName, actions, most_in_flight
from lightning_rotor.pipeline_waves import Waves
from lightning_rotor.planning.partition.moments import Moments


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
