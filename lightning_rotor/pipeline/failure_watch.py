r"""Tells every process at once that another one has failed or is gone, and why.

Processes wait for a dead one for long: gloo notices on connections in use, NCCL after a timeout, and launchers end a
host's processes without a word. So all hold a line to the first; the system hangs up for a process that is killed::

    process 1 ──┐           ┌── "process 2 failed: RuntimeError: this layer broke"
    process 2 ──┼── first ──┤        or the line is dead: "process 2 was killed"
    process 3 ──┘           └──► all others, who end with these words
"""

import logging
import os
import secrets
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

_log = logging.getLogger(__name__)

GRACE_SECONDS = 15.0
"""How long a process that was told of another's end may take to end by itself."""
_HEARD_SECONDS = 5.0
_GOODBYE = b""


class FailureWatch:
    """Lines between the processes of a job, made on all of them at once."""

    def __init__(
        self, rank: int, size: int, *, host: str, from_first: Callable[[Any], Any], grace_seconds: float = GRACE_SECONDS
    ) -> None:
        self._rank, self._grace_seconds = rank, grace_seconds
        self._known, self._ended = threading.Event(), threading.Event()
        self._cause, self._lock = "", threading.Lock()
        self._lines: dict[int, Connection] = {}
        if rank == 0:
            key = secrets.token_bytes(32)
            listener = Listener(("", 0), backlog=size, authkey=key)
            from_first((listener.address[1], key))
            self._start(self._welcome, listener, size - 1)
            return
        port, key = from_first(None)
        try:
            self._lines[0] = Client((host, port), authkey=key)
        except OSError as error:
            _log.warning(
                "process %d cannot reach the first at %s:%d (%s): it will hear of another's end by torch.distributed "
                "alone",
                *(rank, host, port, error),
            )
            return
        _say(self._lines[0], str(rank).encode())
        self._start(self._listen, self._lines[0], 0)

    @staticmethod
    def _start(work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name="lightning-rotor failure watch", daemon=True).start()

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process ends with an error, unless another one did first.

        Another one's error is put in front of this one's error in talking to it, if it is heard in time.
        """
        if _met_in_talking(error) and self._known.wait(_HEARD_SECONDS) and not str(error).startswith(self._cause):
            error.args = (f"{self._cause}. Here: {error}",)
        self._ended.set()
        self._learn(f"process {self._rank} failed: {type(error).__name__}: {error}", told_by=self._rank)

    def close(self) -> None:
        """Sign off: this process ends as it should, or has told its error."""
        self._ended.set()
        with self._lock:
            for line in self._lines.values():
                _say(line, _GOODBYE)

    def _welcome(self, listener: Listener, others: int) -> None:
        """On the first process: accept the others' lines, and listen to each."""
        with listener:
            while len(self._lines) < others:
                try:
                    line: Any = listener.accept()
                    rank = int(line.recv_bytes())
                except (AuthenticationError, EOFError, OSError):  # another program's connection
                    continue
                with self._lock:
                    self._lines[rank] = line
                    if self._known.is_set():
                        _say(line, self._cause.encode())
                    if self._ended.is_set():
                        _say(line, _GOODBYE)
                self._start(self._listen, line, rank)

    def _listen(self, line: Connection, rank: int) -> None:
        """Wait for the one message of another process."""
        try:
            words = line.recv_bytes()
        except (EOFError, OSError):
            self._learn(f"process {rank} is gone without a word: it was killed, or ran out of memory", rank)
        else:
            if words != _GOODBYE:
                self._learn(words.decode(), rank)

    def _learn(self, cause: str, told_by: int) -> None:
        with self._lock:
            if self._known.is_set():
                return
            self._cause = cause
            self._known.set()
            for rank, line in self._lines.items():
                if rank != told_by:
                    _say(line, cause.encode())
        if told_by != self._rank:
            self._start(self._end_in_time)

    def _end_in_time(self) -> None:
        if not self._ended.wait(self._grace_seconds):
            # The main thread waits for a dead process in a call that no exception reaches.
            _log.critical("process %d ends here, since %s", self._rank, self._cause)
            logging.shutdown()
            os._exit(1)


def forget_frames(error: BaseException) -> None:
    """Drop torch.distributed's and pipelines' local variables, and so connections, from an error; keep the user's."""
    seen: set[int] = set()
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        links += [link.__cause__, link.__context__]
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if str(frame.f_globals.get("__name__", "")).startswith(("torch.distributed", "lightning_rotor.")):
                with suppress(RuntimeError):  # it still runs
                    frame.clear()


def _met_in_talking(error: BaseException) -> bool:
    """True if torch.distributed raised the error. Gloo's are plain RuntimeErrors, so the traceback tells."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or not isinstance(error, RuntimeError):
        return False
    return str(frames[-1].f_globals.get("__name__", "")).startswith("torch.distributed")


def _say(line: Connection, words: bytes) -> None:
    with suppress(OSError):  # the receiver is gone
        line.send_bytes(words)
