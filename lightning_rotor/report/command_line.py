"""Reads the command line, and turns errors into messages."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

from lightning_rotor.errors import RotorError, RotorWarning
from lightning_rotor.report.command_options import Options, parse
from lightning_rotor.report.command_output import draw, write_batch_sizes, write_json, write_tables
from lightning_rotor.report.command_planning import find_batch_sizes, find_plan
from lightning_rotor.report.style import require_matplotlib

_FAILED = 2


def main(arguments: Sequence[str] | None = None, *, program: str = "lightning-rotor") -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; by default those of the process.
        program: How it was called, for its usage and examples.
    Returns:
        Exit status: 0, or 2 if there is no plan, whatever the reason. Messages go to the error stream.
    """
    try:
        options = parse(arguments, program=program)
    except SystemExit as end:  # argparse has said what is wrong, or helped
        return end.code if isinstance(end.code, int) else _FAILED
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RotorWarning)
            _run(options)
        for warning in caught:
            _say(f"warning: {warning.message}", sys.stderr)
    except RotorError as error:
        return _fail(error, f"error: {error}", options)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the user's model can raise anything
        return _fail(error, f"error: {type(error).__name__}: {error} (--traceback shows where)", options)
    return 0


def _run(options: Options) -> None:
    if options.batch_sizes is not None:
        write_batch_sizes(find_batch_sizes(options), options, sys.stdout)
        return
    if options.plot or options.plot_curve:
        require_matplotlib()  # before minutes of measuring
    found = find_plan(options)
    if options.json:
        write_json(found, sys.stdout)
    else:
        write_tables(found, sys.stdout)
    for path in draw(found, options):
        _say(f"wrote {path}", sys.stderr)


def _fail(error: Exception, message: str, options: Options) -> int:
    if options.traceback:
        traceback.print_exception(error, file=sys.stderr)
    _say(message, sys.stderr)
    return _FAILED


def _say(message: str, stream: TextIO) -> None:
    stream.write(f"{message}\n")
