"""Copies of models whose tensors have no values, for dry runs that take no memory and touch nothing of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_rotor.private.torch_names import HOOKS, FakeCopyMode, FakeTensorMode


def fake_copy(value: Any, mode: FakeTensorMode, replacements: Mapping[int, Any]) -> Any:
    """Copy modules, and what they are in, deeply, with fake tensors in the place of tensors.

    Tied parameters stay tied, and shared objects shared. Two things would not be the copy's own and are left out or kept apart: hooks that
    are plain functions are dropped, since what they write to is not copied with them, and metrics (modules without parameters that can
    update, compute and reset) give 0, since most look at values. Data sets are not copied.

    Args:
        value: Any nesting of modules and tensors.
        mode: Makes the fake tensors.
        replacements: By ``id``, what stands in for an object in the copy.
    """
    memo = dict(replacements)
    for module in _modules_in(value):
        memo.update((id(held), held) for held in module.__dict__.values() if isinstance(held, (Dataset, DataLoader)))
    with FakeCopyMode(mode):
        duplicate = deepcopy(value, memo)
    for module in _modules_in(duplicate):
        for kind in HOOKS:
            hooks = getattr(module, kind)
            for key in [key for key, hook in hooks.items() if isinstance(hook, FunctionType)]:
                del hooks[key]
        if _is_metric(module):
            module.__dict__.update(forward=_zero, update=_nothing, compute=_zero, reset=_nothing)
    return duplicate


def _modules_in(value: Any) -> list[nn.Module]:
    roots = value if isinstance(value, (tuple, list)) else (value,)
    return [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]


def _is_metric(module: nn.Module) -> bool:
    """A metric of torchmetrics, or one like it; a collection of metrics is not one, but holds them."""
    return (
        all(callable(getattr(module, name, None)) for name in ("update", "compute", "reset"))
        and not module._modules
        and next(module.parameters(), None) is None
    )


def _zero(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(())


def _nothing(*_: Any, **__: Any) -> None:
    return None
