"""A chain cut into pipeline stages, each with its plan, and what a step then takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from rich import box
from rich.table import Table

from lightning_rotor.chain import Chain
from lightning_rotor.pipeline.partition.in_flight import END, StagePlan, sub_chain
from lightning_rotor.pipeline.partition.problem import Problem, StageChoice
from lightning_rotor.pipeline.simulator import PipelineSimulation, simulate_pipeline
from lightning_rotor.units import format_bytes, format_seconds, rendered


@dataclass(frozen=True)
class Partition:
    """A chain cut for a pipeline. Printed, it is a table.

    Attributes:
        problem: What was to be cut, for which devices and schedule.
        choices: By pipeline stage, what it runs and how.
        bound_seconds: No other cuts are faster, each stage planned as well as the planner can.
        solve_seconds: Time spent on finding it.
    """

    problem: Problem
    choices: tuple[StageChoice, ...]
    bound_seconds: float
    solve_seconds: float

    @property
    def balance(self) -> tuple[int, ...]:
        """How many stages of the chain are in each pipeline stage."""
        return tuple(choice.last + 1 - choice.first for choice in self.choices)

    @cached_property
    def simulation(self) -> PipelineSimulation:
        """One step: who works when, and what each device holds."""
        return simulate_pipeline(
            self.problem.order,
            [choice.load for choice in self.choices],
            micro_batches=self.problem.micro_batches,
            gradients_exist=self.problem.gradients_exist,
            lingering=self.problem.lingering,
            results_bytes=self.problem.results_bytes,
        )

    @cached_property
    def seconds(self) -> float:
        """Duration of a step."""
        return self.problem.step_seconds([choice.load for choice in self.choices])

    @property
    def gap(self) -> float:
        """The part of the step that other cuts might save; 0 if these are optimal."""
        return max(1 - self.bound_seconds / self.seconds, 0.0) if self.seconds else 0.0

    @property
    def is_optimal(self) -> bool:
        """No other cuts are faster."""
        return self.gap < 1e-9

    def chain(self, stage: int) -> Chain:
        """What a pipeline stage runs, as a chain of its own."""
        return sub_chain(self.problem.chain, self.choices[stage].first, self.choices[stage].last)

    def plan(self, stage: int, *, last_micro_batch: bool = False) -> StagePlan:
        """How a pipeline stage runs a micro-batch.

        Args:
            stage: Its number.
            last_micro_batch: The last one, which ``recompute="except_last"`` runs otherwise.
        """
        choice = self.choices[stage]
        plan = choice.last_plan if last_micro_batch and choice.last_plan is not None else choice.plan
        # Runs of stages that are alike share a plan, but not their names.
        names = [*self.chain(stage).names, END]
        stages = tuple(replace(each, name=name) for each, name in zip(plan.chain, names, strict=False))
        return replace(plan, chain=replace(plan.chain, stages=stages))

    def summary(self) -> str:
        """The partition on one line."""
        proof = "optimal" if self.is_optimal else f"within {self.gap:.1%} of the best"
        return (
            f"balance {list(self.balance)} on {len(self.problem.devices)} devices, {self.problem.schedule} with "
            f"{self.problem.micro_batches} micro-batches: {format_seconds(self.seconds)} per step, {self.simulation.bubble:.1%} bubble, "
            f"peak {format_bytes(max(self.simulation.peak_bytes))}; {proof}"
        )

    def __rich__(self) -> Table:
        table = Table(title=self.summary(), box=box.SIMPLE_HEAD, title_justify="left", title_style="")
        for name in (
            "stage",
            "device",
            "model",
            "in flight",
            "forward",
            "backward",
            "recomputed",
            "held each",
            "device peak",
        ):
            table.add_column(name, justify="left" if name == "model" else "right")
        peaks, devices = self.simulation.peak_bytes, len(self.problem.devices)
        for stage, choice in enumerate(self.choices):
            load, names = choice.load.micro_batch, self.problem.chain.names
            ends = [names[choice.first], names[choice.last]]
            table.add_row(
                str(stage),
                str(stage % devices),
                f"{len(self.chain(stage))}: {' … '.join(dict.fromkeys(ends))}",
                str(choice.plan.in_flight),
                format_seconds(load.forward_seconds),
                format_seconds(load.backward_seconds),
                format_seconds(load.recompute_seconds),
                format_bytes(load.held_bytes),
                format_bytes(peaks[stage % devices]) if stage < devices else "",
            )
        return table

    def __str__(self) -> str:
        return rendered(self, width=120)
