"""Classes of the user's in the arguments, results and tensors of planned modules: the bits of plain training, or an error of this package."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from lightning_rotor import BudgetError, Checkpointable, ModelError, RotorCallback, SampleError
from lightning_rotor.private.nestings import flatten, tree_unflatten
from tests.training import assert_same_bits

ROWS = torch.randn(128, 16, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------- named tuples that do more than generated ones


class Batch(NamedTuple):
    rows: torch.Tensor
    name: str = ""


class Halving(Batch):
    """Is made of fewer arguments than it has entries, and not as it is given."""

    def __new__(cls, rows: torch.Tensor) -> Any:
        return super().__new__(cls, rows / 2, "halved")


class Scaling(Batch):
    """Takes all its entries, and changes one."""

    def __new__(cls, rows: torch.Tensor, name: str = "") -> Any:
        return super().__new__(cls, rows * 0.9, name)


class Lying(Batch):
    def __iter__(self) -> Any:
        return iter((self.rows * 0, "nothing"))


class Carrying(Batch):
    """Has an attribute besides its entries."""

    more: torch.Tensor


def carrying(rows: torch.Tensor) -> Carrying:
    made = Carrying(rows)
    made.more = rows / 4
    return made


KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "generated": (Batch, lambda batch: batch.rows),
    "fewer arguments": (Halving, lambda batch: batch.rows),
    "changes an entry": (Scaling, lambda batch: batch.rows),
    "lies of its entries": (Lying, lambda batch: batch.rows),
    "has an attribute": (carrying, lambda batch: batch.rows + batch.more),
}


class Layer(nn.Module):
    """Takes and returns such an object; as one stage, if values decide."""

    def __init__(self, kind: str, values_decide: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.make, self.rows = KINDS[kind]
        self.values_decide = values_decide

    def forward(self, batch: Any) -> Any:
        rows = self.rows(batch)
        rows = rows + self.inner(rows)
        if self.values_decide and float(rows.detach().sum()) == 1e9:
            rows = rows + 1
        return self.make(rows)


class Layers(nn.Module):
    def __init__(self, kind: str, values_decide: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind, values_decide) for _ in range(4))

    def forward(self, batch: Any) -> Any:
        for layer in self.layers:
            batch = layer(batch)
        return batch


def least_of(net: nn.Module, step: Callable[[nn.Module], torch.Tensor]) -> int:
    with pytest.raises(BudgetError) as caught:
        step(Checkpointable(copy.deepcopy(net), mem_limit=1, show_progress=False))
    return caught.value.minimum_bytes


def assert_plain_bits(net: nn.Module, step: Callable[[nn.Module], torch.Tensor]) -> Checkpointable:
    """Two steps at the least limit, and two plain ones."""
    plain = copy.deepcopy(net)
    planned = Checkpointable(net, mem_limit=least_of(net, step), show_progress=False)
    for trained in (plain, planned):
        optimizer = torch.optim.SGD([each for each in trained.parameters() if each.requires_grad], 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            step(trained).backward()
            optimizer.step()
    assert_same_bits([*plain.parameters()], [*net.parameters()])
    assert planned.plan is not None
    assert planned.plan.recomputed
    return planned


@pytest.mark.parametrize(
    ("kind", "values_decide"),
    [
        pytest.param(kind, values_decide, marks=[] if values_decide == (number % 2 == 1) else pytest.mark.wide)
        for number, kind in enumerate(KINDS)
        for values_decide in (False, True)
    ],
)
def test_named_tuples_of_the_users(kind: str, values_decide: bool) -> None:
    torch.manual_seed(0)
    make, rows = KINDS[kind]
    assert_plain_bits(Layers(kind, values_decide), lambda net: rows(net(make(ROWS))).square().mean())


@pytest.mark.parametrize("kind", KINDS)
def test_a_named_tuple_comes_back_as_it_was_wherever_it_is(kind: str) -> None:
    make, _ = KINDS[kind]
    given = {"deep": [make(ROWS), 3]}
    leaves, spec = flatten(given)
    back = tree_unflatten(leaves, spec)["deep"][0]
    assert type(back) is type(given["deep"][0])
    assert back.rows is given["deep"][0].rows
    assert vars(back) == vars(given["deep"][0]) if kind == "has an attribute" else back.name == given["deep"][0].name
    assert flatten(given)[1] == spec


# ---------------------------------------------------------------- tensors


class Wrapping(torch.Tensor):
    """Keeps its values in another tensor, and does not say in which."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapping) else value

        def wrapped(value: Any) -> Any:
            return Wrapping(value) if isinstance(value, torch.Tensor) and not isinstance(value, Wrapping) else value

        return tree_map(wrapped, func(*tree_map(bare, args), **tree_map(bare, kwargs or {})))


