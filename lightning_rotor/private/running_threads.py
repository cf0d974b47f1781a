"""Threads that may draw random numbers, and the generators that all of them share."""

import os
import random
import sys
import threading
from concurrent.futures import thread as pools
from types import FrameType
from typing import Any

import numpy as np

_DRAW_NOTHING = tuple(
    f"{os.sep}{path.replace('/', os.sep)}"
    for path in (
        # pytest-xdist's channel.
        "execnet/",
        # The monitor of progress bars, and what draws them anew.
        "tqdm/",
        "rich/live.py",
        # Hands on what was put into a queue: DataLoader has one for each worker.
        "multiprocessing/queues.py",
        # Hands out file descriptors, once a tensor was sent to another process.
        "multiprocessing/resource_sharer.py",
        # Hands on what a pool of processes is to do.
        "concurrent/futures/process.py",
        "torch/utils/data/_utils/pin_memory.py",
        "tensorboard/summary/writer/event_file_writer.py",
        # Copies what a plan moves to a disk.
        "lightning_rotor/execution/file_memory.py",
        # Waits for what other processes compile.
        "torch/_inductor/",
        # Send what was logged.
        *("wandb/sdk/", "mlflow/", "comet_ml/", "neptune/", "clearml/", "aim/", "sentry_sdk/", "opentelemetry/"),
        # Serve a notebook and a debugger.
        *("ipykernel/", "IPython/core/history.py", "tornado/", "zmq/", "debugpy/", "pydevd"),
    )
)
"""Code that runs in threads of its own for as long as the process lives, and draws no random numbers."""


def threads() -> int:
    """Number of threads that run Python code and may draw random numbers, also unknown to ``threading``."""
    frames = sys._current_frames()
    # A frame that holds itself would keep the tensors of all its callers alive.
    frames.pop(threading.get_ident())
    # This thread.
    count = 1
    for frame in frames.values():
        # A worker of a ThreadPoolExecutor that waits for work, as Inductor leaves two behind. Who gives it some counts.
        if frame.f_code is pools._worker.__code__:
            continue
        file = _started_in(frame)
        if not any(path in file for path in _DRAW_NOTHING):
            count += 1
    return count


def _started_in(frame: FrameType) -> str:
    """File of the code that a thread was started for: the outermost one besides that of ``threading``.

    Not any on the stack: a user's thread may wait in a queue, too.
    """
    file = ""
    current: FrameType | None = frame
    while current is not None:
        if current.f_code.co_filename != threading.__file__:
            file = current.f_code.co_filename
        current = current.f_back
    return file


def global_generators() -> tuple[Any, ...]:
    """The objects behind the functions of ``random`` and ``numpy.random``."""
    return random._inst, np.random.mtrand._rand
