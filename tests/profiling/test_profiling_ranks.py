"""One process alone answers all questions for itself, and runs what it likes."""

from __future__ import annotations

from lightning_rotor.profiling.ranks import ALONE


def test_a_process_alone_decides_for_itself() -> None:
    assert ALONE.any(True)
    assert not ALONE.any(False)
    assert ALONE.common({1, 2}) == {1, 2}
    assert not ALONE.together
    assert not ALONE.watches


def test_a_process_alone_compares_nothing_and_looks_for_no_messages() -> None:
    with ALONE.alike(["a", "b"]), ALONE.watching(), ALONE.watching(marks=False):
        assert not ALONE.together
