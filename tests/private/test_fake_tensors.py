"""Tensors without values: made by a mode, which knows a value where it was given one."""

from __future__ import annotations

import torch

from lightning_rotor.private.fake_tensors import (
    fake_mode,
    fake_with_value,
    forget_value,
    mode_of,
    value_of,
    with_values,
)


def test_a_tensor_has_its_mode_and_no_value() -> None:
    with fake_mode() as mode, mode:
        tensor = torch.ones(1 << 40)
        assert mode_of(tensor) is mode
        assert value_of(tensor) is None
        assert (tensor + 1).shape == (1 << 40,)


def test_a_value_that_was_given_is_known_until_it_is_forgotten() -> None:
    with fake_mode() as mode, with_values(8):
        number = fake_with_value(mode, torch.tensor(3))
        known = value_of(number)
        assert known is not None
        assert known.item() == 3
        forget_value(number)
        assert value_of(number) is None
