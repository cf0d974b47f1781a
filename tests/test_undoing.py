"""Changes are undone whatever happens: at the end, after an exception, and after an interrupt in the undoing itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_rotor.private.undoing import undone


def counting(calls: list[str], *, raises: list[BaseException]) -> Callable[[], None]:
    """A function that notes its calls; the first ones raise what is given, one each."""

    def undo() -> None:
        calls.append("undo")
        if raises:
            raise raises.pop(0)

    return undo


def test_a_change_is_undone_once_at_the_end() -> None:
    calls: list[str] = []
    with undone(counting(calls, raises=[])):
        calls.append("change")
    assert calls == ["change", "undo"]


def test_a_change_is_undone_once_after_an_exception() -> None:
    calls: list[str] = []
    with pytest.raises(ValueError, match="in the middle"), undone(counting(calls, raises=[])):
        raise ValueError("in the middle")
    assert calls == ["undo"]


def test_an_interrupt_in_the_undoing_has_it_undone_again() -> None:
    calls: list[str] = []
    with (
        pytest.raises(KeyboardInterrupt, match="Ctrl-C"),
        undone(counting(calls, raises=[KeyboardInterrupt("Ctrl-C")])),
    ):
        calls.append("change")
    assert calls == ["change", "undo", "undo"]


def test_contexts_are_undone_from_the_inside_out() -> None:
    calls: list[str] = []
    with undone(lambda: calls.append("outer")), undone(lambda: calls.append("inner")):
        pass
    assert calls == ["inner", "outer"]
