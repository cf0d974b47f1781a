# ruff: noqa: D101, D102, D103  (tables of small things whose names say what they are)
"""Kinds of layers of the fuzzer that deal with objects of the user's own.

Values that objects around a layer hold and that change at each step, layers that are skipped by chance or by value, modules in wrappers,
containers whose methods raise, tensors of other classes, and messages between processes. Likewise the loader that draws in a thread.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from benchmarks.fuzz_kinds import Around, Build, Fork, Join, OnFirst, around, kind

Forward = Callable[..., torch.Tensor]
Read = Callable[[Any], Any]
Put = Callable[[Any], None]

# ----------------------------------------------------------------------- values that change at each step, and who holds them


class Box:
    """An object with a value."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Reader(Box):
    """Reads its value by itself."""

    def __init__(self, value: Any, read: Read) -> None:
        super().__init__(value)
        self.read = read

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read(self.value)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)


class Computed(Box):
    @property
    def current(self) -> Any:
        return self.value


class Slotted:
    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


def _scale(step: float) -> float:
    return 1 + 0.1 * step


def _fill(value: torch.Tensor, step: float) -> torch.Tensor:
    return value.fill_(_scale(step))


def _enter(value: dict[str, Any], step: float) -> dict[str, Any]:
    value["all"][0] = _scale(step)
    return value


def _nest(value: Box, step: float) -> Box:
    value.value.value = _scale(step)
    return value


def _assign(value: Any, step: float) -> Any:
    value[0] = _scale(step)
    return value


# Name: the first value, how a layer reads it, and what becomes of it at a step.
CONTENTS: dict[str, tuple[Callable[[], Any], Read, Callable[[Any, float], Any]]] = {
    "number": (lambda: 1.0, lambda value: value, lambda _, step: _scale(step)),
    "text": (lambda: "1.0", float, lambda _, step: str(_scale(step))),
    "tensor": (lambda: torch.tensor(1.0), lambda value: value, lambda _, step: torch.tensor(_scale(step))),
    "written": (lambda: torch.tensor(1.0), lambda value: value, _fill),
    "entry": (lambda: {"all": [1.0]}, lambda value: value["all"][0], _enter),
    "attribute": (lambda: Box(Box(1.0)), lambda value: value.value.value, _nest),
    "array": (lambda: np.ones(3), lambda value: float(value[0]), _assign),
}
GLOBALS: dict[int, Any] = {}


def _class(value: Any, read: Read) -> tuple[Forward, Put]:
    class Context:
        current = value

    return lambda self, x: x * read(Context.current), partial(setattr, Context, "current")


def _object(value: Any, read: Read, box: type = Box) -> tuple[Forward, Put]:
    holder = box(value)
    return lambda self, x: x * read(holder.value), partial(setattr, holder, "value")


def _property(value: Any, read: Read) -> tuple[Forward, Put]:
    holder = Computed(value)
    return lambda self, x: x * read(holder.current), partial(setattr, holder, "value")


def _mapping(value: Any, read: Read) -> tuple[Forward, Put]:
    holder = {"value": value}
    return lambda self, x: x * read(holder["value"]), partial(holder.__setitem__, "value")


def _default(value: Any, read: Read) -> tuple[Forward, Put]:
    def forward(self: nn.Module, x: torch.Tensor, box: Any = Box(value)) -> torch.Tensor:  # noqa: B008
        return x * read(box.value)

    assert forward.__defaults__ is not None
    return forward, partial(setattr, forward.__defaults__[0], "value")


def _scaled(box: Any, read: Read, x: torch.Tensor) -> torch.Tensor:
    return x * read(box.value)


def _partial(value: Any, read: Read) -> tuple[Forward, Put]:
    holder = Box(value)
    scaled = partial(_scaled, holder, read)
    return lambda self, x: scaled(x), partial(setattr, holder, "value")


def _method(value: Any, read: Read) -> tuple[Forward, Put]:
    reader = Reader(value, read)
    scaled = reader.scaled
    return lambda self, x: scaled(x), partial(setattr, reader, "value")


def _called(value: Any, read: Read) -> tuple[Forward, Put]:
    reader = Reader(value, read)
    return lambda self, x: reader(x), partial(setattr, reader, "value")


def _global(value: Any, read: Read) -> tuple[Forward, Put]:
    place = len(GLOBALS)
    GLOBALS[place] = value
    return lambda self, x: x * read(GLOBALS[place]), partial(GLOBALS.__setitem__, place)


def _function(value: Any, read: Read) -> tuple[Forward, Put]:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * read(scaled.value)  # type: ignore[attr-defined]

    scaled.value = value  # type: ignore[attr-defined]
    return lambda self, x: scaled(x), partial(setattr, scaled, "value")


