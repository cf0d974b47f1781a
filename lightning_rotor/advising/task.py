"""The question that advice answers: a model's costs, a batch, and devices with a limit."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_rotor.advising.cluster import Cluster
from lightning_rotor.advising.model_costs import ModelCosts

# Of a data sheet's bandwidth, as in ``profiling.accelerators``.
_BANDWIDTH_EFFICIENCY = 0.8


@dataclass(frozen=True, slots=True)
class Task:
    """Training of a model with one batch a step, ``batch`` samples on all devices together.

    Attributes:
        costs: Of the model.
        cluster: The devices.
        batch: Samples of a step.
        limit_bytes: That training may hold on each device.
        precision: As Lightning names it, for the lines of Python.
        limit_text: The limit as in these lines.
    """

    costs: ModelCosts
    cluster: Cluster
    batch: int
    limit_bytes: int
    precision: str
    limit_text: str

    def optimizer_seconds(self, learning_bytes: float) -> float:
        """Seconds of an optimizer's step over so many bytes of parameters, which memory decides."""
        # It reads parameters, gradients and state, and writes parameters and state.
        moved_bytes = learning_bytes * (3 + 2 * self.costs.state_scale)
        return moved_bytes / (_BANDWIDTH_EFFICIENCY * self.cluster.gpu.bandwidth)

    def divided(self, copies: int) -> int | None:
        """Samples for each of some copies of the model; None if they do not get equally many."""
        samples, left = divmod(self.batch, copies)
        # Unequal shares would weigh samples unequally: DDP averages over its copies.
        if left or not samples:
            return None
        return samples
