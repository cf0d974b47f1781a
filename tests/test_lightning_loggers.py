"""What RotorCallback gives to loggers, read back from what they wrote."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_rotor import RotorCallback
from lightning_rotor.report import PlotError

SCALARS = {
    f"RotorCallback/{name}"
    for name in (
        "overhead_percent", "measured_overhead_percent", "budget_bytes", "predicted_peak_bytes", "measured_peak_bytes",
        "measuring_seconds", "planning_seconds", "recomputed_stages",
    )
}  # fmt: skip
SETTINGS = {"RotorCallback/mem_limit": "1.00 GiB", "RotorCallback/module": "body", "RotorCallback/slots": "500"}


class Small(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 16})
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.body(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(folder: Path, logger: Logger | list[Logger] | bool, **options: Any) -> RotorCallback:
    callback = RotorCallback("1GiB", "body", show_table=False, **options)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[callback], logger=logger, log_every_n_steps=2, default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Small(), DataLoader(TensorDataset(torch.randn(24, 4)), 4))
    return callback


@pytest.mark.feature("Loggers", "CSV: numbers and hyperparameters")
def test_csv(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    callback = fit(tmp_path, logger)
    with Path(logger.log_dir, "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["step"] for row in rows if row["loss"]} == {"1", "3", "5"}
    rows = [row for row in rows if not row["loss"]]  # the model's own numbers are in rows of their own
    assert set(rows[0]) >= SCALARS
    assert float(rows[-1]["RotorCallback/measured_peak_bytes"]) == callback.measured_peak_bytes
    assert [row["step"] for row in rows] == ["1", "3", "5"]
    settings = yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())
    assert {name: str(settings[name]) for name in SETTINGS} == SETTINGS
    assert settings["width"] == 16


@pytest.mark.feature("Loggers", "TensorBoard: numbers, hyperparameters, the timeline as a figure, the plan as text")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    logger = TensorBoardLogger(tmp_path)
    callback = fit(tmp_path, logger)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert set(events.Tags()["scalars"]) >= SCALARS
    peak = events.Scalars("RotorCallback/measured_peak_bytes")[-1]
    assert (peak.step, peak.value) == (5, pytest.approx(callback.measured_peak_bytes))
    (figure,) = events.Images("RotorCallback/timeline")
    assert figure.encoded_image_string.startswith(b"\x89PNG")
    (text,) = events.Tensors("RotorCallback/plan/text_summary")
    plan = text.tensor_proto.string_val[0].decode()
    assert "Recomputation plan" in plan
    assert "Time added to these modules" in plan
    settings = yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())
    assert {name: str(settings[name]) for name in SETTINGS} == SETTINGS
    shown = HParamsPluginData.FromString(events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    assert {*SETTINGS, "width"} == set(shown.session_start_info.hparams)


@pytest.mark.feature("Loggers", "W&B: numbers, hyperparameters, the timeline as an image, the plan as text")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    callback = fit(tmp_path, logger)
    summary = dict(logger.experiment.summary)
    assert set(summary) >= SCALARS
    assert summary["RotorCallback/measured_peak_bytes"] == callback.measured_peak_bytes
    assert {name: str(logger.experiment.config[name]) for name in SETTINGS} == SETTINGS
    folder = Path(logger.experiment.dir)
    wandb.finish()
    (figure,) = folder.rglob("media/images/RotorCallback/timeline*.png")
    assert figure.read_bytes().startswith(b"\x89PNG")
    (table,) = folder.rglob("media/table/RotorCallback/plan*.json")
    assert "Time added to these modules" in json.loads(table.read_text())["data"][0][0]


@pytest.mark.feature("Loggers", "MLflow: numbers, hyperparameters, the timeline as a PNG, the plan as a text file")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path / 'runs'}")
    callback = fit(tmp_path, logger)
    run = logger.experiment.get_run(logger.run_id)
    assert set(run.data.metrics) >= SCALARS
    assert run.data.metrics["RotorCallback/measured_peak_bytes"] == callback.measured_peak_bytes
    assert {name: run.data.params[name] for name in SETTINGS} == SETTINGS
    (figure,) = tmp_path.rglob("artifacts/RotorCallback/timeline.png")
    assert figure.read_bytes().startswith(b"\x89PNG")
    (text,) = tmp_path.rglob("artifacts/RotorCallback/plan.txt")
    assert "Time added to these modules" in text.read_text()


@pytest.mark.feature("Loggers", "several at once")
def test_several_loggers(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="first"), CSVLogger(tmp_path, name="second")]
    fit(tmp_path, loggers)
    first, second = (Path(logger.log_dir, "metrics.csv").read_text() for logger in loggers)
    assert first == second
    assert set(first.splitlines()[0].split(",")) >= SCALARS


@pytest.mark.feature("Loggers", "`logger=False`")
def test_no_logger(tmp_path: Path) -> None:
    callback = fit(tmp_path, False)
    assert callback.plan is not None
    assert not list(tmp_path.iterdir())


def test_the_plan_is_not_logged_on_request(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    fit(tmp_path, logger, log_plan=False)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert set(events.Tags()["scalars"]) >= SCALARS
    assert not events.Tags()["images"]


def test_without_matplotlib_there_is_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def missing(*_: Any, **__: Any) -> None:
        raise PlotError("matplotlib is not installed")

    monkeypatch.setattr("lightning_rotor.callbacks.rotor_callback.plot_timeline", missing)
    logger = TensorBoardLogger(tmp_path)
    fit(tmp_path, logger)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert not events.Tags()["images"]
    assert "RotorCallback/plan/text_summary" in events.Tags()["tensors"]
