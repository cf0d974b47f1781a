"""A plan for one module, seen from the whole training process: what users are shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from lightning_rotor.planning import Plan
from lightning_rotor.planning.tables import rendered
from lightning_rotor.report import plan_table, plot_timeline, stage_table
from lightning_rotor.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """A plan and what the process holds besides.

    Attributes:
        plan: For the activations of one module.
        limit_bytes: For the whole process.
        measured_peak_bytes: Of the whole process, or None if no step was measured.
        measured_reserved_bytes: What a GPU's caching allocator had reserved at most in that step, or None.
        target: The planned module, for people.
    """

    plan: Plan
    limit_bytes: int
    measured_peak_bytes: int | None
    measured_reserved_bytes: int | None
    target: str

    @property
    def reserved_bytes(self) -> int:
        """What the process holds besides what was planned."""
        return self.limit_bytes - self.plan.budget_bytes

    @property
    def predicted_peak_bytes(self) -> int:
        """Of the whole process."""
        return self.reserved_bytes + self.plan.peak_bytes

    def metrics(self) -> dict[str, float]:
        """Numbers to log, by name."""
        numbers: dict[str, float] = {
            "overhead_percent": 100 * self.plan.overhead,
            "budget_bytes": self.limit_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "planning_seconds": self.plan.solve_seconds,
            "recomputed_stages": len(self.plan.recomputed),
        }
        if self.measured_peak_bytes is not None:
            numbers["measured_peak_bytes"] = self.measured_peak_bytes
        if self.measured_reserved_bytes is not None:
            numbers["measured_reserved_bytes"] = self.measured_reserved_bytes
        return numbers

    def table(self) -> Table:
        """What the plan costs, in a few rows."""
        return plan_table(
            self.plan,
            reserved_bytes=self.reserved_bytes,
            measured_peak_bytes=self.measured_peak_bytes,
            extra_rows=[*self._reserved_row(), ("Planned module", self.target)],
        )

    def _reserved_row(self) -> list[tuple[str, str]]:
        if self.measured_reserved_bytes is None:
            return []
        return [("Reserved by PyTorch", f"{format_bytes(self.measured_reserved_bytes)}, with what it keeps for reuse")]

    def text(self) -> str:
        """The table, and what is done with which stages, as text."""
        return rendered(self.table(), stage_table(self.plan))

    def timeline(self) -> Figure:
        """Memory over one step, and which stage runs when.

        Raises:
            PlotError: matplotlib is not installed.
        """
        return plot_timeline(self.plan, reserved_bytes=self.reserved_bytes)
