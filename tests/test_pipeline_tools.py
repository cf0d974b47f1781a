"""RotorPipelineStrategy beside what else a Trainer has: the command line, loggers, and what ``self.log`` can be asked for."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from pipelines import Failure, Processes, good, processes
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_pipeline_strategy import Model, fit, loader
from torch import nn
from torchmetrics import MeanSquaredError, SumMetric

from lightning_rotor.strategies import RotorPipelineStrategy
from tests.grids import few


@pytest.fixture(scope="module")
def group() -> Iterator[Processes]:
    with processes(2) as made:
        yield made


# -------------------------------------------------------------------------------------------------- LightningCLI


class Trained(Model):
    def train_dataloader(self) -> Any:
        return loader(shuffle=False)

    def val_dataloader(self) -> Any:
        return loader(shuffle=False)


QUIET = "accelerator: cpu, logger: false, enable_checkpointing: false, enable_progress_bar: false, enable_model_summary: false, max_epochs: 1"
STRATEGIES = {
    "a name": "rotor_pipeline",
    "a class": "{class_path: RotorPipelineStrategy, init_args: {module: net, micro_batches: 4, schedule: gpipe, balance: [3, 5], mem_limit: 1GiB}}",
    "a full path": "{class_path: lightning_rotor.strategies.RotorPipelineStrategy, init_args: {module: net, schedule: interleaved}}",
}


def from_yaml(rank: int, folder: str, strategy: str | None) -> list[Any]:
    path = Path(folder) / f"config{rank}.yaml"
    where = "devices: 1" if strategy is None else f"devices: 2, strategy: {strategy}"
    path.write_text(f"seed_everything: 3\ntrainer: {{{QUIET}, {where}}}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = LightningCLI(Trained, args=["fit", f"--config={path}"], save_config_callback=None)
    if strategy is not None:
        assert isinstance(made.trainer.strategy, RotorPipelineStrategy)
    return made.model.steps


@pytest.mark.parametrize("strategy", few(STRATEGIES.values(), STRATEGIES["a class"]), ids=STRATEGIES)
def test_a_yaml_trains_as_one_process_does(group: Processes, tmp_path: Path, strategy: str) -> None:
    expected = torch.tensor(from_yaml(0, str(tmp_path), None))
    for steps in good(group.run(2, from_yaml, str(tmp_path), strategy)):
        assert torch.allclose(torch.tensor(steps), expected, atol=1e-6)


def test_a_bad_argument_in_a_yaml_ends_the_command(group: Processes, tmp_path: Path) -> None:
    bad = "{class_path: RotorPipelineStrategy, init_args: {schedule: zb}}"
    for answer in group.run(2, from_yaml, str(tmp_path), bad):
        assert isinstance(answer, Failure)
        assert answer.kind == "SystemExit"


# -------------------------------------------------------------------------------------------------- loggers


class Talks(Model):
    """Learns nothing, so that what it logs does not depend on how a batch is normalized; BatchNorm in front of the pipeline."""

    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(16), *self.net)
        self.error, self.count = MeanSquaredError(), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        values = self.stem(batch[0])
        self.log("rows", float(len(values)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("rows of all", float(len(values)), reduce_fx="sum", sync_dist=True, on_step=True, on_epoch=True)
        self.log("mean of all", values.mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("most", values.max(), reduce_fx="max")
        self.log("least", values.min(), reduce_fx="min")
        self.log_dict({"mean": values.mean(), "size": values.abs().mean()}, on_step=True, on_epoch=True, prog_bar=True)
        self.error(values, torch.ones_like(values))
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.count.update(len(values))
        self.log("count", self.count, on_step=False, on_epoch=True)
        return {"loss": self.head(self.net(values)).square().mean(), "rows": batch[1]}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def loggers(folder: str) -> list[Any]:
    return [CSVLogger(folder, "csv", "0", flush_logs_every_n_steps=1), TensorBoardLogger(folder, "board", "0")]


def logging(rank: int, folder: str, world: int) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Statistics of BatchNorm, and metrics."""
    strategy = RotorPipelineStrategy("net", micro_batches=2, deferred_batch_norm=True) if world > 1 else None
    model, made = fit(folder, strategy, world, rows=45, kind=Talks, logger=loggers(folder), log_every_n_steps=1)
    return list(model.net[0].buffers()), {name: float(value) for name, value in made.callback_metrics.items()}


def written(folder: Path) -> dict[str, list[float]]:
    """By logger and name, all values."""
    with (folder / "csv/0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    board = EventAccumulator(str(folder / "board/0")).Reload()
    return {f"csv {name}": [float(row[name]) for row in rows if row[name]] for name in rows[0]} | {
        f"board {tag}": [event.value for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]
    }


def test_loggers_get_once_what_one_process_logs(group: Processes, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    buffers, metrics = logging(0, str(one), 1)
    for found, logged in good(group.run(2, logging, str(two), 2)):
        assert logged == pytest.approx(metrics, abs=1e-5)
        for mine, theirs in zip(found, buffers, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5)
    expected, lines = written(one), written(two)
    assert lines.keys() == expected.keys()
    assert len(lines["csv rows_step"]) == len(lines["board rows_step"]) == 12
    for name, values in expected.items():
        assert lines[name] == pytest.approx(values, abs=1e-5), name
