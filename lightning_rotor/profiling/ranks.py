"""Questions of code that runs again, for cutting and measuring, to other processes that run it at the same time.

Processes that exchange messages in some code must run it equally often, or their messages pair up wrongly. So whatever
decides whether a stage runs once more is asked here: one process alone answers for itself, and several agree
(:class:`lightning_rotor.planned.agreement.Agreement`).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext


class Ranks:
    """Processes that exchange messages in some code, and so run it equally often; this one alone, in this class."""

    @property
    def watches(self) -> bool:
        """True if there could be messages at all."""
        return False

    @property
    def together(self) -> bool:
        """True if others run the code whenever this process does: neither times nor sizes may decide over it."""
        return False

    def any(self, is_so: bool) -> bool:
        """True if it is so in this process or in one that runs together with it."""
        return is_so

    def common(self, numbers: Set[int]) -> Set[int]:
        """The numbers of these that all processes have which run together."""
        return numbers

    def alike(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Context of code that asks each other about stages with these names in turn: all must have the same.

        They are compared when they are together: at once, or in the middle.
        """
        return nullcontext()

    def watching(self, *, marks: bool = True) -> AbstractContextManager[None]:
        """Context of code that all run in the same way so far. Those that exchange a message in it are together then.

        ``marks``: what was received counts as a change in place.
        """
        return nullcontext()


ALONE = Ranks()
"""This process, which nobody waits for."""
