"""The state of random generators: Python's, NumPy's, torch's, and those that user code has of its own."""

from __future__ import annotations

import pickle
import random
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_rotor.errors import RotorWarning
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import tensors_in, uncounted_copy

PYTHON, NUMPY, HOST, CUDA = (
    "Python's random",
    "NumPy's global generator",
    "torch's CPU generator",
    "torch's CUDA generator",
)
"""The kinds of global generators, as messages spell them."""


class GeneratorStates:
    """The state of global generators at one moment: Python's, NumPy's, torch's on the host and on the CUDA device.

    With ``counted``, torch's allocator counts the remembered bytes, as plans do. torch's own layers never use Python's
    and NumPy's generators (``host``), and some draw no random numbers at all (``torchs``). Kinds that are left alone
    (:func:`leaving_alone`) do not count: other threads draw from them, and the code that runs here does not.

    ``shared`` is True if another thread could draw from them at that moment.
    """

    __slots__ = ("_counted", "_states", "device", "shared")

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        counted: bool = True,
        host: bool = True,
        torchs: bool = True,
        kinds: Collection[str] | None = None,
    ) -> None:
        if torchs and device is None and torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device if device is not None and device.type == "cuda" else None
        self._counted, self.shared = counted, others_may_draw()
        if kinds is None:
            kinds = (*((PYTHON, NUMPY) * host), *((HOST, *((CUDA,) * (self.device is not None))) * torchs))
            kinds = [kind for kind in kinds if kind not in _left.alone]
        self._states: dict[str, Any] = {kind: self._read(kind) for kind in kinds}

    @property
    def kinds(self) -> frozenset[str]:
        """Of which generators there is a state."""
        return frozenset(self._states)

    def _read(self, kind: str) -> Any:
        if kind == PYTHON:
            return random.getstate()
        if kind == NUMPY:  # the one that users' code shares, of whatever kind
            return np.random.get_state(legacy=False)  # noqa: NPY002
        with private.no_dispatch():  # a state is a tensor, and real even among fake ones
            if kind == CUDA:
                assert self.device is not None
                return torch.cuda.get_rng_state(self.device)
            return torch.get_rng_state() if self._counted else uncounted_copy(torch.get_rng_state())

    def now(self) -> GeneratorStates:
        """The state of the same generators at this moment."""
        return GeneratorStates(self.device or torch.device("cpu"), kinds=self.kinds)

    def changed(self) -> frozenset[str]:
        """The kinds that were used since."""
        return frozenset(kind for kind, then in self._states.items() if not _same_state(kind, then, self._read(kind)))

    def restore(self, kinds: Collection[str] | None = None) -> None:
        """Set the generators, by default all, back to this state. What others may draw from and has not moved stays."""
        moved = self.changed() if self.shared else self.kinds  # looking takes 5 kB for torch's
        for kind, state in self._states.items():
            if kind not in moved or (kinds is not None and kind not in kinds):
                continue
            if kind == PYTHON:
                random.setstate(state)
            elif kind == NUMPY:
                np.random.set_state(state)  # noqa: NPY002
            elif kind == HOST:
                torch.set_rng_state(state)
            else:
                assert self.device is not None
                torch.cuda.set_rng_state(state, self.device)

    def keep_only(self, kinds: Collection[str]) -> None:
        """Forget the states of all other kinds."""
        self._states = {kind: state for kind, state in self._states.items() if kind in kinds}

    def equals(self, other: GeneratorStates) -> bool:
        """True if no generator of which both have the state was used in between."""
        shared = self.kinds & other.kinds
        return all(_same_state(kind, self._states[kind], other._states[kind]) for kind in shared)


def _same_state(kind: str, then: Any, now: Any) -> bool:
    if kind == PYTHON:
        return bool(then == now)
    if kind == NUMPY:
        return pickle.dumps(then) == pickle.dumps(now)
    with private.no_dispatch():
        return torch.equal(then, now)


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if an operation draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    defaults = {argument.name: argument.default_value for argument in private.schema_of(func).arguments}
    given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p", True))


