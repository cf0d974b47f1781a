"""Compiling is left to another process: nobody waits for it without need, and one is enough."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rotor.planning import compilation

ROOT = Path(__file__).parents[2]

# A process that finds no code plans at once, waits for the code, and then finds it in the cache.
SCRIPT = """
import json, random, sys, threading, time
from benchmarks.random_chains import random_chain
from lightning_rotor.planning import compilation, dynamic_program
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.requirements import requirements_of

def table(compiled):
    table = Table(requirements_of(random_chain(random.Random(3), 61, "cnn", grain=4099), unit=1e6), slots=60, compiled=compiled)
    table.solve()
    return table

compilation._NICENESS = 0  # this machine may be busy for longer than a test should take
first = table(None)
compiled = table(True)
later = table(None)
assert first.seconds.tolist() == compiled.seconds.tolist() == later.seconds.tolist()
assert first.traced(50).tolist() == compiled.traced(50).tolist()
module = compilation._decorated()
stats = module.solve.stats
print(json.dumps([first.is_compiled, compiled.is_compiled, later.is_compiled, sum(stats.cache_hits.values()), sum(stats.cache_misses.values()),
                  sum(module.traced.stats.cache_misses.values()), threading.active_count(), stats.cache_path]))
"""


@pytest.mark.wide
def test_a_fresh_cache_is_filled_by_another_process_while_plain_loops_serve(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0
        *found, folder = json.loads(output)
        # One table was plain; the code of the others was in the cache, for just these types, and no thread has made it.
        assert found == [False, True, True, 1, 0, 0, 1]
        # One process has compiled, for both.
        names = [path.name for path in Path(folder).iterdir()]
        assert sum(name.endswith(".nbc") for name in names) == 2
        assert sum(name.endswith(".complete") for name in names) == 1


def test_nobody_waits_for_code_longer_than_the_plain_loops_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "kernels.complete"
    monkeypatch.setattr(compilation, "_marker", lambda module: marker)
    monkeypatch.setattr(compilation, "_let_compile", lambda module: None)
    waits: list[float] = []
    monkeypatch.setattr(compilation.time, "sleep", waits.append)
    assert compilation.compiled_kernels(1e6) is None  # nobody compiles
    with marker.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert compilation.compiled_kernels(1.0) is None  # the plain loops are done before
        assert not waits
        monkeypatch.setattr(
            compilation.time, "sleep", lambda seconds: marker.touch() or fcntl.flock(lock, fcntl.LOCK_UN)
        )
        assert compilation.compiled_kernels(1e6) is not None


def test_a_program_that_is_no_python_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(compilation.subprocess, "run", lambda *arguments, **_: started.append(arguments))
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    module = compilation._decorated()
    assert module is not None
    compilation._let_compile.__wrapped__(module)
    assert not started
