"""Layers and steps that change what lies outside of modules, where code alone names it: as often as in plain training."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import nn

from lightning_rotor import RotorCallback
from tests.grids import few
from tests.training import assert_same_bits, assert_same_training, tight_limit, train

WIDTH, BATCH = 32, 64

LOSSES: list[torch.Tensor] = []
LOSS_OF_LAYER: dict[int, torch.Tensor] = {}
NUMBERS: list[float] = []
CONTEXT = SimpleNamespace(losses=[])
PYTHONS = random.Random(0)
NUMPYS = np.random.default_rng(0)
TORCHS = torch.Generator()
CALLS = 0


class Shared:
    losses: ClassVar[list[torch.Tensor]] = []
    calls = 0


def _square(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().mean()


class Layer(nn.Module):
    """One layer with an activation; subclasses do something beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(rows).tanh()
        return rows + hidden * self.beside(hidden)

    def beside(self, hidden: torch.Tensor) -> float | torch.Tensor:
        raise NotImplementedError


class InGlobalList(Layer):
    def beside(self, hidden: torch.Tensor) -> float:
        LOSSES.append(_square(hidden))
        return 1.0


class InListOfClass(Layer):
    def beside(self, hidden: torch.Tensor) -> float:
        Shared.losses.append(_square(hidden))
        return 1.0


class InGlobalObject(Layer):
    def beside(self, hidden: torch.Tensor) -> float:
        CONTEXT.losses.append(_square(hidden))
        return 1.0


class InGlobalDict(Layer):
    def beside(self, hidden: torch.Tensor) -> float:
        LOSS_OF_LAYER[id(self)] = _square(hidden)
        return 1.0


class ByFunction(Layer):
    def beside(self, hidden: torch.Tensor) -> float:
        note(_square(hidden))
        return 1.0


def note(loss: torch.Tensor) -> None:
    LOSSES.append(loss)


class ByStaticMethod(Layer):
    @staticmethod
    def beside(hidden: torch.Tensor) -> float:
        LOSSES.append(_square(hidden))
        return 1.0


class ByProperty(Layer):
    @property
    def collected(self) -> list[torch.Tensor]:
        return LOSSES

    def beside(self, hidden: torch.Tensor) -> float:
        self.collected.append(_square(hidden))
        return 1.0


class Collector:
    def note(self, loss: torch.Tensor) -> None:
        LOSSES.append(loss)

    @classmethod
    def note_for_class(cls, loss: torch.Tensor) -> None:
        cls.__call__(cls(), loss)

    def __call__(self, loss: torch.Tensor) -> None:
        LOSSES.append(loss)


COLLECTOR = Collector()


class ByMethodOfObject(Layer):
    def beside(self, hidden: torch.Tensor) -> float:
        COLLECTOR.note(_square(hidden))
        return 1.0


class ByMethodOfClass(Layer):
    def beside(self, hidden: torch.Tensor) -> float:
        Collector.note_for_class(_square(hidden))
        return 1.0


