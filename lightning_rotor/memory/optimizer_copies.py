"""Copies of optimizers without values: on fake tensors for a first step, and on ``meta`` for a later one.

Fake tensors know their device, by which an optimizer chooses its kernels. Operators on ``meta`` take a fraction of the
time, and by then the choice is made.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import is_made_of_others, tree_map
from lightning_rotor.profiling.fake_copies import fake_copy

GROWING = ("params", "state", "param_groups")
"""Attributes and keys of an optimizer that grow, and are no settings."""
# A copy fires no hooks, and a scheduler's or compiler's replacement of ``step`` on the instance is not for it. A
# GradScaler leaves the other two on the instance of a fused optimizer for one step; they are real tensors.
_NOT_COPIED = frozenset((*private.OPTIMIZER_HOOKS, "step", "grad_scale", "found_inf"))
ASSUMED_NUMBER = 0.5
"""For numbers that a step reads. NAdam divides by 1 minus such a number."""
# Number of a step that is like all later ones: RAdam takes more from its sixth step on.
_LATE_STEP = 1000.0


def fake_copy_of(
    optimizer: Optimizer, mode: private.FakeTensorMode, stand_ins: Mapping[int, nn.Parameter]
) -> Optimizer:
    """A copy with fake tensors; ``stand_ins`` are its parameters, by ``id`` of the optimizer's.

    It is copied by attribute: constructors may want unknown arguments, ``__getstate__`` drops those of subclasses.
    """
    clone: Optimizer = object.__new__(type(optimizer))
    attributes = {}
    for name, value in vars(optimizer).items():
        if name not in _NOT_COPIED:
            attributes[name] = value
    # Attributes may refer to the optimizer, and then mean the copy.
    copies = {**stand_ins, id(optimizer): clone}
    vars(clone).update(fake_copy(attributes, mode, copies))
    for name in private.OPTIMIZER_HOOKS:
        vars(clone)[name] = OrderedDict()
    # Steps run without gradients, and a differentiable one would record them.
    clone.defaults["differentiable"] = False
    for group in clone.param_groups:
        # Fused kernels have no shape rule.
        settings = {
            "fused": False,
            "differentiable": False,
            "capturable": _keeps_counters_on_device(group),
        }
        for name, value in settings.items():
            if name in group:
                group[name] = value
    return clone


def _keeps_counters_on_device(group: Mapping[str, Any]) -> bool:
    """True if step counters lie where they are captured: an accelerator's fused and capturable kernels want that.

    On the CPU and on meta, capturable ones are refused.
    """
    on_device = group.get("fused") or group.get("capturable")
    return _is_accelerated(group) and bool(on_device)


def _is_accelerated(group: Mapping[str, Any]) -> bool:
    return any(parameter.device.type not in ("cpu", "meta") for parameter in group["params"])


def stand_in_for(parameter: torch.Tensor, mode: private.FakeTensorMode) -> nn.Parameter:
    """A fake parameter with a gradient if the parameter gets one."""
    fake = mode.from_tensor(parameter.detach(), static_shapes=True)
    stand_in = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    _copy_marks(parameter, stand_in)
    if parameter.requires_grad:
        with mode:
            stand_in.grad = torch.empty_like(stand_in)
    return stand_in


def _copy_marks(parameter: torch.Tensor, stand_in: nn.Parameter) -> None:
    """Copy marks that the user put on a parameter: some optimizers look at them."""
    vars(stand_in).update({**vars(parameter), **vars(stand_in)})


def copy_on_meta(clone: Optimizer) -> Optimizer:
    """A copy of a copy without values, moved to ``meta``, as it is before a late step."""
    moved: Optimizer = object.__new__(type(clone))
    stand_ins = _stand_ins_on_meta(clone)

    def on_meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in stand_ins:
            return stand_ins[id(value)]
        return _on_meta(value)

    # Groups and state refer to parameters, and are copied below, one by one.
    attributes = {name: value for name, value in vars(clone).items() if name not in GROWING}
    vars(moved).update(tree_map(on_meta, attributes))
    moved.param_groups = []
    for group in clone.param_groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        copied = {**tree_map(on_meta, settings)}
        copied["params"] = [stand_ins[id(parameter)] for parameter in group["params"]]
        if "foreach" in copied and copied["foreach"] is None:
            # torch decides by the device, which these parameters no longer show.
            copied["foreach"] = _are_all_accelerated(group)
        if "capturable" in copied:
            # Refused on meta. It moves step counters alone, which are a few bytes.
            copied["capturable"] = False
        moved.param_groups.append(copied)
    # An optimizer may ask for a state that is not there, as torch's own do for parameters without gradients.
    moved.state = defaultdict(dict)
    for key, state in clone.state.items():
        copied_state = tree_map(on_meta, state)
        if isinstance(copied_state, dict) and "step" in copied_state:
            copied_state["step"] = _late_step_like(copied_state["step"])
        moved.state[stand_ins.get(id(key), key)] = copied_state
    return moved


def _are_all_accelerated(group: Mapping[str, Any]) -> bool:
    return all(parameter.device.type not in ("cpu", "meta") for parameter in group["params"])


def _stand_ins_on_meta(clone: Optimizer) -> dict[int, torch.Tensor]:
    """Parameters on ``meta`` with gradients, by ``id`` of the copy's parameters."""
    stand_ins: dict[int, torch.Tensor] = {}
    for group in clone.param_groups:
        for parameter in group["params"]:
            on_meta = _on_meta(parameter)
            stand_in = nn.Parameter(on_meta, requires_grad=parameter.requires_grad)
            _copy_marks(parameter, stand_in)
            if parameter.requires_grad:
                stand_in.grad = torch.empty_like(stand_in)
            stand_ins[id(parameter)] = stand_in
    return stand_ins


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    # A step counter, or a product such as NAdam's: it is read, so it has a value, on the host.
    if not tensor.dim():
        return torch.full((), ASSUMED_NUMBER, dtype=tensor.dtype)
    if is_made_of_others(tensor):
        return torch.empty_like(tensor.detach(), device="meta")
    # Not like a fake tensor, for that would be a fake one again, whose operators take four times as long.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _late_step_like(number: Any) -> Any:
    if isinstance(number, torch.Tensor):
        return torch.full((), _LATE_STEP)
    return type(number)(_LATE_STEP)


def take_step(clone: Optimizer) -> None:
    """Take one step as the class defines it, without the wrapper that fires all optimizers' hooks."""
    step: Any = type(clone).step
    # torch.optim wraps the step of every class, and the wrapper also records a range for profilers.
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    # A closure that must be given is called, and its loss may be compared: a number will do.
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        step(clone, _zero)
    else:
        step(clone)


def _zero() -> torch.Tensor:
    """The loss of a closure that trains nothing."""
    return torch.zeros(())
