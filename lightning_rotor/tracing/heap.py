"""What is alive at one moment: tensors and modules, and the functions around which variables are.

Python keeps no such list. To make one is to look at each of half a million objects, which takes a tenth of a second. So the first recording
of a module looks, and says what came of it; a recording for inputs of another size looks no further than that one had to.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import Any

import torch
from torch import nn

from lightning_rotor.tensors import address_of
from lightning_rotor.tracing.lessons import Lessons
from lightning_rotor.tracing.places import Closures


class Heap:
    """Looks for what is alive.

    Args:
        is_users: Says of a file whether functions in it count.
        lessons: Of an earlier recording of the module.
        looks: Whether to note what is there before a recording, which takes long where much is. Without, a recording that asks for it is of
            no use, and the heap misled.

    Attributes:
        closures: The variables of functions.
    """

    def __init__(self, is_users: Callable[[str], bool], lessons: Lessons | None, *, looks: bool = False) -> None:
        self.closures = Closures(is_users, None if lessons is None else lessons.closures)
        self._looks = looks or (lessons is not None and lessons.asks_what_was_there)
        self._was_asked = False

    @property
    def misled(self) -> bool:
        """Whether something that the code did was not looked at: the lessons do not fit, or nobody has looked at what was there."""
        return self.closures.misled or self.must_look

    @property
    def must_look(self) -> bool:
        """Whether somebody has asked what was there, and nobody has looked."""
        return self._was_asked and not self._looks

    def inventory(self) -> Inventory | None:
        """What is there now; None if it is expected that nobody will ask."""
        return Inventory() if self._looks else None

    def lessons(self, opaque: Mapping[str, str]) -> Lessons:
        """What came of the recording.

        Args:
            opaque: Modules that had to become one operation, by name, and why.
        """
        return Lessons(opaque, self._was_asked, tuple(self.closures.asked.values()))

    def note_question(self) -> None:
        """Somebody asks what was there before."""
        self._was_asked = True


class Inventory:
    """The tensors and modules that are there now. It keeps them alive, so that no other object gets the address of one."""

    def __init__(self) -> None:
        self._found = {id(thing): thing for thing in _alive(torch.Tensor, nn.Module)}
        self._memory = {memory_of(thing) for thing in self._found.values() if torch.Tensor in type(thing).__mro__}

    def has(self, thing: object) -> bool:
        """Whether a tensor or a module is among them."""
        return self._found.get(id(thing)) is thing

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether one of them lies where the tensor does."""
        address = memory_of(tensor)
        return address != 0 and address in self._memory


def memory_of(value: Any) -> int:
    """Where a tensor's bytes are; 0 if there are none."""
    try:
        return address_of(value)
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return 0


def _alive(*bases: type) -> list[Any]:
    """All objects of some classes and their subclasses.

    ``isinstance`` would ask each object for its class, at which a lazy import loads its module.
    """
    everything = gc.get_objects()
    wanted = _with_subclasses(bases)
    return list(compress(everything, map(wanted.__contains__, map(type, everything))))


def _with_subclasses(bases: Iterable[type]) -> set[type]:
    found: set[type] = set()
    pending = list(bases)
    while pending:
        kind = pending.pop()
        if kind not in found:
            found.add(kind)
            pending.extend(type.__subclasses__(kind))
    return found
