"""What recorded code reads outside of modules changes at each step: seen, wherever it is held and however deep it lies.

Each case trains plainly and under a plan that recomputes all. The weights are equal, or a typed error refuses the case.
"""

from __future__ import annotations

import builtins
import copy
import ctypes
import enum
import functools
import importlib.util
import json
import multiprocessing
import operator
import os
import sys
import threading
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from queue import Queue, SimpleQueue
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DistributedSampler

from lightning_rotor import Checkpointable, ModelError
from tests import holders_module

STEPS = 3


# ---------------------------------------------------------------- what is held


class Plain:
    """An object of the user's."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Slotted:
    """An object with a slot that only its class can name."""

    __slots__ = ("__hidden", "inner")

    def __init__(self, value: Any) -> None:
        self.__hidden = value
        self.inner = value

    @property
    def hidden(self) -> Any:
        return self.__hidden

    def hide(self, value: Any) -> None:
        self.__hidden = value


@dataclass
class Record:
    value: Any


@dataclass(slots=True)
class SlottedRecord:
    value: Any


class Pair(NamedTuple):
    first: Any
    second: Any


class Computed:
    """An object whose attribute is computed from what it holds."""

    def __init__(self) -> None:
        self._settings = Plain(factor=1.0)

    @property
    def value(self) -> float:
        return self._settings.factor * 2

    def method(self) -> float:
        return self._settings.factor * 3

    def __getitem__(self, key: str) -> Any:
        return getattr(self._settings, key)

    def __call__(self) -> float:
        return self._settings.factor * 5


class Once:
    """An object with a property that keeps what it has computed."""

    factor = 1.0

    @functools.cached_property
    def doubled(self) -> float:
        return self.factor * 2


class Replaced:
    """An object whose class gets another method."""

    def factor(self) -> float:
        return 1.0


class Content(NamedTuple):
    """A value, how code reads it, and how it becomes another one: in place, or by giving a new one."""

    make: Callable[[], Any]
    read: Callable[[Any], Any]
    change: Callable[[Any, float], Any]


def put(value: Any, /, **attributes: Any) -> None:
    for name, each in attributes.items():
        setattr(value, name, each)


def item(value: Any, key: Any, new: Any) -> None:
    value[key] = new


def last(*values: Any) -> Any:
    return values[-1]


def toggled(event: Any, new: float) -> None:
    if new % 0.5:
        event.set()
    else:
        event.clear()


def variable_of(value: Any) -> ContextVar[Any]:
    variable: ContextVar[Any] = ContextVar("held")
    variable.set(value)
    return variable


def computed_name(value: Any) -> Any:
    return getattr(value, "sc" + "ale")


def as_mapping(value: Any) -> Any:
    return vars(value)["scale"]


def matched(value: Any) -> Any:
    match value:
        case Plain(scale=found):
            return found
    return 0.0


CONTENTS: dict[str, Content] = {
    "number": Content(lambda: 1.0, lambda v: v, lambda v, new: new),
    "tensor": Content(lambda: torch.ones(16), lambda v: v, lambda v, new: torch.full((16,), new)),
    "tensor in place": Content(lambda: torch.ones(16), lambda v: v, lambda v, new: last(v.fill_(new), None)),
    "dict": Content(lambda: {"a": 1.0}, lambda v: v["a"], lambda v, new: v.update(a=new)),
    "list": Content(lambda: [1.0], lambda v: v[0], lambda v, new: item(v, 0, new)),
    "another list": Content(lambda: [1.0], lambda v: v[0], lambda v, new: [new]),
    "deque": Content(lambda: deque([1.0]), lambda v: v[0], lambda v, new: item(v, 0, new)),
    "object": Content(lambda: Plain(scale=1.0), lambda v: v.scale, lambda v, new: put(v, scale=new)),
    "tensor of object": Content(
        lambda: Plain(scale=torch.ones(16)), lambda v: v.scale, lambda v, new: put(v, scale=torch.full((16,), new))
    ),
    "new attribute": Content(Plain, lambda v: getattr(v, "scale", 1.0), lambda v, new: put(v, scale=new)),
    "object of object": Content(
        lambda: Plain(inner=Plain(scale=1.0)), lambda v: v.inner.scale, lambda v, new: put(v.inner, scale=new)
    ),
    "dict of object": Content(
        lambda: Plain(inner={"a": 1.0}), lambda v: v.inner["a"], lambda v, new: v.inner.update(a=new)
    ),
    "list of object": Content(lambda: Plain(inner=[1.0]), lambda v: v.inner[0], lambda v, new: item(v.inner, 0, new)),
    "object in dict": Content(
        lambda: {"a": Plain(scale=1.0)}, lambda v: v["a"].scale, lambda v, new: put(v["a"], scale=new)
    ),
    "object in list": Content(lambda: [Plain(scale=1.0)], lambda v: v[0].scale, lambda v, new: put(v[0], scale=new)),
    "four deep": Content(
        lambda: Plain(a={"b": [Plain(c=Plain(scale=1.0))]}),
        lambda v: v.a["b"][0].c.scale,
        lambda v, new: put(v.a["b"][0].c, scale=new),
    ),
    "namespace": Content(lambda: SimpleNamespace(scale=1.0), lambda v: v.scale, lambda v, new: put(v, scale=new)),
    "dataclass": Content(lambda: Record(Record(1.0)), lambda v: v.value.value, lambda v, new: put(v.value, value=new)),
    "slotted dataclass": Content(
        lambda: SlottedRecord(SlottedRecord(1.0)), lambda v: v.value.value, lambda v, new: put(v.value, value=new)
    ),
    "slots": Content(lambda: Slotted(Slotted(1.0)), lambda v: v.inner.hidden, lambda v, new: v.inner.hide(new)),
    "named tuple": Content(
        lambda: Pair(Plain(scale=1.0), [1.0]),
        lambda v: v.first.scale + v.second[0],
        lambda v, new: last(put(v.first, scale=new), item(v.second, 0, new)),
    ),
    "property": Content(Computed, lambda v: v.value, lambda v, new: put(v._settings, factor=new)),
    "method": Content(Computed, lambda v: v.method(), lambda v, new: put(v._settings, factor=new)),
    "item": Content(Computed, lambda v: v["factor"], lambda v, new: put(v._settings, factor=new)),
    "callable": Content(Computed, lambda v: v(), lambda v, new: put(v._settings, factor=new)),
    "computed name": Content(lambda: Plain(scale=1.0), computed_name, lambda v, new: put(v, scale=new)),
    "vars": Content(lambda: Plain(scale=1.0), as_mapping, lambda v, new: put(v, scale=new)),
    "match": Content(lambda: Plain(scale=1.0), matched, lambda v, new: put(v, scale=new)),
    "array": Content(lambda: np.ones(3), lambda v: float(v[0]), lambda v, new: item(v, 0, new)),
    "array of object": Content(
        lambda: Plain(scales=np.ones(3)), lambda v: float(v.scales[0]), lambda v, new: item(v.scales, 0, new)
    ),
    "large array": Content(lambda: np.ones(100_000), lambda v: float(v[0]), lambda v, new: item(v, 0, new)),
    "huge array": Content(lambda: np.ones(1_000_000), lambda v: float(v[0]), lambda v, new: item(v, 0, new)),
    "array of objects": Content(
        lambda: np.array([[1.0], None], dtype=object), lambda v: v[0][0], lambda v, new: item(v[0], 0, new)
    ),
    "long list": Content(lambda: [1.0] * 5_000, lambda v: v[7], lambda v, new: item(v, 7, new)),
    "huge list": Content(lambda: [1.0] * 50_000, lambda v: v[7], lambda v, new: item(v, 7, new)),
    "deep list": Content(
        lambda: [[[[[[1.0]]]]]], lambda v: v[0][0][0][0][0][0], lambda v, new: item(v[0][0][0][0][0], 0, new)
    ),
    "user dict": Content(lambda: UserDict(a=1.0), lambda v: v["a"], lambda v, new: item(v, "a", new)),
    "user list": Content(lambda: UserList([1.0]), lambda v: v[0], lambda v, new: item(v, 0, new)),
    "chain map": Content(lambda: ChainMap({"a": 1.0}), lambda v: v["a"], lambda v, new: item(v, "a", new)),
    "context variable": Content(
        lambda: ContextVar("scale", default=1.0), lambda v: v.get(), lambda v, new: last(v.set(new), None)
    ),
    "object in a context variable": Content(
        lambda: variable_of(Plain(scale=1.0)),
        lambda v: v.get().scale,
        lambda v, new: put(v.get(), scale=new),
    ),
    "default of a context variable": Content(
        lambda: ContextVar("scale", default={"a": [1.0]}),  # noqa: B039 - what changes is what is tested
        lambda v: v.get()["a"][0],
        lambda v, new: item(v.get()["a"], 0, new),
    ),
    "order of a dict": Content(
        lambda: OrderedDict(a=1.0, b=2.0), lambda v: next(iter(v.values())), lambda v, _: v.move_to_end(next(iter(v)))
    ),
    "weak set": Content(
        lambda: (lambda kept: Plain(kept=kept, among=weakref.WeakSet([kept])))(Plain(scale=1.0)),
        lambda v: next(iter(v.among)).scale,
        lambda v, new: put(v.kept, scale=new),
    ),
    "names of an attrgetter": Content(
        lambda: Plain(get=operator.attrgetter("a.deeply_held"), kept=Plain(a=Plain(deeply_held=1.0))),
        lambda v: v.get(v.kept),
        lambda v, new: put(v.kept.a, deeply_held=new),
    ),
    "name in a format": Content(
        lambda: Plain(formatted=1.0),
        lambda v: float("{.formatted}".format(v)),  # noqa: UP032 - not an attribute in the code
        lambda v, new: put(v, formatted=new),
    ),
    "property that is computed once": Content(
        Once, lambda v: v.doubled, lambda v, new: last(put(v, factor=new), vars(v).pop("doubled", None), None)
    ),
    "one attribute for another": Content(
        lambda: Plain(unnamed=1.0),
        lambda v: getattr(v, "scale", 1.0),
        lambda v, new: last(vars(v).clear(), vars(v).update({"scale" if new == 1.25 else "unnamed": new}), None),
    ),
    "method that is replaced": Content(
        Replaced, lambda v: v.factor(), lambda v, new: put(type(v), factor=lambda _: new)
    ),
    "thread local": Content(threading.local, lambda v: getattr(v, "scale", 1.0), lambda v, new: put(v, scale=new)),
    "lambda in a list": Content(
        lambda: [functools.partial(lambda cell: cell.scale, Plain(scale=1.0))],
        lambda v: v[0](),
        lambda v, new: put(v[0].args[0], scale=new),
    ),
    "partial": Content(
        lambda: functools.partial(lambda a, b: a[0] * b["c"], [1.0], b={"c": 1.0}),
        lambda v: v(),
        lambda v, new: last(item(v.args[0], 0, new), v.keywords["b"].update(c=new + 1)),
    ),
    "bound method": Content(
        lambda: Computed().method, lambda v: v(), lambda v, new: put(v.__self__._settings, factor=new)
    ),
    "weak reference": Content(
        lambda: (lambda kept: Plain(ref=weakref.ref(kept), kept=kept))(Plain(scale=1.0)),
        lambda v: v.ref().scale,
        lambda v, new: put(v.ref(), scale=new),
    ),
    "module that is no part": Content(
        nn.Identity, lambda v: getattr(v, "scale", 1.0), lambda v, new: put(v, scale=new)
    ),
    "read-only mapping": Content(
        lambda: Plain(kept=(kept := {"a": 1.0}), view=MappingProxyType(kept)),
        lambda v: v.view["a"],
        lambda v, new: v.kept.update(a=new),
    ),
    "proxy": Content(
        lambda: (lambda kept: Plain(proxy=weakref.proxy(kept), kept=kept))(Plain(scale=1.0)),
        lambda v: v.proxy.scale,
        lambda v, new: put(v.kept, scale=new),
    ),
    "result in a cache": Content(
        lambda: functools.lru_cache(lambda: Plain(scale=1.0)), lambda v: v().scale, lambda v, new: put(v(), scale=new)
    ),
    "result in a cache without an end": Content(
        lambda: functools.cache(lambda: [Plain(scale=1.0)]),
        lambda v: v()[0].scale,
        lambda v, new: put(v()[0], scale=new),
    ),
    "function by type": Content(
        lambda: functools.singledispatch(lambda _: 1.0),
        lambda v: v(3),
        lambda v, new: last(v.register(int, lambda _: new), None),
    ),
    "module without a file": Content(
        lambda: ModuleType("settings"), lambda v: getattr(v, "scale", 1.0), lambda v, new: put(v, scale=new)
    ),
    "number of ctypes": Content(lambda: ctypes.c_float(1.0), lambda v: v.value, lambda v, new: put(v, value=new)),
    "number that processes share": Content(
        lambda: multiprocessing.Value("d", 1.0), lambda v: v.value, lambda v, new: put(v, value=new)
    ),
    "numbers that processes share": Content(
        lambda: multiprocessing.Array("d", [1.0, 1.0]), lambda v: v[1], lambda v, new: item(v, 1, new)
    ),
    "event": Content(threading.Event, lambda v: 1.0 + v.is_set(), toggled),
    "event of processes": Content(multiprocessing.Event, lambda v: 1.0 + v.is_set(), toggled),
    "queue": Content(Queue, lambda v: v.qsize(), lambda v, new: v.put(new)),
    "simple queue": Content(SimpleQueue, lambda v: v.qsize(), lambda v, new: v.put(new)),
    "memory view": Content(
        lambda: memoryview(bytearray(2)), lambda v: 1 + v[1], lambda v, new: item(v, 1, int(4 * new))
    ),
    "scheduler": Content(
        lambda: StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0), 1, 0.5),
        lambda v: v.get_last_lr()[0],
        lambda v, _: last(v.optimizer.step(), v.step()),
    ),
    "sampler": Content(
        lambda: DistributedSampler([0, 1], 2, 0), lambda v: 1 + v.epoch, lambda v, new: v.set_epoch(int(4 * new))
    ),
}
REFUSED = {"huge array", "huge list", "array of objects"}
"""Contents that are refused in each holder."""
UNSEEN = ("attribute of a layer", "module that is no part")
"""A layer that runs as it is gets an attribute that it did not have, for which code around it asks with a default."""


# ---------------------------------------------------------------- where it is held


class Body(nn.Module):
    """A recorded module. What ``extra`` gives is a factor between its layers."""

    def __init__(self, extra: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.last = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x * self.extra(self, x))


class Holding(NamedTuple):
    """A module that reads what is held, and how to get and set that."""

    net: nn.Module
    get: Callable[[], Any]
    set: Callable[[Any], Any]


Read = Callable[[Any], Any]
GLOBAL: Any = None
INSTANCE = Plain()


class Shared:
    """A class in globals."""

    value: Any = None


class Derived(Shared):
    pass


class Mode(enum.Enum):
    ONE = Plain()


def in_global(read: Read) -> Holding:
    return Holding(Body(lambda net, x: read(GLOBAL)), lambda: GLOBAL, lambda value: globals().update(GLOBAL=value))


def in_instance(read: Read) -> Holding:
    return Holding(
        Body(lambda net, x: read(INSTANCE.held)), lambda: INSTANCE.held, lambda value: put(INSTANCE, held=value)
    )


def in_class(read: Read) -> Holding:
    return Holding(
        Body(lambda net, x: read(Shared.value)), lambda: Shared.value, lambda value: put(Shared, value=value)
    )


def in_base_class(read: Read) -> Holding:
    return Holding(
        Body(lambda net, x: read(Derived.value)), lambda: Shared.value, lambda value: put(Shared, value=value)
    )


def in_enum(read: Read) -> Holding:
    return Holding(
        Body(lambda net, x: read(Mode.ONE.value.held)),
        lambda: Mode.ONE.value.held,
        lambda value: put(Mode.ONE.value, held=value),
    )


def unbound(value: Any) -> Any:
    """What a class has to hold, so that its objects read the value itself: functions would become methods of theirs."""
    return staticmethod(value) if hasattr(type(value), "__get__") else value


def in_own_class(read: Read) -> Holding:
    class Own(Body):
        held: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * read(self.held)

    return Holding(Own(lambda net, x: 1.0), lambda: Own.held, lambda value: put(Own, held=unbound(value)))


def in_own_base_class(read: Read) -> Holding:
    class Base(Body):
        held: Any = None

    class Own(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * read(self.held)

    return Holding(Own(lambda net, x: 1.0), lambda: Base.held, lambda value: put(Base, held=unbound(value)))


def in_closure(read: Read) -> Holding:
    held: Any = None

    def change(value: Any) -> None:
        nonlocal held
        held = value

    return Holding(Body(lambda net, x: read(held)), lambda: held, change)


def in_class_in_closure(read: Read) -> Holding:
    class Context:
        held: Any = None

    return Holding(
        Body(lambda net, x: read(Context.held)), lambda: Context.held, lambda value: put(Context, held=value)
    )


def in_helpers_closure(read: Read) -> Holding:
    held: Any = None

    def change(value: Any) -> None:
        nonlocal held
        held = value

    def helper() -> Any:
        return read(held)

    def outer() -> Any:
        return helper()

    return Holding(Body(lambda net, x: outer()), lambda: held, change)


def in_default(read: Read) -> Holding:
    def extra(net: Any, x: Any, held: Any = None) -> Any:
        return read(held)

    extra.__defaults__ = (None,)
    return Holding(Body(extra), lambda: extra.__defaults__[0], lambda value: put(extra, __defaults__=(value,)))


def in_keyword_default(read: Read) -> Holding:
    def extra(net: Any, x: Any, *, held: Any = None) -> Any:
        return read(held)

    return Holding(
        Body(extra), lambda: extra.__kwdefaults__["held"], lambda value: extra.__kwdefaults__.update(held=value)
    )


def in_default_of_a_method(read: Read) -> Holding:
    class Own(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor()

        def factor(self, held: Any = None) -> Any:
            return read(held)

    return Holding(
        Own(lambda net, x: 1.0),
        lambda: Own.factor.__defaults__[0],
        lambda value: put(Own.factor, __defaults__=(value,)),
    )


def in_keyword_of_partial(read: Read) -> Holding:
    extra = functools.partial(lambda net, x, held: read(held), held=None)
    return Holding(Body(extra), lambda: extra.keywords["held"], lambda value: extra.keywords.update(held=value))


def in_argument_of_partial(read: Read) -> Holding:
    net = Body(functools.partial(lambda held, net, x: read(held), None))
    return Holding(
        net, lambda: net.extra.args[0], lambda value: put(net, extra=functools.partial(net.extra.func, value))
    )


def in_function_of_partial(read: Read) -> Holding:
    def extra(net: Any, x: Any) -> Any:
        return read(extra.held)

    extra.held = None
    return Holding(Body(functools.partial(extra)), lambda: extra.held, lambda value: put(extra, held=value))


def in_object_of_a_method(read: Read) -> Holding:
    class Owner:
        held: Any = None

        def extra(self, net: Any, x: Any) -> Any:
            return read(self.held)

    owner = Owner()
    return Holding(Body(owner.extra), lambda: owner.held, lambda value: put(owner, held=value))


def in_callable_object(read: Read) -> Holding:
    class Owner:
        held: Any = None

        def __call__(self, net: Any, x: Any) -> Any:
            return read(self.held)

    owner = Owner()
    return Holding(Body(owner), lambda: owner.held, lambda value: put(owner, held=value))


def in_other_module(read: Read) -> Holding:
    name = "held_for_tests"
    path = Path(sys.modules[__name__].__file__ or "").with_name("holders_module.py")
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    other: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(other)
    return Holding(Body(lambda net, x: read(other.held)), lambda: other.held, lambda value: put(other, held=value))


def in_function_of_other_module(read: Read) -> Holding:
    holding = in_other_module(read)
    other = holding.net.extra.__closure__[0].cell_contents
    assert isinstance(other, ModuleType)
    return Holding(Body(lambda net, x: read(other.get())), holding.get, holding.set)


def in_imported_module(read: Read) -> Holding:
    other: Any = holders_module

    def extra(net: Any, x: Any) -> Any:
        from tests import holders_module as imported

        return read(imported.held)

    return Holding(Body(extra), lambda: other.held, lambda value: put(other, held=value))


def in_module_by_its_name(read: Read) -> Holding:
    other: Any = holders_module
    return Holding(
        Body(lambda net, x: read(sys.modules["tests.holders_module"].held)),
        lambda: other.held,
        lambda value: put(other, held=value),
    )


def in_globals_by_name(read: Read) -> Holding:
    return Holding(
        Body(lambda net, x: read(globals()["GLO" + "BAL"])),
        lambda: GLOBAL,
        lambda value: globals().update(GLOBAL=value),
    )


def in_built_in(read: Read) -> Holding:
    return Holding(
        Body(lambda net, x: read(held_by_builtins)),  # type: ignore[name-defined]  # noqa: F821
        lambda: builtins.held_by_builtins,
        lambda value: put(builtins, held_by_builtins=value),
    )


def in_partial_of_a_method(read: Read) -> Holding:
    class Owner:
        held: Any = None

        def extra(self, factor: float, net: Any, x: Any) -> Any:
            return read(self.held) * factor

    owner = Owner()
    return Holding(Body(functools.partial(owner.extra, 2.0)), lambda: owner.held, lambda value: put(owner, held=value))


def in_partialmethod(read: Read) -> Holding:
    kept: dict[str, Any] = {"held": None}

    class Own(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor()

        def held_in(self, kept: dict[str, Any]) -> Any:
            return read(kept["held"])

        factor = functools.partialmethod(held_in, kept)

    return Holding(Own(lambda net, x: 1.0), lambda: kept["held"], lambda value: item(kept, "held", value))


def in_attribute(read: Read) -> Holding:
    net = Body(lambda net, x: read(net.held))
    net.held = None
    return Holding(net, lambda: net.held, lambda value: put(net, held=value))


def in_attribute_of_a_layer(read: Read) -> Holding:
    net = Body(lambda net, x: read(net.first[0].held))
    net.first[0].held = None
    return Holding(net, lambda: net.first[0].held, lambda value: put(net.first[0], held=value))


def in_attribute_of_a_parameter(read: Read) -> Holding:
    net = Body(lambda net, x: read(net.weight.held))
    net.weight = nn.Parameter(torch.ones(16))
    return Holding(net, lambda: net.weight.held, lambda value: put(net.weight, held=value))


class Child(nn.Module):
    def __init__(self, parent: Any, read: Read) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.parent, self.read = parent, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parent = self.parent() if callable(self.parent) else self.parent[0]
        return torch.tanh(self.linear(x)) * self.read(parent.held)


def in_parent_in_a_list(read: Read) -> Holding:
    parent = nn.Module()
    return Holding(
        nn.Sequential(*(Child([parent], read) for _ in range(6))),
        lambda: parent.held,
        lambda value: put(parent, held=value),
    )


KEPT: list[Any] = []


def in_parent_behind_a_reference(read: Read) -> Holding:
    parent = nn.Module()
    KEPT[:] = [parent]
    net = nn.Sequential(*(Child(weakref.ref(parent), read) for _ in range(6)))
    return Holding(net, lambda: parent.held, lambda value: put(parent, held=value))


HOLDERS = {
    name.removeprefix("in_").replace("_", " "): make for name, make in list(globals().items()) if name.startswith("in_")
}


# ---------------------------------------------------------------- the table


def recompute_all(run: Checkpointable) -> None:
    """Everything but the last stage, which would be recomputed at once."""
    last = len(run.chain) - 1
    run.use(f"(0-{last - 1}) {last}")


def train(holder: Callable[[Read], Holding], content: Content, *, planned: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    holding = holder(content.read)
    holding.set(content.make())
    run: Any = holding.net
    generator = torch.Generator().manual_seed(1)
    if planned:
        run = Checkpointable(
            holding.net, torch.randn(24, 16, generator=torch.Generator().manual_seed(2)), "1GiB", show_progress=False
        )
        recompute_all(run)
    optimizer = torch.optim.SGD(holding.net.parameters(), 0.1)
    for step in range(STEPS):
        changed = content.change(holding.get(), 1.0 + 0.25 * step)
        if changed is not None:
            holding.set(changed)
        optimizer.zero_grad()
        run(torch.randn(24, 16, generator=generator)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in holding.net.parameters()]


def _cells() -> Iterator[Any]:
    """All cells of the table; ``make test`` runs one of every second column, and one or two of each row."""
    holders, contents = list(HOLDERS), list(CONTENTS)
    chosen = {(holders[number % len(holders)], content) for number, content in enumerate(contents[::2])}
    assert len(contents) >= 2 * len(holders)
    for holder, content in product(holders, contents):
        if (holder, content) != UNSEEN:
            marks = [] if (holder, content) in chosen else [pytest.mark.wide]
            yield pytest.param(holder, content, marks=marks)


@pytest.mark.parametrize(("holder", "content"), [*_cells()])
def test_a_change_of_what_is_held_is_seen(holder: str, content: str) -> None:
    plain = train(HOLDERS[holder], CONTENTS[content], planned=False)
    try:
        ours = train(HOLDERS[holder], CONTENTS[content], planned=True)
    except ModelError as refusal:
        if content not in REFUSED or "cannot be compared at each call" not in str(refusal):
            raise
    else:
        assert all(map(torch.equal, plain, ours))


@pytest.mark.parametrize(
    "read",
    [
        lambda path: float(path.read_text()),
        lambda path: json.load(path.open()),
        lambda path: float(np.loadtxt(path)),
    ],
    ids=["text", "json", "numpy"],
)
@pytest.mark.filterwarnings("ignore:unclosed file")
def test_what_stands_in_a_file_is_read_in_each_step(read: Callable[[Path], float], tmp_path: Path) -> None:
    file = tmp_path / "scale"
    content = Content(lambda: file, read, lambda path, new: last(path.write_text(str(new)), None))
    file.write_text("1.0")
    plain = train(HOLDERS["global"], content, planned=False)
    file.write_text("1.0")
    with pytest.raises(ModelError, match="opens or writes a file, whenever it runs"):
        train(HOLDERS["global"], content, planned=True)
    net = nn.Sequential(nn.Linear(16, 16), Body(lambda *_: read(file)), nn.Linear(16, 16))
    weights = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        copied = copy.deepcopy(net)
        run: Any = copied
        if is_planned:
            run = Checkpointable(copied, torch.randn(24, 16), "1GiB", show_progress=False)
            recompute_all(run)
        for step in range(STEPS):
            file.write_text(str(1 + step))
            run(torch.full((24, 16), 1.0 + step)).square().mean().backward()
        weights.append([parameter.grad for parameter in copied.parameters()])
    assert all(map(torch.equal, *weights))
    assert plain


def test_an_attribute_that_comes_for_one_that_does_not_count_is_seen() -> None:
    class Asking(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * getattr(self, "scale", 1.0)

    weights = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = Asking(lambda *_: 1.0)
        net.mood = 0
        run: Any = net
        generator = torch.Generator().manual_seed(1)
        if is_planned:
            run = Checkpointable(net, torch.randn(24, 16), "1GiB", show_progress=False)
            recompute_all(run)
        for step in range(6):
            # As many attributes as before. The code names one of them alone.
            for name in ("mood", "scale"):
                vars(net).pop(name, None)
            setattr(net, "scale" if step == 4 else "mood", 2.0 + step)
            run(torch.randn(24, 16, generator=generator)).square().mean().backward()
        weights.append([parameter.grad for parameter in net.parameters()])
    assert all(map(torch.equal, *weights))


class Meta(type):
    """A class of classes."""

    scale = 1.0


class OfMeta(metaclass=Meta):
    pass


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "attribute of a metaclass": (lambda: OfMeta.scale, lambda step: put(Meta, scale=1.0 + step)),
    "precision": (
        lambda: 1.0 + (torch.get_float32_matmul_precision() == "high"),
        lambda step: torch.set_float32_matmul_precision("high" if step % 2 else "highest"),
    ),
    "benchmark": (
        lambda: 1.0 + torch.backends.cudnn.benchmark,
        lambda step: put(torch.backends.cudnn, benchmark=bool(step % 2)),
    ),
    "folder": (lambda: len(str(Path.cwd())), lambda step: os.chdir("/usr" if step % 2 else "/")),
    "environment": (
        lambda: float(os.environ.get("LIGHTNING_ROTOR_TEST", "1")),
        lambda step: item(os.environ, "LIGHTNING_ROTOR_TEST", str(1 + step)),
    ),
    "seed": (lambda: torch.initial_seed() % 5, torch.manual_seed),
}


@pytest.fixture
def _settings_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LIGHTNING_ROTOR_TEST", "1")
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setattr(Meta, "scale", 1.0)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.mark.usefixtures("_settings_as_before")
@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_change_of_a_setting_is_seen(name: str) -> None:
    ask, change = SETTINGS[name]
    weights = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = Body(lambda *_: ask())
        run: Any = net
        if is_planned:
            sample = torch.randn(24, 16, generator=torch.Generator().manual_seed(2))
            run = Checkpointable(net, sample, "1GiB", show_progress=False)
            recompute_all(run)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        generator = torch.Generator().manual_seed(1)
        for step in range(STEPS):
            change(step)
            optimizer.zero_grad()
            run(torch.randn(24, 16, generator=generator)).square().mean().backward()
            optimizer.step()
        weights.append([parameter.detach().clone() for parameter in net.parameters()])
    assert all(map(torch.equal, *weights))
