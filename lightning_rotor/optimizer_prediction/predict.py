"""The ways to a prediction, tried from the best to the worst."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from lightning_rotor.optimizer_prediction.dry_step import isolated, trained_parameters
from lightning_rotor.optimizer_prediction.lbfgs import lbfgs_state, lbfgs_step_peak
from lightning_rotor.optimizer_prediction.on_meta import state_on_meta, step_peak_on_meta
from lightning_rotor.optimizer_prediction.on_small_tensors import state_on_small_tensors
from lightning_rotor.optimizer_prediction.state_prediction import StatePrediction
from lightning_rotor.training_state import block_bytes, is_on

_log = logging.getLogger(__name__)


def predict_optimizer_state_bytes(
    optimizer: torch.optim.Optimizer, device: torch.device | str | None = None
) -> StatePrediction:
    """Predict what an optimizer's state takes after its next step.

    Args:
        optimizer: With or without state. Nothing about it changes. Every parameter that requires a gradient is taken to get one.
        device: Count only what will lie there; None counts all devices.
    Returns:
        State that exists and state that will be created, in bytes of unique storages. Exact for every optimizer of ``torch.optim``
        but LBFGS.
    Example:
        >>> weight = nn.Parameter(torch.zeros(1000))
        >>> predict_optimizer_state_bytes(torch.optim.Adam([weight])).bytes  # two moments and a step counter
        8004
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return lbfgs_state(optimizer, device)
    stock = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    with isolated():
        prediction = (
            _attempt(lambda: state_on_meta(optimizer, device, stock))
            or _attempt(lambda: state_on_small_tensors(optimizer, device, stock, sparse=False))
            or _attempt(lambda: state_on_small_tensors(optimizer, device, stock, sparse=True))
        )
    if prediction is not None:
        return prediction
    size_bytes = 2 * sum(_dense_bytes(p) for p in trained_parameters(optimizer) if is_on(p.device, device))
    return StatePrediction(size_bytes, False, "assumed to be two tensors per parameter, like Adam's: no dry step works")


def predict_optimizer_step_peak_bytes(optimizer: torch.optim.Optimizer) -> StatePrediction:
    """Predict the temporary memory of one ``step()``, beyond parameters, gradients and the state that it leaves behind.

    Multi-tensor implementations, the default on GPUs, hold a temporary of the size of all parameters; loops, the default on CPUs,
    of the largest one; fused kernels none.

    Args:
        optimizer: With or without state, its parameters on one kind of device. Nothing about it changes.
    Returns:
        An estimate: the tensors that a dry step on ``meta`` creates, not what kernels allocate inside.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return lbfgs_step_peak(optimizer)
    with isolated():
        prediction = _attempt(lambda: step_peak_on_meta(optimizer))
    if prediction is not None:
        return prediction
    size_bytes = sum(_dense_bytes(p) for p in trained_parameters(optimizer))
    return StatePrediction(
        size_bytes, False, "assumed to be one tensor per parameter: no dry step works on meta tensors"
    )


def _attempt(predict: Callable[[], StatePrediction]) -> StatePrediction | None:
    try:
        return predict()
    except Exception as error:  # whatever a step does that was written for real tensors
        _log.debug("no dry step: %s", error)
        return None


def _dense_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor's shard
    return block_bytes(local.numel() * tensor.element_size(), tensor.device)
