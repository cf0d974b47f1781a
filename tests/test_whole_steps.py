"""The limit is for every moment of a step, the optimizer's included: optimizers by models by limits, each step measured by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lightning_rotor import BudgetError, RotorCallback, RotorWarning
from lightning_rotor.memory.budget import allocated_bytes
from lightning_rotor.profiling import StepMeter
from tests.training import train

pytestmark = pytest.mark.usefixtures("coarse_tables")

STEPS = 8


def wide() -> nn.Module:
    """Parameters are most of it."""
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64, bias=False), nn.GELU())))


def deep() -> nn.Module:
    """Activations are most of it."""
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 64))))


BATCH = {wide: 8, deep: 256}


class Lamb(torch.optim.Optimizer):
    """As users write them: everything out of place, several lists at a time."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            learning = [each for each in group["params"] if each.grad is not None]
            for each in learning:
                if not self.state[each]:
                    self.state[each].update(first=torch.zeros_like(each), second=torch.zeros_like(each))
            firsts = [0.9 * self.state[each]["first"] + 0.1 * each.grad for each in learning]
            seconds = [0.99 * self.state[each]["second"] + 0.01 * each.grad**2 for each in learning]
            updates = [one / (two.sqrt() + 1e-6) for one, two in zip(firsts, seconds, strict=True)]
            for each, first, second, update in zip(learning, firsts, seconds, updates, strict=True):
                self.state[each].update(first=first, second=second)
                each.sub_(update * group["lr"] * (each.norm() / (update.norm() + 1e-6)))
        return loss


class Quantized(torch.optim.Optimizer):
    """Keeps its moments in 8 bits, asks for values, and unpacks all of them at once."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            learning = [each for each in group["params"] if each.grad is not None]
            moments = []
            for each in learning:
                state = self.state[each]
                old = 0.9 * state["moment"].float() * state["scale"] if state else torch.zeros_like(each)
                moments.append(old + each.grad)
            for each, moment in zip(learning, moments, strict=True):
                scale = float(moment.abs().max()) / 127 + 1e-12
                assert moment.numpy() is not None  # no dry run can say this
                self.state[each].update(moment=(moment / scale).to(torch.int8), scale=scale)
                each.sub_(group["lr"] * moment)
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01),
    "Adam foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, foreach=False),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "Adadelta foreach": lambda parameters: torch.optim.Adadelta(parameters, foreach=True),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, 0.1, max_iter=3, history_size=4),
    "Lamb": lambda parameters: Lamb(parameters, 0.01),
    "8 bits": lambda parameters: Quantized(parameters, 0.01),
    "Muon": lambda parameters: torch.optim.Muon([each for each in parameters if each.ndim == 2]),
}


class Task(L.LightningModule):
    """One module, and a loss outside of it."""

    def __init__(self, make: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net, self.optimizer = make(), optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


class WholeSteps(L.Callback):
    """Peaks of whole steps: the rotor's own while it measures, and the allocator's of all others."""

    def __init__(self, rotor: RotorCallback | None = None) -> None:
        self.rotor, self.peaks = rotor, list[int]()
        self._meter: StepMeter | None = None
        self._base = 0

    def on_train_batch_start(self, trainer: L.Trainer, model: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self._meter = None
        if self.rotor is not None and not self.rotor._planner.is_settled:
            return
        self._meter = StepMeter(torch.device("cpu"))
        self._meter.start()
        self._base = allocated_bytes(model, trainer.optimizers, batch, torch.device("cpu"))

    def on_train_batch_end(self, *_: Any) -> None:
        if self._meter is not None:
            self.peaks.append(self._base + self._meter.stop().peak_bytes)
        elif self.rotor.measured_peak_bytes is not None:
            self.peaks.append(self.rotor.measured_peak_bytes)


def run(
    make: Any, optimizer: Any, folder: Path, limit: int | None, *, batches: int = STEPS, task: Any = Task, **options: Any
) -> tuple[WholeSteps, RotorCallback | None, BudgetError | None]:
    """Peaks, and the error that ended training."""
    rotor = None if limit is None else RotorCallback(limit, show_table=False)
    peaks, error = WholeSteps(rotor), None
    data = [torch.randn(BATCH[make] * batches, 64)]
    more = options.pop("callbacks", [])
    try:
        train(lambda: task(make, optimizer), data, folder, callback=None, batch_size=BATCH[make],
              callbacks=[*more, *([] if rotor is None else [rotor]), peaks], **options)  # fmt: skip
    except BudgetError as raised:
        error = raised
    finally:
        if peaks._meter is not None and peaks._meter._recording is not None:
            peaks._meter.stop()
    return peaks, rotor, error


def least_limit(make: Any, optimizer: Any, folder: Path, **options: Any) -> BudgetError:
    _, _, error = run(make, optimizer, folder, 1024, **options)
    assert error is not None
    return error
