"""Deep copies of models and batches with fake tensors, which have shapes, types and devices but no memory.

What a step asks of its batch (lengths, labels, masks, edges of a graph) decides over shapes. So small tensors may keep
their values, and operations on such tensors alone are computed. Values that come out of parameters do not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_rotor.private import torch_names as private
from lightning_rotor.private.process_groups import copied_as_they_are
from lightning_rotor.private.values import attribute_of, is_fake

MOST_KNOWN = 2**16
"""Elements of tensors whose values a dry run may know."""


class _CopyWithValues(private.FakeCopyMode):
    """Lets small tensors keep their values in a deep copy. Parameters lose them: all compute would become real."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        # Subclasses are copied by their own rules: a parameter loses its values, and others have insides.
        if func is torch.Tensor.__deepcopy__ and type(args[0]) is torch.Tensor:
            tensor, memo = args
            if _keeps_values(tensor):
                # Shared tensors stay shared: a buffer and a batch may refer to the same one.
                if id(tensor) not in memo:
                    memo[id(tensor)] = private.fake_with_value(self.fake_mode, tensor)
                return memo[id(tensor)]
        return super().__torch_function__(func, types, args, kwargs)


def _keeps_values(tensor: torch.Tensor) -> bool:
    is_small = tensor.numel() <= MOST_KNOWN and tensor.layout is torch.strided and tensor.device.type != "meta"
    return is_small and not tensor.requires_grad and not is_fake(tensor)


def fake_copy(
    value: Any,
    mode: private.FakeTensorMode,
    replacements: Mapping[int, Any],
    *,
    with_values: bool = False,
) -> Any:
    """A deep copy with fake tensors in the place of tensors.

    Tied parameters stay tied, and shared objects shared. Hooks that are plain functions are dropped, and metrics give
    0. Data sets are not copied.

    Args:
        value: A module or anything else; modules are looked for here and in a tuple or list of values.
        mode: Of the fake tensors.
        replacements: By ``id``, what stands in the copy for objects.
        with_values: Small tensors keep their values.
    """
    memo = dict(replacements)
    for module in _modules_in(value):
        for held in module.__dict__.values():
            if isinstance(held, (Dataset, DataLoader)):
                # A data set may be as large as the memory.
                memo[id(held)] = held
    copying = _CopyWithValues(mode) if with_values else private.FakeCopyMode(mode)
    with copying, copied_as_they_are():
        duplicate = deepcopy(value, memo)
    for module in _modules_in(duplicate):
        # What they write to is not copied.
        _drop_plain_hooks(module)
        if _is_metric(module):
            # Most look at values, of which a dry run has none.
            _give_zero(module)
    return duplicate


def _modules_in(value: Any) -> list[nn.Module]:
    roots = value if isinstance(value, (tuple, list)) else (value,)
    return [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]


def _drop_plain_hooks(module: nn.Module) -> None:
    for kind in private.HOOKS:
        hooks = module.__dict__[kind]
        # Of a bound method, the object that it belongs to is copied, too.
        for key in [key for key, hook in hooks.items() if isinstance(hook, FunctionType)]:
            del hooks[key]


def _is_metric(module: nn.Module) -> bool:
    """True for a metric of torchmetrics, or one like it; False for a collection, which holds metrics."""
    has_methods = all(callable(attribute_of(module, name)) for name in ("update", "compute", "reset"))
    return has_methods and not module._modules and next(module.parameters(), None) is None


def _give_zero(module: nn.Module) -> None:
    """Let a metric give 0, and nothing else."""
    # On the instance: other metrics of the class are somebody else's.
    module.__dict__.update(dict.fromkeys(("forward", "compute"), _zero))
    module.__dict__.update(dict.fromkeys(("update", "reset"), _nothing))


def _zero(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(())


def _nothing(*_: Any, **__: Any) -> None:
    return None
