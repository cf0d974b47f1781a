"""Objects of the user's whose methods raise or lie: training asks the classes of Python and torch that they derive from."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor import Checkpointable, RotorCallback
from lightning_rotor.stages.containers import entries_of, length_of
from lightning_rotor.stages.snapshot import Snapshot
from tests.grids import few

METHODS = (
    *("__len__", "__iter__", "__eq__", "__ne__", "__bool__", "__getitem__", "__repr__", "__contains__", "__reversed__"),
    *("items", "keys", "values", "get", "copy", "__hash__"),
)


CONTAINERS: dict[type, tuple[Any, ...]] = {
    tuple: ((1, "a"),),
    list: ([1, "a"],),
    dict: ({"a": 1},),
    set: ({1, 2},),
    frozenset: ({1, 2},),
    OrderedDict: ({"a": 1},),
    defaultdict: (None, {"a": 1}),
    deque: ([1, 2],),
    bytearray: (b"abc",),
    str: ("abc",),
    int: (3,),
    float: (3.0,),
}


def raising(*_: Any, **__: Any) -> Any:
    raise NotImplementedError


def lying(*_: Any, **__: Any) -> Any:
    return torch.zeros(3)


def odd_ones() -> Iterator[Any]:
    """An object for each class of Python and each of its methods, which raises or returns nonsense."""
    for base, content in CONTAINERS.items():
        for name in METHODS:
            if name in dir(base) and getattr(base, name) is not None:
                for method in (raising, lying):
                    yield type(f"Odd{base.__name__}", (base,), {name: method})(*content)


class Slotted:
    __slots__ = ("value",)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Refusing:
    """Refuses every question."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.function: Callable[[torch.Tensor], torch.Tensor] = torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def keep_in_attribute(layer: Layer, things: list[Any]) -> None:
    layer.__dict__.update({f"thing_{number}": thing for number, thing in enumerate(things)})


def keep_in_containers(layer: Layer, things: list[Any]) -> None:
    layer.things, layer.named = things, dict(enumerate(things))


def keep_in_object(layer: Layer, things: list[Any]) -> None:
    layer.config = types.SimpleNamespace(**{f"thing_{number}": thing for number, thing in enumerate(things)})


def keep_in_closure(layer: Layer, things: list[Any]) -> None:
    layer.function = lambda x: torch.tanh(x) if things is not None else x


def keep_in_default(layer: Layer, things: list[Any]) -> None:
    def function(x: torch.Tensor, things: Any = tuple(things)) -> torch.Tensor:
        return torch.tanh(x) if things is not None else x

    layer.function = function


def keep_in_hook(layer: Layer, things: list[Any]) -> None:
    layer.register_forward_hook(partial(lambda things, *_: None, things))


PLACES = [keep_in_attribute, keep_in_containers, keep_in_object, keep_in_closure, keep_in_default, keep_in_hook]


@pytest.mark.parametrize(
    ("in_a_row", "place"),
    [
        pytest.param(in_a_row, place, marks=[] if in_a_row == (number % 2 == 0) else pytest.mark.wide)
        for in_a_row in (True, False)
        for number, place in enumerate(PLACES)
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_odd_objects_wherever_they_are_kept(place: Callable[..., None], in_a_row: bool) -> None:
    things = [*odd_ones(), Slotted(), Refusing()]
    layers = [Layer() for _ in range(3)]
    for layer in layers:
        place(layer, things)
    row = nn.Sequential(*layers)
    plain, net = (row, row) if in_a_row else (nn.Sequential(row), nn.Sequential(row))
    x, found = torch.randn(8, 16), []
    limits = [None, "1GiB", least(net, x)]
    for limit in limits:
        net.zero_grad()
        model = plain if limit is None else Checkpointable(net, mem_limit=limit)
        for _ in range(3):
            model(x).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in net.parameters()])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


def least(net: nn.Module, x: torch.Tensor) -> int:
    return Checkpointable(net, x).frontier().points[0].peak_bytes


def test_contents_are_asked_of_the_class_of_python() -> None:
    for thing in odd_ones():
        if isinstance(thing, (tuple, list, set, frozenset, dict, deque)):
            assert length_of(thing) == len(entries_of(thing)) > 0


