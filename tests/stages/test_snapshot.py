"""Everything that user code can reach is remembered, compared and put back into the very things that had it."""

from __future__ import annotations

import contextvars
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_rotor.errors import ExecutionError
from lightning_rotor.stages.containers import entries_of, length_of
from lightning_rotor.stages.holders import ABSENT, CELL, ENTRIES, OWN_THREAD, SLOTS, Kind, slots_of
from lightning_rotor.stages.snapshot import SMALL_BYTES, Snapshot
from lightning_rotor.stages.user_code import globals_of, is_users, is_users_class

COUNTER = [0]
VARIABLE: contextvars.ContextVar[list[int]] = contextvars.ContextVar("VARIABLE")


class Slotted:
    """An object without a dict."""

    __slots__ = ("_Slotted__secret", "size")

    def __init__(self) -> None:
        self.size = 1


class Holder(nn.Module):
    """A module with one attribute."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2], lambda value: value.append(3), list),
    "deque": (lambda: deque([1]), lambda value: value.append(3), list),
    "dict": (lambda: {"a": 1}, lambda value: value.update(b=2), dict),
    "ordered dict": (lambda: OrderedDict(a=1, b=2), lambda value: value.move_to_end("a"), list),
    "set": (lambda: {1}, lambda value: value.add(3), set),
    "array": (lambda: np.zeros(2), lambda value: value.__setitem__(0, 5), lambda value: value.tolist()),
    "bytes": (lambda: bytearray(b"ab"), lambda value: value.reverse(), bytes),
    "array of Python": (lambda: array("i", [1]), lambda value: value.append(2), list),
    "tensor": (lambda: torch.zeros(2), lambda value: value.add_(1), lambda value: value.tolist()),
    "object": (lambda: SimpleNamespace(a=1), lambda value: setattr(value, "a", 2), lambda value: value.a),
    "slots": (Slotted, lambda value: setattr(value, "size", 2), lambda value: value.size),
    "list in a tuple": (lambda: ([1],), lambda value: value[0].append(2), lambda value: list(value[0])),
    "generator": (
        lambda: np.random.default_rng(3),
        lambda value: value.random(),
        lambda value: str(value.bit_generator.state),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_in_an_attribute_is_put_back_into_the_same_thing(name: str) -> None:
    make, change, look = CASES[name]
    value = make()
    module = Holder(value)
    before, then = look(value), Snapshot([module])
    assert not then.changed()
    change(value)
    assert look(value) != before
    module.value = None
    then.restore()
    assert module.value is value
    assert look(value) == before
    if not isinstance(value, torch.Tensor):  # whose version says that it was written to
        assert not then.changed()


def test_attributes_that_are_new_go_and_old_ones_come_back() -> None:
    module: Any = Holder(1)
    then = Snapshot([module])
    module.another = 2
    del module.value
    assert then.changed() & {id(module.__dict__)}
    then.restore()
    assert module.value == 1
    assert not hasattr(module, "another")


def test_what_hooks_can_reach_is_put_back() -> None:
    kept: list[int] = []

    def hook(*_: object) -> None:
        kept.append(1)
        COUNTER[0] += 1

    module = nn.Linear(2, 2)
    module.register_forward_hook(hook)
    then = Snapshot([module])
    module(torch.ones(2))
    assert (kept, COUNTER) == ([1], [1])
    then.restore()
    assert (kept, COUNTER) == ([], [0])


def test_hooks_themselves_are_put_back() -> None:
    module = nn.Linear(2, 2)
    then = Snapshot([module])
    module.register_forward_hook(print)
    then.restore()
    assert not module._forward_hooks


def test_small_tensors_are_lent_as_copies() -> None:
    module = Holder(torch.zeros(2))
    original = module.value
    then = Snapshot([module])
    around = then.again()
    then.lend()
    assert module.value is not original
    module.value.add_(1)
    around.restore()
    assert module.value is original
    assert original.tolist() == [0.0, 0.0]


def test_a_large_tensor_that_changes_is_refused() -> None:
    module = Holder(torch.zeros(SMALL_BYTES))
    then = Snapshot([module], small_bytes=SMALL_BYTES)
    module.value.add_(1)
    assert [tensor is module.value for tensor in then.gone()] == [True]
    message = r"changes a tensor of shape \(65536,\) in place that is no buffer"
    with pytest.raises(ExecutionError, match=message):
        then.require_undoable()
    with pytest.raises(ExecutionError, match=message):
        then.restore()


def test_long_lists_are_put_back_and_not_followed() -> None:
    inner = [1]
    module = Holder([inner] * 1001)
    then = Snapshot([module])
    assert then.changed_large() == []
    module.value.append(2)
    inner.append(2)
    assert then.changed_large() == [module.value]
    then.restore()
    assert len(module.value) == 1001
    assert inner == [1, 2]


def test_containers_that_lie_are_asked_as_what_they_are() -> None:
    class Odd(list[Any]):
        def __len__(self) -> int:
            raise TypeError("no length")

        def __iter__(self) -> Any:
            return iter((7, 8, 9))

    odd = Odd([1, 2])
    assert length_of(odd) == 2
    assert entries_of(odd) == [1, 2]
    module = Holder(odd)
    then = Snapshot([module])
    list.append(odd, 3)
    then.restore()
    assert entries_of(odd) == [1, 2]


@pytest.mark.parametrize(
    ("kind", "owner", "name"),
    [(ENTRIES, {"a": 1}, "a"), (SLOTS, Slotted(), "size"), (CELL, (lambda value: lambda: value)(1).__closure__[0], "")],
    ids=["entry", "slot", "cell"],
)
def test_a_name_can_be_read_written_and_removed(kind: Kind, owner: Any, name: str) -> None:
    assert kind.read(owner, name) == 1
    kind.put(owner, {name: 2})
    assert kind.read(owner, name) == 2
    kind.put(owner, {name: ABSENT})
    assert kind.read(owner, name) is ABSENT
    kind.put(owner, {name: 1})
    assert kind.same(owner, {name: 1})


def test_attributes_of_a_thread_are_those_of_this_one() -> None:
    import threading

    local = threading.local()
    OWN_THREAD.put(local, {"a": 1})
    assert local.a == 1
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(OWN_THREAD.read(local, "a")))
    thread.start()
    thread.join()
    assert seen == [ABSENT]


def test_slots_have_the_names_under_which_they_are_looked_up() -> None:
    assert set(slots_of(Slotted)) == {"size", "_Slotted__secret"}
    assert slots_of(torch.Tensor) == []


def test_code_of_the_user_is_told_from_others() -> None:
    assert is_users(__file__)
    assert not is_users(torch.nn.modules.linear.__file__)
    assert not is_users(contextvars.__file__)
    assert is_users("/site-packages/some/module.py")
    assert is_users_class(Holder)
    assert not is_users_class(nn.Linear)
    assert not is_users_class(int)


def test_globals_of_code_are_told_from_attributes() -> None:
    def code() -> Any:
        def inner() -> Any:
            return VARIABLE.get

        return COUNTER, inner

    assert set(globals_of(code.__code__)) == {"COUNTER", "VARIABLE"}
    assert globals_of(code.__code__, only_set=True) == ()


class Counted(nn.Module):
    """The counter of its class is one that subclasses hide once they count."""

    count = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        type(self).count += 1
        return input / (1 + type(self).count % 3)


class Counting(Counted):
    """Has no attribute of its own yet."""


def test_a_new_attribute_of_a_class_goes_again() -> None:
    snapshot = Snapshot((Counting(),))
    Counting()(torch.ones(1))
    assert vars(Counting)["count"] == 1
    assert id(Counting) in snapshot.changed()
    snapshot.restore()
    assert "count" not in vars(Counting)
    assert Counting.count == Counted.count == 0
    assert not snapshot.changed()


def test_what_python_notes_in_a_class_stays() -> None:
    snapshot = Snapshot((Counting(),))
    Counting.__annotations__ = {"count": int}
    snapshot.restore()
    assert Counting.__annotations__ == {"count": int}
    del Counting.__annotations__
