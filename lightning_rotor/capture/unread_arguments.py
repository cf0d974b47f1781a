"""Plain arguments that a forward is given and does not read: file names in a batch, numbers of samples.

A recording takes plain arguments for granted, so another file name would mean another recording, in every step. Whether
a forward reads one cannot be seen from the recording: comparing it leaves no trace in the graph. So when a call differs
from a recorded one in strings and numbers alone, the forward runs once more with objects in their places that note any
use. If none was used, and the same operations were recorded, the recording holds whatever stands there::

    recorded with    {"image": tensor, "name": "a.png"}
    called with      {"image": tensor, "name": "b.png"}
    run with         {"image": tensor, "name": <Untouched>}        the same graph, not used: names are free from now on

Code can tell such an object from a string by ``type(x)`` and ``x is y`` alone, so booleans and None are never free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning_rotor.capture.call import Call

_FREE_TYPES = (str, bytes, int, float)
"""Types whose values code reads by operations, which can be noted."""


@dataclass(slots=True)
class Use:
    """Set once an object that should stay untouched was used, also where the error that follows is caught."""

    seen: bool = False


class UsedError(Exception):
    """A forward uses an argument that was to stay untouched."""


class Untouched:
    """Stands for a value, and notes its first use. For ``isinstance`` it is of the value's type."""

    __slots__ = ("_kind", "_use")

    def __init__(self, kind: type, use: Use) -> None:
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_use", use)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            # The value's own class gives the same answer to isinstance, whatever that says about the value.
            return object.__getattribute__(self, "_kind")
        return _refuse(self)


def _refuse(self: Untouched, *_: Any) -> Any:
    object.__getattribute__(self, "_use").seen = True
    raise UsedError("an argument was read that is no tensor")


# Python looks these up on the class, past __getattribute__. What is not among them raises TypeError, as for any object:
# the run fails then, and the argument counts as used.
_OPERATORS = (
    "abs add and bool bytes call ceil complex contains delitem dir divmod enter eq exit float floor floordiv format "
    "fspath ge getitem gt hash iadd iand ifloordiv ilshift imod imul index int invert ior ipow irshift isub iter "
    "itruediv ixor le len length_hint lshift lt matmul mod mul ne neg next or pos pow radd rand rdivmod reduce "
    "reduce_ex repr reversed rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor "
    "setattr setitem sizeof str sub truediv trunc xor"
)
for _name in _OPERATORS.split():
    setattr(Untouched, f"__{_name}__", _refuse)


def differing_leaves(recorded: Any, called: Any) -> frozenset[int] | None:
    """Places in which two calls' plain arguments differ in value alone; None if the calls differ in more.

    Args:
        recorded: The key of a recorded call.
        called: That of another one.
    """
    *structure, kinds = recorded
    *other_structure, other_kinds = called
    if structure != other_structure or len(kinds) != len(other_kinds):
        return None
    places = set()
    for place, (one, other) in enumerate(zip(kinds, other_kinds, strict=True)):
        if one == other:
            continue
        if not (isinstance(one, tuple) and isinstance(other, tuple)):
            # A tensor in the place of a plain value, or the other way round.
            return None
        if one[0] is not other[0] or one[0] not in _FREE_TYPES:
            return None
        places.add(place)
    return frozenset(places)


def without_leaves(key: Any, places: frozenset[int]) -> Any:
    """A call's key in which the leaves of these places stand for any value of their types."""
    *structure, kinds = key
    bare = []
    for place, kind in enumerate(kinds):
        is_any = place in places and isinstance(kind, tuple)
        bare.append(kind[0] if is_any else kind)
    return (*structure, tuple(bare))


def is_unread(call: Call, places: frozenset[int], runs_the_same: Callable[[Call], bool]) -> bool:
    """True if a forward uses none of the leaves in these places.

    Args:
        call: Of the forward.
        places: Numbers of leaves.
        runs_the_same: Runs the forward for a call. True if it could be recorded, and does what is known of it.
    """
    use = Use()
    leaves = list(call.leaves)
    for place in places:
        leaves[place] = Untouched(type(leaves[place]), use)
    try:
        same = runs_the_same(replace(call, leaves=tuple(leaves)))
    except UsedError:
        # Our own code compares what a graph holds, and an argument that is handed on is in there.
        return False
    return same and not use.seen
