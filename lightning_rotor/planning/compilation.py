"""The dynamic program's loops in machine code, where Numba can compile them.

Compiling takes about ten seconds, once for an installation, and must not be in the way of a first step. So a process of
its own fills Numba's cache, and plain loops, which find the same plans, serve until it is done::

    this process     ─ measures ─────────────── plans: code is there? ─ no ─► plain loops, or wait, if sooner done
                       │ prepare()                     ▲
    another process    └► compiles, least urgent of all ┘ a marker beside the code says that it is complete

A process and not a thread: a thread that compiles holds Python's lock while stages are timed, and generators that
several threads may draw from cannot be set back. It goes on if this process ends. Of several processes (ranks, jobs
that share a home) one compiles: the others find its lock.

Windows has neither such locks nor ``fork``. There plain loops serve, unless compiling here takes less time than they.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import subprocess
import sys
import time
from functools import cache
from importlib import import_module, util
from pathlib import Path
from types import ModuleType

from lightning_rotor.planning import kernels

_log = logging.getLogger(__name__)

_NAME = kernels.__name__.replace("kernels", "compiled_kernels")
_SOURCE = Path(kernels.__file__)

# Seconds that compiling takes on a machine that is not busy, and after which something must have gone wrong.
_COMPILING_SECONDS = 15.0
_MOST_SECONDS = 120.0
_POLL_SECONDS = 0.05
# Least urgent of all: it disturbs no measurement, and gets a core as soon as there is an idle one.
_NICENESS = 19
# Address space that must be left: Numba, LLVM and the loops' code map 309 MiB. With less, loading has failed with
# OSError and MemoryError, and with 250 MiB it has never ended.
_ADDRESS_SPACE_BYTES = 512 * 2**20

# Runs without this package, whose import takes seconds, and looks for modules where this process does and nowhere else.
# The first process ends once it has the lock; a child of it keeps the lock and compiles, so nobody has to wait for it.
_SCRIPT = """
import json, sys
names, source, lock, marker, niceness, sys.path[:] = json.loads(sys.argv[1])
import fcntl, os
from importlib import util
held = open(lock, "a")
try:
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    os._exit(0)
os.utime(lock)
if os.fork():
    os._exit(0)
os.setsid()
os.nice(niceness)
if not os.path.exists(marker):
    for name in names:
        specification = util.spec_from_file_location(name, source)
        sys.modules[name] = util.module_from_spec(specification)
        specification.loader.exec_module(sys.modules[name])
    plain, module = map(sys.modules.get, names)
    plain.compile_all(module)
    if module.solve.stats.cache_path == os.path.dirname(marker):
        open(marker, "w").close()
"""


def prepare() -> None:
    """Let another process compile, unless that was done before, is being done, or cannot be done."""
    module = _decorated()
    if module is not None and _can_lock() and not _marker(module).exists():
        _let_compile(module)


def compiled_kernels(patience_seconds: float = math.inf) -> ModuleType | None:
    """The module :mod:`.kernels` in machine code; None if it is not there, or cannot be, and planning takes longer.

    Args:
        patience_seconds: How long the plain loops would take. Code that is being compiled is waited for if it will be
            there before. By default it is waited for in any case, and compiled here if no other process can.
    """
    module = _decorated()
    if module is None or _marker(module).exists():
        return module
    if not _can_lock():
        return module if patience_seconds > _COMPILING_SECONDS else None
    _let_compile(module)
    begin = time.monotonic()
    while _is_being_compiled(module):
        waited_seconds = time.monotonic() - begin
        if waited_seconds > min(patience_seconds, _MOST_SECONDS):
            break
        if patience_seconds < _COMPILING_SECONDS - (time.time() - _lock(module).stat().st_mtime):
            break
        time.sleep(_POLL_SECONDS)
    # Whoever waits without an end gets functions that compile when they are first called.
    return module if math.isinf(patience_seconds) or _marker(module).exists() else None


@cache
def _decorated() -> ModuleType | None:
    """The module whose functions Numba compiles when they are first called, unless it finds their code in its cache."""
    if not _has_address_space():
        return None
    try:
        import numba
    except (ImportError, OSError) as error:
        # Numba raises an ImportError, too, if it is too old for NumPy; llvmlite an OSError if its library is broken.
        _log.debug("long chains are planned without compilation: %s", error)
        return None
    # It would run loops over slots in Python, which take far longer.
    if getattr(numba.config, "DISABLE_JIT", False):
        return None
    specification = util.spec_from_file_location(_NAME, _SOURCE)
    assert specification is not None
    assert specification.loader is not None
    module = util.module_from_spec(specification)
    # Compiled code that is kept finds its types there.
    sys.modules[_NAME] = module
    try:
        specification.loader.exec_module(module)
    except RuntimeError as error:
        # No place to keep compiled code: compiling takes longer than it saves.
        del sys.modules[_NAME]
        _log.info("long chains are planned without compilation, for Numba cannot keep compiled code: %s", error)
        return None
    return module


def _has_address_space() -> bool:
    """True unless the system has set this process a limit (``ulimit -v``) that leaves too little for loading."""
    if util.find_spec("resource") is None:
        return True
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return True
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        # Not Linux: whether the limit is enforced differs.
        return True
    return limit - pages * resource.getpagesize() >= _ADDRESS_SPACE_BYTES


@cache
def _let_compile(module: ModuleType) -> None:
    """Start a process that compiles if no other does, once; it outlives this one."""
    if not sys.executable or getattr(sys, "frozen", False):
        # The program that runs is no Python that could be started again.
        return
    paths = [[kernels.__name__, _NAME], str(_SOURCE), str(_lock(module)), str(_marker(module)), _NICENESS, sys.path]
    try:
        _lock(module).parent.mkdir(parents=True, exist_ok=True)
        # Isolated and without site-packages' start-up code: the script sets its own paths.
        command = [sys.executable, "-I", "-S", "-c", _SCRIPT, json.dumps(paths)]
        nowhere = subprocess.DEVNULL
        subprocess.run(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, check=False)
    except OSError as error:
        _log.info("long chains are planned without compilation, which could not be started: %s", error)
    else:
        _log.info("compiling the planner for long chains in another process, once; plans are the same meanwhile")


def _can_lock() -> bool:
    """True if processes of this system can lock files and leave a child behind; all but Windows' can."""
    return util.find_spec("fcntl") is not None and hasattr(os, "fork")


def _is_being_compiled(module: ModuleType) -> bool:
    """True if a process holds the lock."""
    import fcntl

    try:
        with _lock(module).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # There is none, or this file system knows no locks.
        pass
    return False


def _lock(module: ModuleType) -> Path:
    """File that a process locks while it compiles; its time is that of the start."""
    return _marker(module).with_suffix(".lock")


@cache
def _marker(module: ModuleType) -> Path:
    """File that is there once all code is in Numba's cache, for this source, interpreter, Numba and processor."""
    import numba

    stat = _SOURCE.stat()
    binding = import_module("llvmlite.binding")
    processor = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    # All on which Numba makes its cache depend: code of another of these would not be found there.
    key = stat.st_mtime_ns, stat.st_size, sys.version, numba.__version__, processor
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    return Path(module.solve.stats.cache_path) / f"{_SOURCE.stem}.{digest}.complete"
