"""Modes of torch around code: which are there, and code without them."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

from lightning_rotor.private.modes import default_device, function_modes, is_captured, is_transformed, without_modes


class Counting(TorchFunctionMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_code_without_modes_is_heard_by_none() -> None:
    mode = Counting()
    with mode:
        torch.ones(2).sum()
        heard = mode.calls
        assert mode in function_modes()
        with without_modes():
            torch.ones(2).sum()
        assert mode.calls == heard
        torch.ones(2).sum()
    assert mode.calls > heard > 0


def test_a_device_as_context_is_the_default_one() -> None:
    assert default_device() is None
    with torch.device("meta"):
        assert default_device() == torch.device("meta")
    assert default_device() is None


def test_a_function_under_grad_is_transformed_and_not_captured() -> None:
    seen = []

    def square(x: torch.Tensor) -> torch.Tensor:
        seen.append((is_transformed(), is_captured()))
        return x * x

    torch.func.grad(square)(torch.tensor(2.0))
    square(torch.tensor(2.0))
    assert seen == [(True, False), (False, False)]
