"""The bars that show up when measuring or planning takes long."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.errors import LiveError
from rich.progress import Progress

from lightning_rotor.profiling.progress_bar import measuring_progress, planning_progress


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


class Terminal(Console):
    """A console that says when something is written to it."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), force_terminal=True, width=80)
        self.written = threading.Event()

    def print(self, *args: Any, **kwargs: Any) -> None:
        super().print(*args, **kwargs)
        self.written.set()

    @property
    def text(self) -> str:
        return self.file.getvalue()


def test_long_planning_shows_a_sign_of_life_and_leaves_no_thread() -> None:
    before, terminal = threading.active_count(), Terminal()
    with planning_progress(300, long_seconds=0.0, console=terminal):
        assert terminal.written.wait(60)
    assert "planning 300 stages" in terminal.text
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "settings", [{"stages": 300, "enabled": False}, {"stages": 10}, {"stages": 300, "long_seconds": 3600.0}]
)
def test_short_planning_shows_nothing_and_leaves_no_thread(settings: dict[str, Any]) -> None:
    before, terminal = threading.active_count(), Terminal()
    with planning_progress(**{"long_seconds": 0.0, **settings}, console=terminal):
        pass
    assert terminal.text == ""
    assert threading.active_count() == before


def test_an_error_of_the_planner_ends_its_bar() -> None:
    before, terminal = threading.active_count(), Terminal()

    def fail() -> None:
        with planning_progress(300, long_seconds=0.0, console=terminal):
            assert terminal.written.wait(60)
            raise ValueError("nothing fits")

    with pytest.raises(ValueError, match="nothing fits"):
        fail()
    assert threading.active_count() == before


def test_a_terminal_that_another_display_has_is_left_alone() -> None:
    class Taken(Terminal):
        def set_live(self, live: Any) -> bool:
            self.written.set()
            raise LiveError("taken")

    terminal = Taken()
    with planning_progress(300, long_seconds=0.0, console=terminal):
        assert terminal.written.wait(60)
    assert "planning" not in terminal.text
