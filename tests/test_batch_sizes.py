"""Advice on batch sizes: predicted bytes are the allocator's, the limit holds, and the advised size is what is trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_rotor import (
    BudgetError,
    ModelError,
    RotorBatchSizeAdvice,
    RotorCallback,
    SampleError,
    advise_batch_size,
    profile_chain,
    sequential_stages,
)
from lightning_rotor.execution.executor import Executor
from lightning_rotor.planned.batch_sizes import AffineCosts
from lightning_rotor.profiling import StepMeter
from tests.training import assert_same_bits

WIDTH = 16
LOSS_BYTES = 16


def blocks(count: int = 4) -> nn.Sequential:
    layers = [
        [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)] for _ in range(count)
    ]
    return nn.Sequential(*(layer for block in layers for layer in block))


def step_bytes(model: nn.Module, run: Executor, sample: torch.Tensor) -> int:
    weight = torch.rand(1)
    meter = StepMeter(torch.device("cpu"))
    meter.start()
    output = run(sample)
    model.zero_grad()  # before the loss, whose own memory is outside of the chain and predicted by nobody
    loss = (output * weight).sum()
    loss.backward()
    return meter.stop().peak_bytes


@pytest.mark.wide
def test_predicted_bytes_are_those_of_the_allocator() -> None:
    model = blocks()
    advice = advise_batch_size(
        model, torch.randn(64, WIDTH), mem_limit="600KiB", optimizers=[torch.optim.Adam(model.parameters())]
    )
    assert advice.measured == (32, 64)
    assert [option.batch_size for option in advice.options][:6] == [1, 2, 3, 4, 6, 8]
    assert all(option.peak_bytes <= 600 * 1024 for option in advice.options)
    assert any(option.plan.recomputed for option in advice.options)
    largest = advice.options[-1]
    assert largest.batch_size > 64  # extrapolated
    for option in (advice.best, largest, *(each for each in advice.options if each.batch_size in (64, 128))):
        sample = torch.randn(option.batch_size, WIDTH)
        profile = profile_chain(sequential_stages(model), sample, repeats=1)
        run = Executor(profile.stages, profile.chain, option.plan.schedule, profile.states)
        model.zero_grad()
        step_bytes(model, run, sample)
        lingering = sum(
            parameter.nbytes for parameter in model.parameters()
        )  # gradients of the step before, as in a Trainer
        peak_bytes = lingering + step_bytes(model, run, sample)
        assert option.plan.lingering_bytes == lingering
        assert 0.99 * option.plan.peak_bytes <= peak_bytes <= option.plan.peak_bytes + LOSS_BYTES


def test_the_chain_of_any_size_has_the_bytes_that_would_be_measured() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )

    def chain(size: int) -> Any:
        return profile_chain(sequential_stages(model), torch.randn(size, 3, 8, 8), repeats=1).chain

    costs = AffineCosts((4, 8), (chain(4), chain(8)))
    for size in (2, 6, 32):
        predicted, measured = costs.at(size), chain(size)
        for mine, true in zip(predicted, measured, strict=True):
            for field in ("output_bytes", "discard_peak_bytes"):
                assert getattr(mine, field) == getattr(true, field), (size, mine.name, field)
            for field in (
                "saved_bytes",
                "forward_peak_bytes",
                "backward_peak_bytes",
                "parameter_gradient_bytes",
                "input_gradient_bytes",
            ):
                assert getattr(mine.keep, field) == getattr(true.keep, field), (size, mine.name, field)


def test_noise_in_durations_never_makes_larger_batches_faster_than_smaller_ones() -> None:
    chain = profile_chain(sequential_stages(blocks(1)), torch.randn(8, WIDTH), repeats=1).chain
    costs = AffineCosts((8, 16), (chain, chain))  # the same duration for twice the batch
    seconds = [costs.at(size).step_seconds for size in (1, 8, 64)]
    assert seconds[0] > 0
    assert seconds == sorted(seconds)


def test_what_cannot_be_advised_says_why() -> None:
    model = blocks(1)
    with pytest.raises(SampleError, match="at least 2"):
        advise_batch_size(model, torch.randn(1, WIDTH), mem_limit="1MiB")
    with pytest.raises(BudgetError, match=r"Raise mem_limit"):
        advise_batch_size(model, torch.randn(8, WIDTH), mem_limit="1KiB")
    small, large = (
        profile_chain(sequential_stages(blocks(count)), torch.randn(8, WIDTH), repeats=1).chain for count in (1, 2)
    )
    with pytest.raises(ModelError, match="run differently"):
        AffineCosts((8, 16), (small, large)).at(4)


# -------------------------------------------------------------------- with a Trainer


class Net(L.LightningModule):
    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
        self.body = blocks()
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.body(self.stem(batch[0])).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(
            TensorDataset(torch.randn(2048, WIDTH, generator=generator)), self.hparams["batch_size"], drop_last=True
        )


def fit(folder: Path, callbacks: list[L.Callback], kind: type[Net] = Net) -> tuple[L.Trainer, Net]:
    L.seed_everything(3, verbose=False)
    model = kind()
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_steps=4,
        callbacks=callbacks, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model)
    return trainer, model


@pytest.mark.feature("Tuners", "RotorBatchSizeAdvice reports the best batch size, and changes nothing")
def test_a_report_leaves_training_alone(tmp_path: Path) -> None:
    advisor = RotorBatchSizeAdvice("600KiB", "body", show_table=False)
    plain, advised = fit(tmp_path, []), fit(tmp_path, [advisor])
    assert advisor.advice is not None
    assert_same_bits(dict(plain[1].state_dict()), dict(advised[1].state_dict()))
    assert advised[1].sizes[0] == 32


@pytest.mark.wide
def test_a_module_that_is_called_with_keywords(tmp_path: Path) -> None:
    class Named(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.body(input=self.stem(batch[0])).square().mean()

    advisor = RotorBatchSizeAdvice("600KiB", "body", show_table=False)
    fit(tmp_path, [advisor], Named)
    assert advisor.advice is not None
    assert advisor.advice.measured == (16, 32)


@pytest.mark.feature("Tuners", "RotorBatchSizeAdvice sets the best batch size, which then trains inside `mem_limit`")
def test_the_advised_size_trains_inside_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    advisor = RotorBatchSizeAdvice("600KiB", set_batch_size=True)
    rotor = RotorCallback("600KiB", show_table=False)
    _, model = fit(tmp_path, [advisor, rotor])
    assert advisor.advice is not None
    best = advisor.advice.best
    assert "best" in capsys.readouterr().out
    assert model.hparams["batch_size"] == best.batch_size
    assert set(model.sizes) == {best.batch_size}
    assert rotor.measured_peak_bytes is not None
    assert rotor.measured_peak_bytes <= rotor.budget_bytes == 600 * 1024
    with pytest.raises(ModelError, match="'size' to set"):
        fit(tmp_path, [RotorBatchSizeAdvice("600KiB", set_batch_size=True, batch_arg_name="size")])
