"""Random numbers that do not depend on which part of a module runs first.

A forward runs f, then g; the inverse has to run g before f. If both draw from one generator, they find it in other states than the forward did.
So whatever may draw gets a generator of its own, seeded by a single number that is drawn first, in the forward as in the inverse.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from lightning_rotor.generators import GeneratorStates
from lightning_rotor.private.torch_names import (
    has_forward_hooks,
    no_dispatch,  # a seed is a number, and known even where a mode makes all tensors fake
)
from lightning_rotor.sequential import DROPOUTS

_DROPPING = (*DROPOUTS, nn.MultiheadAttention, nn.RNNBase)
_DRAWING = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class PartSeeds:
    """Generators for the parts of one call. Draws one number from torch's generator on the host, if any part may draw.

    Args:
        parts: The modules that will run, each under its number.
        device: Where they run.
    """

    def __init__(self, parts: tuple[nn.Module, ...], device: torch.device) -> None:
        self._device = device
        self._seed: int | None = None
        if any(_may_draw(module) for part in parts for module in part.modules()):
            with no_dispatch():
                self._seed = int(torch.randint(2**62, (), device="cpu"))

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        """Context in which a part draws its own numbers; the generators are as before afterwards."""
        if self._seed is None:
            yield
            return
        before = GeneratorStates(self._device)
        _seed_all(self._seed + number, self._device)
        try:
            yield
        finally:
            before.restore()


def _may_draw(module: nn.Module) -> bool:
    """Whether a module itself may draw random numbers. Of those that are not torch's nobody knows, in training."""
    if isinstance(module, _DROPPING):
        return module.training and bool(getattr(module, "p", 0.0) or getattr(module, "dropout", 0.0))
    if isinstance(module, _DRAWING):
        return module.training or not isinstance(module, nn.RReLU)
    is_torchs = type(module).__module__.startswith("torch.")
    has_hooks = has_forward_hooks(module)
    return module.training and (has_hooks or not (is_torchs or getattr(module, "draws_by_parts", False)))


def _seed_all(seed: int, device: torch.device) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (the one that users' code shares)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
