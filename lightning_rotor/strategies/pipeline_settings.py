"""Arguments of the pipeline strategy, and refusals of what a pipeline cannot train, with what would work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.micro_batches import rows_in
from lightning_rotor.pipeline.pipeline_options import PipelineOptions
from lightning_rotor.pipeline.pipeline_schedule import check_numbers
from lightning_rotor.private import lightning_packages as packages
from lightning_rotor.units import MemoryLimit

if TYPE_CHECKING:
    import lightning.pytorch as pl

_AVERAGING = (
    *packages.from_each("callbacks.StochasticWeightAveraging"),
    *packages.from_each("callbacks.WeightAveraging"),
)
_MIXED_PRECISION = packages.from_each("plugins.precision.MixedPrecision")


@dataclass(frozen=True, slots=True, eq=False)
class PipelineSettings(PipelineOptions):
    """Arguments of :class:`~lightning_rotor.strategies.RotorPipelineStrategy`; the limit is parsed."""

    module: str | None = None
    limit: MemoryLimit | None = None
    pipeline_stages: int | None = None
    sample: Any = None

    def __post_init__(self) -> None:
        PipelineOptions.__post_init__(self)
        # By the rules of every schedule alone. Those of the chosen one need the number of devices, which the Trainer
        # brings (check_devices).
        check_numbers("gpipe", self.pipeline_stages or 1, self.micro_batches, 1)

    def options(self, devices: int) -> PipelineOptions:
        """Options of a pipeline over some devices."""
        if self.schedule != "interleaved":
            return self
        stages_per_device = 2
        if not isinstance(self.balance, str):
            stages_per_device = max(len(self.balance) // devices, 1)
        return replace(self, stages_per_device=stages_per_device)

    def check_devices(self, world: int, stages: int) -> None:
        """Refuse numbers of devices that make no pipelines of so many stages."""
        if world % stages:
            raise PipelineError(
                f"pipeline_stages is {stages}, but there are {world} devices: expected a number of devices that is a "
                f"multiple, such as devices={stages * max(world // stages, 1)}"
            )
        if self.schedule == "1f1b" and self.micro_batches < stages:
            raise PipelineError(
                f"micro_batches is {self.micro_batches} for {stages} devices: expected at least as many micro-batches "
                f'as devices under schedule "1f1b". Use micro_batches={stages}, or schedule="gpipe"'
            )

    def check_fit(self, trainer: pl.Trainer) -> None:
        """Refuse scaled losses, manual optimization, and callbacks that average weights."""
        precision = trainer.precision_plugin
        # The scale of a step follows from all gradients of the last one, which no process has.
        if isinstance(precision, _MIXED_PRECISION) and precision.scaler is not None:
            raise PipelineError(
                'precision "16-mixed" scales the loss by gradients of all stages: expected "bf16-mixed" or "32-true"'
            )
        if not trainer.lightning_module.automatic_optimization:
            raise PipelineError(
                "manual optimization asks for each backward itself, but a pipeline runs them as scheduled: expected "
                "automatic optimization, one optimizer and a training_step that returns the loss"
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, _AVERAGING):
                raise PipelineError(
                    f"{type(callback).__name__} averages the weights of the whole model, of which each process of a "
                    "pipeline has a part: expected no such callback. Average the weights of checkpoints after training"
                )

    def check_rows(self, batch: Any, what: str) -> None:
        """Refuse fewer rows than micro-batches."""
        rows = rows_in(batch)
        if rows < self.micro_batches:
            raise PipelineError(
                f"{what} has {rows} rows for {self.micro_batches} micro-batches: expected at least one row for each. "
                f"Use a larger batch, or micro_batches={rows}"
            )
