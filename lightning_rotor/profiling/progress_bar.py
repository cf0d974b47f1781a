"""A progress bar for measuring, which stays out of sight while measuring is quick."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.errors import LiveError
from rich.progress import Progress

_LONG_SECONDS = 2.0


@contextmanager
def measuring_progress(
    *,
    enabled: bool = True,
    clock: Callable[[], float] = time.monotonic,
    console: Console | None = None,
) -> Iterator[Callable[[int, int], None]]:
    """Show how many stages are measured once that takes long, on the error stream by default, until the end."""
    with ExitStack() as displays:
        yield _Bar(displays, enabled, clock, console).show


class _Bar:
    """A bar that appears when time has passed, on a terminal that nobody else uses."""

    def __init__(
        self,
        displays: ExitStack,
        enabled: bool,
        clock: Callable[[], float],
        console: Console | None,
    ) -> None:
        self._displays = displays
        self._enabled = enabled
        self._clock = clock
        self._console = console
        self._started = clock()
        self._bar: Progress | None = None

    def show(self, done: int, total: int) -> None:
        """Tell that so many stages of all are measured."""
        if self._enabled and self._bar is None and self._clock() - self._started >= _LONG_SECONDS:
            self._appear(total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def _appear(self, total: int) -> None:
        bar = Progress(console=self._console or Console(stderr=True), transient=True)
        bar.add_task("measuring stages", total=total)
        try:
            self._displays.enter_context(bar)
        except LiveError:
            # Another live display, such as the trainer's own bar, has the terminal.
            self._enabled = False
        else:
            self._bar = bar
