"""Hooks of modules, tensors and optimizers, which can be set in public, and not looked at."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrize

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes in which a module keeps the hooks around its forward and backward. Nothing public reads them."""
_HOOKS_OF_ALL: tuple[dict[int, Any], ...] = tuple(getattr(nn_module, f"_global{name}") for name in HOOKS)
_BACKWARD_HOOKS_OF_ALL = _HOOKS_OF_ALL[2:]
_HOOK_KINDS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
# Without two that are settings, which code may change.
STRUCTURE = frozenset(vars(nn.Module())) - {"training", "_is_full_backward_hook"}
"""Attributes of a module that are torch's own bookkeeping."""

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
OPTIMIZER_HOOKS = (
    *_STEP_HOOKS,
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Attributes in which an optimizer keeps its hooks."""


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer has hooks around its steps."""
    return any(bool(getattr(optimizer, name, None)) for name in _STEP_HOOKS)


def has_forward_hooks(module: nn.Module) -> bool:
    """True if a module has hooks of its own around its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """True if hooks of the module, or of all modules, follow its backward."""
    return any((module._backward_hooks, module._backward_pre_hooks, *_BACKWARD_HOOKS_OF_ALL))


def hook_tables(module: nn.Module | None, names: Sequence[str] = (*HOOKS, *_HOOK_KINDS)) -> list[dict[int, Any]]:
    """Where a module keeps hooks, and how they are called; None is all modules."""
    if module is None:
        owner = vars(nn_module)
        keys = [f"_global{name}" for name in names]
    else:
        owner, keys = vars(module), list(names)
    # Not all that a module has, torch has for all modules; a scripted module has them elsewhere.
    return [owner[key] for key in keys if key in owner]


def gradient_hooks(tensor: torch.Tensor) -> list[Any]:
    """The hooks that ``Tensor.register_hook`` was given."""
    return list((tensor._backward_hooks or {}).values())


@contextmanager
def without_hooks_of_several(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context without the hooks of ``register_multi_grad_hook``, which ``torch.autograd.grad`` cannot call."""
    tables = [tensor._backward_hooks for tensor in tensors]
    kept = [(table, dict(table)) for table in tables if table]
    for table, before in kept:
        for key, hook in before.items():
            # Each tensor has a closure of that function's among its hooks, which only its name tells.
            if getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook."):
                del table[key]
    try:
        yield
    finally:
        for table, before in kept:
            # Emptied first, so that they stand in their order.
            table.clear()
            table.update(before)


def any_hooks_of_all() -> bool:
    """True if there are hooks for every module."""
    return any(_HOOKS_OF_ALL)


def shares_weights(module: nn.Module) -> bool:
    """True inside of ``parametrize.cached()``, where a parametrized weight is computed once for all calls."""
    return bool(parametrize._cache_enabled) and any(map(parametrize.is_parametrized, module.modules()))
