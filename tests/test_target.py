"""What RotorCallback plans when nobody names a module: real Trainers, models whose parameters and compute are in different places."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_rotor import BudgetError, ModelError, RotorCallback, RotorWarning
from lightning_rotor.planned.target_search import named_target
from tests.grids import few
from tests.test_callback import Recorder, assert_equal_runs, fit, least_limit, seeded


def convolutions(first: int = 3, width: int = 12, depth: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Conv2d(first, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.1)]
        first = width
    return nn.Sequential(*layers)


class Base(L.LightningModule):
    """Images to classes; what is computed is up to the children."""

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("no batch is validated here")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Trunk(Base):
    """A trunk with most of the compute beside a table with nearly all parameters, looked up through a module of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Sequential(nn.Embedding(50_000, 12), nn.LayerNorm(12), nn.Dropout(0.1))
        self.trunk = convolutions()
        self.head = nn.Linear(12, 10)

    def features(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.trunk(images).mean((2, 3)) + self.table(labels)

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.features(images, labels)).float(), labels)


class RareHead(Trunk):
    """A huge head that only every third step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Sequential(nn.Linear(12, 2000), nn.ReLU(), nn.Linear(2000, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + (self.rare(self.features(*batch)).square().mean() if batch_idx % 3 == 2 else 0)


class Restless(Trunk):
    """Does in its step what steps do."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=12)
        self.all = torchmetrics.MetricCollection([torchmetrics.Precision("multiclass", num_classes=12)])
        self.register_buffer("steps", torch.zeros(()))
        self.outputs: list[torch.Tensor] = []
        self.offset = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.epoch_of_batch = self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        images = images + 0.1 * torch.randn_like(images) * float(torch.rand(()))
        features = self.features(images, labels)
        loss = nn.functional.cross_entropy(self.head(features).float(), labels, reduction="none")
        if loss.mean().item() > 100 * (1 + self.trainer.max_epochs + self.epoch_of_batch):
            raise AssertionError("diverged")
        loss = loss[labels > 0].mean()
        self.log("accuracy", self.accuracy(features, labels), prog_bar=True)
        self.log_dict(self.all(features, labels))
        self.log_dict({"loss": loss, "lr": self.trainer.optimizers[0].param_groups[0]["lr"]})
        self.steps += 1
        self.offset += 1
        self.outputs.append(loss.detach())
        self.trainer.callback_metrics.get("nothing")
        assert self.global_step == batch_idx
        assert int(self.steps) in (1, self.offset)  # 1 is what values are taken for in the dry run
        if self.logger is not None:
            self.logger.experiment.add_scalar("loss", loss)
        return loss


