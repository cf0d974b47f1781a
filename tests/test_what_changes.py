"""What changes between the steps of training, or in its forward, is seen; and what cannot be followed is refused."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from lightning_rotor import Checkpointable, ModelError, RotorWarning, is_recomputing
from tests.grids import few

STEPS = 4


class Body(nn.Module):
    """A recorded module. What ``extra`` gives is a factor between its layers."""

    def __init__(self, extra: Callable[[Any, torch.Tensor], Any] = lambda net, x: 1.0, **attributes: Any) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.last = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.extra = extra
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x * self.extra(self, x))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 16, generator=generator) for _ in range(STEPS)]


def train(
    make: Callable[[], nn.Module],
    change: Callable[[Any, int], Any],
    state: Callable[[Any], Any],
    inputs: Sequence[torch.Tensor],
    *,
    planned: bool,
) -> tuple[list[torch.Tensor], str]:
    """Losses and weights of a few steps, and what the module says of its state; planned in the least memory."""
    torch.manual_seed(0)
    net = make()
    run: Any = net
    if planned:
        run = Checkpointable(net, inputs[0], "1GiB", show_progress=False)
        run.use(run.frontier().points[0].schedule)
        assert run.plan.recomputed
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for number, x in enumerate(inputs):
        change(net, number)
        optimizer.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach().clone() for parameter in net.parameters())], repr(state(net))


def agree(
    make: Callable[[], nn.Module],
    change: Callable[[Any, int], Any] = lambda net, number: None,
    state: Callable[[Any], Any] = lambda net: None,
    inputs: Callable[[], Sequence[torch.Tensor]] = batches,
) -> None:
    plain = train(make, change, state, inputs(), planned=False)
    ours = train(make, change, state, inputs(), planned=True)
    assert all(map(torch.equal, plain[0], ours[0]))
    assert plain[1] == ours[1]


# ---------------------------------------------------------------- between the steps


def bank_of(net: nn.Module, number: int) -> None:
    net.bank = torch.ones(3 + number, 16)


def bank_in_place(net: nn.Module, number: int) -> None:
    net.bank.data = torch.ones(3 + number, 16)


def bank_of_doubles(net: nn.Module, number: int) -> None:
    net.bank = torch.ones(3, 16, dtype=torch.float64 if number > 1 else torch.float32)


def rows(net: Any, x: torch.Tensor) -> Any:
    return (net.bank.shape[0] + len(net.bank) + 2 * net.bank.mean(0).shape[0]) * 0.1


@pytest.mark.parametrize(
    ("extra", "change"),
    [
        pytest.param(rows, bank_of, marks=pytest.mark.wide),
        (rows, bank_in_place),
        (lambda net, x: 2.0 if net.bank.dtype is torch.float64 else 1.0, bank_of_doubles),
    ],
)
def test_a_buffer_of_another_shape_or_type(
    extra: Callable[[Any, torch.Tensor], Any], change: Callable[[Any, int], Any]
) -> None:
    def make() -> nn.Module:
        net = Body(extra)
        net.register_buffer("bank", torch.ones(3, 16))
        return net

    agree(make, change)


def test_a_parameter_of_another_shape() -> None:
    def grow(net: Any, number: int) -> None:
        if number == 2:
            net.rank = nn.Parameter(torch.ones(5))

    agree(lambda: Body(lambda net, x: len(net.rank) * 0.1 + net.rank.sum(), rank=nn.Parameter(torch.ones(3))), grow)


@dataclass(slots=True)
class Slotted:
    value: Any = 1.0
    calls: int = 0
    entries: list[float] = field(default_factory=list)


@pytest.mark.parametrize("holder", few([SimpleNamespace, Slotted], Slotted))
@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda value: value[0], lambda number: [1.0 + number]),
        (lambda value: value[0], lambda number: (1.0 + number,)),
        (lambda value: value["scale"], lambda number: {"scale": 1.0 + number}),
        (lambda value: value, lambda number: torch.ones(16) * number),
        (float, np.float32),
        (lambda value: 2.0 if value is True else 1.0, lambda number: True if number > 1 else 1),
    ],
)
def test_an_attribute_of_an_object_outside_of_modules(
    holder: type, read: Callable[[Any], Any], value: Callable[[int], Any]
) -> None:
    agree(
        lambda: Body(lambda net, x: read(net.config.value), config=holder(value=value(0))),
        lambda net, number: setattr(net.config, "value", value(number)),
    )


def test_a_setting_of_torch() -> None:
    try:
        agree(
            lambda: Body(lambda net, x: 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0),
            lambda net, number: torch.use_deterministic_algorithms(number > 1),
        )
    finally:
        torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------- in the forward


def count_in_slots(net: Any, x: torch.Tensor) -> float:
    net.state.calls += 1
    return float(net.state.calls)


def count_in_an_array(net: Any, x: torch.Tensor) -> float:
    net.state[0] += 1
    return float(net.state[0])


@pytest.mark.parametrize(
    ("count", "state"),
    [
        (count_in_slots, Slotted),
        (count_in_an_array, lambda: np.zeros(100)),
        (count_in_an_array, lambda: np.zeros(100_000)),
        (count_in_an_array, lambda: [0] * 2000),
    ],
)
def test_state_that_a_recorded_forward_changes_is_refused(
    count: Callable[[Any, torch.Tensor], float], state: Callable[[], Any]
) -> None:
    net = Body(count, state=state())
    with pytest.raises(ModelError, match="its forward changes attributes of the module"):
        Checkpointable(net, batches()[0])
    assert repr(net.state) == repr(state())


class Counting(nn.Module):
    """Keeps state in slots, in an array, in a long list, in bytes, and on its class."""

    calls = 0
    shapes: ClassVar[set[tuple[int, ...]]] = set()

    def __init__(self, size: int = 100) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU())
        self.slotted, self.array, self.list = Slotted(), np.zeros(size), [0] * 2000
        self.bytes, self.numbers = bytearray(3), array("d", [0.0, 1.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        self.shapes.add((type(self).calls, *x.shape))
        self.slotted.calls += 1
        for state in (self.array, self.list, self.bytes, self.numbers):
            state[0] += 1  # type: ignore[index, operator]
        return self.layers(x) * self.numbers[0]  # type: ignore[no-any-return]

    @property
    def state(self) -> Any:
        counted = self.array[0], self.list[0], self.bytes, self.numbers
        return type(self).calls, sorted(self.shapes), self.slotted.calls, counted


def test_state_is_counted_once() -> None:
    def make() -> nn.Module:
        Counting.calls = 0
        Counting.shapes.clear()
        return nn.Sequential(*(Counting() for _ in range(4)))

    agree(make, state=lambda net: [layer.state for layer in net], inputs=lambda: [x.repeat(20, 1) for x in batches()])


def test_a_stage_that_changes_a_large_array_is_kept() -> None:
    net = nn.Sequential(Counting(20_000), nn.Linear(16, 16))
    with pytest.warns(RotorWarning, match="'0' gives other bits"):
        run = Checkpointable(net, batches()[0], "1GiB", show_progress=False)
    run.use(run.frontier().points[0].schedule)
    for x in batches():
        run(x).sum().backward()
    assert net[0].array[0] == STEPS


class Iterating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.numbers = nn.Linear(16, 16), iter(range(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * next(self.numbers)


def test_state_that_nobody_can_put_back_is_announced() -> None:
    net = nn.Sequential(Iterating(), nn.Linear(16, 16))
    with pytest.warns(RotorWarning, match=r"'0' gives other bits .* in an iterator, .* measuring has moved it on"):
        Checkpointable(net, batches()[0])


# ---------------------------------------------------------------- what code does besides computing


class Telling(nn.Module):
    def __init__(self, tell: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.tell = nn.Linear(16, 16), tell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_recomputing():
            self.tell()
        return self.linear(x)


def test_a_module_that_asks_whether_it_recomputes_is_one_stage() -> None:
    told: list[int] = []
    net = Body(lambda net, x: net.telling(x), telling=Telling(lambda: told.append(1)))
    run = Checkpointable(net, batches()[0], "1GiB", show_progress=False)
    run.use(run.frontier().points[0].schedule)
    for x in batches():
        run(x).sum().backward()
    assert len(told) == STEPS
    with pytest.raises(ModelError, match=r"it asks is_recomputing\(\)"):
        Checkpointable(Body(lambda net, x: 1.0 + is_recomputing()), batches()[0])


def test_a_module_that_prints_is_one_stage() -> None:
    out = io.StringIO()

    def prints(net: nn.Module, x: torch.Tensor) -> float:
        print("called", file=out)
        return 1.0

    with pytest.raises(ModelError, match="it prints, or opens or writes a file, whenever it runs"):
        Checkpointable(Body(prints), batches()[0])

    def warns_once(net: Any, x: torch.Tensor) -> float:
        if not out.getvalue():
            print("once", file=out)
        return 1.0

    out = io.StringIO()
    assert Checkpointable(Body(warns_once), batches()[0]).plan is None
    assert out.getvalue() == "once\n"


# ---------------------------------------------------------------- Python attributes of tensors


def scaled(net: Any, x: torch.Tensor) -> Any:
    return getattr(x, "scale", 1.0)


def with_scales() -> list[torch.Tensor]:
    inputs = batches()
    for number, x in enumerate(inputs):
        x.scale = 1.0 + number  # type: ignore[attr-defined]
    return inputs


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * x.scale)  # type: ignore[attr-defined, no-any-return]


class Marks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x * getattr(x, "scale", 1.0)))
        y.scale = getattr(x, "scale", 1.0) + 0.5  # type: ignore[attr-defined]
        return y


class Chained(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Marks(), Marks()])
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Scaled, with_scales),
        (lambda: nn.Sequential(Marks(), Marks(), Marks(), nn.Linear(16, 16)), with_scales),
        (lambda: Chained(nn.Linear(16, 16)), batches),
    ],
)
def test_tensors_keep_their_python_attributes(
    make: Callable[[], nn.Module], inputs: Callable[[], Sequence[torch.Tensor]]
) -> None:
    agree(make, inputs=inputs)


class OneStage(Marks):
    """Cannot be recorded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.sum()) > -1e9 else x


