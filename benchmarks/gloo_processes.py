"""Real gloo processes, started once, that run one job after the other."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

_PATIENCE_SECONDS = 90


class Processes:
    """So many processes that wait for jobs.

    Args:
        count: Number of processes.
        preload: Modules that the server imports from which the processes are forked.
        patience_seconds: Longest that a job may take.
    """

    def __init__(self, count: int, preload: Sequence[str] = (), *, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self._patience_seconds = patience_seconds
        self._folder = tempfile.TemporaryDirectory()
        self._jobs = [context.Queue() for _ in range(count)]
        self._answers = context.Queue()
        self._numbers = iter(range(10**6))
        self._processes = [
            context.Process(target=_work, args=(rank, self._jobs[rank], self._answers, patience_seconds), daemon=True)
            for rank in range(count)
        ]
        # The server, which the first one starts, finds modules as this process does.
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            for process in self._processes:
                process.start()

    def run(self, world: int, job: Callable[..., Any], *arguments: Any, mortal: tuple[int, ...] = ()) -> list[Any]:
        """What a function gives in each of ``world`` processes that can talk to each other. An exception counts as an answer.

        Those that are ``mortal`` end without one: their exit code stands for it.
        """
        store = str(Path(self._folder.name) / f"store{next(self._numbers)}")
        for rank in range(world):
            self._jobs[rank].put((store, world, job, arguments))
        answers: dict[int, Any] = {}
        for _ in range(world - len(mortal)):
            rank, answer = self._answers.get(timeout=self._patience_seconds)
            answers[rank] = answer
        for rank in mortal:
            self._processes[rank].join(self._patience_seconds)
            answers[rank] = self._processes[rank].exitcode
        return [answers[rank] for rank in range(world)]

    def close(self) -> None:
        """End them."""
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()


class Failure:
    """An exception in a process."""

    def __init__(self, error: BaseException) -> None:
        self.kind, self.message = type(error).__name__, str(error)
        self.text = "".join(traceback.format_exception(error))


def _work(rank: int, jobs: Any, answers: Any, patience_seconds: float) -> None:
    torch.set_num_threads(1)
    while (task := jobs.get()) is not None:
        # The library collects garbage and looks through all objects, of which imported modules have millions. Take these out.
        gc.collect()
        gc.freeze()
        store, world, job, arguments = task
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="tests",
        )  # fmt: skip
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=patience_seconds - 20),
            )
            answer = job(rank, *arguments)
        except BaseException as error:
            answer = Failure(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        answers.put((rank, answer))