def _variable(value: Any, read: Read) -> tuple[Forward, Put]:
    def put(new: Any) -> None:
        nonlocal value
        value = new

    return lambda self, x: x * read(value), put


def _context(value: Any, read: Read) -> tuple[Forward, Put]:
    variable: ContextVar[Any] = ContextVar("value")
    variable.set(value)
    return lambda self, x: x * read(variable.get()), variable.set


def _weak(value: Any, read: Read) -> tuple[Forward, Put]:
    holder = Box(value)
    reference = weakref.ref(holder)
    return lambda self, x: x * read(reference().value), partial(setattr, holder, "value")  # type: ignore[union-attr]


HOLDERS: dict[str, Callable[[Any, Read], tuple[Forward, Put]]] = {
    "class": _class,
    "object": _object,
    "slots": partial(_object, box=Slotted),
    "property": _property,
    "mapping": _mapping,
    "default": _default,
    "partial": _partial,
    "method": _method,
    "called": _called,
    "global": _global,
    "function": _function,
    "variable": _variable,
    "context": _context,
    "weak": _weak,
}


def _reading(holder: str, content: str) -> Callable[[Build], nn.Module]:
    def make(build: Build) -> nn.Module:
        start, read, changed = CONTENTS[content]
        value = start()
        forward, put = HOLDERS[holder](value, read)

        def change(step: float) -> None:
            nonlocal value
            value = changed(value, step)
            put(value)

        build.changes.append(change)
        name = f"Reads{holder.title()}{content.title()}"
        return type(name, (nn.Module,), {"forward": forward, "__module__": __name__})()

    return make


for _holder, _content in itertools.product(HOLDERS, CONTENTS):
    kind(f"{_holder}_{_content}", 0.06)(_reading(_holder, _content))


@kind("own_class", 0.3)
def _own_class(build: Build) -> nn.Module:
    """Reads an attribute of its class, and one of a base."""

    class Base(nn.Module):
        shift = 0.0

    class Layer(Base):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + type(self).shift

    build.changes += [lambda step: setattr(Layer, "scale", _scale(step)), lambda step: setattr(Base, "shift", step)]
    return Layer()


# --------------------------------------------------------------------------------------------------- depth by chance or by value


def _layerdrop(self: Around, x: torch.Tensor) -> torch.Tensor:
    for layer in self.inner:
        if not self.training or random.random() > 0.4:
            x = x + layer(x)
    return x


def _stochastic_depth(self: Around, x: torch.Tensor) -> torch.Tensor:
    if self.training and torch.rand(()) < 0.4:
        return x
    return x + self.inner(x)


def _random_depth(self: Around, x: torch.Tensor) -> torch.Tensor:
    for _ in range(np.random.randint(0, 4)):  # noqa: NPY002
        x = x + self.inner(x)
    return x


def _routed(self: Around, x: torch.Tensor) -> torch.Tensor:
    return self.inner[int(x.detach().mean() > 0)](x)


def _experts(self: Around, x: torch.Tensor) -> torch.Tensor:
    """Each row to one of two, by its value."""
    first = x.detach().flatten(1).mean(1) > 0
    y = torch.zeros_like(x)
    for expert, rows in zip(self.inner, (first, ~first), strict=True):
        if rows.any():
            y[rows] = expert(x[rows]).to(y.dtype)
    return x + y


around("layerdrop", 1, _layerdrop)
around("stochastic_depth", 1, _stochastic_depth)
around("random_depth", 0.6, _random_depth)
around("routed", 0.7, _routed, inner=2)
around("experts", 0.8, _experts, inner=2)


# --------------------------------------------------------------------------------------------------------------- wrappers


class ModuleChild(nn.Module):
    """A wrapper whose child is named as that of DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Delegating(ModuleChild):
    """A wrapper that has what its child has."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class RaisingKeyError(ModuleChild):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise KeyError(name) from None


WRAPPERS = {"module_child": ModuleChild, "delegating": Delegating, "raising_key_error": RaisingKeyError}


def _wrapped(wrapper: type[nn.Module]) -> Callable[..., nn.Module]:
    return lambda build, *inner: wrapper(nn.Sequential(*inner))


for _name, _wrapper in WRAPPERS.items():
    kind(_name, 0.6, inner=1)(_wrapped(_wrapper))


@kind("two_names", 0.8, inner=1)
class _TwoNames(Around):
    """The same modules by another name."""

    def __init__(self, build: Build, *inner: nn.Module) -> None:
        super().__init__(build, *inner)
        self.layers = nn.ModuleList(self.inner)
        self.again = self.inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.again(x))


# ------------------------------------------------------------------------------------------------------------- containers


class Two(NamedTuple):
    left: Any
    right: Any


@dataclass
class Both:
    left: Any
    right: Any