@pytest.mark.parametrize("last", [Marks, lambda: nn.Sequential(OneStage(), nn.Linear(16, 16))])
def test_attributes_that_a_recording_would_lose_are_refused(last: Callable[[], nn.Module]) -> None:
    with pytest.raises(ModelError, match="it sets Python attributes of tensors"):
        Checkpointable(Chained(last()), batches()[0])


# ---------------------------------------------------------------- what a Checkpointable looks like


class Versioned(nn.Module):
    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.loaded: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.loaded.append(metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


def versioned() -> nn.Sequential:
    return nn.Sequential(Versioned(), nn.Linear(16, 16))


def test_state_dicts_keep_versions_and_names() -> None:
    plain, wrapped = versioned(), Checkpointable(versioned())
    plain.load_state_dict(wrapped.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    around, other = nn.ModuleDict({"net": wrapped}), nn.ModuleDict({"net": plain})
    around.load_state_dict(around.state_dict())
    other.load_state_dict(around.state_dict())
    assert plain[0].loaded == wrapped[0].loaded == [2, 2]
    assert [name for name, _ in around.named_parameters()] == [name for name, _ in other.named_parameters()]
    state = around.state_dict()
    state["net.more"] = state.pop("net.0.weight")
    assert tuple(around.load_state_dict(state, strict=False)) == (["net.0.weight"], ["net.more"])
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "net.0.weight"'):
        around.load_state_dict(state)


def test_attributes_are_set_on_the_module() -> None:
    net = Body(lambda net, x: net.scale, scale=1.0)
    run = Checkpointable(net, batches()[0], "1GiB", show_progress=False)
    run.scale = 2.0
    assert net.scale == 2.0
    assert torch.equal(run(batches()[0]), net(batches()[0]))
    run.last = nn.Linear(16, 4)
    run.register_buffer("mean", torch.zeros(1))
    run.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    run.add_module("more", nn.Identity())
    assert isinstance(net.last, nn.Linear)
    assert list(dict(net.named_children())) == ["first", "last", "more"]
    assert {"mean", "bias"} <= net.state_dict().keys() == run.state_dict().keys()
    assert run(batches()[0]).shape == (6, 4)
    del run.scale
    assert not hasattr(net, "scale")
    other = pickle.loads(pickle.dumps(Checkpointable(versioned())))
    assert list(copy.deepcopy(other).state_dict()) == ["0.weight", "1.weight", "1.bias"]


def test_a_planned_forward_has_the_arguments_of_the_modules_own() -> None:
    seen: list[str] = []

    class Asking(Body):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    net = Asking()
    net.register_forward_pre_hook(lambda module, args: seen.append(str(inspect.signature(module.forward))))
    Checkpointable(net, batches()[0])(batches()[0])
    assert seen == ["(x: 'torch.Tensor', scale: 'float' = 1.0) -> 'torch.Tensor'"]


def test_a_configuration_of_the_users_own_keeps_use_cache() -> None:
    agree(
        lambda: Body(lambda net, x: 2.0 if net.config.use_cache else 1.0, config=SimpleNamespace(use_cache=True)),
    )


def test_an_input_of_inference_mode() -> None:
    def inputs() -> list[torch.Tensor]:
        with torch.inference_mode():
            return batches()

    class Cloning(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.clone())

    agree(Cloning, inputs=inputs)