def test_what_such_containers_held_is_put_back() -> None:
    layer = Layer()
    layer.things = [thing for thing in odd_ones() if isinstance(thing, (list, dict, set, deque, bytearray))]
    before = [bytes(memoryview(t)) if isinstance(t, bytearray) else entries_of(t) for t in layer.things]
    snapshot = Snapshot((layer,))
    for thing in layer.things:
        base = next(base for base in (list, dict, set, deque, bytearray) if isinstance(thing, base))
        base.clear(thing)
    snapshot.restore()
    after = [bytes(memoryview(t)) if isinstance(t, bytearray) else entries_of(t) for t in layer.things]
    assert [list(map(id, each)) for each in after] == [list(map(id, each)) for each in before]


class Irreps(tuple):
    """Refuses len(), as e3nn's does."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_change_inside_of_a_list_that_refuses_len_is_seen() -> None:
    class Factors(list):
        __len__ = __iter__ = raising

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.factors = nn.ModuleList(Layer() for _ in range(3)), Factors([1.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) * self.factors[0]
            return x

    module, x = Scaled(), torch.randn(4, 16)
    net = Checkpointable(module, mem_limit="1GiB")
    for step in range(4):
        module.factors[0] = 1.0 + step
        assert torch.equal(net(x), module(x))


# -------------------------------------------------------------------- modules and contexts


class Configured(nn.Module):
    """Answers names that its configuration has by looking them up there, as diffusers' models do."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.SiLU())])
        self.__dict__["error"] = error

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_modules", ()):
            return self._modules[name]
        raise self.__dict__["error"](name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("error", few([KeyError, RuntimeError, NotImplementedError], KeyError))
def test_a_module_whose_getattr_raises_anything(error: type[Exception]) -> None:
    for net in (Configured(error), nn.Sequential(Configured(error), nn.Tanh(), Configured(error))):
        x, limit = torch.randn(8, 16), "1GiB"
        net(x).sum().backward()
        expected = [parameter.grad.clone() for parameter in net.parameters()]
        for parameter in net.parameters():
            parameter.grad = None
        Checkpointable(net, mem_limit=limit)(x).sum().backward()
        assert all(map(torch.equal, expected, [parameter.grad for parameter in net.parameters()]))


def test_a_module_that_raises_for_some_names_is_counted_in_a_dry_run() -> None:
    import lightning as L

    class Looking(Configured):
        def __getattr__(self, name: str) -> Any:
            if hasattr(dict, name):
                return {}[name]
            return nn.Module.__getattr__(self, name)

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.text = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
            self.unet = Looking(KeyError).requires_grad_(False)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.unet(self.text(batch)).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.text.parameters(), 0.01)

    rotor = RotorCallback("1GiB", show_table=False)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[rotor], **options)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=32))
    assert "% of the FLOPs" in rotor._last.target
    assert "'unet'" in rotor._last.target


NAMES = (
    *("name", "register_hook", "register_prehook", "variable", "run", "_sequence_nr", "save"),
    *("way", "own", "output", "inputs", "stage", "state"),
)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        for name in NAMES:
            setattr(ctx, name, "mine")
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        assert all(getattr(ctx, name) == "mine" for name in NAMES)
        return gradient * ctx.factor, None


class WithContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scale.apply(torch.tanh(Scale.apply(self.linear(x), 2.0)), 0.5)


@pytest.mark.filterwarnings("ignore:stage '4' gives other bits:lightning_rotor.RotorWarning")  # RReLU
@pytest.mark.parametrize("last", few([nn.Identity, nn.RReLU], nn.Identity))
def test_the_context_of_a_function_may_have_any_attribute(last: Callable[[], nn.Module]) -> None:
    net = nn.Sequential(*[WithContext() for _ in range(4)], last())
    x = torch.randn(8, 16)
    torch.manual_seed(1)
    net(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    for limit in ("1GiB", least(net, x)):
        net.zero_grad()
        torch.manual_seed(1)
        Checkpointable(net, mem_limit=limit)(x).square().sum().backward()
        assert all(map(torch.equal, expected, [parameter.grad for parameter in net.parameters()]))
