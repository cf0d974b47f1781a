"""Prediction of what an optimizer's state and its steps will take, from dry steps of a copy without values.

The first dry step makes the state. The second shows what later steps allocate, operator by operator, which the state
alone does not say: Adam with ``foreach`` (torch's default on GPUs) makes temporary copies of all parameters, and steps
exceeded the limit by 16 % before these were counted. Steps of torch's own optimizers are alike. Others may do more in
some steps (Lookahead and Shampoo in every fifth or so), so of these several are looked at.

LBFGS is computed by hand, since its step calls a closure, and its history fills over many steps.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from lightning_rotor.memory.held import AnyDevice, block_bytes, dense_bytes, is_on, optimizer_state_bytes
from lightning_rotor.memory.optimizer_copies import (
    ASSUMED_NUMBER,
    GROWING,
    copy_on_meta,
    fake_copy_of,
    stand_in_for,
    take_step,
)
from lightning_rotor.memory.step_allocations import StepAllocations
from lightning_rotor.private import torch_names as private
from lightning_rotor.profiling.assumed_values import AssumedValues
from lightning_rotor.profiling.dry_run import run_dry, without_trace

_log = logging.getLogger(__name__)

_DRY_STEPS_AHEAD = 16
"""Dry steps of an optimizer that is not torch's, whose steps may differ. Periods of 5 and 10 are common."""
_MOST_SECONDS = 0.5
"""Processor time for them."""


def predict_optimizer_state_bytes(optimizer: Optimizer, device: AnyDevice = None) -> int:
    """Predict the bytes of an optimizer's state after its next step. The optimizer stays as it is.

    Every parameter that requires a gradient is taken to get one. Exact for every optimizer of ``torch.optim`` but
    LBFGS, which fills its history over many steps. If no dry step works, what there is, and before the first step two
    tensors per parameter, like Adam's.

    Example:
        >>> weight = nn.Parameter(torch.zeros(1000))
        >>> predict_optimizer_state_bytes(torch.optim.Adam([weight]))  # two moments and a step counter
        8004
    """
    return _prediction_of(optimizer, device).state_bytes


def predict_optimizer_temporary_bytes(optimizer: Optimizer, device: AnyDevice = None) -> int | None:
    """Predict the most bytes that an optimizer allocates at once in a step, state that exists not included.

    The first step, which makes the state, takes no more than this and the state. None if no dry step works.

    Example:
        >>> weights = [nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(3000))]
        >>> predict_optimizer_temporary_bytes(torch.optim.RMSprop(weights, foreach=True))  # a root of each
        16000
    """
    return _prediction_of(optimizer, device).temporary_bytes


def steps_differ(optimizer: Optimizer) -> bool:
    """True if some steps of an optimizer are known to take more than its second one."""
    return not _prediction_of(optimizer, None).are_alike


def is_torchs_own(optimizer: Optimizer) -> bool:
    """True of torch's optimizers, whose steps are alike but for LBFGS. Others may do more in every fifth, say."""
    return type(optimizer).__module__.startswith("torch.optim.")


