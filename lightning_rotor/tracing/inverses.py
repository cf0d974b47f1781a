"""Modules with an inverse that does not undo their forward: they are cut inside like any others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lightning_rotor.invertible.trial import try_inverse
from lightning_rotor.tensors import is_fake
from lightning_rotor.tracing.call import Call
from lightning_rotor.tracing.modules import is_invertible_as_a_whole

_log = logging.getLogger(__name__)


def has_inverses(module: nn.Module) -> bool:
    """Whether there are submodules that could be inverted as a whole."""
    return any(map(is_invertible_as_a_whole, list(module.modules())[1:]))


def unusable_inverses(module: nn.Module, call: Call, tensors: Sequence[torch.Tensor]) -> frozenset[nn.Module]:
    """Find the submodules whose inverse cannot be used, by running the module and trying each on its own input.

    Args:
        module: Is called without gradients.
        call: How.
        tensors: In the place of those of the call. If they are fake, nobody knows, and none is found.
    """
    if any(map(is_fake, tensors)):
        return frozenset()
    names = {each: name for name, each in module.named_modules() if name and is_invertible_as_a_whole(each)}
    found: dict[nn.Module, str] = {}
    trying = False

    def attempt(each: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal trying
        if trying:  # it is called by the trial, or within one
            return
        trying = True
        if kwargs or len(args) != 1:
            objection = "it takes several arguments: expected one, which may be a tuple"
        else:
            objection = try_inverse(each, args[0], name=names[each]).inverse
        trying = False
        if objection:
            found.setdefault(each, objection)

    with ExitStack() as hooks, torch.no_grad():
        for each in names:
            hooks.callback(each.register_forward_pre_hook(attempt, with_kwargs=True).remove)
        args, kwargs = call.with_tensors(tensors)
        type(module).forward(module, *args, **kwargs)
    for each, objection in found.items():
        _log.info("%r is not inverted, and cut inside like any other module: %s", names[each], objection)
    return frozenset(found)
