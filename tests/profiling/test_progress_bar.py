"""The bar that shows up when measuring takes long."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress

from lightning_rotor.profiling.progress_bar import measuring_progress


class Clock:
    """Gives the times it was made with, one a call."""

    def __init__(self, *times: float) -> None:
        self._times: Iterator[float] = iter(times)

    def __call__(self) -> float:
        return next(self._times)


def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80)


def test_quick_measuring_shows_nothing() -> None:
    quiet = console()
    with measuring_progress(clock=Clock(0.0, 0.5, 1.9), console=quiet) as progress:
        progress(1, 3)
        progress(2, 3)
    assert quiet.file.getvalue() == ""  # type: ignore[attr-defined]


def test_slow_measuring_shows_a_bar_and_takes_it_away() -> None:
    loud = console()
    with measuring_progress(clock=Clock(0.0, 1.0, 2.5), console=loud) as progress:
        progress(1, 4)
        progress(2, 4)
        progress(3, 4)
    printed = loud.file.getvalue()  # type: ignore[attr-defined]
    assert "measuring stages" in printed
    assert printed.endswith("\x1b[2K")  # the line is erased


def test_it_can_be_switched_off() -> None:
    quiet = console()
    with measuring_progress(enabled=False, clock=Clock(0.0, 9.0), console=quiet) as progress:
        progress(1, 4)
    assert quiet.file.getvalue() == ""  # type: ignore[attr-defined]


def test_it_works_beside_another_bar() -> None:
    shared = console()
    with Progress(console=shared) as other, measuring_progress(clock=Clock(0.0, 9.0), console=shared) as progress:
        other.add_task("training", total=2)
        progress(1, 4)
        progress(4, 4)
    assert "training" in shared.file.getvalue()  # type: ignore[attr-defined]
