"""The state of random generators: Python's, NumPy's, torch's, and those that user code has of its own."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import uncounted_copy


class GeneratorStates:
    """The state of all global generators at one moment: Python's, NumPy's, torch's on the host and on the CUDA device.

    With ``counted``, torch's allocator counts the remembered bytes, as plans do. torch's own layers never use Python's
    and NumPy's generators (``host``), and some draw no random numbers at all (``torchs``).
    """

    __slots__ = ("_host", "_torch", "device")

    def __init__(
        self, device: torch.device | None = None, *, counted: bool = True, host: bool = True, torchs: bool = True
    ) -> None:
        if torchs and device is None and torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device if device is not None and device.type == "cuda" else None
        # NumPy's is the one that users' code shares, of whatever kind.
        self._host: Any = (random.getstate(), np.random.get_state(legacy=False)) if host else None  # noqa: NPY002
        self._torch: list[torch.Tensor] = []
        if torchs:
            with private.no_dispatch():  # a state is a tensor, and real even among fake ones
                self._torch.append(torch.get_rng_state() if counted else uncounted_copy(torch.get_rng_state()))
                if self.device is not None:
                    self._torch.append(torch.cuda.get_rng_state(self.device))

    def now(self) -> GeneratorStates:
        """The state of the same generators at this moment."""
        device = self.device or torch.device("cpu")
        return GeneratorStates(device, host=self._host is not None, torchs=bool(self._torch))

    def restore(self) -> None:
        """Set the generators back to this state."""
        if self._host is not None:
            random.setstate(self._host[0])
            np.random.set_state(self._host[1])  # noqa: NPY002
        if self._torch:
            torch.set_rng_state(self._torch[0])
        if self.device is not None:
            torch.cuda.set_rng_state(self._torch[1], self.device)

    def equals(self, other: GeneratorStates) -> bool:
        """True if no generator was used in between."""
        if self._host is not None and other._host is not None and pickle.dumps(self._host) != pickle.dumps(other._host):
            return False
        with private.no_dispatch():
            return len(self._torch) == len(other._torch) and all(map(torch.equal, self._torch, other._torch))


@contextmanager
def seeded(seed: int, device: torch.device | None = None, *, host: bool = True) -> Iterator[None]:
    """Context with all global generators under a seed; their states are restored behind it."""
    before = GeneratorStates(device, host=host)
    if host:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  (the one that users' code shares)
    torch.default_generator.manual_seed(seed)
    if before.device is not None:
        with torch.cuda.device(before.device):
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        before.restore()


def generator_state(value: Any) -> Any:
    """The state of a random generator, comparable; None for anything else."""
    access = _access_to(value)
    return None if access is None else pickle.dumps(access[0]())


def rewinding(generator: Any) -> Callable[[], object] | None:
    """A function that sets a random generator back to its present state; None if it has none."""
    access = _access_to(generator)
    return None if access is None else partial(access[1], access[0]())


def _access_to(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """What reads and what sets the state of a random generator; None for anything else."""
    match value:
        case random.SystemRandom():
            return None
        case random.Random():
            return value.getstate, value.setstate
        case np.random.Generator():
            return partial(getattr, value.bit_generator, "state"), partial(setattr, value.bit_generator, "state")
        case np.random.RandomState():
            return partial(value.get_state, legacy=False), value.set_state
        case torch.Generator():
            return lambda: value.get_state().numpy(), lambda state: value.set_state(torch.from_numpy(state))
    return None
