"""States of random generators, those of Python and NumPy included, which torch's own bookkeeping leaves alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_rotor.private.torch_names import (
    no_dispatch,
)  # a state is a tensor, and real even where a mode makes all tensors fake
from lightning_rotor.tensors import uncounted_copy


class HostGenerators:
    """Python's and NumPy's random number generators at one moment. torch's own are remembered by its checkpoint."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()  # noqa: NPY002  (the one that users' code shares)

    def restore(self) -> None:
        """Set both back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002

    def equals(self, other: HostGenerators) -> bool:
        """Whether neither generator was used in between."""
        name, keys, *rest = self._numpy
        other_name, other_keys, *other_rest = other._numpy
        return (
            self._python == other._python
            and (name, rest) == (other_name, other_rest)
            and bool((keys == other_keys).all())
        )


class GeneratorStates:
    """The state of all global generators at one moment: Python's, NumPy's, torch's on the host and on the CUDA device in use.

    Args:
        device: The CUDA device; by default the current one, if CUDA is in use at all.
        counted: Whether torch's allocator counts the bytes that are remembered, as plans do.
        host: Whether Python's and NumPy's are of interest, which torch's own layers never use.
    """

    __slots__ = ("_cuda", "_device", "_host", "_torch")

    def __init__(self, device: torch.device | None = None, *, counted: bool = True, host: bool = True) -> None:
        if device is None and torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device if device is not None and device.type == "cuda" else None
        self._host = HostGenerators() if host else None
        with no_dispatch():
            self._torch = torch.get_rng_state() if counted else uncounted_copy(torch.get_rng_state())
            self._cuda = torch.cuda.get_rng_state(self._device) if self._device is not None else None

    def restore(self) -> None:
        """Set the generators back to this state."""
        if self._host is not None:
            self._host.restore()
        torch.set_rng_state(self._torch)
        if self._cuda is not None and self._device is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    def equals(self, other: GeneratorStates) -> bool:
        """Whether no generator was used in between."""
        with no_dispatch():
            if self._host is not None and other._host is not None and not self._host.equals(other._host):
                return False
            if not torch.equal(self._torch, other._torch):
                return False
            return self._cuda is other._cuda is None or (
                self._cuda is not None and other._cuda is not None and torch.equal(self._cuda, other._cuda)
            )


def generator_state(value: Any) -> Any:
    """The state of a random generator, comparable; None for anything else."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        # Its numbers are equal only if their text is: a NumPy array in a state has no truth value.
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        legacy: Any = value.get_state()
        name, keys, *rest = legacy
        return name, keys.tobytes(), *rest
    return None


def rewinding(generator: Any) -> Callable[[], object]:
    """What sets a random generator back to its present state."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return partial(generator.set_state, generator.get_state())
