"""LBFGS, whose state grows over many steps up to a size that is known."""

from __future__ import annotations

import torch

from lightning_rotor.optimizer_prediction.dry_step import trained_parameters
from lightning_rotor.optimizer_prediction.state_prediction import StatePrediction
from lightning_rotor.training_state import block_bytes, is_on


def lbfgs_state(optimizer: torch.optim.LBFGS, device: torch.device | str | None) -> StatePrediction:
    """What a full history takes."""
    parameters = [p for p in trained_parameters(optimizer) if is_on(p.device, device)]
    history = optimizer.param_groups[0]["history_size"]
    # Two vectors per entry, the direction and the last gradient; scalars: two per entry, the scale of the Hessian, the step size.
    vectors = (2 * history + 2) * _flat_bytes(parameters)
    scalars = (2 * history + 2) * block_bytes(parameters[0].element_size(), parameters[0].device) if parameters else 0
    return StatePrediction(vectors + scalars, False, f"a full history of {history} entries, the most that LBFGS holds")


def lbfgs_step_peak(optimizer: torch.optim.LBFGS) -> StatePrediction:
    """What a step takes besides: an estimate, since the line search keeps more the longer it searches."""
    # Seen: up to 6, and 7 with a line search (gradients, directions, a copy of the parameters).
    vectors = 6 if optimizer.param_groups[0].get("line_search_fn") is None else 9
    return StatePrediction(
        vectors * _flat_bytes(trained_parameters(optimizer)), False, f"{vectors} vectors of the size of all parameters"
    )


def _flat_bytes(parameters: list[torch.Tensor]) -> int:
    """One vector of all parameters."""
    if not parameters:
        return 0
    return block_bytes(sum(p.numel() * p.element_size() for p in parameters), parameters[0].device)
