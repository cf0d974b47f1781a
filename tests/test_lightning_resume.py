"""Checkpoints: a plan goes with them, and training goes on without measuring again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_rotor.planned.module_plans
from lightning_rotor import BudgetError, RotorCallback, RotorWarning
from lightning_rotor.profiling import Profile, profile_chain
from tests.training import assert_same_bits

WIDTH, BATCH = 16, 32


class Net(L.LightningModule):
    def __init__(self, depth: int = 4, fail_at: int | None = None) -> None:
        super().__init__()
        blocks = [
            [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.1)]
            for _ in range(depth)
        ]
        self.body = nn.Sequential(*(layer for block in blocks for layer in block))
        self.fail_at = fail_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.fail_at:
            raise KeyError("a bug of the user")
        return self.body(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Resumable(DataLoader[Any]):
    """Goes on in the middle of an epoch, which Lightning asks of a loader."""

    def __init__(self) -> None:
        super().__init__(TensorDataset(torch.randn(6 * BATCH, WIDTH)), BATCH)
        self.done = self.skipped = 0

    def __iter__(self) -> Iterator[Any]:
        skipped, self.skipped = self.skipped, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= skipped:
                self.done = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["done"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a model is measured."""
    count: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Profile:
        count.append(1)
        return profile_chain(*args, **kwargs)

    monkeypatch.setattr(lightning_rotor.planned.call_profiler, "profile_chain", counted)
    return count


def fit(
    folder: Path,
    callbacks: list[L.Callback],
    model: L.LightningModule | None = None,
    resume: Path | None = None,
    **options: Any,
) -> L.Trainer:
    L.seed_everything(3, verbose=False)
    model = model or Net()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    trainer = L.Trainer(accelerator="cpu", default_root_dir=folder, callbacks=callbacks, **quiet | options)
    trainer.fit(model, Resumable(), ckpt_path=resume)
    return trainer


def rotor() -> RotorCallback:
    return RotorCallback("48KiB", show_table=False)


class SaveAt(L.Callback):
    """Writes a checkpoint with the generator's state after some step, in the middle of an epoch."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Generator(L.Callback):
    """Dropout goes on as it would have."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state: torch.Tensor | None = state["torch"]

    def on_train_batch_start(self, *_: Any) -> None:
        if getattr(self, "state", None) is not None:
            torch.set_rng_state(self.state)
            self.state = None


@pytest.mark.feature(
    "Checkpoints", "save in the middle of an epoch, resume without measuring again, to the same weights"
)
def test_a_resumed_training_does_not_measure_again(tmp_path: Path, measured: list[int]) -> None:
    path = tmp_path / "middle.ckpt"
    first = rotor()
    whole = fit(tmp_path, [first, Generator(), SaveAt(path, step=4)], max_epochs=2)
    assert first.plan is not None
    assert first.plan.recomputed
    assert len(measured) == 1
    second = rotor()
    resumed = fit(tmp_path, [second, Generator()], resume=path, max_epochs=2)
    assert len(measured) == 1
    assert second.plan is not None
    assert (second.plan.schedule, second.plan.chain) == (first.plan.schedule, first.plan.chain)
    assert second.plan.solve_seconds == first.plan.solve_seconds  # nor plan
    assert second.measured_peak_bytes is not None
    assert second.measured_peak_bytes <= 48 * 1024
    assert_same_bits(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))


