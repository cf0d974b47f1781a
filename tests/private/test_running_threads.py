"""Threads that may draw random numbers are counted, this one included."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from lightning_rotor.private.running_threads import global_generators, threads


def test_a_thread_of_the_users_counts_while_it_runs() -> None:
    before = threads()
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert threads() == before + 1
    finally:
        done.set()
        thread.join()
    assert threads() == before


def test_a_thread_of_a_pool_counts_while_it_has_work() -> None:
    before = threads()
    started, done = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        done.wait()

    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(wait)
        started.wait()
        assert threads() == before + 1
        done.set()
        work.result()
        # It has handed in the result, and is on its way back to where it waits.
        deadline = time.monotonic() + 30
        while threads() > before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert threads() == before
        assert any(thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate())


def test_the_generator_behind_random_is_the_one_that_draws() -> None:
    generator, _ = global_generators()
    state = generator.getstate()
    random.random()
    assert generator.getstate() != state
    generator.setstate(state)


def test_a_display_that_is_drawn_anew_is_no_thread_that_draws_random_numbers() -> None:
    before = threads()
    with Progress(console=Console(file=StringIO(), force_terminal=True)):
        assert any("rich" in type(each).__module__ for each in threading.enumerate())
        assert threads() == before


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("/environment/site-packages/wandb/sdk/lib/service/service_finalizer.py", False),
        ("/environment/site-packages/ipykernel/iostream.py", False),
        ("/environment/site-packages/IPython/core/history.py", False),
        ("/home/user/project/prefetching.py", True),
        ("/environment/site-packages/prefetching/threads.py", True),
    ],
)
def test_threads_that_log_or_serve_a_notebook_draw_nothing(file: str, counts: bool) -> None:
    done = threading.Event()
    names: dict[str, Any] = {}
    # The code of a thread is known by its file.
    exec(compile("def run(wait):\n    wait()\n", file, "exec"), names)
    before = threads()
    thread = threading.Thread(target=names["run"], args=(done.wait,))
    thread.start()
    try:
        assert threads() == before + counts
    finally:
        done.set()
        thread.join()
