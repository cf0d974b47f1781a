"""Objects of the user's that are nothing but their values travel into planned modules, out of them, and between stages."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.fuzz_objects import Fields, Odd, RefusesIter, RefusesLen
from lightning_rotor import BudgetError, Checkpointable, ModelError
from lightning_rotor.private.values import flatten, tensors_in, tree_unflatten
from tests.grids import few


class Nested:
    """Holds another object, a number and a text."""

    def __init__(self, left: Any, right: Any) -> None:
        self.inner, self.scale, self.name = Odd([left]), 2.0, "nested"
        self.right = right


class Itself(dict[str, Any]):
    """A dict whose entries are its attributes."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


class Ordered(OrderedDict[str, Any]):
    """With an attribute besides its entries."""

    kind = "none"


@dataclass
class Record:
    left: Any
    right: Any


def ordered(left: Any, right: Any) -> Ordered:
    made = Ordered(right=right, left=left)
    made.kind = "some"
    return made


# How two values get into an object, and out of it.
OBJECTS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "attributes": (lambda left, right: Odd((left, right)), lambda each: each.value),
    "nested": (Nested, lambda each: (each.inner.value[0], each.right)),
    "tuple": (lambda left, right: RefusesLen((left, right)), lambda each: (each[0], each[1])),
    "list": (lambda left, right: RefusesIter((left, right)), lambda each: (each[0], each[1])),
    "dict": (lambda left, right: Fields(left=left, right=right), lambda each: (each.left, each.right)),
    "ordered": (ordered, lambda each: (each["left"], each["right"])),
    "itself": (lambda left, right: Itself(left=left, right=right), lambda each: (each.left, each["right"])),
    "dataclass": (Record, lambda each: (each.left, each.right)),
}


class Travelling(nn.Module):
    """Takes an object, hands another one from part to part, and gives one back."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.pack, self.open = OBJECTS[kind]
        self.first = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Tanh()) for _ in range(4)])
        self.second = Opening(kind)

    def forward(self, given: Any) -> Any:
        left, right = self.open(given)
        return self.second(self.pack(self.first(left), right * 2))


class Opening(nn.Module):
    """Branches on a value, so that it is one stage."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.pack, self.open = OBJECTS[kind]
        self.layer = nn.Linear(8, 8)

    def forward(self, given: Any) -> Any:
        left, right = self.open(given)
        factor = 2 if right.sum() > 0 else 3
        return self.pack(self.layer(left) * factor, right)


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_is_made_again_from_its_parts(kind: str) -> None:
    pack, opened = OBJECTS[kind]
    given = pack(torch.ones(2), torch.zeros(3))
    leaves, spec = flatten(given)
    made = tree_unflatten(leaves, spec)
    assert type(made) is type(given)
    assert made is not given
    left, right = opened(made)
    assert torch.equal(left, torch.ones(2))
    assert torch.equal(right, torch.zeros(3))
    assert str(flatten(made)[1]) == str(spec)


def test_attributes_besides_entries_come_along() -> None:
    leaves, spec = flatten(ordered(torch.ones(2), torch.zeros(3)))
    assert tree_unflatten(leaves, spec).kind == "some"
    leaves, spec = flatten(Itself(left=torch.ones(2)))
    made = tree_unflatten(leaves, spec)
    made.right = 3
    assert made["right"] == 3


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Made:
    """May count how often it is made."""

    def __new__(cls, value: Any) -> Made:
        return object.__new__(cls)

    def __init__(self, value: Any) -> None:
        self.value = value


class Ring:
    def __init__(self, value: Any) -> None:
        self.value, self.next = value, self


class Locked:
    def __init__(self, value: Any) -> None:
        self.value, self.lock = value, threading.Lock()


@pytest.mark.parametrize("kind", [Slotted, Made, Ring, Locked])
def test_what_is_more_than_its_values_stays_whole(kind: Callable[[Any], Any]) -> None:
    assert not tensors_in(kind(torch.ones(2)))


def test_an_object_without_tensors_stays_whole() -> None:
    class Settings:
        rate = 1.0

    leaves, _ = flatten([Settings()])
    assert type(leaves[0]) is Settings


@pytest.mark.parametrize("kind", few(OBJECTS, "attributes", "nested", "dict", "dataclass"))
def test_a_module_that_takes_and_gives_objects_trains_to_the_same_bits(kind: str) -> None:
    pack, opened = OBJECTS[kind]
    torch.manual_seed(0)
    plain = Travelling(kind)
    with pytest.raises(BudgetError, match="minimum") as refused:
        Checkpointable(copy.deepcopy(plain), mem_limit=1, show_progress=False)(pack(torch.randn(4, 8), torch.randn(4)))
    planned = copy.deepcopy(plain)
    wrapped = Checkpointable(planned, mem_limit=refused.value.minimum_bytes, show_progress=False)
    for _ in range(3):
        left, right = torch.randn(4, 8), torch.randn(4)
        losses = []
        for net in (plain, wrapped):
            found = net(pack(left.clone(), right.clone()))
            assert type(found) is type(pack(left, right))
            loss = opened(found)[0].square().sum()
            loss.backward()
            losses.append(loss)
        assert torch.equal(*losses)
    assert wrapped.plan is not None
    assert wrapped.plan.recomputed
    for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Writes(nn.Module):
    """Writes a value into an object that it is called with."""

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        value = 1 + float(x.detach().mean())
        if isinstance(given, dict):
            given["left"] = value
        elif isinstance(given, list):
            given[0] = value
        else:
            given.left = value
        return x * 2


class ReadsWhatAPartWrote(nn.Module):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make
        self.first, self.writes, self.last = nn.Linear(8, 8), Writes(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.make()
        x = self.writes(self.first(x), given)
        left = given["left"] if isinstance(given, dict) else given[0] if isinstance(given, list) else given.left
        return self.last(x) * left


class Holding:
    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


@pytest.mark.parametrize(
    "make",
    [
        lambda: Record(1.0, torch.ones(8)),
        lambda: Holding(1.0, torch.ones(8)),
        lambda: {"left": 1.0, "right": torch.ones(8)},
        lambda: Fields(left=1.0, right=torch.ones(8)),
        lambda: [1.0, torch.ones(8)],
    ],
)
def test_a_part_that_writes_into_an_object_of_its_caller_is_refused(make: Callable[[], Any]) -> None:
    """In a graph it gets an object of its own, and the code around it would go on with the value of the recording."""
    net = Checkpointable(ReadsWhatAPartWrote(make), mem_limit="1MiB", show_progress=False)
    with pytest.raises(ModelError, match="changes a container that it is called with"):
        net(torch.randn(4, 8))
