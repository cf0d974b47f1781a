"""RotorCallback in LightningCLI: on the command line, in YAML, and in what --help and --print_config say."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_rotor import Offload, RotorCallback
from lightning_rotor.offload import parse_offload
from lightning_rotor.strategies import RotorPipelineStrategy
from tests.grids import few

# Lightning 2.6 calls jsonargparse in ways that newer versions of it announce to drop.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

_FORMS = ["10", "2000000", "0.8", "80%", "10GiB", "1.5 GB", "1e9", "null"]


class Small(L.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.body(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(8, 4)), 4)


_QUIET = [
    "--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false", "--trainer.max_epochs=1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_other_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])


def cli(*args: str, run: bool = False) -> LightningCLI:
    return LightningCLI(Small, args=[*args], run=run, save_config_callback=None, seed_everything_default=0)


def rotor_of(made: LightningCLI) -> RotorCallback:
    (callback,) = (each for each in made.trainer.callbacks if isinstance(each, RotorCallback))
    return callback


def config_file(folder: Path, form: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(
        f"trainer:\n  accelerator: cpu\n  callbacks:\n    - class_path: RotorCallback\n      init_args:\n        mem_limit: {form}\n"
    )
    return path


@pytest.mark.feature("LightningCLI", "every form of `mem_limit` on the command line and in YAML")
@pytest.mark.parametrize("form", _FORMS)
def test_a_limit_means_the_same_everywhere(tmp_path: Path, form: str) -> None:
    in_python = RotorCallback(mem_limit=yaml.safe_load(form) if form != "1e9" else 1e9)
    on_the_line = rotor_of(cli(*_QUIET, "--trainer.callbacks+=RotorCallback", f"--trainer.callbacks.mem_limit={form}"))
    in_yaml = rotor_of(cli(*_QUIET, f"--config={config_file(tmp_path, form)}"))
    assert on_the_line.mem_limit == in_yaml.mem_limit == in_python.mem_limit


@pytest.mark.feature("LightningCLI", "a bad `mem_limit` is told what is expected")
def test_a_bad_limit_stops_the_command() -> None:
    with pytest.raises(
        ValueError, match=r"memory limit '10 parsecs' has the unknown unit 'parsecs': expected one of B, kB"
    ):
        cli(*_QUIET, "--trainer.callbacks+=RotorCallback", "--trainer.callbacks.mem_limit=10 parsecs")


@pytest.mark.feature("LightningCLI", "`--print_config` round-trips")
@pytest.mark.parametrize("form", few(_FORMS, "80%", "1.5 GB", "null"))
def test_a_printed_config_gives_the_same_callback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    options = [
        "--trainer.callbacks+=RotorCallback",
        f"--trainer.callbacks.mem_limit={form}",
        "--trainer.callbacks.module=body",
    ]

    def printed(*args: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            cli(*args, "--print_config")
        return capsys.readouterr().out

    first = printed(*_QUIET, *options)
    path = tmp_path / "printed.yaml"
    path.write_text(first)
    assert printed(f"--config={path}") == first
    callback = rotor_of(cli(f"--config={path}"))
    assert callback.mem_limit == rotor_of(cli(*_QUIET, *options)).mem_limit
    assert yaml.safe_load(first)["trainer"]["callbacks"][0]["init_args"]["module"] == "body"


@pytest.mark.feature("LightningCLI", "every option explained in `--help`")
def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli("--trainer.callbacks.help=RotorCallback")
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for name, parameter in inspect.signature(RotorCallback).parameters.items():
        described = re.search(rf"--trainer\.callbacks\.{name}\+? (?:\S+) (\w[^()]+)", text)
        assert described is not None, name
        assert len(described[1]) > 20, name
        assert parameter.annotation is not parameter.empty


@pytest.mark.feature("LightningCLI", "`fit` by short name")
def test_a_command_trains() -> None:
    made = cli("fit", *_QUIET, "--trainer.callbacks+=RotorCallback", "--trainer.callbacks.show_table=false", run=True)
    assert rotor_of(made).plan is not None


@pytest.mark.feature("LightningCLI", "`offload` in YAML, as a text or an `Offload`")
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("null", None),
        ("host", Offload("host")),
        ("host:20GiB", Offload("host", "20GiB")),
        ("disk:/scratch", Offload("disk:/scratch")),
        ("{target: host, limit: 64GiB, bandwidth: [50e9, 50e9]}", Offload("host", "64GiB", (50e9, 50e9))),
        ("{target: host, bandwidth: 170/410GB/s}", Offload("host", bandwidth=(170e9, 410e9))),
    ],
)
def test_offload_means_the_same_in_yaml(
    tmp_path: Path, form: str, expected: Offload | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    made = RotorCallback.__init__

    def noting(self: RotorCallback, *args: Any, **kwargs: Any) -> None:
        given.append(kwargs.get("offload"))
        made(self, *args, **kwargs)

    noting.__signature__ = inspect.signature(made)  # type: ignore[attr-defined]
    monkeypatch.setattr(RotorCallback, "__init__", functools.wraps(made)(noting))
    config = config_file(tmp_path, "1GiB")
    config.write_text(config.read_text() + f"        offload: {form}\n")
    rotor_of(cli(*_QUIET, f"--config={config}"))
    assert parse_offload(given[-1]) == expected


def test_a_pipeline_is_a_strategy_of_the_command_line() -> None:
    """The command hands on all options of its bases, by their defaults, which choose nothing."""
    options = [
        "--trainer.strategy=lightning_rotor.strategies.RotorPipelineStrategy",
        "--trainer.strategy.micro_batches=4",
    ]
    strategy = cli(*_QUIET, *options, "--trainer.strategy.timeout=null").trainer.strategy
    assert isinstance(strategy, RotorPipelineStrategy)
    assert strategy._settings.micro_batches == 4
