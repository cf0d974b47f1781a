"""Either package of Lightning is enough; where both are installed, a Trainer of either takes callbacks and strategies."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from pipelines import PATIENCE_SECONDS, Processes, good, processes
from torch import nn
from torch.utils.data import DataLoader

from lightning_rotor import RotorBatchSizeAdvice, RotorCallback
from lightning_rotor.private import lightning_packages
from lightning_rotor.strategies import RotorPipelineStrategy
from tests.grids import few
from tests.imported_python import ImportedPython

pytorch_lightning = pytest.importorskip("pytorch_lightning")
LIGHTNINGS = [lightning.pytorch, pytorch_lightning]
ROWS = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1}


def model_of(pl: Any) -> Any:
    class Model(pl.LightningModule):
        def __init__(self, width: int = 32) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.batch_size = 16
            self.net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())])

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

        def train_dataloader(self) -> DataLoader[Any]:
            rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
            return DataLoader(rows, batch_size=self.batch_size)

    return Model


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("pl", few(LIGHTNINGS, pytorch_lightning), ids=lambda pl: pl.__name__)
def test_a_trainer_of_either_trains_with_plans_and_resumes(pl: Any, tmp_path: Path) -> None:
    plain = model_of(pl)()
    pl.Trainer(logger=False, enable_checkpointing=False, **QUIET).fit(plain)
    roomy = RotorCallback("1GiB", show_table=False)
    pl.Trainer(logger=False, enable_checkpointing=False, callbacks=roomy, **QUIET).fit(model_of(pl)())
    limit = int(roomy.measured_peak_bytes - 6_000)
    rotor, model = RotorCallback(limit, show_table=False), model_of(pl)()
    advice = RotorBatchSizeAdvice("1GiB", show_table=False, batch_sizes=[8, 16])
    logger = pl.loggers.TensorBoardLogger(tmp_path)
    saver = pl.callbacks.ModelCheckpoint(tmp_path / "saved")
    trainer = pl.Trainer(
        logger=logger, default_root_dir=tmp_path, callbacks=[rotor, advice, saver], log_every_n_steps=1, **QUIET
    )
    trainer.fit(model)
    assert advice.advice is not None
    assert rotor.plan.recomputed
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))
    logger.finalize("success")
    logged = b"".join(path.read_bytes() for path in Path(logger.log_dir).glob("events*"))
    assert b"RotorCallback/overhead_percent" in logged
    assert b"RotorCallback/plan" in logged
    again = RotorCallback(limit, show_table=False)
    longer = pl.Trainer(
        logger=False,
        default_root_dir=tmp_path,
        callbacks=[again, pl.callbacks.ModelCheckpoint(tmp_path / "again")],
        **{**QUIET, "max_epochs": 2},
    )
    longer.fit(model_of(pl)(), ckpt_path=saver.best_model_path, weights_only=False)
    assert again.plan.schedule == rotor.plan.schedule


@pytest.mark.filterwarnings("ignore:No seed found")
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize("pl", few(LIGHTNINGS, pytorch_lightning), ids=lambda pl: pl.__name__)
def test_the_command_line_of_either_takes_the_callback(pl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    options = ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    options += [f"--trainer.{name}={str(value).lower()}" for name, value in QUIET.items()]
    options += ["--trainer.callbacks=RotorCallback", "--trainer.callbacks.mem_limit=1GiB"]
    cli = import_module(f"{pl.__name__}.cli")
    made = cli.LightningCLI(model_of(pl), args=["fit", *options], save_config_callback=None)
    (rotor,) = (each for each in made.trainer.callbacks if isinstance(each, RotorCallback))
    assert rotor.plan is not None


def test_they_are_classes_of_both() -> None:
    for pl in LIGHTNINGS:
        for kind in (RotorCallback, RotorBatchSizeAdvice):
            assert issubclass(kind, pl.Callback)
        assert issubclass(RotorPipelineStrategy, pl.strategies.Strategy)
        assert pl.strategies.StrategyRegistry["rotor_pipeline"]["strategy"] is RotorPipelineStrategy


@pytest.fixture(scope="module")
def group() -> Iterator[Processes]:
    with processes(2, patience_seconds=PATIENCE_SECONDS) as made:
        yield made


class Short(pytorch_lightning.LightningModule):
    """Of the package that is not the one this library is written for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def pipelined(rank: int) -> list[torch.Tensor]:
    """Weights after a training over two processes."""
    warnings.simplefilter("ignore")
    model = Short()
    strategy = RotorPipelineStrategy(micro_batches=2, process_group_backend="gloo")
    trainer = pytorch_lightning.Trainer(devices=2, strategy=strategy, logger=False, enable_checkpointing=False, **QUIET)
    trainer.fit(model, DataLoader(ROWS, batch_size=8))
    return [weight.detach() for weight in model.parameters()]


def test_a_trainer_of_the_other_package_runs_a_pipeline(group: Processes) -> None:
    model = Short()
    optimizer = model.configure_optimizers()
    for batch in ROWS.split(8):
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        optimizer.step()
    for weights in good(group.run(2, pipelined)):
        for weight, expected in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(weight, expected.detach(), rtol=0, atol=1e-6)


ONE_IS_MISSING = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
import torch
import {name} as pl
from torch import nn
from lightning_rotor import RotorCallback, RotorPipelineStrategy

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

rotor = RotorCallback("1GiB", show_table=False)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[rotor], logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4))
print(json.dumps([str(rotor.plan.schedule), [kind.__module__ for kind in RotorCallback.__bases__],
                  issubclass(RotorPipelineStrategy, pl.strategies.DDPStrategy)]))
"""


@pytest.mark.parametrize(
    ("name", "blocked"),
    [("pytorch_lightning", ("lightning",)), ("lightning.pytorch", ("pytorch_lightning", "lightning_fabric"))],
)
def test_one_of_them_is_enough(name: str, blocked: tuple[str, ...], imported_python: ImportedPython) -> None:
    printed = imported_python.run(ONE_IS_MISSING.format(name=name, blocked=blocked))
    schedule, bases, is_strategy = json.loads(printed.splitlines()[-1])
    assert schedule == "0-2"
    assert bases == [f"{name}.callbacks.callback"]
    assert is_strategy


def test_one_that_is_too_old_is_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch_lightning, "__version__", "1.9.5")
    lightning_packages.installed.cache_clear()
    try:
        assert lightning_packages.installed() == (lightning.pytorch,)
    finally:
        lightning_packages.installed.cache_clear()


@pytest.mark.parametrize("name", few(["lightning.pytorch", "pytorch_lightning"], "pytorch_lightning"))
def test_the_lightning_that_was_imported_keeps_its_logger(name: str, imported_python: ImportedPython) -> None:
    lines = (
        f"import sys, logging, {name}",
        f"logging.getLogger({name!r}).setLevel(logging.ERROR)",
        "from lightning_rotor import RotorCallback",
        "from lightning_utilities.core import rank_zero",
        "assert {'lightning.pytorch', 'pytorch_lightning'} <= set(sys.modules)",
        "print(rank_zero.log.name)",
    )
    assert imported_python.run("\n".join(lines)).strip() == f"{name}.utilities.rank_zero"