class DrawsSeen(private.TorchDispatchMode):
    """Notes from which of torch's generators operations of this thread draw, by kind."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, private.OpOverload) and draws(func, args, kwargs or {}):
            self.kinds.add(CUDA if any(tensor.is_cuda for tensor in tensors_in((args, result))) else HOST)
        return result


# ----------------------------------------------------------------------------------------------------
# Other threads draw from the same generators: a loader that prefetches. Setting one back would repeat their numbers.
#
#   the measured stage        S ──────────── T ──────────── U      it does not draw, so there is nothing to set back
#   a thread that prefetches       draws: T         draws: U       and the generator stays at U
#
# So only generators that the code itself draws from are set back. Which these are is told by running it once more from
# the same numbers, while other threads rest: code that skips layers by chance then takes the same way, and draws from
# the same generators. If they do not rest, a generator that has not moved in one of several runs is none of them.


class _Left(threading.local):
    """The kinds of generators that this thread leaves alone for now."""

    alone: frozenset[str] = frozenset()


_left = _Left()
_RUNS, _REST_SECONDS = 4, 0.02


@contextmanager
def leaving_alone(kinds: Collection[str]) -> Iterator[None]:
    """Context in which :class:`GeneratorStates` has no state of these kinds, nor of those left alone around it."""
    before = _left.alone
    _left.alone = before | frozenset(kinds)
    try:
        yield
    finally:
        _left.alone = before


def others_may_draw() -> bool:
    """True if there is another thread of Python's that may draw random numbers.

    Not among several processes: they run the same code as often as each other, and each has threads of its own.
    """
    if private.threads() == 1:
        return False
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def drawn_since(
    before: GeneratorStates, again: Callable[[], object], *, certain: Collection[str] = ()
) -> frozenset[str]:
    """The kinds that code has drawn from which ran once since ``before``; ``again`` runs it again.

    Where other threads do not rest, a kind that moves in every run is taken for the code's. If it is not in
    ``certain``, another thread may have moved it each time: a warning says so if equal runs move it differently.
    """
    drawn = before.changed()
    if drawn <= frozenset(certain) or not (before.shared or others_may_draw()):
        return drawn
    if (behind := _at_rest(before)) is not None:
        drawn = before.changed()
        before.restore(drawn)
        try:
            again()
            return drawn & (before.changed() | frozenset(certain))
        finally:
            behind.restore()
    for _ in range(_RUNS):
        if drawn <= frozenset(certain) or not (before.shared or others_may_draw()):
            return drawn
        time.sleep(_REST_SECONDS)
        now = before.now()
        again()
        drawn &= now.changed()
    doubtful = drawn - frozenset(certain)
    if mixed := {kind for kind in doubtful if _moves_differently(kind, before, again)}:
        warnings.warn(
            f"another thread draws from {' and '.join(sorted(mixed))} while this one runs the model to measure or to "
            "repeat it, and sets it back each time, so numbers of that thread may repeat: expected a generator of its "
            "own for each thread (np.random.default_rng(seed), random.Random(seed), torch.Generator())",
            RotorWarning,
            stacklevel=2,
        )
    return drawn


def _at_rest(states: GeneratorStates) -> GeneratorStates | None:
    """The state of the same generators once nobody draws from them; None if somebody does not stop."""
    now = states.now()
    for _ in range(_RUNS):
        time.sleep(_REST_SECONDS)  # what prefetches comes to rest when its queue is full
        before, now = now, states.now()
        if now.equals(before):
            return now
    return None


def _moves_differently(kind: str, before: GeneratorStates, again: Callable[[], object]) -> bool:
    """True if two runs from one state of a generator leave it in two."""
    start = GeneratorStates(before.device or torch.device("cpu"), kinds=(kind,))
    again()
    first = start.now()
    start.restore()
    again()
    second = start.now()
    start.restore()
    return not first.equals(second)


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


_GLOBAL = (*private.global_generators(), torch.default_generator)


def _access_to(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """What reads and what sets the state of a random generator of the user's own; None for anything else."""
    if any(value is each for each in _GLOBAL):  # whoever refers to one, GeneratorStates sees to it
        return None
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
