"""Random numbers that code draws: by which operations, and from which generators."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch

from lightning_rotor.devices import kind_of
from lightning_rotor.errors import RotorWarning
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import tensors_in
from lightning_rotor.stages.generators import HOST, GeneratorStates
from lightning_rotor.stages.other_threads import others_may_draw

_RUNS = 4
"""Runs that tell draws of the code from those of other threads."""
_REST_SECONDS = 0.02


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if an operation draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    defaults = {argument.name: argument.default_value for argument in private.schema_of(func).arguments}
    positional = dict(zip(defaults, args, strict=False))
    arguments = defaults | positional | kwargs
    return bool(arguments.get("dropout_p", True))


class DrawsSeen(private.TorchDispatchMode):
    """Notes from which of torch's generators operations of this thread draw, by kind."""

    # Else torch raises an error where the mode meets one, such as flex_attention's.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Operations of higher order are no overloads, and have no tags to ask.
        is_operator = isinstance(func, private.OpOverload)
        if is_operator and draws(func, args, kwargs) and not _has_own(args, kwargs):
            devices = {tensor.device for tensor in tensors_in((args, result))}
            # Refuses a device whose generator is not known.
            own = {kind_of(device).own_generator for device in devices}
            # Operations on a device draw from its generator, also if they read numbers on the host.
            of_devices = {name for name in own if name is not None}
            self.kinds |= of_devices or {HOST}
        return result


def _has_own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if an operation is given a generator of the user's own to draw from."""
    for argument in (*args, *kwargs.values()):
        if not isinstance(argument, torch.Generator):
            continue
        if argument is not torch.default_generator and argument.device.type == "cpu":
            return True
    return False


def drawn_since(
    before: GeneratorStates,
    again: Callable[[], object],
    *,
    certain: Collection[str] = (),
) -> frozenset[str]:
    """The kinds that code has drawn from which ran once since ``before``; ``again`` runs it again.

    Where other threads do not rest, a kind that moves in every run is taken for the code's. If it is not in
    ``certain``, another thread may have moved it each time: a warning says so if equal runs move it differently, or if
    a thread has drawn that seemed to rest.
    """
    drawn = before.changed()
    # What moved is the code's if nobody else could move it. That is so in nearly every program.
    if drawn <= frozenset(certain) or not (before.shared or others_may_draw()):
        return drawn
    repeated = frozenset[str]()
    behind = _at_rest(before)
    if behind is not None:
        drawn = before.changed()
        before.restore(drawn)
        try:
            again()
            drawn &= before.changed() | frozenset(certain)
            # Equal code ends alike from equal numbers. If not, another thread has drawn in one of the two runs, or one
            # that only seemed to rest draws now, from numbers that it has had before.
            repeated = drawn & behind.changed() - frozenset(certain)
        finally:
            # The other threads' numbers go on where they stood before the code ran again.
            behind.restore()
        if not repeated:
            return drawn
    for _ in range(_RUNS):
        if drawn <= frozenset(certain) or not (before.shared or others_may_draw()):
            break
        time.sleep(_REST_SECONDS)
        now = before.now()
        again()
        drawn &= now.changed()
    # A thread that draws all the time has moved them in each of these runs. Equal runs of the code alone end alike.
    doubtful = drawn - frozenset(certain)
    mixed = {kind for kind in doubtful if _moves_differently(kind, before, again)}
    mixed |= repeated - drawn
    if mixed:
        warnings.warn(
            f"another thread draws from {' and '.join(sorted(mixed))} while this one runs the model to measure or to "
            "repeat it, and sets it back each time, so numbers of that thread may repeat: expected a generator of its "
            "own for each thread (np.random.default_rng(seed), random.Random(seed), torch.Generator())",
            RotorWarning,
            stacklevel=2,
        )
    return drawn


def _at_rest(states: GeneratorStates) -> GeneratorStates | None:
    """The state of the same generators once nobody draws from them; None if somebody does not stop, or may not."""
    now = states.now()
    for _ in range(_RUNS):
        # A thread that prefetches comes to rest when its queue is full.
        began = time.monotonic()
        time.sleep(_REST_SECONDS)
        # Where the machine keeps this thread waiting, another one that did not draw may only wait, too.
        is_busy = time.monotonic() - began > 2 * _REST_SECONDS
        before, now = now, states.now()
        if now.equals(before) and not is_busy:
            return now
    return None


def _moves_differently(
    kind: str,
    before: GeneratorStates,
    again: Callable[[], object],
) -> bool:
    """True if two runs from one state of a generator leave it in two."""
    start = GeneratorStates(before.device or torch.device("cpu"), kinds=(kind,))
    again()
    first = start.now()
    start.restore()
    again()
    second = start.now()
    start.restore()
    return not first.equals(second)
