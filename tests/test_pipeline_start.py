"""What RotorPipelineStrategy makes alike before the first step: weights, buffers, generators, the batch and its precision."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from pipelines import Failure, Processes, good, processes
from test_pipeline_strategy import loader, trainer
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from lightning_rotor.execution.settings import settings
from lightning_rotor.strategies import RotorPipelineStrategy


@pytest.fixture(scope="module")
def group() -> Iterator[Processes]:
    with processes(4) as made:
        yield made


class Unseeded(L.LightningModule):
    """Buffers and weights inside and outside of the cut, drawn from whatever the generator holds."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late, self.draws = late, []
        if not late:
            self.build()

    def build(self) -> None:
        self.stem = nn.Linear(8, 16)
        self.register_buffer("shift", torch.randn(16))
        self.register_buffer("rows", torch.randn(1).expand(16), persistent=False)
        self.net = nn.Sequential(
            *[layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())]
        )
        for layer in self.net:
            if isinstance(layer, nn.BatchNorm1d):
                layer.running_mean.normal_()
        self.head = nn.Linear(16, 4)

    def configure_model(self) -> None:
        if self.late and not hasattr(self, "stem"):
            self.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(self.stem(x) + self.shift + self.rows))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.draws.append((random.random(), np.random.rand(), float(torch.rand(()))))  # noqa: NPY002

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-2)

    def on_fit_start(self) -> None:
        self.start = {name: value.detach().clone() for name, value in self.everything().items()}

    def everything(self) -> dict[str, torch.Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


def seed_apart(rank: int) -> None:
    os.environ.pop(
        "PL_GLOBAL_SEED", None
    )  # of another test's seed_everything, which Lightning would seed all processes with
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002
    torch.manual_seed(rank)


def started(rank: int, folder: str, late: bool, world: int, options: dict[str, Any], training: dict[str, Any]) -> Any:
    """What a process has after the start, where it is no stand-in, and after the fit; what it drew in validation."""
    seed_apart(rank)
    model = Unseeded(late)
    strategy = RotorPipelineStrategy("net", micro_batches=2, **options) if world > 1 else None
    made = trainer(folder, strategy, world, **{"max_epochs": 1, **training})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(model, loader(16, 8, shuffle=False), loader(8, 8, shuffle=False))
    return (
        {name: value for name, value in model.start.items() if not value.is_meta},
        {name: value.detach() for name, value in model.everything().items()},
        model.draws,
    )


@pytest.mark.parametrize("late", [False, True], ids=["__init__", "configure_model"])
def test_ranks_start_from_the_first_ones_weights_buffers_and_generators(
    group: Processes, tmp_path: Path, late: bool
) -> None:
    first, *others = good(group.run(2, started, str(tmp_path), late, 2, {"balance": [4, 5]}, {}))
    seed_apart(0)
    plain = Unseeded()
    for start, end, draws in (first, *others):
        for name, value in start.items():
            assert torch.equal(value, plain.everything()[name]), name
        for name, value in end.items():
            assert torch.equal(value, first[1][name]), name
        assert draws == first[2]
    assert first[0].keys() | others[0][0].keys() == plain.everything().keys()


def test_copies_of_a_pipeline_stay_alike(group: Processes, tmp_path: Path) -> None:
    """Running statistics are those of the first copy's batches, as under DDP."""
    first, *others = good(group.run(4, started, str(tmp_path), False, 4, {"pipeline_stages": 2}, {}))
    for _, end, _ in others:
        for name, value in end.items():
            assert torch.equal(value, first[1][name]), name


class Texts(Unseeded):
    """Calls the module without any tensor."""

    def build(self) -> None:
        self.net = nn.Sequential(Table(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(["text"] * len(batch[0])).square().mean()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, texts: list[str]) -> torch.Tensor:
        return self.weight.expand(len(texts), 4) * 1.0


class Puts(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global _handed_on  # noqa: PLW0603 -- what is refused
        _handed_on = super().forward(x)
        return _handed_on.tanh()


class Takes(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + _handed_on)


_handed_on = torch.zeros(())


class Aside(Unseeded):
    """A long skip through a global variable."""

    def build(self) -> None:
        super().build()
        self.net = nn.Sequential(Puts(16, 16), nn.Linear(16, 16), nn.Tanh(), Takes(16, 16))


def without(rank: int, folder: str, kind: type[Unseeded], sizes: list[int]) -> None:
    batches = [[torch.ones(size, 8), torch.zeros(size, dtype=torch.long)] for size in sizes]
    made = trainer(folder, RotorPipelineStrategy("net", micro_batches=2), 2, max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(kind(), DataLoader(batches, batch_size=None))


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (Texts, [4], "Sequential is called without any tensor"),
        (Aside, [4], "Puts.forward sets the global variable '_handed_on', which layers on other devices read"),
        (
            Unseeded,
            [0],
            "this one holds tensors of 0 rows: expected tensors that all have one row for each sample, and a sample at least",
        ),
        (Unseeded, [4, 0], "this one holds tensors of 0 rows"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_on_every_process(
    group: Processes, tmp_path: Path, kind: type[Unseeded], sizes: list[int], message: str
) -> None:
    for answer in group.run(2, without, str(tmp_path), kind, sizes):
        assert isinstance(answer, Failure)
        assert answer.kind == "PipelineError", answer.text
        assert message in answer.message


class Precise(L.LightningModule):
    """Makes tensors of the default dtype on the way, before the cut, inside of it and behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.net = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh(), Ones())])
        self.losses: list[tuple[float, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(self.stem(x) + torch.full((16,), 0.1)) * torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output = self(batch["x"])
        loss = F.cross_entropy(output, batch["y"])
        self.losses.append((float(loss), output.dtype))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch["x"]), batch["y"]))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0], "y": batch[1]} if isinstance(batch, list) else batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] + torch.rand(()) * 0.1}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9)


class Ones(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.ones(16)


def trained(
    rank: int, folder: str, world: int, precision: str, options: dict[str, Any], kind: type[Precise] = Precise
) -> Any:
    """Weights, losses, what was logged, and whether the settings are what they were."""
    before = settings()
    model = kind()
    L.seed_everything(3, verbose=False)
    strategy = RotorPipelineStrategy("net", **options) if world > 1 else None
    clip = {"gradient_clip_val": 0.1} if model.automatic_optimization else {}
    made = trainer(folder, strategy, world, precision=precision, **clip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(model, loader(16, 8, shuffle=False), loader(8, 8, shuffle=False))
    logged = {name: float(value) for name, value in made.callback_metrics.items()}
    return dict(model.state_dict()), model.losses, logged, settings() == before


class Recorded(nn.Sequential):
    """A forward of its own, so that it is recorded: under the settings of a step, autocast for one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = x + layer(x)
        return x


class PreciseRecorded(Precise):
    def __init__(self) -> None:
        super().__init__()
        self.net = Recorded(*self.net)


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        ("32-true", Precise),
        ("bf16-mixed", PreciseRecorded),
        *(
            pytest.param(*each, marks=pytest.mark.wide)
            for each in (
                ("64-true", Precise),
                ("bf16-true", PreciseRecorded),
                ("16-true", Precise),
                ("32-true", PreciseRecorded),
                ("64-true", PreciseRecorded),
                ("bf16-true", Precise),
                ("16-true", PreciseRecorded),
                ("bf16-mixed", Precise),
            )
        ),
    ],
)
def test_precisions_are_those_of_one_process(
    group: Processes, tmp_path: Path, precision: str, kind: type[Precise]
) -> None:
    """To the bit where the batch is one micro-batch; several add up their gradients."""
    weights, losses, logged, _ = trained(0, str(tmp_path), 1, precision, {}, kind)
    whole = {"micro_batches": 1, "schedule": "gpipe", "recompute": "always"}
    for found in good(group.run(2, trained, str(tmp_path), 2, precision, whole, kind)):
        assert found[1:] == (losses, logged, True)
        for name, value in weights.items():
            assert torch.equal(found[0][name], value), name
    for found in good(group.run(2, trained, str(tmp_path), 2, precision, {"micro_batches": 4}, kind)):
        assert {dtype for _, dtype in found[1]} == {dtype for _, dtype in losses}
        tolerance = {"32-true": 1e-6, "64-true": 1e-12}.get(precision, 2e-2)
        assert found[2]["val_loss"] == pytest.approx(logged["val_loss"], abs=tolerance)
        assert found[3]


class Around(Precise):
    """Calls the module under settings of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            x = self.net(x)
        assert torch.backends.cuda.flash_sdp_enabled()
        return self.head(x.float())


def test_settings_around_the_call_of_the_module_hold_in_it(group: Processes, tmp_path: Path) -> None:
    weights, losses, logged, _ = trained(0, str(tmp_path), 1, "32-true", {}, Around)
    for micro_batches, tolerance in ((1, 0.0), (4, 2e-2)):
        options = {"micro_batches": micro_batches, "schedule": "gpipe", "recompute": "always"}
        for found in good(group.run(2, trained, str(tmp_path), 2, "32-true", options, Around)):
            assert found[3]
            assert found[2]["val_loss"] == pytest.approx(logged["val_loss"], abs=tolerance)
            for name, value in weights.items():
                assert torch.allclose(found[0][name], value, atol=tolerance, rtol=0), name
    assert losses
