"""Tables of results, in terminals and notebooks.

A plan, a curve or a chain is data, and knows no table. Whoever draws one registers how::

    class Frontier(Shown)                       planning: data
    @table_of.register                          report: a table of rich
    def frontier_table(frontier: Frontier, ...)

so ``print(frontier)``, ``rich.print(frontier)`` and a notebook show it.
"""

from __future__ import annotations

import io
import logging
import sys
from functools import singledispatch
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Imported where something is shown: most programs show nothing, and would wait for the import at their start.
    from rich.console import RenderableType
    from rich.text import Text

_log = logging.getLogger(__name__)


# Registers tables and pictures when it is imported, which takes 50 ms and is seldom wanted: so at the first use.
_REPORT = "lightning_rotor.report"


@singledispatch
def table_of(result: object) -> RenderableType:
    """Tables of a result for ``rich.print``; registered by type."""
    import_module(_REPORT)
    draw = table_of.dispatch(type(result))
    if draw is table_of.dispatch(object):
        raise TypeError(f"there is no table of {type(result).__name__}: expected a type that {_REPORT} registers")
    return draw(result)


@singledispatch
def html_of(result: object) -> str:
    """HTML of a result for notebooks; registered by type."""
    import_module(_REPORT)
    draw = html_of.dispatch(type(result))
    if draw is html_of.dispatch(object):
        raise TypeError(f"there is no HTML of {type(result).__name__}: expected a type that {_REPORT} registers")
    return draw(result)


class Notebook:
    """A result that notebooks show as registered in :func:`html_of`."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return html_of(self)


class Shown(Notebook):
    """A result that is printed as registered in :func:`table_of`, too."""

    __slots__ = ()

    def __rich__(self) -> RenderableType:
        return table_of(self)

    def __str__(self) -> str:
        return rendered(table_of(self))


def cell(text: str) -> Text:
    """A text as it is: names may hold what rich takes for markup, or no terminal can show."""
    from rich.text import Text

    return Text(printable(text))


def printable(text: str) -> str:
    """A text with control characters, halves of characters and marks of direction as Python spells them."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def show(table: RenderableType) -> None:
    """Print a table in what the terminal can show. What is only shown never ends training."""
    from rich.console import Console

    console = Console()
    try:
        try:
            console.print(table)
        except UnicodeEncodeError:
            plain = io.TextIOWrapper(io.BytesIO(), console.encoding, errors="replace")
            Console(file=plain, width=console.width, force_terminal=False, force_jupyter=False).print(table)
            plain.seek(0)
            sys.stdout.write(plain.read())
    except Exception as error:  # a closed stream, or another display that has the terminal
        _log.warning("a table could not be shown (%s: %s)", type(error).__name__, error)


def rendered(*tables: RenderableType, width: int = 100) -> str:
    """Tables as text without colours, without a line break at the end."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, force_terminal=False, force_jupyter=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(*tables)
    lines = captured.get().rstrip("\n").splitlines()
    return "\n".join(line.rstrip() for line in lines)