class Fields(dict[str, Any]):
    """A dict whose entries are attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]  # a KeyError for what it has not, as of many such classes


class RefusesLen(tuple[Any, ...]):
    def __len__(self) -> int:
        raise NotImplementedError("no length")


class RefusesIter(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise TypeError("not iterable")


class Odd:
    """An object whose methods raise."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        raise TypeError("not comparable")

    def __hash__(self) -> int:
        raise TypeError("unhashable")

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")

    def __len__(self) -> int:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


@dataclass(frozen=True)
class Carrier:
    """How two values travel in one container."""

    pack: Callable[[Any, Any], Any]
    left: Callable[[Any], Any]
    right: Callable[[Any], Any]
    is_known: bool = False  # a container that can be taken apart and made again


_BY_NAME = (lambda c: c.left, lambda c: c.right)
_BY_KEY = (lambda c: c["left"], lambda c: c["right"])
_BY_PLACE = (lambda c: c[0], lambda c: c[1])
CARRIERS = {
    "namedtuple": Carrier(Two, *_BY_NAME, True),
    "dataclass": Carrier(Both, *_BY_NAME, True),
    "fields": Carrier(lambda left, right: Fields(left=left, right=right), *_BY_NAME),
    "ordered": Carrier(lambda left, right: OrderedDict(left=left, right=right), *_BY_KEY, True),
    "refuses_len": Carrier(lambda left, right: RefusesLen((left, right)), *_BY_PLACE),
    "refuses_iter": Carrier(lambda left, right: RefusesIter((left, right)), *_BY_PLACE),
    "odd": Carrier(lambda left, right: Odd((left, right)), lambda c: c.value[0], lambda c: c.value[1]),
}


class CarriedFork(Fork):
    def __init__(self, carrier: Carrier) -> None:
        super().__init__()
        self.carrier = carrier

    def forward(self, x: torch.Tensor) -> Any:
        return self.carrier.pack(*super().forward(x))


class CarriedOnFirst(OnFirst):
    def __init__(self, layer: nn.Module, carrier: Carrier) -> None:
        super().__init__(layer)
        self.carrier = carrier

    def forward(self, pair: Any) -> Any:
        return self.carrier.pack(self.layer(self.carrier.left(pair)), self.carrier.right(pair))


class CarriedJoin(Join):
    def __init__(self, carrier: Carrier) -> None:
        super().__init__()
        self.carrier = carrier

    def forward(self, pair: Any) -> torch.Tensor:
        return self.carrier.left(pair) + self.carrier.right(pair)


def _carried(carrier: Carrier) -> Callable[..., nn.Module]:
    def make(build: Build, *inner: nn.Module) -> nn.Module:
        layers = [CarriedOnFirst(layer, carrier) for layer in inner]
        return nn.Sequential(CarriedFork(carrier), *layers, CarriedJoin(carrier))

    return make


for _name, _carrier in CARRIERS.items():
    kind(f"pair_{_name}", 0.4 if _carrier.is_known else 0.1, inner=1)(_carried(_carrier))


@kind("odd_attributes", 1)
class _OddAttributes(nn.Module):
    """Has containers whose methods raise, and reads entries that change."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.numbers, self.irreps = RefusesIter([1.0]), RefusesLen((1.0, 2.0))
        self.settings, self.odd = Fields(scale=1.0), Odd(1.0)
        build.changes.append(self.change)

    def change(self, step: float) -> None:
        self.numbers[0] = self.odd.value = self.settings["scale"] = _scale(step)
        self.irreps = RefusesLen((_scale(step), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.numbers[0] * self.irreps[0] * self.settings.scale * self.odd.value


# --------------------------------------------------------------------------------------------------------- tensors of other classes


class Quantized(torch.Tensor):
    """Eight bits a number and a scale, as weights of torchao are."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=dtype, device=numbers.device)  # type: ignore[attr-defined]

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.numbers, self.scale = numbers, scale

    @classmethod
    def of(cls, values: torch.Tensor) -> Any:
        scale = values.abs().max() / 127
        return cls((values / scale).round().to(torch.int8), scale, values.dtype)

    def dequantized(self) -> torch.Tensor:
        return self.numbers.to(self.dtype) * self.scale.to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], dtype: Any, size: Any, stride: Any) -> Any:
        return cls(inner["numbers"], inner["scale"], dtype)

    def __repr__(self, **_: Any) -> str:
        return f"Quantized({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        kwargs = kwargs or {}
        if function in (aten.detach.default, aten.alias.default, aten.clone.default):
            numbers, scale = (function(each) for each in (args[0].numbers, args[0].scale))
            return cls(numbers, scale, args[0].dtype)
        if function is aten._to_copy.default:
            return cls(args[0].numbers.clone(), args[0].scale.clone(), kwargs.get("dtype") or args[0].dtype)
        return function(*tree_map_only(cls, cls.dequantized, args), **tree_map_only(cls, cls.dequantized, kwargs))


