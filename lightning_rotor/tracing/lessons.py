"""What one recording of a module teaches about the next, for inputs of other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType


@dataclass(frozen=True, slots=True)
class Lessons:
    """What came of a recording that holds for some sizes.

    None of it is taken on trust: where a recording for other sizes meets something else, it starts over without lessons.

    Attributes:
        opaque: Modules that had to become one operation, by name, and why. They run as they are, which is right for any size.
        asks_what_was_there: Whether it mattered which tensors and modules were there before.
        closures: Code of the functions that ran and use variables of enclosing ones.
        impossible: Ways to a chain that hold for all sizes, or for none, and why they failed.
    """

    opaque: Mapping[str, str]
    asks_what_was_there: bool
    closures: tuple[CodeType, ...]
    impossible: Mapping[str, str] = field(default_factory=dict)