class Manual(Trunk):
    """Two optimizers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        schedulers = self.lr_schedulers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        schedulers.step()

    def configure_optimizers(self) -> Any:
        body = torch.optim.SGD([*self.trunk.parameters(), *self.head.parameters()], lr=0.1)
        return [body, torch.optim.SGD(self.table.parameters(), lr=0.1)], [torch.optim.lr_scheduler.StepLR(body, 1)]


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        # The others are trunks, too; test_lightning_training has these precisions and ways to optimize.
        *(pytest.param(Trunk, precision, marks=pytest.mark.wide) for precision in ("32-true", "bf16-mixed")),
        pytest.param(RareHead, "32-true", marks=pytest.mark.wide),
        (Restless, "32-true"),
        pytest.param(Manual, "32-true", marks=pytest.mark.wide),
    ],
)
def test_the_submodule_with_most_of_the_compute_is_planned(
    tmp_path: Path, kind: type[Trunk], precision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning_rotor")
    least = least_limit(tmp_path, model=seeded(kind, {}), precision=precision)
    left, right = Recorder(measured=(2,)), Recorder()
    plain = fit([left], tmp_path, model=seeded(kind, {}), precision=precision)
    caplog.clear()
    share = 0.8 if kind is Manual else 0.5  # by hand, the graphs of two losses may be alive at once
    callback = RotorCallback(mem_limit=int(least + share * (left.peaks[2] - least)), show_table=False)
    planned = fit([callback, right], tmp_path, model=seeded(kind, {}), precision=precision)
    assert callback.plan is not None
    # By hand, the last plan is of the pass whose trunk is frozen: its backward needs little. In half precision the
    # optimizer's step takes most, so that nothing has to be recomputed at the least limit.
    assert callback.plan.recomputed or kind is Manual or precision == "bf16-mixed"
    assert callback.plan.chain.names[0].removeprefix("trunk.").startswith("0")
    assert len(callback.plan.chain) > 6
    chosen = [r.getMessage() for r in caplog.records if "plans 'trunk' (Sequential)" in r.getMessage()]
    assert len(chosen) == 1
    assert re.search(r": (9\d|100) % of the FLOPs of a training step's forward", chosen[0])
    assert "RotorCallback(module=...)" in chosen[0]
    assert_equal_runs(plain, planned, left, right)
    if kind is Restless:
        assert planned[1].offset == len(planned[1].outputs) == 4
        assert "forward" not in planned[1].trunk.__dict__
        assert "log" not in planned[1].__dict__


def test_a_frozen_network_in_the_loss_is_planned_if_gradients_flow_through_it(tmp_path: Path) -> None:
    class Perceptual(Base):
        """What the frozen network keeps for the backward is most of what there is."""

        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1))
            self.judge = convolutions(width=16, depth=4).requires_grad_(False)
            self.teacher = convolutions(width=32, depth=4).requires_grad_(False)

        def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wanted, taught = self.judge(images), self.teacher(images).mean()
            return (self.judge(self.generator(images)) - wanted - taught).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.generator.parameters(), lr=0.1)

    least = least_limit(tmp_path, model=seeded(Perceptual, {}))
    left, right = Recorder(measured=(2,)), Recorder()
    plain = fit([left], tmp_path, model=seeded(Perceptual, {}))
    callback = RotorCallback(mem_limit=(least + left.peaks[2]) // 2, show_table=False)
    planned = fit([callback, right], tmp_path, model=seeded(Perceptual, {}))
    assert callback.plan is not None
    assert callback.plan.recomputed
    assert len(callback.plan.chain) > 8  # the judge: not the generator, and not the teacher, which keeps nothing
    assert_equal_runs(plain, planned, left, right)


def test_a_wrong_name_is_answered_with_the_closest_one_and_those_that_compute() -> None:
    class Nested(Restless):
        def __init__(self) -> None:
            super().__init__()
            self.model = convolutions()
            self.model.blocks = convolutions()

    with pytest.raises(
        ModelError, match=r"no submodule 'model.blok': .*, such as 'model.blocks'\. .*: 'table', 'trunk', 'model'$"
    ):
        named_target(Nested(), "model.blok")
    with pytest.raises(ModelError, match=r"no submodule 'x': expected a dotted name\. .*: 'table', 'trunk'$"):
        named_target(Restless(), "x")


def test_what_can_be_no_chain_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 32, 7, padding=3)
            self.seen = 0

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.seen += 1  # neither a trace nor a recording would do that
            return self.layer(images).mean((2, 3))[:, :12]

    class Both(Trunk):
        def __init__(self) -> None:
            super().__init__()
            self.opaque = Opaque()

        def features(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.opaque(images) + super().features(images, labels)

    caplog.set_level(logging.INFO, "lightning_rotor")
    left, right = Recorder(), Recorder()
    plain = fit([left], tmp_path, model=seeded(Both, {}))
    callback = RotorCallback(mem_limit="1GiB", show_table=False)
    with pytest.warns(
        RotorWarning,
        match=r"plans 'trunk', .*not planned.*'opaque' \(\d+ %\).*'opaque' could not be planned as a whole",
    ):
        planned = fit([callback, right], tmp_path, model=seeded(Both, {}))
    messages = [record.getMessage() for record in caplog.records]
    assert any("cannot plan 'opaque'" in message and "changes attributes" in message for message in messages)
    assert callback.plan is not None
    assert len(callback.plan.chain) > 6
    assert planned[1].opaque.seen == 4
    assert_equal_runs(plain, planned, left, right)


def test_layers_of_the_lightning_module_itself(tmp_path: Path) -> None:
    class Tutorial(Base):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 10, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(images).relu()).tanh().mean((2, 3))

        def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self(images), labels)

    left, right = Recorder(), Recorder()
    plain = fit([left], tmp_path, model=seeded(Tutorial, {}))
    callback = RotorCallback(mem_limit="1GiB", show_table=False)
    planned = fit([callback, right], tmp_path, model=seeded(Tutorial, {}))
    assert callback.plan is not None
    assert len(callback.plan.chain) >= 3
    assert_equal_runs(plain, planned, left, right)

    class Unused(Tutorial):
        def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(images)).mean()

    plain = fit([left := Recorder()], tmp_path, model=seeded(Unused, {}))
    with pytest.warns(RotorWarning, match=r"plans nothing.* holds no submodule .* that its training_step calls"):
        planned = fit([RotorCallback(show_table=False), right := Recorder()], tmp_path, model=seeded(Unused, {}))
    assert_equal_runs(plain, planned, left, right)
    with (
        pytest.warns(RotorWarning, match="plans nothing"),
        pytest.raises(BudgetError, match="nothing in it is planned"),
    ):
        fit([RotorCallback(1000, show_table=False)], tmp_path, model=Unused())


def test_layers_made_in_configure_model_are_weighed_too(tmp_path: Path) -> None:
    class Late(Trunk):
        def __init__(self) -> None:
            super().__init__()
            del self.trunk

        def configure_model(self) -> None:
            if not hasattr(self, "trunk"):
                self.trunk = convolutions()

    callback = RotorCallback(show_table=False)
    fit([callback], tmp_path, model=Late(), limit_train_batches=1)
    assert callback.plan is not None
    assert len(callback.plan.chain) > 6


# ---------------------------------------------------------------- several chains


def bottlenecks(inner: int = 16) -> nn.Sequential:
    """Wide in the middle of each block, so that a recomputation has something to save between its ends."""
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 1)]
    for _ in range(3):
        layers += [
            nn.Conv2d(4, inner, 3, padding=1),
            nn.BatchNorm2d(inner),
            nn.Tanh(),
            nn.Dropout(0.1),
            nn.Conv2d(inner, 4, 1),
        ]
    return nn.Sequential(*layers)


class Towers(nn.Module):
    """Two towers that meet at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = bottlenecks(), bottlenecks(14)
        self.head = nn.Linear(8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.left(images).mean((2, 3)), self.right(-images).mean((2, 3))], 1))


class Apart(Base):
    """The same towers, called by training_step itself."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = bottlenecks(), bottlenecks(14)
        self.head = nn.Linear(8, 10)

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(Towers.forward(self, images).float(), labels)  # type: ignore[arg-type]


class Together(Base):
    def __init__(self) -> None:
        super().__init__()
        self.towers = Towers()

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.towers(images).float(), labels)


class OwnForward(Apart):
    """The towers are children, and the LightningModule's forward calls both."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return Towers.forward(self, images)  # type: ignore[arg-type]

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(images).float(), labels)


class Sentences(Dataset[Any]):
    """Numbers to translate, of different lengths."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        source = torch.randint(1, 30, (24,), generator=generator)
        target = torch.randint(1, 30, (17,), generator=generator)
        return source, target, torch.arange(24) >= 10 + index % 14


class Translator(Base):
    """An encoder-decoder of torch, with a causal mask and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 32), nn.Linear(32, 30)
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, dropout=0.1, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        source, target, padding = batch
        causal = nn.Transformer.generate_square_subsequent_mask(16)
        output = self.transformer(
            self.embedding(source),
            self.embedding(target[:, :-1]),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        loss = nn.functional.cross_entropy(self.head(output).flatten(0, 1), target[:, 1:].flatten())
        self.log("loss", loss)
        return loss


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("kind", few([Together, OwnForward, Translator], Translator))
def test_several_towers_in_one_forward_are_one_chain(tmp_path: Path, kind: type[Base]) -> None:
    options: dict[str, Any] = {}
    if kind is Translator:
        options["data"] = DataLoader(Sentences(), 16)
    start = Recorder(measured=(2,))
    plain = fit([start], tmp_path, model=seeded(kind, {}), **options)
    least = least_limit(tmp_path, model=seeded(kind, {}), **options)
    assert least < 0.8 * start.peaks[2]
    limit = int(1.03 * least)
    callback, right = RotorCallback(mem_limit=limit, show_table=False), Recorder()
    planned = fit([callback, right], tmp_path, model=seeded(kind, {}), **options)
    assert callback.plan is not None
    assert callback.measured_peak_bytes is not None
    assert callback.measured_peak_bytes <= limit
    assert callback.plan.recomputed
    stages = " ".join(callback.plan.chain.names)
    first, second = ("encoder", "decoder") if kind is Translator else ("left", "right")
    assert first in stages
    assert second in stages
    assert_equal_runs(plain, planned, start, right)


@pytest.mark.parametrize(
    ("named", "share"),
    [
        (None, 0.0),
        pytest.param(["left", "right"], 0.5, marks=pytest.mark.wide),
        pytest.param(None, 0.5, marks=pytest.mark.wide),
        pytest.param(["left", "right"], 0.0, marks=pytest.mark.wide),
    ],
)
def test_towers_that_the_step_calls_share_one_limit(tmp_path: Path, named: list[str] | None, share: float) -> None:
    start = Recorder(measured=(2,))
    plain = fit([start], tmp_path, model=seeded(Apart, {}))
    least = least_limit(tmp_path, model=seeded(Apart, {}), module=named)
    limit = int(least + share * (start.peaks[2] - least))
    callback, right = RotorCallback(limit, named, show_table=False), Recorder()
    planned = fit([callback, right], tmp_path, model=seeded(Apart, {}))
    assert callback.plan is not None
    assert callback.plan.recomputed
    assert [len(plan.chain) for plan in callback.plan.calls] == [len(Apart().left), len(Apart().right)]
    assert callback.measured_peak_bytes is not None
    assert callback.measured_peak_bytes <= limit
    assert_equal_runs(plain, planned, start, right)


# ---------------------------------------------------------------- modules inside of wrappers


class Diffusion(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(images)
        return (self.model(images + noise).mean((2, 3)) - noise.mean()).square().mean()


@pytest.mark.parametrize("order", few(["inner first", "outer first"], "inner first"))
def test_of_a_module_and_its_wrapper_the_outer_one_is_planned(tmp_path: Path, order: str) -> None:
    class Wrapped(Base):
        def __init__(self) -> None:
            super().__init__()
            net = bottlenecks()
            if order == "inner first":
                self.net = net
            self.diffusion = Diffusion(net)
            self.net = net

        def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.diffusion(images)

    left, right = Recorder(), Recorder()
    plain = fit([left], tmp_path, model=seeded(Wrapped, {}))
    rotor = RotorCallback("1GiB", show_table=False)
    planned = fit([rotor, right], tmp_path, model=seeded(Wrapped, {}))
    assert rotor.plan is not None
    assert len(rotor.plan.calls) == 1
    assert rotor.plan.chain.names[0].startswith("randn_like")
    assert_equal_runs(plain, planned, left, right)


def test_equal_blocks_are_planned_together_however_small_each_is(tmp_path: Path) -> None:
    class Blocks(Base):
        """The step calls 24 equal blocks, each with 4 % of the compute, and a head."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 3, 1)) for _ in range(24)
            )
            self.head = nn.Sequential(nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 10))

        def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                images = images + block(images)
            return nn.functional.cross_entropy(self.head(images.mean((2, 3))).float(), labels)

    rotor = RotorCallback("1GiB", show_table=False)
    fit([rotor], tmp_path, model=seeded(Blocks, {}), limit_train_batches=1)
    assert rotor.plan is not None
    assert len(rotor.plan.calls) == 24
