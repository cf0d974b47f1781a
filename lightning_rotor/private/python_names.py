"""Facts about CPython that no public name tells: addresses in a tuple, the bytecode after a question, ``__class__``.

Tried on CPython 3.10 to 3.13. Each has a plain way to the same answer, or an answer that only costs a plan, where it
does not hold.
"""

from __future__ import annotations

import ctypes
import dis
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import takewhile
from struct import calcsize, pack
from types import FrameType
from typing import Any

# Addresses of the objects in a tuple.
#
# A guard looks at some thousand objects at every training call and asks whether they are the very objects of the last
# one. CPython keeps the entries of a tuple as an array of pointers behind its header, so this memory can be copied, and
# two copies compared, at once. Measured for 2,000 objects on CPython 3.11, in nanoseconds an object: 0.7 so, 14 by
# ``all(map(is_, now, then))``, 66 by two lists of ``id``.


def _entries_of(objects: tuple[Any, ...]) -> bytes:
    """The pointers in a tuple, as CPython keeps them."""
    return ctypes.string_at(id(objects) + tuple.__basicsize__, calcsize("P") * len(objects))


def _ids_of(objects: tuple[Any, ...]) -> list[int]:
    """The fact in public names, for every other Python."""
    return list(map(id, objects))


def _keeps_pointers() -> bool:
    """True if this Python keeps tuples as :func:`_entries_of` takes for granted: a tuple of three is looked at."""
    some = None, "", sys
    return sys.implementation.name == "cpython" and _entries_of(some) == pack("3P", *map(id, some))


addresses_of: Callable[[tuple[Any, ...]], Any] = _entries_of if _keeps_pointers() else _ids_of
"""A value that is equal for two tuples of the very same objects, as long as those live."""


# An assert in the code that is running.
#
# ``assert mask.all()`` asks for a truth value, as ``if mask.all():`` does. Torch tells neither from the other. Where
# the recording depends on the answer, only the first can be recorded: as a check that raises an error. Without it,
# every model with ``torch.distributions`` (a VAE) would be one stage, for its constructors check their arguments so.

_LEAVES_THE_LINE = {dis.opname[number] for number in (*dis.hasjrel, *dis.hasjabs)} | {"RETURN_VALUE", "RETURN_CONST"}
"""Instructions behind which a straight line of code is at its end."""


def raises_otherwise(frame: FrameType, answer: bool) -> bool:
    """True if a frame asks for a truth value to raise an error unless it is ``answer``.

    That is ``assert`` and ``if …: raise``: Python jumps on the value, and the branch that it does not take leads to
    ``raise`` in a straight line. Unknown bytecode gives False.
    """
    # CPython 3.13 converts to a bool first; before, the jump itself did.
    steps = [step for step in dis.get_instructions(frame.f_code) if step.opname != "TO_BOOL"]
    jump, *behind = [step for step in steps if step.offset >= frame.f_lasti]
    if not jump.opname.startswith("POP_JUMP"):
        return False
    jumps_if = "TRUE" in jump.opname
    other_branch = behind if jumps_if is answer else _from(steps, jump.argval)
    straight = takewhile(lambda step: step.opname not in _LEAVES_THE_LINE, other_branch)
    return any(step.opname == "RAISE_VARARGS" for step in straight)


def _from(steps: Sequence[dis.Instruction], offset: int) -> list[dis.Instruction]:
    return [step for step in steps if step.offset >= offset]


class PassesForItsValue:
    """An object that ``isinstance`` takes for its ``value``, though no C code does.

    A subclass of ``float`` is read by C code (``math.sqrt``, torch's operations) without asking it, so the recording
    would not hear of it. An object that is no float has to be asked: by ``__float__`` and ``__torch_function__``. But
    users' code asks ``isinstance(x, float)`` first, and torch's own Python does. ``isinstance`` looks at ``__class__``
    where the type itself does not fit, which the language reference documents for proxies.
    """

    value: Any
    __class__ = property(lambda self: type(self.value))


# Numbers in C, and semaphores.
#
# ``multiprocessing.Value`` and ``Event``, with which processes tell each other how far training is, hold them. Neither
# has an attribute that shows its value.

C_DATA: tuple[type, ...] = (ctypes.c_int.__mro__[-2],)
"""The base of all types of :mod:`ctypes`."""


def _semaphores() -> tuple[type, ...]:
    try:
        semaphores = import_module("_multiprocessing").SemLock
    except (ImportError, AttributeError):
        return ()
    return (semaphores,)


SEMAPHORES = _semaphores()
"""The type of a semaphore of :mod:`multiprocessing`; none on a system that has none."""


def value_of_semaphore(semaphore: Any) -> Any:
    """Number of times that a semaphore may be taken now; None where the system does not tell, as on macOS."""
    try:
        return semaphore._get_value()
    except (AttributeError, NotImplementedError):
        return None
