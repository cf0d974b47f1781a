"""Progress bars for measuring and planning, which stay out of sight while those are quick."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# Less is over before anybody wonders, and a bar that comes and goes at once would flicker.
_LONG_SECONDS = 2.0
_REFRESH_SECONDS = 0.2
# Chains of fewer stages are planned within a fraction of a second, and no thread is worth starting for them.
_LONG_CHAIN = 64


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
        # The clock is asked when a stage is done, so a bar costs no thread.
        if self._enabled and self._bar is None and self._clock() - self._started >= _LONG_SECONDS:
            self._appear(total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def _appear(self, total: int) -> None:
        # Imported here, as most programs never see a bar and would wait for its import at their start.
        from rich.console import Console
        from rich.errors import LiveError
        from rich.progress import Progress

        bar = Progress(console=self._console or Console(stderr=True), transient=True)
        bar.add_task("measuring stages", total=total)
        try:
            self._displays.enter_context(bar)
        except LiveError:
            # Another live display, such as the trainer's own bar, has the terminal.
            self._enabled = False
        else:
            self._bar = bar


@contextmanager
def planning_progress(
    stages: int, *, enabled: bool = True, long_seconds: float = _LONG_SECONDS, console: Console | None = None
) -> Iterator[None]:
    """Show for how many seconds a chain is being planned once that takes long, until the end."""
    if not enabled or stages < _LONG_CHAIN:
        yield
        return
    # The planner does not know how much is left, and its compiled loops give Python's lock away. So another thread
    # shows the seconds that have passed.
    done = threading.Event()
    arguments = (stages, done, long_seconds, console)
    # A daemon, so that a display which hangs cannot keep the process from ending.
    thread = threading.Thread(target=_show_seconds, args=arguments, name="planning progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show_seconds(stages: int, done: threading.Event, long_seconds: float, console: Console | None) -> None:
    """Show for how long a chain has been planned for, from a moment on until it is done."""
    if done.wait(long_seconds):
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # What is only shown never ends training: the stream may be closed, or another display have the terminal.
    with suppress(Exception):
        bar = Progress(*columns, console=console or Console(stderr=True), transient=True, auto_refresh=False)
        bar.add_task(f"planning {stages} stages", total=None)
        with bar:
            while not done.wait(_REFRESH_SECONDS):
                bar.refresh()
