"""Functions under ``functools.cache`` that a recorded forward calls, so that a recording holds for other sizes.

A cache looks sizes up by their hash, and a recording that depends on a hash holds for these very sizes alone: a model
that computes its shapes by such a function, as einops does, would be recorded anew for each length. What the function
computes of sizes stays traced instead::

    the cached answer is numbers alone  ─►  the function itself runs on traced sizes, past its cache
    it holds anything else, or differs  ─►  the cached answer, for these very sizes
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from lightning_rotor.capture.notes import Place
from lightning_rotor.capture.traced_numbers import plain, traced_in
from lightning_rotor.private.undoing import undone
from lightning_rotor.stages.holders import CACHED, CLASS_ENTRIES, ENTRIES

_log = logging.getLogger(__name__)

_NUMBERS = (int, float, bool, str, type(None))


class Memoized:
    """Stands in for a function under a cache while a forward is recorded."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The answer, with the nodes of the sizes that it is computed of."""
        answer = self.function(*plain(args), **plain(kwargs))
        sizes = traced_in((args, kwargs))
        if not sizes:
            return answer
        # Tensors are no answer to compute again: the cached ones are the same in each call, and may be drawn.
        if _is_numbers(answer):
            try:
                traced = self.function.__wrapped__(*args, **kwargs)
            except Exception as error:
                # It has just run with plain numbers, so it does something with them that cannot be recorded.
                _log.debug("%r is recorded for these sizes alone: %s", self.function, error)
            else:
                if plain(traced) == answer:
                    return traced
        for size in sizes:
            size.pin()
        return answer

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # Python asks for a method so. The cache knows the object by its hash, which is none of a size.
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


class StandIns:
    """Places at which a :class:`Memoized` stands in for a function."""

    def __init__(self) -> None:
        # With what was there, and what stands there now.
        self._places: list[tuple[Place, Any, Any]] = []
        self._are_wanted = False

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Context of a recording, at whose end every function is in its place again."""

        def put_back() -> None:
            self._are_wanted = False
            for place, original, stand_in in self._places:
                # Where the forward has set another value, that stays.
                if place.read() is stand_in:
                    place.kind.put(place.owner, {place.name: original})
            self._places.clear()

        with undone(put_back):
            self._are_wanted = True
            yield

    def stand_in_at(self, place: Place) -> None:
        """Put a stand-in at a place, if there is a function under a cache and code looks it up there by its name."""
        original = place.read()
        is_static = isinstance(original, staticmethod)
        function = original.__func__ if is_static else original
        # Objects of the user's, and classes of a metaclass, may notice that something is set. Variables of enclosing
        # functions are written back from the frame when Python's profiler returns (up to 3.12).
        is_table = place.kind is ENTRIES or (place.kind is CLASS_ENTRIES and type(place.owner) is type)
        if not (self._are_wanted and isinstance(function, CACHED) and is_table):
            return
        stand_in: Any = Memoized(function)
        if is_static:
            stand_in = staticmethod(stand_in)
        # Noted first: an interrupt in between leaves nothing behind.
        self._places.append((place, original, stand_in))
        place.kind.put(place.owner, {place.name: stand_in})


def _is_numbers(answer: Any) -> bool:
    """True for numbers and texts, and for tuples, lists and dicts of them."""
    if type(answer) in (tuple, list):
        return all(map(_is_numbers, answer))
    if type(answer) is dict:
        return all(map(_is_numbers, answer)) and all(map(_is_numbers, answer.values()))
    return type(answer) in _NUMBERS
