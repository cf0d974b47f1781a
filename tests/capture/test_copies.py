"""Values are compared with what they were, by what they hold, and by the quick way first."""

from __future__ import annotations

from array import array
from collections import deque
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rotor.capture.copies import MOST_COMPARED, Copies, Objects, Same, version_of


class OddList(list[Any]):
    """A list that refuses to be measured."""

    def __len__(self) -> int:
        raise TypeError("no length")

    def __iter__(self) -> Any:
        return iter(())


class Slotted:
    """An object without a dict."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 3


def change_list(value: Any) -> None:
    value[0] = 9


def change_dict(value: Any) -> None:
    value["b"] = 2


def change_object(value: Any) -> None:
    value.size = 4


CHANGES: dict[str, tuple[Any, Any]] = {
    "list": (lambda: [1, 2], change_list),
    "list in a list": (lambda: [[1], 2], lambda value: value[0].append(3)),
    "list of a class that lies": (lambda: OddList([1, 2]), lambda value: list.append(value, 3)),
    "deque": (lambda: deque([1, 2]), change_list),
    "set": (lambda: {1, 2}, lambda value: value.add(3)),
    "dict": (lambda: {"a": 1}, change_dict),
    "view of a dict": (lambda: MappingProxyType({"a": [1]}), lambda value: value["a"].append(2)),
    "array": (lambda: np.zeros(3), change_list),
    "bytes": (lambda: bytearray(b"abc"), change_list),
    "array of Python": (lambda: array("i", [1, 2]), change_list),
    "tensor": (lambda: torch.zeros(2), lambda value: value.add_(1)),
    "object": (lambda: SimpleNamespace(size=3), change_object),
    "slots": (Slotted, change_object),
    "generator": (lambda: np.random.default_rng(0), lambda value: value.random()),
    "partial": (lambda: partial(max, [1]), lambda value: value.args[0].append(2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_its_absence_too(name: str) -> None:
    make, change = CHANGES[name]
    value = make()
    copies = Copies()
    before = copies.of(value)
    copies.settle(lambda: (value,))
    assert Copies().of(value) == before
    assert copies.hold()
    change(value)
    assert Copies().of(value) != before
    assert not copies.hold()


def test_equal_values_of_other_types_are_others() -> None:
    assert Copies().of([1]) != Copies().of([True])
    assert Copies().of((1,)) != Copies().of([1])
    assert Copies().of(0.0) != Copies().of(-0.0)
    assert Copies().of(float("nan")) == Copies().of(float("nan"))
    assert Copies().of(complex("nan")) == Copies().of(complex("nan"))
    assert Copies().of(0.0) != Copies().of(-0.0)
    assert Copies().of(complex(0.0, 0.0)) != Copies().of(complex(0.0, -0.0))


def test_a_container_in_itself_comes_to_an_end() -> None:
    value: list[Any] = [1]
    value.append(value)
    assert Copies().of(value) == Copies().of(value)
    value[0] = 2
    other: list[Any] = [1]
    other.append(other)
    assert Copies().of(value) != Copies().of(other)


def test_of_a_container_that_is_too_long_only_the_length_counts() -> None:
    value = [0] * (MOST_COMPARED + 1)
    before = Copies().of(value)
    value[0] = 1
    assert Copies().of(value) == before
    value.append(1)
    assert Copies().of(value) != before


def test_objects_in_objects_count_by_identity_alone() -> None:
    value = SimpleNamespace(inner=SimpleNamespace(size=1))
    before = Copies().of(value)
    value.inner.size = 2
    assert Copies().of(value) == before
    value.inner = SimpleNamespace(size=1)
    assert Copies().of(value) != before


def test_a_row_of_objects_is_compared_by_identity() -> None:
    row = (object(), [1], "a")
    assert Objects(row).are(tuple(row))
    assert not Objects(row).are((row[0], [1], "a"))
    assert not Objects(row).are(row[:2])
    assert Same(row[1]) == Same(row[1])
    assert Same(row[1]) != Same([1])


def test_nobody_counts_changes_in_inference_mode() -> None:
    tensor = torch.zeros(2)
    before = version_of(tensor)
    tensor.add_(1)
    assert version_of(tensor) == before + 1
    with torch.inference_mode():
        assert version_of(torch.zeros(2)) == -1
