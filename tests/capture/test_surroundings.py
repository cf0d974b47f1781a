"""Values that code can reach outside of modules are noted while it runs, and seen when they change."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_rotor.capture.names_in_code import names_attribute, names_in, names_of_others, reads_whole_objects
from lightning_rotor.capture.node_facts import Region
from lightning_rotor.capture.operations import UntraceableError
from lightning_rotor.capture.surroundings import Surroundings, functions

FACTOR = 2.0
TABLE: dict[str, Any] = {"scale": [1.0]}


class Config:
    """Settings as objects of the user's."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)


CONFIG: Any = Config(rate=0.5, deeper=Config(width=3), unread=1)


class Net(nn.Module):
    """A module whose forward is a function from outside."""

    def __init__(self, code: Callable[[], Any]) -> None:
        super().__init__()
        self.code = code

    def forward(self) -> Any:
        """Whatever the function gives."""
        return self.code()


def listened(code: Callable[[], Any]) -> Surroundings:
    """The surroundings of a module that runs this code once."""
    net = Net(code)
    surroundings = Surroundings(net, lambda: "", cache(functions))
    with surroundings.listening():
        net.forward()
    surroundings.notes.settle()
    assert surroundings.notes.holds()
    return surroundings


def changed_by(code: Callable[[], Any], change: Callable[[], object]) -> bool:
    """True if a change after the code has run is seen."""
    notes = listened(code).notes
    assert notes.holds()  # by the quick comparison
    change()
    seen = not notes.holds()
    notes.restore()
    return seen


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


@pytest.mark.parametrize(
    ("code", "change"),
    [
        (lambda: FACTOR * 2, lambda: set_global("FACTOR", 3.0)),
        (lambda: TABLE["scale"], lambda: TABLE["scale"].append(2.0)),
        (lambda: CONFIG.rate, lambda: setattr(CONFIG, "rate", 0.25)),
        (lambda: CONFIG.deeper.width, lambda: setattr(CONFIG.deeper, "width", 4)),
        (lambda: [getattr(CONFIG, name) for name in ("un" + "read",)], lambda: setattr(CONFIG, "unread", 2)),
        (lambda: os.environ.get("ROTOR_TEST"), lambda: os.environ.update(ROTOR_TEST="1")),
    ],
    ids=["global", "in a dict", "attribute", "deeper", "computed name", "environment"],
)
def test_a_change_of_what_code_reads_is_seen_and_undone(code: Any, change: Any) -> None:
    assert changed_by(code, change)
    assert (FACTOR, TABLE, CONFIG.rate, CONFIG.deeper.width) == (2.0, {"scale": [1.0]}, 0.5, 3)


class Collecting(Surroundings):
    """Surroundings during which garbage is collected whenever a callback of the collector is made."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("_collection_begins", "_collection_ends"):
            gc.collect()
        return super().__getattribute__(name)


def test_a_collection_of_garbage_at_a_bad_moment_hides_nothing() -> None:
    net = Net(lambda: FACTOR * 2)
    surroundings = Collecting(net, lambda: "", cache(functions))
    with surroundings.listening():
        net.forward()
    surroundings.notes.settle()
    assert "FACTOR" in surroundings.notes.names
    assert not [callback for callback in gc.callbacks if getattr(callback, "__self__", None) is surroundings]


def test_classes_of_this_package_are_no_code_of_the_users() -> None:
    surroundings = listened(lambda: Region(gradients=True, autocast=()) and CONFIG.rate)
    assert "gradients" in surroundings.notes.names  # the user's code names it
    assert "object" not in surroundings.notes.names  # the __init__ that Python wrote for the class does


def test_what_code_does_not_name_may_change() -> None:
    assert not changed_by(lambda: CONFIG.rate, lambda: setattr(CONFIG, "unread", 5))


def test_variables_of_enclosing_functions_are_followed() -> None:
    scale = [1.0]

    def code() -> float:
        return scale[0]

    def with_default(factor: list[float] = scale) -> float:
        return factor[0]

    assert changed_by(code, lambda: scale.append(2.0))
    assert changed_by(with_default, lambda: scale.append(2.0))
    assert changed_by(partial(max, scale), lambda: scale.append(3.0)) is False  # no code of the user's ran


def test_printing_is_told_with_the_path() -> None:
    silent, loud = listened(lambda: 1), listened(lambda: print(end=""))  # noqa: T201
    assert (silent.written_by, loud.written_by) == (None, "")


LARGE = np.zeros(2**20)


def sum_of_large() -> Any:
    return LARGE.sum()


def test_what_is_too_large_to_compare_is_refused() -> None:
    net = Net(sum_of_large)
    surroundings = Surroundings(net, lambda: "", cache(functions))
    with (
        pytest.raises(UntraceableError, match="an array of 8388608 bytes of float64, which cannot be compared"),
        surroundings.listening(),
    ):
        net.forward()


def test_a_profiler_gets_its_place_back() -> None:
    import sys

    seen: list[str] = []

    def profiler(frame: Any, event: str, argument: Any) -> None:
        seen.append(event)

    sys.setprofile(profiler)
    try:
        listened(lambda: torch.zeros(1))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert seen


def test_names_are_read_from_code() -> None:
    def code(self: Any, other: Any) -> Any:
        return self.own + other.theirs + getattr(other, "spelled.out")

    assert {"own", "theirs", "spelled", "out"} <= names_in(code.__code__)
    assert "theirs" in names_of_others(code.__code__)
    assert "own" not in names_of_others(code.__code__)
    # A method of another is no attribute that could hold something else at the next call.
    assert not names_of_others((lambda self, other: other.mean()).__code__)
    assert not reads_whole_objects(code.__code__)
    assert reads_whole_objects((lambda thing: vars(thing)[0]).__code__)


def test_a_name_that_stands_in_the_call_of_getattr_is_no_computed_one() -> None:
    import sys

    answers: list[bool] = []

    def listen(frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and called is getattr:
            answers.append(names_attribute(frame.f_code, frame.f_lasti))

    name = "rate"
    sys.setprofile(listen)
    try:
        getattr(CONFIG, "rate")  # noqa: B009
        getattr(CONFIG, "rate", None)
        getattr(CONFIG, name)
        getattr(CONFIG, "ra" + name[2:], 1)
    finally:
        sys.setprofile(None)
    assert answers == [True, True, False, False]
