"""Room for functions that follow segments into one another: Python allows a thousand calls inside one another, whoever makes them."""

from __future__ import annotations

import sys

# What programs have left of their limit, about.
_USUAL = 1000


def make_room_for(calls: int) -> None:
    """Let so many calls more than usual be inside one another; in all threads, and for good, since another thread may need it by then."""
    if sys.getrecursionlimit() < _USUAL + calls:
        sys.setrecursionlimit(_USUAL + calls)