class ByObjectOfItsOwn(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.collector = Collector()

    def beside(self, hidden: torch.Tensor) -> float:
        self.collector(_square(hidden))
        return 1.0


def enclosing() -> type[Layer]:
    noted = CONTEXT.losses

    class InEnclosingList(Layer):
        def beside(self, hidden: torch.Tensor) -> float:
            noted.append(_square(hidden))
            return 1.0

    return InEnclosingList


class NotesNumbers(Layer):
    def beside(self, hidden: torch.Tensor) -> float:
        NUMBERS.append(0.5)
        return 1.0


class CountsInGlobal(Layer):
    def beside(self, hidden: torch.Tensor) -> float:
        global CALLS  # noqa: PLW0603
        CALLS += 1
        return 1 / (1 + CALLS % 7)


class CountsInClass(Layer):
    def beside(self, hidden: torch.Tensor) -> float:
        Shared.calls += 1
        return 1 / (1 + Shared.calls % 7)


class DrawsFromPythons(Layer):
    def beside(self, hidden: torch.Tensor) -> float:
        return PYTHONS.random()


class DrawsFromNumpys(Layer):
    def beside(self, hidden: torch.Tensor) -> float:
        return float(NUMPYS.random())


class DrawsFromTorchs(Layer):
    def beside(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.rand(WIDTH, generator=TORCHS)


KINDS: dict[str, Callable[[], type[Layer]]] = {"InEnclosingList": enclosing}
for _kind in (
    InGlobalList, InListOfClass, InGlobalObject, InGlobalDict, ByFunction, ByStaticMethod, ByProperty, ByMethodOfObject,
    ByMethodOfClass, ByObjectOfItsOwn, NotesNumbers, CountsInGlobal, CountsInClass,
    DrawsFromPythons, DrawsFromNumpys, DrawsFromTorchs,
):  # fmt: skip
    KINDS[_kind.__name__] = lambda kind=_kind: kind


class Model(L.LightningModule):
    """Adds to its loss what its layers have left outside."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        global CALLS  # noqa: PLW0603
        CALLS = Shared.calls = 0
        NUMBERS.clear()
        PYTHONS.seed(0)
        NUMPYS.bit_generator.state = np.random.default_rng(0).bit_generator.state
        TORCHS.manual_seed(0)
        layer = KINDS[kind]()
        self.net = nn.Sequential(*(layer() for _ in range(6)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for losses in (LOSSES, Shared.losses, CONTEXT.losses, LOSS_OF_LAYER):
            losses.clear()
        loss = self.net(batch[0]).square().mean()
        left = [*LOSSES, *Shared.losses, *CONTEXT.losses, *LOSS_OF_LAYER.values(), *NUMBERS]
        return loss + 0.1 * sum(left)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def outside() -> list[Any]:
    """All that layers have left outside, and generators; of losses their number alone, as graphs hang on them."""
    numbers = [len(LOSSES), len(Shared.losses), len(CONTEXT.losses), len(LOSS_OF_LAYER), CALLS, Shared.calls]
    return [*numbers, NUMBERS[:], PYTHONS.getstate(), NUMPYS.bit_generator.state, TORCHS.get_state()]


@pytest.mark.filterwarnings("ignore:.*that no checkpoint can free")
@pytest.mark.parametrize(
    "kind", few(KINDS, "InGlobalList", "InEnclosingList", "ByMethodOfClass", "NotesNumbers", "DrawsFromPythons")
)
def test_it_changes_as_often_as_in_plain_training(kind: str, tmp_path: Path) -> None:
    rows = [torch.randn(4 * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))]
    plain, expected = train(lambda: Model(kind), rows, tmp_path, batch_size=BATCH), outside()
    least = tight_limit(lambda: Model(kind), rows, tmp_path, batch_size=BATCH, room=0.02)
    for limit in (least, "1GiB"):
        callback = RotorCallback(limit, show_table=False)
        planned = train(lambda: Model(kind), rows, tmp_path, batch_size=BATCH, callback=callback)
        assert callback.plan is not None
        assert_same_training(plain, planned)
        assert_same_bits(expected, outside())


MEANS: dict[str, torch.Tensor] = {}


class Keeper:
    def keep(self, mean: torch.Tensor) -> None:
        MEANS["last"] = mean

    @staticmethod
    def last() -> torch.Tensor | None:
        return MEANS.get("last")


KEEPER = Keeper()


class ByItself(L.LightningModule):
    """A step that compares with the step before, whose mean it keeps outside, by a method of its own or of others."""

    def __init__(self) -> None:
        super().__init__()
        MEANS.clear()
        self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output = self.net(batch[0])
        last = self.last()
        self.keep(output.detach().mean(0))
        return output.square().mean() if last is None else (output - last).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    @staticmethod
    def keep(mean: torch.Tensor) -> None:
        MEANS["last"] = mean

    @classmethod
    def last(cls) -> torch.Tensor | None:
        return MEANS.get("last")


class ByGlobal(ByItself):
    @property
    def keep(self) -> Callable[[torch.Tensor], None]:  # type: ignore[override]
        return KEEPER.keep


class ByClass(ByItself):
    keep = partialmethod(lambda _, mean: Keeper().keep(mean))


class ByAttribute(ByItself):
    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output = self.net(batch[0])
        last = self.keeper.last()
        self.keeper.keep(output.detach().mean(0))
        return output.square().mean() if last is None else (output - last).square().mean()


@pytest.mark.parametrize("model", [ByItself, ByGlobal, ByClass, ByAttribute])
def test_what_a_step_keeps_outside_of_modules_is_of_real_steps(
    model: Callable[[], L.LightningModule], tmp_path: Path
) -> None:
    rows = [torch.randn(4 * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))]
    plain, expected = train(model, rows, tmp_path, batch_size=BATCH), MEANS["last"].clone()
    planned = train(model, rows, tmp_path, batch_size=BATCH, callback=RotorCallback("1GiB", show_table=False))
    assert_same_training(plain, planned)
    assert_same_bits(expected, MEANS["last"])
