"""The table: compiled code against loops, schedules against what the table says of them, and what is shared."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import KINDS, random_chain, with_skips

from lightning_rotor.chain import Chain
from lightning_rotor.planning.backtracking import Extraction
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.kernel import aligned_unit, first_twins
from lightning_rotor.planning.requirements import Thresholds, thresholds_of
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate


def in_slots(chain: Chain, slots: int, *, aligned: bool = False, **step: bool | int) -> tuple[Thresholds, int]:
    """The chain in so many slots or a few more, and how many."""
    most_bytes = max(simulate(chain, Schedule.keep_all(len(chain))).peak_bytes, 1)
    unit = aligned_unit(chain, most_bytes / slots) if aligned else most_bytes / slots
    return thresholds_of(chain, unit=unit, **step), int(most_bytes / unit) + 6  # type: ignore[arg-type]


def solved(thresholds: Thresholds, slots: int, *, refined: bool, compiled: bool = False) -> Table:
    table = Table(thresholds, slots=slots, refined=refined, compiled=compiled)
    table.solve()
    assert table.is_compiled is compiled
    return table


def assert_same_tables(compiled: Table, by_loops: Table, every: int) -> None:
    np.testing.assert_array_equal(compiled.seconds, by_loops.seconds)
    for memory in np.flatnonzero(np.isfinite(compiled.seconds))[::every].tolist():
        assert Extraction(compiled).schedule(memory) == Extraction(by_loops).schedule(memory)


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


@settings(max_examples=150, deadline=None)
@given(
    any_chains() | any_chains(repeats=4), st.sampled_from((30, 150, 600)), st.booleans(), st.booleans(), st.booleans()
)
def test_compiled_code_fills_the_same_table_bit_by_bit(
    chain: Chain, slots: int, gradients_exist: bool, readers_pay: bool, lingering: bool
) -> None:
    thresholds, slots = in_slots(
        chain,
        slots,
        aligned=True,
        gradients_exist=gradients_exist,
        readers_pay=readers_pay,
        lingering_bytes=slots * lingering,
    )
    by_loops, compiled = (solved(thresholds, slots, refined=False, compiled=choice) for choice in (False, True))
    assert (np.diff(by_loops.seconds[np.isfinite(by_loops.seconds)]) <= 0).all()
    assert_same_tables(compiled, by_loops, every=9)


@pytest.mark.parametrize(("threads", "columns"), [(1, 32), (2, 7), (3, 1), (3, 200)])
@pytest.mark.parametrize("options", [1, 3])
def test_compiled_code_gives_long_chains_the_same_plans(
    monkeypatch: pytest.MonkeyPatch, threads: int, columns: int, options: int
) -> None:
    chain = random_chain(random.Random(options), 110, "options", grain=4099, most_options=110 * options)
    chain = with_skips(random.Random(1), chain)
    thresholds, slots = in_slots(chain, 150)
    monkeypatch.setattr("lightning_rotor.planning.dynamic_program._cores", lambda: threads)
    monkeypatch.setattr("lightning_rotor.planning.dynamic_program._COLUMNS", columns)
    by_loops, compiled = (solved(thresholds, slots, refined=False, compiled=choice) for choice in (False, True))
    assert_same_tables(compiled, by_loops, every=5)


def test_short_chains_and_refined_tables_do_not_wait_for_compiled_code() -> None:
    thresholds, _ = in_slots(random_chain(random.Random(1), 100, "cnn"), 500)
    assert not Table(thresholds, slots=500, refined=False).is_compiled
    thresholds, _ = in_slots(random_chain(random.Random(1), 150, "cnn"), 500)
    assert Table(thresholds, slots=500, refined=False).is_compiled
    assert not Table(thresholds, slots=500, refined=True).is_compiled


SCRIPT = """
import random, sys
{before}
sys.path.insert(0, {tests!r})
from strategies import random_chain
from lightning_rotor.planning import minimum_budget
from lightning_rotor.planning.machine_code import compiled_code
assert (compiled_code() is not None) is {compiled}
print(minimum_budget(random_chain(random.Random(3), 140, "cnn", grain=4099)).schedule)
"""


def run_alone(before: str, compiled: bool, **environment: str) -> str:
    """The least plan of a chain in a process of its own."""
    script = SCRIPT.format(before=before, tests=str(Path(__file__).parent), compiled=compiled)
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_without_numba_or_a_place_for_its_code_plans_are_the_same(tmp_path: Path) -> None:
    expected = run_alone("", True)
    assert run_alone('sys.modules["numba"] = None', False) == expected
    assert run_alone("", False, NUMBA_DISABLE_JIT="1") == expected
    # No cache beside the package, and none in the user's directory.
    no_locators = "import numba.core.caching as c; c.CacheImpl._locator_classes = []"
    assert run_alone(no_locators, False) == expected


@settings(max_examples=60, deadline=None)
@given(any_chains(), st.booleans())
def test_schedules_that_are_read_from_the_table_take_the_seconds_that_it_says(chain: Chain, refined: bool) -> None:
    chain = replace(chain, segment_seconds=0.0)  # of segments nested twice the table knows one pass less
    thresholds, slots = in_slots(chain, 150)
    table = solved(thresholds, slots, refined=refined)
    extraction = Extraction(table)
    for memory in np.flatnonzero(np.isfinite(table.seconds))[::9].tolist():
        seconds = simulate(chain, extraction.schedule(memory)).seconds
        assert seconds == pytest.approx(float(table.seconds[memory]), rel=1e-5)


def periodic_chain(repeats: int) -> Chain:
    block = random_chain(random.Random(4), 6, "heterogeneous", grain=4099).stages[1:]
    return Chain(tuple(replace(block[index % 5], name=f"stage{index}") for index in range(5 * repeats)))


def test_most_intervals_of_a_periodic_chain_are_copies_where_gradients_exist() -> None:
    chain = periodic_chain(12)
    thresholds, slots = in_slots(chain, 300, aligned=True, gradients_exist=True)
    table = Table(thresholds, slots=slots, refined=False)
    twins = first_twins(table.decisions)
    assert twins is not None
    copies = np.count_nonzero(twins != np.arange(60))
    assert copies > 0.75 * 60 * 61 / 2  # all but the first of each kind, and those that touch an end of the chain
    length, first = 7, 33
    assert twins[length, first] == first % 5
    assert twins[length, 35] == 5  # stage 0 is different: its input is the caller's


def test_chain_without_identical_stages_has_no_copies() -> None:
    chain = random_chain(random.Random(5), 30, "heterogeneous")
    thresholds, slots = in_slots(chain, 100)
    assert first_twins(Table(thresholds, slots=slots, refined=False).decisions) is None
    assert aligned_unit(chain, 12.5) == 12.5


def test_unit_is_a_whole_part_of_what_a_period_retains() -> None:
    chain = periodic_chain(12)
    period = sum(stage.output_bytes + stage.keep.saved_bytes for stage in chain.stages[5:10])
    unit = aligned_unit(chain, period / 7.3)
    assert period / unit == pytest.approx(8)


def test_an_error_in_one_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    thresholds, slots = in_slots(random_chain(random.Random(3), 80, "cnn", grain=4099), 50)
    table = Table(thresholds, slots=slots, refined=False, compiled=True)
    monkeypatch.setattr("lightning_rotor.planning.dynamic_program._cores", lambda: 3)
    monkeypatch.setattr("lightning_rotor.planning.machine_code.CompiledTable.solve", None)
    with pytest.raises(TypeError, match="not callable"):
        table.solve()