class WrappedBuffer(nn.Module):
    """Reads what is inside of a result, where no recording looks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("scale", Wrapping(torch.full((16,), 2.0)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.inner((rows * self.scale).inner)


def test_a_tensor_that_does_not_say_what_it_is_made_of_is_refused() -> None:
    row = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    with pytest.raises(SampleError, match="a Wrapping has no memory of its own and does not say which tensors"):
        Checkpointable(row, mem_limit="1MiB", show_progress=False)(Wrapping(ROWS))
    layers = nn.Sequential(nn.Linear(16, 16), WrappedBuffer(), WrappedBuffer())
    with pytest.raises(SampleError, match=r"expected plain tensors, or a class with __tensor_flatten__"):
        Checkpointable(layers, mem_limit="1MiB", show_progress=False)(ROWS)


class WithoutValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.register_buffer("elsewhere", torch.empty(3, device="meta"))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.inner(rows)


def test_a_buffer_without_values_is_left_alone() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(WithoutValues(), WithoutValues(), WithoutValues())
    assert_plain_bits(net, lambda net: net(ROWS).square().mean())


# ---------------------------------------------------------------- modules


class Squashed(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.tanh()


class Cached(nn.Module):
    """Computes each weight once for two calls, in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        for layer in self.layers:
            parametrize.register_parametrization(layer, "weight", Squashed())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            for layer in self.layers:
                rows = rows + layer(rows).tanh() + layer(rows.tanh())
        return rows


def test_weights_that_a_forward_computes_once_are_refused_there_and_one_stage_below() -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelError, match=r"computes parametrized weights once for several calls"):
        Checkpointable(Cached(), mem_limit="1MiB", show_progress=False)(ROWS)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
            self.cached = Cached()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.cached(self.before(rows).sin()).square()

    planned = assert_plain_bits(Two(), lambda net: net(ROWS).mean())
    assert any("cached" in name for name in planned.chain.names)


class NamedAsMethods(nn.Module):
    """Its submodules have names of methods of ``nn.Module``."""

    def __init__(self) -> None:
        super().__init__()
        self.modules = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self._modules["modules"]:
            rows = rows + layer(rows)
        return rows


class Step(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = NamedAsMethods()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fitted(rotor: RotorCallback | None) -> Step:
    step = Step()
    L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[] if rotor is None else [rotor],
    ).fit(step, torch.utils.data.DataLoader(ROWS, 32))  # fmt: skip
    return step


def test_submodules_may_have_names_of_methods() -> None:
    with pytest.raises(BudgetError) as caught:
        fitted(RotorCallback("1KiB", show_table=False))
    rotor = RotorCallback(caught.value.minimum_bytes, show_table=False)
    assert_same_bits([*fitted(None).parameters()], [*fitted(rotor).parameters()])
    assert rotor.plan is not None
    assert rotor.plan.recomputed


class Word(str):
    """Cannot be compared."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, rows: torch.Tensor, *, way: str) -> torch.Tensor:
        for layer in self.layers:
            rows = rows + layer(rows)
        return rows

    def children(self) -> Any:
        raise RuntimeError("not to be asked")


def test_arguments_that_cannot_be_compared_and_modules_that_hide_their_children() -> None:
    torch.manual_seed(0)
    assert_plain_bits(Told(), lambda net: net(ROWS, way=Word("left")).square().mean())


# ---------------------------------------------------------------- forwards of an object


class WithoutForward(nn.Module):
    """Its forward is the object's, and not its class's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.forward = self.run

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_a_forward_that_was_set_on_an_object_is_refused_by_what_it_is() -> None:
    module = WithoutForward()
    with pytest.raises(ModelError, match=r"set on this object alone .* expected it in the class"):
        Checkpointable(module, ROWS, mem_limit="1MiB")
    assert module.forward == module.run
