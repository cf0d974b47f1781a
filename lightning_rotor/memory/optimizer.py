"""What an optimizer's state will take, found in a dry step of a copy without values."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from lightning_rotor.memory.held import block_bytes, is_on, storages_of, walk_tensors
from lightning_rotor.private.torch_names import OPTIMIZER_HOOKS, FakeTensor, FakeTensorMode, identity_of
from lightning_rotor.profiling.dry_run import AssumedValues, fake_copy, without_trace

_log = logging.getLogger(__name__)

# A copy fires no hooks, and a scheduler's or compiler's replacement of ``step`` on the instance is not for it.
_NOT_COPIED = frozenset((*OPTIMIZER_HOOKS, "step", "grad_scale", "found_inf"))


def predict_optimizer_state_bytes(optimizer: torch.optim.Optimizer, device: torch.device | str | None = None) -> int:
    """Predict what an optimizer's state takes after its next step.

    Args:
        optimizer: With or without state. Nothing about it changes. Every parameter that requires a gradient is taken to
            get one.
        device: Count only what will lie there; None counts all devices.
    Returns:
        State that exists and state that will be created, in bytes of unique storages. Exact for every optimizer of
        ``torch.optim`` but LBFGS, which fills its history over many steps. Two tensors per parameter, like Adam's, if
        no dry step works.
    Example:
        >>> weight = nn.Parameter(torch.zeros(1000))
        >>> predict_optimizer_state_bytes(torch.optim.Adam([weight]))  # two moments and a step counter
        8004
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return _full_history_bytes(optimizer, device)
    try:
        with without_trace():
            return _bytes_after_dry_step(optimizer, device)
    except Exception as error:  # whatever a step does that was written for real tensors
        _log.debug("no dry step of %s: %s", type(optimizer).__name__, error)
    return 2 * sum(_dense_bytes(parameter) for parameter in _trained(optimizer, device))


def _trained(optimizer: torch.optim.Optimizer, device: torch.device | str | None) -> list[torch.Tensor]:
    """Parameters on a device that a backward gives a gradient."""
    return [
        p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and is_on(p.device, device)
    ]


def _dense_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor's shard
    return block_bytes(local.numel() * tensor.element_size(), tensor.device)


def _full_history_bytes(optimizer: torch.optim.LBFGS, device: torch.device | str | None) -> int:
    parameters = _trained(optimizer, device)
    if not parameters:
        return 0
    # Two vectors per entry, the direction and the last gradient; scalars: two per entry, the scale of the Hessian, the
    # step size.
    entries: int = 2 * optimizer.param_groups[0]["history_size"] + 2
    vector = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return entries * sum(block_bytes(each, parameters[0].device) for each in (vector, parameters[0].element_size()))


def _bytes_after_dry_step(optimizer: torch.optim.Optimizer, device: torch.device | str | None) -> int:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    modes = [parameter.fake_mode for parameter in parameters if isinstance(parameter, FakeTensor)]
    # An operator without a shape rule would run on real tensors otherwise.
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    stand_ins = {id(parameter): _stand_in(parameter, mode) for parameter in parameters}
    clone = _copy(optimizer, mode, stand_ins)
    with mode, torch.no_grad(), AssumedValues(0.5):  # NAdam divides by 1 minus a number that it reads
        _take_step(clone)
    gradients = [parameter.grad for parameter in stand_ins.values() if parameter.grad is not None]
    others = {identity_of(storage) for tensor in (*stand_ins.values(), *gradients) for storage in storages_of(tensor)}
    sizes = {
        identity_of(storage): block_bytes(storage.nbytes(), tensor.device)
        for tensor in walk_tensors(list(clone.state.values()))
        if is_on(tensor.device, device)
        for storage in storages_of(tensor)
    }
    return sum(size for identity, size in sizes.items() if identity not in others)


def _stand_in(parameter: torch.Tensor, mode: FakeTensorMode) -> nn.Parameter:
    fake = mode.from_tensor(parameter.detach(), static_shapes=True)
    stand_in = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    # Some optimizers look at marks that the user put on parameters.
    vars(stand_in).update({**vars(parameter), **vars(stand_in)})
    if parameter.requires_grad:
        with mode:
            stand_in.grad = torch.empty_like(stand_in)
    return stand_in


def _copy(
    optimizer: torch.optim.Optimizer, mode: FakeTensorMode, stand_ins: dict[int, nn.Parameter]
) -> torch.optim.Optimizer:
    """Copy without the constructor, which may want arguments that nobody knows any more.

    ``Optimizer.__getstate__`` drops attributes of subclasses, hence attribute by attribute.
    """
    clone: torch.optim.Optimizer = object.__new__(type(optimizer))
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _NOT_COPIED}
    vars(clone).update(fake_copy(attributes, mode, {**stand_ins, id(optimizer): clone}))
    vars(clone).update({name: OrderedDict() for name in OPTIMIZER_HOOKS})
    clone.defaults["differentiable"] = False
    for group in clone.param_groups:
        _use_plain_kernels(group)
    return clone


def _use_plain_kernels(group: dict[str, Any]) -> None:
    """Switch off what has no shape rule; where the step counters lie stays as it is."""
    # Fused kernels of an accelerator want them there, as capturable ones do, which torch refuses on the CPU and on
    # meta.
    accelerated = any(parameter.device.type not in ("cpu", "meta") for parameter in group["params"])
    on_device = accelerated and bool(group.get("fused") or group.get("capturable"))
    plain = {"fused": False, "differentiable": False, "capturable": on_device}
    group.update({name: value for name, value in plain.items() if name in group})


def _take_step(clone: torch.optim.Optimizer) -> None:
    """Take one step as the class defines it, without the wrapper that fires all optimizers' hooks."""
    step: Any = type(clone).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    closure = inspect.signature(step).parameters.get("closure")
    arguments = [lambda: torch.zeros(())] if closure is not None and closure.default is closure.empty else []
    step(clone, *arguments)