def predict_closure_bytes(optimizer: Optimizer, device: AnyDevice = None) -> int:
    """Predict what an optimizer holds besides its state while its closure trains, which LBFGS calls several times."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return 0
    return _lbfgs_vectors(optimizer).in_closure * _vector_bytes(optimizer, device)


def temporary_bytes_one_by_one(optimizer: Optimizer, device: AnyDevice = None) -> int | None:
    """Predict the same with ``foreach=False``; None if an optimizer has no such switch, or does not use it."""
    groups = optimizer.param_groups
    has_switch = all("foreach" in group for group in groups)
    if not has_switch or all(group["foreach"] is False for group in groups):
        return None
    # LBFGS and fused kernels never look at it.
    if isinstance(optimizer, torch.optim.LBFGS) or _is_fused(optimizer):
        return None
    prediction = _predict_by_dry_steps(optimizer, device, foreach=False)
    return prediction.temporary_bytes


@dataclass(frozen=True, slots=True)
class _Prediction:
    """Bytes of the state after a step, and the most that another one allocates meanwhile, None if unknown.

    ``are_alike``: later steps take no more than the second.
    """

    state_bytes: int
    temporary_bytes: int | None
    are_alike: bool = True


# Each with what it depends on: dry steps take milliseconds, and many steps ask. A prediction goes with its optimizer.
_predicted: WeakKeyDictionary[Optimizer, tuple[Any, _Prediction]] = WeakKeyDictionary()


def _prediction_of(optimizer: Optimizer, device: AnyDevice) -> _Prediction:
    """The result of dry steps, taken anew only if something has changed that it depends on."""
    if isinstance(optimizer, torch.optim.LBFGS):
        most_bytes = _lbfgs_vectors(optimizer).at_most * _vector_bytes(optimizer, device)
        return _Prediction(_full_history_bytes(optimizer, device), most_bytes)
    if device is not None and torch.device(device).type == "cpu":
        on_host = all(parameter.device.type == "cpu" for parameter in _parameters_of(optimizer))
        if on_host:
            # All of the state is there, too, so that one prediction serves questions with a device and without.
            device = None
    facts = _facts(optimizer, device)
    prediction = _predicted.get(optimizer)
    if prediction is None or not _holds(prediction, facts, optimizer, device):
        prediction = facts, _predict_by_dry_steps(optimizer, device)
    # Under the facts of now, so that the next question compares with them, and does not count the state again.
    _, predicted = prediction
    _predicted[optimizer] = facts, predicted
    return predicted


def _holds(
    prediction: tuple[Any, _Prediction],
    facts: list[Any],
    optimizer: Optimizer,
    device: AnyDevice,
) -> bool:
    """True if nothing has changed that a prediction depends on, or steps have made the state that it has told."""
    facts_then, predicted = prediction
    if facts_then == facts:
        return True
    # The last of the facts is how much state there is, which the first real step changes as predicted.
    only_state_differs = facts_then[:-1] == facts[:-1]
    return only_state_differs and optimizer_state_bytes(optimizer, device) == predicted.state_bytes


def _facts(optimizer: Optimizer, device: AnyDevice) -> list[Any]:
    """All that may change what a step keeps: settings, parameters with their marks, and how much state there is."""
    settings = []
    for key, value in vars(optimizer).items():
        if key not in GROWING:
            # A count of steps would ask for dry steps in each. Those that were taken looked further ahead than this.
            is_count = type(value) is int
            settings.append((key, value // (_DRY_STEPS_AHEAD // 2) if is_count else _fact(value)))
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key not in GROWING:
                settings.append((key, _fact(value)))
    parameters: list[tuple[Any, ...]] = []
    for parameter in _parameters_of(optimizer):
        kind = parameter.shape, parameter.dtype, parameter.device, parameter.requires_grad, parameter.layout
        # Users put marks on parameters (``parameter.no_decay``), and some optimizers read them.
        marks = vars(parameter)
        parameters.append((id(parameter), *kind, *marks))
    state_sizes = [len(state) for state in optimizer.state.values()]
    return [str(device), settings, parameters, state_sizes]


def _fact(value: Any) -> Any:
    """A setting, as far as it may change what a step keeps."""
    # Of a number with a fraction it counts whether it is zero: schedulers change learning rates at every step.
    if isinstance(value, float):
        return value != 0
    if isinstance(value, (int, str)):
        return value
    return id(value)


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    parameters: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def _trained(optimizer: Optimizer, device: AnyDevice) -> list[torch.Tensor]:
    """Parameters on a device that get a gradient in a backward."""
    parameters = []
    for parameter in _parameters_of(optimizer):
        if parameter.requires_grad and is_on(parameter.device, device):
            parameters.append(parameter)
    return parameters


def _is_fused(optimizer: Optimizer) -> bool:
    """True if one kernel steps, which allocates nothing."""
    return all(group.get("fused") for group in optimizer.param_groups)


def _predict_by_dry_steps(optimizer: Optimizer, device: AnyDevice, *, foreach: bool | None = None) -> _Prediction:
    """Take dry steps: the first makes the state, the others show what later ones allocate."""
    parameters = _parameters_of(optimizer)
    state_bytes: int | None = None

    def take_steps() -> _Prediction:
        nonlocal state_bytes
        stand_ins = {id(parameter): stand_in_for(parameter, mode) for parameter in parameters}
        clone = fake_copy_of(optimizer, mode, stand_ins)
        if foreach is not None:
            for group in clone.param_groups:
                group["foreach"] = foreach
        with mode, torch.no_grad(), AssumedValues(ASSUMED_NUMBER):
            take_step(clone)
        # Told at once: if the second step fails, this is known all the same.
        state_bytes = optimizer_state_bytes(clone, device)
        if _is_fused(optimizer):
            return _Prediction(state_bytes, 0)
        allocated_bytes = _allocated_in_steps(clone, device)
        most_bytes = max(allocated_bytes)
        return _Prediction(state_bytes, most_bytes, are_alike=most_bytes == allocated_bytes[0])

    try:
        with _mode_of(parameters) as mode, without_trace() as generators:
            return run_dry(take_steps, generators)
    except Exception as error:
        # Whatever a step does that was written for real tensors. A prediction must not end training.
        _log.debug("no dry step of %s: %s", type(optimizer).__name__, error)
    # The first dry step may have worked, and the second not.
    if state_bytes is None and optimizer.state:
        state_bytes = optimizer_state_bytes(optimizer, device)
    if state_bytes is None:
        # As much as Adam would keep: an unknown optimizer seldom keeps more, and a measured step corrects what is less.
        trained = _trained(optimizer, device)
        state_bytes = 2 * sum(dense_bytes(parameter, parameter.dtype) for parameter in trained)
    return _Prediction(state_bytes, None)


def _mode_of(parameters: list[torch.Tensor]) -> AbstractContextManager[private.FakeTensorMode]:
    """Context with the mode of parameters that are fake already (an estimated model's), or with a new one."""
    for parameter in parameters:
        if isinstance(parameter, private.FakeTensor):
            return nullcontext(parameter.fake_mode)
    # An operator without a shape rule would run on real tensors otherwise.
    return private.fake_mode(allow_fallback_kernels=False)


def _allocated_in_steps(clone: Optimizer, device: AnyDevice) -> list[int]:
    """The most that each step allocates at once, by a copy without values whose state exists.

    State that a later step makes counts as well.
    """
    if device is not None:
        real_device = torch.device(device)
    else:
        real_device = _parameters_of(clone)[0].device
    # On meta, an operator takes a fraction of the time of one on fake tensors, and large models have thousands.
    on_meta = copy_on_meta(clone)
    began = time.process_time()
    allocated_bytes: list[int] = []
    bytes_before = 0
    for number in range(1 if is_torchs_own(clone) else _DRY_STEPS_AHEAD):
        if number and time.process_time() - began > _MOST_SECONDS:
            break
        allocations = StepAllocations(on_meta, real_device)
        if not number:
            bytes_before = allocations.older_bytes
        try:
            with torch.no_grad(), allocations:
                take_step(on_meta)
        except Exception as error:
            if not number:
                raise
            # What only this step does cannot be told without values. A measured step may.
            _log.debug("dry step %d of %s: %s", number + 2, type(clone).__name__, error)
            break
        allocated_bytes.append(allocations.older_bytes - bytes_before + allocations.peak_bytes)
    return allocated_bytes


@dataclass(frozen=True, slots=True)
class _LbfgsVectors:
    """Vectors of all parameters that LBFGS holds beside its state: while a closure runs, and at most in a step."""

    in_closure: int
    at_most: int


def _lbfgs_vectors(optimizer: torch.optim.LBFGS) -> _LbfgsVectors:
    # Counted in torch's ``LBFGS.step``, whose state keeps the last direction until the step has ended. Beside it a step
    # has the gradient, its negative (q) and the new direction: three, while a closure runs again. The check for
    # progress makes two more, ``d.mul(t).abs()``. A line search also holds the parameters that it began with.
    group = optimizer.param_groups[0]
    if group["line_search_fn"] is not None:
        # Where the search narrows an interval, it has five gradients besides: that at its start, the one before the
        # last, one of each end, and the last. Then the next one comes.
        return _LbfgsVectors(in_closure=9, at_most=10)
    if group["max_iter"] > 1:
        return _LbfgsVectors(in_closure=3, at_most=5)
    # The closure runs first, once, when nothing is there yet.
    return _LbfgsVectors(in_closure=0, at_most=3)


def _vector_bytes(optimizer: torch.optim.LBFGS, device: AnyDevice) -> int:
    """Bytes of all parameters in one tensor."""
    parameters = _trained(optimizer, device)
    if not parameters:
        return 0
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return block_bytes(size_bytes, parameters[0].device)


def _full_history_bytes(optimizer: torch.optim.LBFGS, device: AnyDevice) -> int:
    """Bytes of LBFGS's state once its history is full."""
    parameters = _trained(optimizer, device)
    if not parameters:
        return 0
    # Vectors: two per entry, direction, last gradient. Scalars: two per entry, scale of the Hessian, step size.
    entries: int = 2 * optimizer.param_groups[0]["history_size"] + 2
    scalar_bytes = block_bytes(parameters[0].element_size(), parameters[0].device)
    return entries * (_vector_bytes(optimizer, device) + scalar_bytes)
