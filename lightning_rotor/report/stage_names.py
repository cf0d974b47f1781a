"""Names of stages where room is short: in tables, in boxes of drawings, on axes."""

from __future__ import annotations

from collections.abc import Callable

_MOST_LETTERS = 30


def from_to(first: str, last: str, shorten: Callable[[str], str]) -> str:
    """Name of the stages from one to another, its parts shortened."""
    # A stage that was merged of several is named like a run of them already.
    start = first.partition(" … ")[0]
    end = last.rpartition(" … ")[2]
    if start == end:
        return shorten(start)
    return f"{shorten(start)} … {shorten(_relative_name(start, end))}"


def shortened(name: str, most: int = _MOST_LETTERS) -> str:
    """A name without its middle if it is long: the end tells most, the beginning tells where it is."""
    if len(name) <= most:
        return name
    head = most // 3
    tail = most - head - 1
    return f"{name[:head]}…{name[len(name) - tail :]}"


def _relative_name(start: str, end: str) -> str:
    """Name of a module without the modules that another one is in, too: ``d`` for ``a.b.d`` beside ``a.b.c``."""
    around_start = start.split(".")[:-1]
    parts = end.split(".")
    shared = 0
    # Without the last part, so that a name is left whatever the two share.
    for outer, part in zip(around_start, parts[:-1], strict=False):
        if outer != part:
            break
        shared += 1
    return ".".join(parts[shared:])


def times(count: int) -> str:
    """A count of runs in words."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