@pytest.mark.feature("Checkpoints", "the plan is in plain types: `weights_only=True` loads it")
def test_the_state_is_plain(tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    fit(tmp_path, [rotor(), SaveAt(path, step=4)])
    state = torch.load(path, weights_only=True)["callbacks"]
    ((key, saved),) = state.items()
    assert key == "RotorCallback{'module': None}"
    assert saved["module"] == "body"

    def plain(value: Any) -> bool:
        match value:
            case dict():
                return all(isinstance(key, str) and plain(item) for key, item in value.items())
            case list():
                return all(map(plain, value))
            case _:
                return isinstance(value, (bool, int, float, str, type(None)))

    assert plain(saved)


# Lightning says so whenever there is an OnExceptionCheckpoint.
@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*there is no last checkpoint available")
@pytest.mark.feature("Checkpoints", "OnExceptionCheckpoint keeps the plan")
@pytest.mark.parametrize("rotor_first", [True, False])
def test_a_checkpoint_after_an_exception_has_the_plan(tmp_path: Path, measured: list[int], rotor_first: bool) -> None:
    callbacks = [rotor(), OnExceptionCheckpoint(tmp_path, "crash")]
    model = Net(fail_at=4)
    with pytest.raises(KeyError, match="a bug of the user"):
        fit(tmp_path, callbacks if rotor_first else callbacks[::-1], model, enable_checkpointing=True)
    assert "forward" not in model.body.__dict__
    second = rotor()
    fit(tmp_path, [second], resume=tmp_path / "crash.ckpt")
    assert second.plan is not None
    assert len(measured) == 1


@pytest.mark.feature("Checkpoints", "`load_from_checkpoint` and `test` without the callback")
def test_a_checkpoint_loads_without_the_callback(tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    trainer = fit(tmp_path, [rotor(), SaveAt(path, step=6)])
    loaded = Net.load_from_checkpoint(path, weights_only=True)
    assert_same_bits(dict(trainer.model.state_dict()), dict(loaded.state_dict()))
    plain = fit(tmp_path, [], resume=None)
    assert set(torch.load(path, weights_only=True)["state_dict"]) == set(plain.model.state_dict())


@pytest.mark.feature("Checkpoints", "a plan of another model is left aside with a warning")
def test_a_plan_of_another_model(tmp_path: Path, measured: list[int]) -> None:
    first = rotor()
    fit(tmp_path, [first])
    second = rotor()
    second.setup(L.Trainer(accelerator="cpu", logger=False), Net(depth=3), "fit")
    with pytest.warns(RotorWarning, match=r"the checkpoint's plan is not for this Net.*measured anew"):
        second.load_state_dict(first.state_dict())
    fit(tmp_path, [second], Net(depth=3))
    assert second.plan is not None
    assert len(measured) == 2


@pytest.mark.feature("Checkpoints", "damaged or foreign records are measured anew")
def test_a_damaged_record(tmp_path: Path, measured: list[int]) -> None:
    first = rotor()
    fit(tmp_path, [first])
    state = first.state_dict()
    state["records"][0]["chain"]["stages"].pop()
    second = rotor()
    second.load_state_dict(state)
    fit(tmp_path, [second])
    assert second.plan is not None
    assert len(measured) == 2


@pytest.mark.feature("Checkpoints", "resume with another limit: measured as before, planned anew")
def test_another_limit(tmp_path: Path, measured: list[int]) -> None:
    path = tmp_path / "middle.ckpt"
    fit(tmp_path, [rotor(), SaveAt(path, step=4)])
    second = RotorCallback("1GiB", show_table=False)
    fit(tmp_path, [second], resume=path)
    assert len(measured) == 1
    assert second.plan is not None
    assert second.plan.recomputed == ()


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.feature("Checkpoints", "ModelCheckpoint, and resume from its last one")
def test_model_checkpoint(tmp_path: Path, measured: list[int]) -> None:
    saving = ModelCheckpoint(tmp_path / "kept", save_last=True, every_n_train_steps=5)
    fit(tmp_path, [rotor(), saving], enable_checkpointing=True)
    second = rotor()
    fit(
        tmp_path,
        [second, ModelCheckpoint(tmp_path / "kept", save_last=True, every_n_train_steps=5)],
        resume=Path(saving.last_model_path),
        enable_checkpointing=True,
    )
    assert second.plan is not None
    assert len(measured) == 1


@pytest.mark.feature("Trainer", "`trainer.fit` twice, the second time without measuring")
def test_fitting_twice(tmp_path: Path, measured: list[int]) -> None:
    callback, model = rotor(), Net()
    trainer = fit(tmp_path, [callback], model)
    assert "forward" not in model.body.__dict__
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, Resumable())
    assert callback.plan is not None
    assert trainer.global_step == 12
    assert len(measured) == 1


class Wide(L.LightningModule):
    """Gradients of the step before, which linger, are a good part of what a forward finds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 48), *(each for _ in range(6) for each in (nn.Linear(48, 48), nn.Tanh(), nn.Dropout(0.1)))
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.body(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_the_second_step_behind_a_checkpoint_made_without_the_callback_keeps_the_limit(tmp_path: Path) -> None:
    fit(tmp_path, [SaveAt(tmp_path / "plain.ckpt", 2)], Wide())
    with pytest.raises(BudgetError) as refused:
        fit(tmp_path, [RotorCallback(1024, show_table=False)], Wide())
    limit = refused.value.minimum_bytes
    rotor = RotorCallback(limit, show_table=False)
    seen: list[int] = []

    class Seen(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(rotor.measured_peak_bytes or 0)

    fit(tmp_path, [rotor, Seen()], Wide(), resume=tmp_path / "plain.ckpt", max_epochs=2)
    # There is the optimizer's state from the beginning, and there are gradients from the second step on.
    assert seen[1]
    assert max(seen[1:]) <= limit, (seen, limit)
