"""The table: the kernel compiled against the kernel as Python, and schedules against what the table says of them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rotor.chain import Chain
from lightning_rotor.planning import dynamic_program
from lightning_rotor.planning.backtracking import schedule_at
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.requirements import requirements_of
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from tests.grids import examples
from tests.strategies import KINDS, random_chain, with_skips


def solved(chain: Chain, slots: int, *, compiled: bool = False, **arguments: bool | int) -> Table:
    """The table of a chain in so many slots."""
    most_bytes = max(simulate(chain, Schedule.keep_all(len(chain))).peak_bytes, 1)
    requirements = requirements_of(chain, unit=most_bytes / slots, **arguments)  # type: ignore[arg-type]
    table = Table(requirements, slots=slots + 6, compiled=compiled)
    table.solve()
    assert table.is_compiled is compiled
    return table


def assert_same_tables(compiled: Table, plain: Table, every: int) -> None:
    np.testing.assert_array_equal(compiled.seconds, plain.seconds)
    for memory in np.flatnonzero(np.isfinite(compiled.seconds))[::every].tolist():
        assert schedule_at(compiled, memory) == schedule_at(plain, memory)


@st.composite
def any_chains(draw: st.DrawFn, *, repeats: int = 1) -> Chain:
    """Chains of all kinds, with up to six options' worth of choice, with and without skips, made of one block ``repeats`` times."""
    rng = draw(st.randoms(use_true_random=False))
    stages = draw(st.integers(1, 10 if repeats == 1 else 4))
    chain = random_chain(
        rng, stages * (repeats + 1), draw(st.sampled_from(KINDS)), grain=rng.choice((1, 997)), most_options=9
    )
    block = chain.stages[stages:]
    if repeats > 1:
        block = block[:stages]
        repeated = (replace(block[index % stages], name=f"stage{index}") for index in range(stages * repeats))
        chain = replace(chain, stages=tuple(repeated))
    else:
        chain = replace(chain, stages=chain.stages[:stages])
    return with_skips(rng, chain) if len(chain) >= 3 and draw(st.booleans()) else chain


