"""Models without memory: built on ``meta``, then given fake tensors, which behave as if they were on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_rotor.errors import ModelError
from lightning_rotor.private.torch_names import FakeTensorMode


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """A model in training mode whose parameters are on ``meta``; ModelError if its constructor reads their values."""

    def forget_values(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if not parameter.is_meta:
            # The same object still, which may be tied or in a list.
            empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, empty)

    # Parameters lose their memory one by one as they are registered, so a model that does not fit is never there as a
    # whole. Under ``torch.device("meta")`` constructors that make a tensor to compute with it would fail.
    hook = register_module_parameter_registration_hook(forget_values)
    try:
        return build().train()
    except RuntimeError as error:
        # NotImplementedError is one, which operators without a kernel for ``meta`` raise.
        raise ModelError(
            f"the model cannot be built without memory: {str(error).splitlines()[0]}. Expected a constructor that "
            "reads no values of weights; use the device 'cpu'"
        ) from error
    finally:
        hook.remove()


def give_fake_tensors(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace a model's parameters, buffers and tensors in attributes by fake ones on the CPU, keeping ties."""
    fakes: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        # The tables themselves: setting an attribute would run the code of classes that have their own ``__setattr__``.
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
        for table in tables:
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    if value not in fakes:
                        fakes[value] = _fake_like(value, mode)
                    table[name] = fakes[value]


def _fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake
