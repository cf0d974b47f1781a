"""Ways to train: precision, optimization and callbacks that change weights give the same bits with RotorCallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_rotor import RotorCallback
from tests.training import Run, assert_same_training, tight_limit, train

# Outputs outweigh whatever a processor's kernels take for the time of one stage, so that a tight limit asks for recomputation
# on all of them: plain training takes nearly twice the limit (a batch of 64 did not, where half-precision kernels use AMX).
WIDTH, BATCH, BLOCKS, ROOM = 24, 512, 4, 0.25


def layers() -> nn.Sequential:
    blocks = [[nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)] for _ in range(BLOCKS)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


class Classifier(L.LightningModule):
    """A backbone to plan and a head beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = layers()
        self.head = nn.Linear(WIDTH, 5)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            (p for p in self.parameters() if p.requires_grad), lr=1e-2, eps=1e-4
        )  # 1e-8 is 0 in 16 bits


def data(batches: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    size = BATCH * batches
    images = torch.randn(size, WIDTH, generator=generator).to(dtype)
    return [images, torch.randint(5, (size,), generator=generator)]


def assert_same_inside_a_limit(
    make: Callable[[], L.LightningModule],
    folder: Path,
    *,
    tensors: Sequence[torch.Tensor] | None = None,
    callbacks: Callable[[], list[L.Callback]] = list,
    limit: int | str | None = None,
    **options: Any,
) -> tuple[Run, Run]:
    """Train plainly, and with hardly more memory than the least that works."""
    tensors = tensors or data()
    if limit is None:
        limit = tight_limit(
            make, tensors, folder, batch_size=BATCH, module="backbone", room=ROOM, callbacks=callbacks(), **options
        )
    plain = train(make, tensors, folder, batch_size=BATCH, callbacks=callbacks(), **options)
    rotor = RotorCallback(limit, "backbone", show_table=False)
    planned = train(make, tensors, folder, callback=rotor, batch_size=BATCH, callbacks=callbacks(), **options)
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    assert_same_training(plain, planned)
    return plain, planned


# -------------------------------------------------------------------- precision


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        pytest.param("32-true", torch.float32, marks=pytest.mark.feature("Precision", "32-true")),
        pytest.param("64-true", torch.float64, marks=pytest.mark.feature("Precision", "64-true")),
        pytest.param("bf16-true", torch.bfloat16, marks=pytest.mark.feature("Precision", "bf16-true")),
        pytest.param("16-true", torch.float16, marks=pytest.mark.feature("Precision", "16-true")),
        pytest.param("bf16-mixed", torch.float32, marks=pytest.mark.feature("Precision", "bf16-mixed")),
    ],
)
def test_precision(tmp_path: Path, precision: str, dtype: torch.dtype) -> None:
    plain, _ = assert_same_inside_a_limit(Classifier, tmp_path, precision=precision)
    assert next(plain.model.parameters()).dtype == dtype


@pytest.mark.feature("Precision", "16-mixed with GradScaler")
def test_scaled_gradients(tmp_path: Path) -> None:
    # Lightning itself takes bf16 for "16-mixed" on the CPU; torch has had a scaler for it since 2.3.
    def plugin() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**30))  # type: ignore[arg-type]

    limit = tight_limit(
        Classifier, data(8), tmp_path, batch_size=BATCH, module="backbone", room=ROOM, plugins=[plugin()]
    )
    scaled = [plugin(), plugin()]
    plain = train(Classifier, data(8), tmp_path, batch_size=BATCH, plugins=[scaled[0]])
    rotor = RotorCallback(limit, "backbone", show_table=False)
    planned = train(Classifier, data(8), tmp_path, callback=rotor, batch_size=BATCH, plugins=[scaled[1]])
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    assert_same_training(plain, planned)
    first, second = (each.scaler.state_dict() for each in scaled if each.scaler is not None)
    assert first == second
    assert first["scale"] < 2.0**30  # it overflowed and skipped steps


class StepPeak(L.Callback):
    """The caching allocator's peak of the last step."""

    def on_train_batch_start(self, *_: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, *_: Any) -> None:
        self.bytes = torch.cuda.max_memory_allocated()


@pytest.mark.gpu
@pytest.mark.feature("Precision", "16-mixed with GradScaler on CUDA")
def test_scaled_gradients_on_cuda(tmp_path: Path) -> None:
    tensors, peaks = [torch.cat([each] * 40) for each in data()], StepPeak()
    options: dict[str, Any] = {"batch_size": 40 * BATCH, "precision": "16-mixed", "accelerator": "gpu"}
    plain = train(Classifier, tensors, tmp_path, callbacks=[peaks], **options)
    rotor = RotorCallback(peaks.bytes - 2**20, "backbone", show_table=False)
    planned = train(Classifier, tensors, tmp_path, callback=rotor, callbacks=[peaks], **options)
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    assert peaks.bytes <= rotor.budget_bytes
    assert_same_training(plain, planned)


@pytest.mark.gpu
def test_training_on_the_cpu_beside_a_gpu(tmp_path: Path) -> None:
    """Lightning warns that the GPU is not used, and its generator is among those that a step may draw from."""
    torch.cuda.init()
    plain, _ = assert_same_inside_a_limit(Classifier, tmp_path)
    assert all(parameter.is_cpu for parameter in plain.model.parameters())


# -------------------------------------------------------------------- optimization


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"accumulate_grad_batches": 3}, marks=pytest.mark.feature("Optimization", "gradient accumulation"), id="accumulation"
        ),
        pytest.param(
            {"gradient_clip_val": 0.1}, marks=pytest.mark.feature("Optimization", "clipping by norm"), id="clipping by norm"
        ),
        pytest.param(
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
            marks=pytest.mark.feature("Optimization", "clipping by value"), id="clipping by value",
        ),
    ],
)  # fmt: skip
def test_optimization_by_the_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_same_inside_a_limit(Classifier, tmp_path, tensors=data(5), max_epochs=2, **options)


class Manual(Classifier):
    """Two backwards before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer = self.optimizers()
        for half in range(2):
            loss = F.cross_entropy(self.head(self.backbone(batch[0][half::2])), batch[1][half::2])
            self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        return loss


@pytest.mark.feature("Optimization", "manual optimization, several backwards for one step")
def test_manual_optimization(tmp_path: Path) -> None:
    assert_same_inside_a_limit(Manual, tmp_path)


class Adversaries(L.LightningModule):
    """A generator, and a discriminator that is called three times in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.backbone = layers().append(nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        generating, judging = self.optimizers()
        fake = self.generator(torch.randn(len(batch[0]), 4))
        self.toggle_optimizer(generating)
        fooled = F.softplus(-self.backbone(fake)).mean()
        self.manual_backward(fooled)
        generating.step()
        generating.zero_grad()
        self.untoggle_optimizer(generating)
        self.toggle_optimizer(judging)
        loss = F.softplus(-self.backbone(batch[0])).mean() + F.softplus(self.backbone(fake.detach())).mean()
        self.manual_backward(loss)
        judging.step()
        judging.zero_grad()
        self.untoggle_optimizer(judging)
        return loss + fooled.detach()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.backbone)]


# A plan speaks of one call, and two of them are alive at the same time here.
@pytest.mark.filterwarnings("ignore:the step took:lightning_rotor.errors.RotorWarning")
@pytest.mark.feature("Optimization", "several optimizers: a GAN with `toggle_optimizer`")
def test_adversaries(tmp_path: Path) -> None:
    assert_same_inside_a_limit(Adversaries, tmp_path, tensors=data(5), limit="800KiB")


# -------------------------------------------------------------------- callbacks that change weights


@pytest.mark.feature("Callbacks", "BackboneFinetuning: frozen, then unfrozen in the middle of training")
def test_unfreezing_in_the_middle(tmp_path: Path) -> None:
    def finetuning() -> list[L.Callback]:
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False, verbose=False)]

    plain = train(Classifier, data(), tmp_path, batch_size=BATCH, callbacks=finetuning(), max_epochs=3)
    rotor = RotorCallback("1GiB", "backbone", show_table=False)
    planned = train(
        Classifier, data(), tmp_path, callback=rotor, batch_size=BATCH, callbacks=finetuning(), max_epochs=3
    )
    assert_same_training(plain, planned)


def ema() -> list[L.Callback]:
    return [EMAWeightAveraging(decay=0.9)]


def swa() -> list[L.Callback]:
    return [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)]


@pytest.mark.parametrize(
    "averaging",
    [
        pytest.param(ema, marks=pytest.mark.feature("Callbacks", "EMAWeightAveraging (WeightAveraging)")),
        pytest.param(swa, marks=pytest.mark.feature("Callbacks", "StochasticWeightAveraging")),
    ],
)
def test_averaged_weights(tmp_path: Path, averaging: Callable[[], list[L.Callback]]) -> None:
    assert_same_inside_a_limit(Classifier, tmp_path, callbacks=averaging, max_epochs=3)
