"""A plan for one module, seen from the whole training process: what users are shown."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from rich.table import Table

from lightning_rotor.planned.joint import StepPlan
from lightning_rotor.planned.step import StepPlanner
from lightning_rotor.planning import Plan
from lightning_rotor.private import lightning_names as private
from lightning_rotor.report import PlotError, plan_table, plot_timeline, stage_table
from lightning_rotor.units import format_bytes, format_seconds, rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """A plan and what the process holds besides. Bytes are of the whole process, measured ones None without a step."""

    plan: Plan
    limit_bytes: int
    measured_peak_bytes: int | None
    measured_reserved_bytes: int | None
    target: str
    reserved_bytes: int  # what the process holds besides what was planned
    measuring_seconds: float
    measured_overhead: float | None  # None before the second step under a plan

    @classmethod
    def of(cls, planner: StepPlanner) -> ProcessPlan | None:
        """The plan that training runs; None before there is one."""
        plan, watch = planner.plan, planner.watch
        if plan is None:
            return None
        return cls(
            plan,
            planner.limit.size_bytes,
            watch.peak_bytes,
            watch.reserved_bytes,
            str(planner.modules),
            planner.limit.reserved_beside(plan),
            planner.modules.measuring_seconds,
            planner.modules.measured_overhead(plan),
        )

    @property
    def predicted_peak_bytes(self) -> int:
        """Predicted peak of the whole process."""
        return self.reserved_bytes + self.plan.peak_bytes

    def metrics(self) -> dict[str, float]:
        """Numbers to log, by name."""
        overhead = self.measured_overhead
        numbers = {
            "overhead_percent": 100 * self.plan.overhead,
            "budget_bytes": self.limit_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measuring_seconds": self.measuring_seconds,
            "planning_seconds": self.plan.solve_seconds,
            "recomputed_stages": len(self.plan.recomputed),
            "measured_peak_bytes": self.measured_peak_bytes,
            "measured_reserved_bytes": self.measured_reserved_bytes,
            "measured_overhead_percent": None if overhead is None else 100 * overhead,
        }
        return {name: number for name, number in numbers.items() if number is not None}

    def summary(self) -> str:
        """The plan on one line."""
        measured = "" if self.measured_peak_bytes is None else f" (measured {format_bytes(self.measured_peak_bytes)})"
        return (
            f"limit {format_bytes(self.limit_bytes)}, peak {format_bytes(self.predicted_peak_bytes)}{measured}, "
            f"overhead {100 * self.plan.overhead:.1f} % of the step, measuring took "
            f"{format_seconds(self.measuring_seconds)} and planning {format_seconds(self.plan.solve_seconds)}"
        )

    def table(self) -> Table:
        """What the plan costs, in a few rows."""
        rows = [("Measuring", format_seconds(self.measuring_seconds))]
        if self.measured_overhead is not None:
            rows.append(("Overhead measured", f"{100 * self.measured_overhead:.1f} % of the step"))
        if self.measured_reserved_bytes is not None:
            reserved = format_bytes(self.measured_reserved_bytes)
            rows.append(("Reserved by PyTorch", f"{reserved}, with what it keeps for reuse"))
        return plan_table(
            self.plan,
            limit_bytes=self.limit_bytes,
            reserved_bytes=self.reserved_bytes,
            measured_peak_bytes=self.measured_peak_bytes,
            extra_rows=[*rows, *self._call_rows(), ("Planned", self.target)],
        )

    def _call_rows(self) -> list[tuple[str, str]]:
        """What each call of a step takes, if the plan is for several."""
        if not isinstance(self.plan, StepPlan):
            return []
        whole = self.plan.chain.step_seconds
        return [
            (
                f"Call of {name!r}",
                f"{call.chain.step_seconds / whole:.0%} of the time, +{call.overhead:.1%}; keeps "
                f"{format_bytes(call.simulation.held_bytes)} until its backward",
            )
            for name, call in zip(self.plan.names, self.plan.calls, strict=True)
        ]

    def text(self) -> str:
        """The table, and what is done with which stages, as text."""
        return rendered(self.table(), stage_table(self.plan))

    def timeline(self) -> Figure:
        """Memory over one step, and which stage runs when; ``PlotError`` without matplotlib."""
        return plot_timeline(self.plan, budget_bytes=self.limit_bytes, reserved_bytes=self.reserved_bytes)


# --------------------------------------------------- A plan in the user's loggers, through each logger's own interface.


_log = logging.getLogger(__name__)
_WITH_PICTURES = (TensorBoardLogger, WandbLogger, MLFlowLogger)


def log_metrics(trainer: pl.Trainer, prefix: str, metrics: Mapping[str, float]) -> None:
    """Give numbers to every logger."""
    for logger in trainer.loggers:
        logger.log_metrics(_named(logger, prefix, metrics), step=private.logging_step(trainer))


def log_hyperparameters(trainer: pl.Trainer, prefix: str, values: Mapping[str, Any]) -> None:
    """Give settings to every logger, before the Trainer gives those of the model."""
    for logger in trainer.loggers:
        named = _named(logger, prefix, values)
        if isinstance(logger, TensorBoardLogger):
            # It reads the first set that is written, and no other.
            named |= _hyperparameters_of_the_model(trainer)
        logger.log_hyperparams(named)


def _hyperparameters_of_the_model(trainer: pl.Trainer) -> dict[str, Any]:
    """Hyperparameters that the Trainer is about to log."""
    owners = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    return {
        name: value
        for owner in owners
        if owner is not None and private.logs_hyperparameters(owner)
        for name, value in owner.hparams_initial.items()
        if name != private.CLASS_PATH
    }


def log_plan(trainer: pl.Trainer, prefix: str, process: ProcessPlan) -> None:
    """Give the plan, as a figure and as text, to the loggers that take such things."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, _WITH_PICTURES)]
    if not loggers:
        return
    text, figure, step = process.text(), _timeline(process), private.logging_step(trainer)
    for logger in loggers:
        _log_pictures(logger, f"{prefix}{logger.group_separator}", text, figure, step)


def _log_pictures(logger: Logger, prefix: str, text: str, figure: Figure | None, step: int) -> None:
    match logger:
        case TensorBoardLogger():
            indented = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown's way to keep columns in line
            logger.experiment.add_text(f"{prefix}plan", indented, step)
            if figure is not None:
                logger.experiment.add_figure(f"{prefix}timeline", figure, step)
        case WandbLogger():
            logger.log_text(f"{prefix}plan", columns=["plan"], data=[[text]], step=step)
            if figure is not None:
                logger.log_image(f"{prefix}timeline", [figure], step=step)
        case MLFlowLogger():
            logger.experiment.log_text(logger.run_id, text, f"{prefix}plan.txt")
            if figure is not None:
                logger.experiment.log_figure(logger.run_id, figure, f"{prefix}timeline.png")


def _timeline(process: ProcessPlan) -> Figure | None:
    try:
        return process.timeline()
    except PlotError as error:
        _log.info("RotorCallback logs no picture of the plan: %s", error)
        return None


def _named(logger: Logger, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{logger.group_separator}{name}": value for name, value in values.items()}