@settings(max_examples=examples(25, 60), deadline=None)
@given(
    any_chains() | any_chains(repeats=4),
    st.sampled_from((30, 150, 600)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_compiled_kernel_fills_the_same_table_bit_by_bit(
    chain: Chain, slots: int, refined: bool, gradients_exist: bool, readers_pay: bool, lingering: bool
) -> None:
    step = {"gradients_exist": gradients_exist, "readers_pay": readers_pay, "lingering_bytes": slots * lingering}
    plain, compiled = (solved(chain, slots, refined=refined, compiled=choice, **step) for choice in (False, True))
    assert (np.diff(plain.seconds[np.isfinite(plain.seconds)]) <= 0).all()
    assert_same_tables(compiled, plain, every=9)


@pytest.mark.parametrize(
    ("threads", "block", "options"),
    [
        (2, 7, 3),
        *(
            pytest.param(*each, marks=pytest.mark.wide)
            for each in ((3, 1, 1), (1, 16, 1), (3, 200, 3), (1, 16, 3), (2, 7, 1), (3, 1, 3), (3, 200, 1))
        ),
    ],
)
def test_threads_and_blocks_make_no_difference(
    monkeypatch: pytest.MonkeyPatch, threads: int, block: int, options: int
) -> None:
    chain = random_chain(random.Random(options), 60, "options", grain=4099, most_options=60 * options)
    chain = with_skips(random.Random(1), chain)
    monkeypatch.setattr("lightning_rotor.planning.dynamic_program._cores", lambda: threads)
    monkeypatch.setattr("lightning_rotor.planning.dynamic_program._BLOCK", block)
    plain, compiled = (solved(chain, 150, compiled=choice) for choice in (False, True))
    assert_same_tables(compiled, plain, every=5)


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Seconds of plain loops in this process: so far none."""
    fresh = type(dynamic_program._spent)()
    monkeypatch.setattr(dynamic_program, "_spent", fresh)
    return fresh


def test_short_chains_do_not_wait_for_compiled_code(spent: Any) -> None:
    for stages, is_compiled in ((20, False), (150, True)):
        requirements = requirements_of(random_chain(random.Random(1), stages, "cnn"), unit=1e6)
        assert Table(requirements, slots=500).is_compiled is is_compiled


def test_short_chains_get_compiled_code_once_plain_loops_have_taken_as_long_as_loading_it(spent: Any) -> None:
    requirements = requirements_of(random_chain(random.Random(1), 20, "cnn"), unit=1e6)
    plain = Table(requirements, slots=500)
    plain.solve()
    assert not plain.is_compiled
    assert spent.seconds > 0
    spent.seconds = dynamic_program._LOADING_SECONDS
    compiled = Table(requirements, slots=500)
    compiled.solve()
    assert compiled.is_compiled
    assert spent.seconds == dynamic_program._LOADING_SECONDS  # of plain loops alone
    np.testing.assert_array_equal(plain.seconds, compiled.seconds)


@settings(max_examples=examples(10, 20), deadline=None)
@given(any_chains(), st.integers(0, 200), st.integers(0, 200))
def test_a_floor_leaves_so_much_memory_when_the_last_stage_is_kept(chain: Chain, floor: int, before: int) -> None:
    table, free = solved(chain, 150), solved(chain, 150)
    table.solve_last_column(floor=before)
    table.solve_last_column(floor=floor)
    assert (table.seconds >= free.seconds).all()
    assert np.isinf(table.seconds[:floor]).all()
    table.solve_last_column(floor=0)
    np.testing.assert_array_equal(table.seconds, free.seconds)


# One process in five situations: without Numba, with a library of it that does not load, with too little address space
# for it, with it switched off, and with no cache beside the package and none in the user's directory.
SCRIPT = """
import random, resource, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from benchmarks.random_chains import random_chain
from lightning_rotor.planning import compilation
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.requirements import requirements_of

def show():
    compilation._decorated.cache_clear()
    table = Table(requirements_of(random_chain(random.Random(3), 20, "cnn", grain=4099), unit=1e5), slots=100, compiled=True)
    assert table.is_compiled is False
    table.solve()
    print(table.seconds.tolist())

sys.modules["numba"] = None
show()
del sys.modules["numba"]

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "llvmlite":
            raise OSError("Could not find/load shared object file 'libllvmlite.so'")

sys.meta_path.insert(0, Broken())
show()
del sys.meta_path[0]
for name in [name for name in sys.modules if name.partition(".")[0] == "numba"]:
    del sys.modules[name]
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
_, most = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (taken + 200 * 2**20, most))
show()
assert "numba" not in sys.modules
resource.setrlimit(resource.RLIMIT_AS, (most, most))
import numba
assert numba.config.DISABLE_JIT
show()
numba.config.DISABLE_JIT = 0
numba.core.caching.CacheImpl._locator_classes = []
show()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and /proc")
def test_without_numba_or_a_place_for_its_code_tables_are_the_same() -> None:
    requirements = requirements_of(random_chain(random.Random(3), 20, "cnn", grain=4099), unit=1e5)
    table = Table(requirements, slots=100, compiled=True)
    assert table.is_compiled
    table.solve()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(root=str(Path(__file__).parents[2]))],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    assert done.stdout.splitlines() == 5 * [str(table.seconds.tolist())]


@settings(max_examples=examples(20, 40), deadline=None)
@given(any_chains(), st.booleans())
def test_schedules_that_are_read_from_the_table_take_the_seconds_that_it_says(chain: Chain, refined: bool) -> None:
    chain = replace(chain, segment_seconds=0.0)  # of segments nested twice the table knows one pass less
    table = solved(chain, 150, refined=refined)
    for memory in np.flatnonzero(np.isfinite(table.seconds))[::9].tolist():
        assert simulate(chain, schedule_at(table, memory)).seconds == pytest.approx(
            float(table.seconds[memory]), rel=1e-9
        )


def test_an_error_in_one_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = requirements_of(random_chain(random.Random(3), 80, "cnn", grain=4099), unit=1e6)
    table = Table(requirements, slots=50, compiled=True)
    monkeypatch.setattr("lightning_rotor.planning.dynamic_program._cores", lambda: 3)
    monkeypatch.setattr(table, "_kernels", SimpleNamespace(solve=lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        table.solve()
