"""Steps of several calls whose sizes change: searches stop, the limit is kept, and bits are those of plain training."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_rotor import RotorCallback
from lightning_rotor.planned.module_plans import ModulePlans
from lightning_rotor.planning.schedule_search import ScheduleSearch
from tests.grids import few


class EdgeConvolution(nn.Module):
    """A weight matrix for each edge, made by a network from its features."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 64))

    def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        weight = self.net(features).view(-1, 8, 8)
        sent = (x[edges[0]].unsqueeze(1) @ weight).squeeze(1)
        return torch.zeros_like(x).index_add_(0, edges[1], sent)


class Graphs(L.LightningModule):
    """One convolution three times, with another graph in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = EdgeConvolution()
        self.first = nn.Linear(8, 8)

    def training_step(self, graph: Any, batch_idx: int) -> Tensor:
        x, edges, features = graph
        x = torch.relu(self.first(x))
        for _ in range(3):
            x = torch.relu(self.conv(x, edges, features))
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())

    @staticmethod
    def batches(number: int) -> list[Any]:
        maker = torch.Generator().manual_seed(0)
        batches = []
        for _ in range(number):
            nodes, edges = torch.randint(60, 90, (2,), generator=maker).tolist()
            ends = torch.randint(0, nodes, (2, 4 * edges), generator=maker)
            batches.append((torch.randn(nodes, 8), ends, torch.randn(4 * edges, 4)))
        return batches


class Twice(L.LightningModule):
    """One module twice, with another length in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.tower(self.tower(x)).square().mean()

    configure_optimizers = Graphs.configure_optimizers

    @staticmethod
    def batches(number: int) -> list[Any]:
        maker = torch.Generator().manual_seed(0)
        lengths = torch.randint(200, 280, (number,), generator=maker).tolist()
        return [torch.randn(4, length, 16) for length in lengths]


def trained(kind: Any, batches: list[Any], callbacks: list[L.Callback]) -> L.LightningModule:
    torch.manual_seed(0)
    model: L.LightningModule = kind()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, enable_model_summary=False, **quiet)
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    return model


@pytest.mark.parametrize("kind", few([Graphs, Twice], Twice))
def test_where_all_fits_with_room_nothing_is_searched_or_measured_after_the_first_steps(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"searches": 0, "measurements": 0}
    search, measure = ScheduleSearch.fastest, ModulePlans.measure

    def searching(self: Any, *args: Any, **options: Any) -> Any:
        counts["searches"] += 1
        return search(self, *args, **options)

    def measuring(self: Any, *args: Any) -> Any:
        counts["measurements"] += 1
        return measure(self, *args)

    monkeypatch.setattr(ScheduleSearch, "fastest", searching)
    monkeypatch.setattr(ModulePlans, "measure", measuring)
    seen = []

    class Counted(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(dict(counts))

    batches = kind.batches(20)
    plain = trained(kind, batches, [])
    rotor = RotorCallback(10**10, show_table=False)
    model = trained(kind, batches, [rotor, Counted()])
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))
    assert seen[5] == seen[-1]
    assert rotor.plan is not None
    assert not rotor.plan.recomputed


SLOPES = {"steep": 0.5, "flat": 0.01}
WAYS = {"now": "flat"}


class Sloped(nn.Module):
    """Does something else, under equal names, by a word that it is given, holds or reads, or by a size."""

    way = "flat"

    def __init__(self, holder: str) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.holder = holder
        self.ways = {"now": "flat"}

    def forward(self, x: Tensor, way: str = "flat") -> Tensor:
        match self.holder:
            case "size":
                way = "steep" if len(x) > 21 else "flat"
            case "attribute" | "class attribute":
                way = self.way
            case "dict":
                way = self.ways["now"]
            case "global":
                way = WAYS["now"]
        for layer in (self.first, self.second, self.third):
            x = nn.functional.leaky_relu(layer(x), SLOPES[way])
        return x


class Changing(L.LightningModule):
    """Two calls in each step, of other sizes than before, of a module that does something else in every second step."""

    def __init__(self, holder: str) -> None:
        super().__init__()
        self.net = Sloped(holder)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        way = "steep" if batch_idx % 2 else "flat"
        keywords = {}
        match self.net.holder:
            case "argument":
                keywords["way"] = way
            case "attribute":
                self.net.way = way
            case "class attribute":
                Sloped.way = way
            case "dict":
                self.net.ways["now"] = way
            case "global":
                WAYS["now"] = way
        edge = 24 - batch_idx
        loss = self.net(x[:edge], **keywords).square().mean()
        return loss + self.net(x[edge:], **keywords).square().mean()

    configure_optimizers = Graphs.configure_optimizers


@pytest.mark.parametrize(
    "holder",
    few(
        ["size", "argument", "attribute", "class attribute", "dict", "global"],
        "size",
        "attribute",
    ),
)
def test_a_call_runs_what_was_recorded_for_it_where_another_recording_has_equal_names(
    holder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [torch.randn(42, 16, generator=torch.Generator().manual_seed(number)) for number in range(5)]

    def state(callbacks: list[L.Callback]) -> list[Tensor]:
        monkeypatch.setattr(Sloped, "way", "flat")
        monkeypatch.setitem(WAYS, "now", "flat")
        return [*trained(partial(Changing, holder), batches, callbacks).state_dict().values()]

    plain = state([])
    roomy, tight = (RotorCallback(limit, "net", show_table=False) for limit in ("1GiB", "30KiB"))
    assert all(map(torch.equal, plain, state([roomy])))
    assert all(map(torch.equal, plain, state([tight])))
    assert tight.plan is not None
    assert tight.plan.recomputed
