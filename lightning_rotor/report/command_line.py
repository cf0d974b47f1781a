"""``lightning-rotor plan`` and ``advise``: what can be asked, how it is planned, the answer, and errors as messages.

options ──► model, optimizer, batch ──► profile (measured or estimated) ──► plan ──► tables, JSON, pictures
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from lightning_rotor.errors import RotorError, RotorWarning
from lightning_rotor.report.advice_table import advice_as_json, advice_parts
from lightning_rotor.report.command_answer import answer_pictures, answer_tables, batch_sizes_as_json, plan_as_json
from lightning_rotor.report.command_options import parsed_options
from lightning_rotor.report.command_plan import advice_for, answer_to, find_batch_sizes
from lightning_rotor.report.figures import PlotError, new_figure

_FAILED = 2
# Where there is no terminal, as in a pipe or a log. rich would take 80 there.
_WIDTH = 100


def main(arguments: Sequence[str] | None = None, *, program: str = "lightning-rotor") -> int:
    """Run the command line of ``program``; returns 0, or 2 if there is no plan. Messages go to the error stream."""
    try:
        options = parsed_options(arguments, program)
    except SystemExit as end:
        # argparse has said what is wrong, or helped.
        return end.code if isinstance(end.code, int) else _FAILED
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RotorWarning)
            _run(options)
        for warning in caught:
            _say(f"warning: {warning.message}")
    except KeyboardInterrupt:
        return 130
    # The user's model can raise anything.
    except Exception as error:
        if options.traceback:
            traceback.print_exception(error)
        message = f"{type(error).__name__}: {error} (--traceback shows where)"
        _say(f"error: {error if isinstance(error, RotorError) else message}")
        return _FAILED
    return 0


def _run(options: Namespace) -> None:
    if options.command == "advise":
        advice = advice_for(options)
        _write(advice_as_json(advice, options.model) if options.json else advice_parts(advice))
        return
    if options.batch_sizes is not None:
        sizes = find_batch_sizes(options)
        _write(batch_sizes_as_json(sizes, options.model) if options.json else [sizes])
        return
    # An error comes before minutes of measuring.
    _check_pictures(options)
    answer = answer_to(options)
    _write(plan_as_json(answer) if options.json else answer_tables(answer))
    for path, save in answer_pictures(answer):
        try:
            save(path)
        except (OSError, ValueError) as error:
            raise _unwritten(str(error)) from error
        _say(f"wrote {path}")


def _check_pictures(options: Namespace) -> None:
    """``PlotError`` if a picture that was asked for cannot be drawn, or not be written where it is to be."""
    drawn = [path for path in (options.plot, options.plot_curve) if path is not None]
    if drawn:
        new_figure(1, 1)
    # Drawings of stages are SVG that rich writes, and need no matplotlib.
    for path in (*drawn, options.draw):
        if path is None:
            continue
        formats = (".svg",) if path == options.draw else (".png", ".svg", ".pdf")
        if path.suffix.lower() not in formats:
            reason = f"{str(path)!r} ends in {path.suffix!r}" if path.suffix else f"{str(path)!r} has no ending"
        elif not path.parent.is_dir():
            reason = f"there is no folder {str(path.parent)!r}"
        elif path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            reason = f"{str(path)!r} cannot be written to"
        else:
            continue
        raise _unwritten(reason)


def _unwritten(reason: str) -> PlotError:
    return PlotError(
        f"the picture cannot be written: {reason}. Expected a name that ends in .png, .svg or .pdf (.svg for --draw), "
        "in a folder that exists"
    )


def _write(answer: dict[str, Any] | Iterable[Any]) -> None:
    """JSON, or tables and lines of text."""
    if isinstance(answer, dict):
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
        return
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH
    console = Console(file=sys.stdout, width=width, highlight=False)
    for part in answer:
        console.print(part, soft_wrap=isinstance(part, str))


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")