@kind("quantized", 1.2, "rs")
class _QuantizedLinear(nn.Module):
    """As a layer whose base is frozen: a quantized weight, and a small one that learns."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        values = torch.randn(build.width, build.width) / build.width**0.5
        self.weight = nn.Parameter(Quantized.of(values), requires_grad=False)
        self.adapter = nn.Linear(build.width, build.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + 0.1 * self.adapter(x)


class Tagged(torch.Tensor):
    """A class of the user's that does nothing."""


class OwnParameter(nn.Parameter):
    """A parameter with an attribute, as libraries for sharding have."""

    partition_dim = 0


@kind("tagged", 0.6)
class _Tagged(nn.Module):
    def __init__(self, build: Build) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.as_subclass(Tagged) * 2).sin().as_subclass(torch.Tensor)


@kind("own_parameter", 0.6)
class _OwnParameter(nn.Module):
    def __init__(self, build: Build) -> None:
        super().__init__()
        self.scale = OwnParameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.scale.partition_dim


@kind("jagged", 0.15, "r")
class _Jagged(nn.Module):
    """Rows of several lengths, inside of the layer."""

    def __init__(self, build: Build) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, 1, len(x)])
        return torch.nested.nested_tensor_from_jagged(x, offsets).sin().values()


@kind("sparse_embedding", 0.8, "rs")
class _SparseEmbedding(nn.Module):
    """Whose gradient is sparse."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.table = nn.Embedding(12, build.width, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x.detach().float().abs().sum(-1) * 5).long() % 12).to(x.dtype)


# --------------------------------------------------------------------------------------------------------- messages between processes


class Sum(torch.autograd.Function):
    """Of all processes, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SumOfGradients(torch.autograd.Function):
    """Megatron's f: nothing is sent in the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def summed_by_a_helper(x: torch.Tensor) -> torch.Tensor:
    return differentiable.all_reduce(x)


def gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())
    parts[dist.get_rank()] = x
    return torch.stack(parts).sum(0)


def exchanged(x: torch.Tensor) -> torch.Tensor:
    """To all, from all."""
    own = x.detach().repeat(dist.get_world_size())
    received = torch.empty_like(own)
    dist.all_to_all_single(received, own)
    return x + received.sum()


def functionally_summed(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x.detach(), "sum", dist.group.WORLD) + x


# Of a number that says something of the whole batch; what its layer gives back.
SENDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum_direct": differentiable.all_reduce,
    "sum_helper": summed_by_a_helper,
    "sum_function": Sum.apply,
    "sum_of_gradients": SumOfGradients.apply,
    "gather_helper": gathered,
    "exchange_helper": exchanged,
    "sum_functional": functionally_summed,
}


def _sending(send: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Build], nn.Module]:
    class Sending(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            statistic = x.mean().reshape(1)
            return x * torch.sigmoid(send(statistic))

    return lambda build: Sending()


for _name, _send in SENDERS.items():
    kind(_name, 2)(_sending(_send))


# ------------------------------------------------------------------------------------------------ a loader that draws in a thread

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand((), dtype=torch.float32)),  # Lightning sets the default for all threads
    "numpy": lambda: float(np.random.random()),  # noqa: NPY002
    "python": random.random,
}
_PIECES, _NAP_SECONDS = 8, 0.004


class Prefetched:
    """Batches with noise that a thread draws from a global generator while the step before runs: as many numbers for each.

    Plain training repeats if nobody else draws from that generator, and if steps are looked at once the thread waits (:meth:`settle`).
    """

    def __init__(self, batches: list[torch.Tensor], generator: str) -> None:
        self._batches, self._draw = batches, DRAWS[generator]
        self._idle = threading.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[torch.Tensor]:
        wanted: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        made: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        thread = threading.Thread(target=self._work, args=(wanted, made), daemon=True)
        thread.start()
        try:
            for number in range(-1, len(self._batches)):
                self.settle()
                ready = made.get() if number >= 0 else None
                if number + 1 < len(self._batches):
                    self._idle.clear()
                    wanted.put(self._batches[number + 1])
                if ready is not None:
                    yield ready
        finally:
            wanted.put(None)
            thread.join()

    def settle(self) -> None:
        """Wait until the thread does."""
        self._idle.wait()

    def _work(self, wanted: queue.SimpleQueue[torch.Tensor | None], made: queue.SimpleQueue[torch.Tensor]) -> None:
        while (batch := wanted.get()) is not None:
            noise = 0.0
            for _ in range(_PIECES):
                noise += self._draw()
                time.sleep(_NAP_SECONDS)
            made.put(batch * (1 + 0.01 * noise))
            self._idle.set()
