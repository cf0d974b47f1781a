"""A progress bar for measuring, which stays out of sight while measuring is quick."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.errors import LiveError
from rich.progress import Progress


class MeasuringProgress:
    """Shows how many stages are measured once that takes longer than a delay, and vanishes at the end.

    Args:
        enabled: False never shows anything.
        delay_seconds: How long to wait.
        clock: Seconds, for tests.
        console: Where to draw; by default the error stream, so that piped output stays clean.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        delay_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self._enabled = enabled
        self._delay_seconds = delay_seconds
        self._clock = clock
        self._console = console or Console(stderr=True)
        self._started = 0.0
        self._bar: Progress | None = None

    def __enter__(self) -> MeasuringProgress:
        self._started = self._clock()
        return self

    def __call__(self, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` stages are measured."""
        if self._enabled and self._bar is None and self._clock() - self._started >= self._delay_seconds:
            self._bar = Progress(console=self._console, transient=True)
            self._bar.add_task("measuring stages", total=total)
            try:
                self._bar.start()
            except LiveError:  # another live display, such as the trainer's own bar, has the terminal
                self._enabled, self._bar = False, None
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
