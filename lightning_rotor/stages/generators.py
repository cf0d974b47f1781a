"""The state of random generators: Python's, NumPy's, torch's, and those that user code has of its own."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_rotor.devices import device_in_use, kind_of
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import uncounted_copy
from lightning_rotor.stages.other_threads import left_alone, others_may_draw

PYTHON, NUMPY, HOST = (
    "Python's random",
    "NumPy's global generator",
    "torch's CPU generator",
)
"""The kinds of global generators on the host, as messages spell them. Those of devices are named in ``devices``."""


class GeneratorStates:
    """The state of global generators at one moment: Python's, NumPy's, torch's on the host and on a device.

    With ``counted``, torch's allocator counts the remembered bytes, as plans do. torch's own layers never use Python's
    and NumPy's generators (``host``), and some draw no random numbers at all (``torchs``). Kinds that are left alone
    (:func:`~lightning_rotor.stages.other_threads.leaving_alone`) do not count: other threads draw from them, and the
    code that runs here does not.

    ``shared`` is True if another thread could draw from them at that moment. ``ProfilingError`` if the generator of a
    device is not known: what draws from it would be repeated with other numbers.
    """

    __slots__ = ("_counted", "_device_generator", "_states", "device", "shared")

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        counted: bool = True,
        host: bool = True,
        torchs: bool = True,
        kinds: Collection[str] | None = None,
    ) -> None:
        if torchs and device is None:
            device = device_in_use()
        self._device_generator = None if device is None else kind_of(device).own_generator
        self.device = None if self._device_generator is None else device
        self._counted = counted
        self.shared = others_may_draw()
        if kinds is None:
            kinds = self._kinds_of(host=host, torchs=torchs)
        self._states: dict[str, Any] = {kind: self._read(kind) for kind in kinds}

    def _kinds_of(self, *, host: bool, torchs: bool) -> list[str]:
        kinds = []
        if host:
            kinds += [PYTHON, NUMPY]
        if torchs:
            kinds.append(HOST)
        if torchs and self._device_generator is not None:
            kinds.append(self._device_generator)
        others = left_alone()
        return [kind for kind in kinds if kind not in others]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of which there is a state."""
        return frozenset(self._states)

    def _read(self, kind: str) -> Any:
        if kind == PYTHON:
            return random.getstate()
        # The one that users' code shares, of whatever kind.
        if kind == NUMPY:
            return np.random.get_state(legacy=False)  # noqa: NPY002
        # A state is a tensor, and real even among fake ones.
        with private.no_dispatch():
            if kind == self._device_generator:
                assert self.device is not None
                return kind_of(self.device).generator_state(self.device)
            # A tensor of 5 kB, which would count among the bytes of a stage that is being measured.
            state = torch.get_rng_state()
            return state if self._counted else uncounted_copy(state)

    def now(self) -> GeneratorStates:
        """The state of the same generators at this moment."""
        # Without a device it would ask for the one in use, whose generator is none of these.
        return GeneratorStates(self.device or torch.device("cpu"), kinds=self.kinds)

    def changed(self) -> frozenset[str]:
        """The kinds that were used since."""
        moved = set()
        for kind, then in self._states.items():
            if not _same_state(kind, then, self._read(kind)):
                moved.add(kind)
        return frozenset(moved)

    def restore(self, kinds: Collection[str] | None = None) -> None:
        """Set the generators, by default all, back to this state."""
        # What others may draw from and has not moved stays. Looking takes 5 kB for torch's.
        moved = self.changed() if self.shared else self.kinds
        for kind, state in self._states.items():
            if kind in moved and (kinds is None or kind in kinds):
                self._write(kind, state)

    def _write(self, kind: str, state: Any) -> None:
        if kind == PYTHON:
            random.setstate(state)
        elif kind == NUMPY:
            np.random.set_state(state)  # noqa: NPY002
        elif kind == HOST:
            torch.set_rng_state(state)
        else:
            assert self.device is not None
            kind_of(self.device).set_generator_state(self.device, state)

    def keep_only(self, kinds: Collection[str]) -> None:
        """Forget the states of all other kinds."""
        self._states = {kind: state for kind, state in self._states.items() if kind in kinds}

    def equals(self, other: GeneratorStates) -> bool:
        """True if no generator of which both have the state was used in between."""
        for kind in self.kinds & other.kinds:
            if not _same_state(kind, self._states[kind], other._states[kind]):
                return False
        return True


def _same_state(kind: str, then: Any, now: Any) -> bool:
    if kind == PYTHON:
        return bool(then == now)
    if kind == NUMPY:
        # A dict with an array in it, which gives no single answer to ``==``.
        return pickle.dumps(then) == pickle.dumps(now)
    with private.no_dispatch():
        return torch.equal(then, now)


@contextmanager
def seeded(
    seed: int,
    device: torch.device | None = None,
    *,
    host: bool = True,
) -> Iterator[None]:
    """Context with all global generators under a seed; their states are restored behind it."""
    before = GeneratorStates(device, host=host)
    if host:
        random.seed(seed)
        # NumPy takes 32 bits, and the seed may have 63.
        np.random.seed(seed % 2**32)  # noqa: NPY002  (the one that users' code shares)
    torch.default_generator.manual_seed(seed)
    # torch.manual_seed would seed every device, also those whose states are not put back here.
    if before.device is not None:
        kind_of(before.device).seed(before.device, seed)
    try:
        yield
    finally:
        before.restore()


def generator_state(value: Any) -> Any:
    """The state of a random generator, comparable; None for anything else."""
    access = _access_to(value)
    if access is None:
        return None
    read, _ = access
    # States are tuples, dicts with arrays, or arrays. As bytes, all of them compare by ==.
    return pickle.dumps(read())


def rewinding(generator: Any) -> Callable[[], object] | None:
    """A function that sets a random generator back to its present state; None if it has none."""
    access = _access_to(generator)
    if access is None:
        return None
    read, write = access
    return partial(write, read())


_GLOBAL = (*private.global_generators(), torch.default_generator)


def _access_to(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Functions that read and set the state of a random generator of the user's own; None for anything else."""
    # Whoever refers to one, GeneratorStates sees to it.
    if any(value is generator for generator in _GLOBAL):
        return None
    match value:
        case random.SystemRandom():
            # The system's own entropy, which has no state.
            return None
        case random.Random():
            return value.getstate, value.setstate
        case np.random.Generator():
            bits = value.bit_generator
            return partial(getattr, bits, "state"), partial(setattr, bits, "state")
        case np.random.RandomState():
            return partial(value.get_state, legacy=False), value.set_state
        case torch.Generator():
            return lambda: value.get_state().numpy(), lambda state: value.set_state(torch.from_numpy(state))
    return None
