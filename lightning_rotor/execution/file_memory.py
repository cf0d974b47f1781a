"""A file as the other memory of a training on the CPU: one thread writes to it, and one reads from it, each in order.

Reads and writes let other threads of Python run. A memory map would be as fast, but what it maps counts as resident.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

from lightning_rotor.errors import OffloadError
from lightning_rotor.execution.places import Places
from lightning_rotor.units import format_bytes


class FileCopy:
    """A storage on its way to a file or back, or in it; its place in the file is free again when it is dropped."""

    __slots__ = ("__weakref__", "_at", "_back", "_memory", "_out", "_size_bytes", "_target")

    def __init__(self, memory: FileMemory, storage: torch.UntypedStorage, at: int) -> None:
        self._memory = memory
        self._size_bytes = storage.nbytes()
        self._at = at
        self._target: torch.UntypedStorage | None = None
        self._back: Future[None] | None = None
        # In a list, which the job empties: whoever waits for it may then drop the last reference.
        self._out = memory.writer.submit(memory.write, [storage], self._at)

    def wait_out(self) -> None:
        """Wait until the storage is in the file."""
        self._out.result()

    def begin_back(self) -> None:
        """Take memory, and begin to read into it."""
        self._target = torch.empty(self._size_bytes, dtype=torch.uint8).untyped_storage()
        self._back = self._memory.reader.submit(self._memory.read, [self._target], self._at, self._out)

    def wait_back(self) -> torch.UntypedStorage:
        """Wait until the memory holds what was written, and give it away."""
        assert self._back is not None
        assert self._target is not None
        self._back.result()
        storage, self._target = self._target, None
        return storage

    def __del__(self) -> None:
        # Without a reference to this: it is gone when the job is done.
        give_back = partial(_give_back, self._memory.places, self._at, self._size_bytes)
        last = self._back if self._back is not None else self._out
        # A job that has not begun may be left out; one that runs still uses the place.
        last.cancel()
        last.add_done_callback(give_back)


class FileMemory:
    """A file without a name in a folder, which is gone with the process.

    Args:
        folder: Must exist.
        limit_bytes: Most that may be in it; None for what the disk has.
    Raises:
        OffloadError: The folder cannot be written to.
    """

    def __init__(self, folder: Path | str, *, limit_bytes: int | None = None) -> None:
        self._folder = Path(folder)
        try:
            self._file = _File(self._folder)
        except OSError as error:
            raise OffloadError(
                f"no file can be made in {str(self._folder)!r} for what moves to disk ({error.strerror}): expected a "
                'folder that exists and can be written to, such as offload="disk:/tmp"'
            ) from error
        weakref.finalize(self, self._file.close)
        self.places = Places()
        self._limit_bytes = limit_bytes
        # Two, as the two directions of a link are: a copy back need not wait for those that are still going out.
        self.writer = _Worker("rotor-out")
        self.reader = _Worker("rotor-back")

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that hold something."""
        return self.places.used_bytes

    def copy_out(self, storage: torch.UntypedStorage) -> FileCopy:
        """Begin to write a storage, which the file holds until it is written."""
        size_bytes = storage.nbytes()
        limit_bytes = self._limit_bytes
        taken_bytes = self.places.used_bytes + size_bytes
        # A plan has kept the limit. Several calls whose backwards are still to come may not.
        if limit_bytes is not None and taken_bytes > limit_bytes:
            raise OffloadError(
                f"what moves to disk takes {format_bytes(taken_bytes)}, more than its limit of "
                f"{format_bytes(limit_bytes)}: expected calls whose backwards come one after the other. Raise the "
                "limit, or train without offload"
            )
        at = self.places.take(size_bytes)
        assert at is not None
        return FileCopy(self, storage, at)

    def reserve(self, size_bytes: int) -> None:
        """Nothing is to be done: the file grows as it is written to."""

    def drain(self) -> None:
        """Wait for all copies."""
        for thread in (self.writer, self.reader):
            thread.submit(_nothing).result()

    def write(self, box: list[torch.UntypedStorage], at: int) -> None:
        """Write the storage in a box, and drop it."""
        storage = box.pop()
        self._whole(self._file.write, storage, at, "written to")

    def read(self, box: list[torch.UntypedStorage], at: int, written: Future[None]) -> None:
        """Read into the storage in a box once it is written, and drop it."""
        written.result()
        storage = box.pop()
        self._whole(self._file.read_into, storage, at, "read from")

    def _whole(
        self,
        copy: Callable[[memoryview, int], int],
        storage: torch.UntypedStorage,
        at: int,
        verb: str,
    ) -> None:
        """Copy all bytes of a storage; the system may do less at a time."""
        # Over the storage's own address: a bytes object would be a second copy of it.
        array = ctypes.c_char * storage.nbytes()
        memory = memoryview(array.from_address(storage.data_ptr())).cast("B")
        done = 0
        try:
            while done < len(memory):
                count = copy(memory[done:], at + done)
                if count <= 0:
                    raise OSError(0, "the file ends")
                done += count
        except OSError as error:
            raise OffloadError(
                f"{format_bytes(storage.nbytes())} could not be {verb} the disk at {str(self._folder)!r} "
                f"({error.strerror}), where a plan moves what stages hold: expected room for it. Free some, name "
                "another folder, or train without offload"
            ) from error
        finally:
            # A view that stays in a traceback would point to memory that is given back.
            memory.release()


class _File:
    """A file without a name, which one thread may read while another one writes to it."""

    def __init__(self, folder: Path) -> None:
        self._file: FileIO = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed with the memory
        self._lock = threading.Lock()
        self.close = self._file.close

    def write(self, memory: memoryview, at: int) -> int:
        """Write at a place; returns how many bytes were written."""
        if hasattr(os, "pwrite"):
            return os.pwrite(self._file.fileno(), memory, at)
        # Windows: a file has one position, for all threads.
        with self._lock:
            self._file.seek(at)
            return self._file.write(memory)

    def read_into(self, memory: memoryview, at: int) -> int:
        """Fill memory from a place on; returns how many bytes were read."""
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [memory], at)
        with self._lock:
            self._file.seek(at)
            return self._file.readinto(memory)


_Job: TypeAlias = tuple["Future[None]", Callable[..., None], tuple[Any, ...]]


class _Worker:
    """A thread that does one job after the other, until this is dropped.

    No pool of Python's: whether a thread may draw random numbers is told by the file that it was started in.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[..., None], *args: Any) -> Future[None]:
        """Do a job behind all that were submitted before."""
        future: Future[None] = Future()
        self._jobs.put((future, job, args))
        return future


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, function, args = job
        if future.set_running_or_notify_cancel():
            try:
                function(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        # While the thread waits, no name may hold what the last job was about.
        del job, future, function, args


def _nothing() -> None:
    pass


def _give_back(places: Places, at: int, size_bytes: int, _: Future[None]) -> None:
    places.give_back(at, size_bytes)
