"""Forces are gradients of energies, and both are in the loss, for molecules of other sizes in each step.

What the first backward makes is kept for the second one, and no plan can drop it. So only measured steps tell what training takes, although
each of them brings sizes that have to be measured, too.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_rotor import BudgetError, RotorCallback
from lightning_rotor.memory.resident_memory import allocated_bytes
from lightning_rotor.profiling import StepMeter
from tests.grids import few
from tests.training import assert_same_training, train

WIDTH = 32
ATOMS = 20


class Interaction(nn.Module):
    """Atoms hear of those near by."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, atoms: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
        heard = torch.exp(-distances) @ self.message(atoms)
        return atoms + self.down(functional.silu(self.up(atoms + heard)))


class Energy(nn.Module):
    """Energy of a molecule by the positions of its atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, WIDTH)
        self.interactions = nn.ModuleList(Interaction() for _ in range(3))
        self.readout = nn.Linear(WIDTH, 1)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        distances = (positions[:, None] - positions[None]).square().sum(-1)
        atoms = self.embedding(positions)
        for interaction in self.interactions:
            atoms = interaction(atoms, distances)
        return self.readout(atoms).sum()


class WithForces(Energy):
    """The forward itself asks for gradients, so that only its parts can be planned."""

    def forward(self, positions: torch.Tensor) -> Any:
        positions = positions.requires_grad_()
        energy = super().forward(positions)
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -gradient


class Training(L.LightningModule):
    """Molecules of ``ATOMS`` atoms, and of so many times more in each further step."""

    def __init__(self, *, in_parts: bool, growth: float = 1.5) -> None:
        super().__init__()
        self.net = WithForces() if in_parts else Energy()
        self.in_parts, self.growth = in_parts, growth

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        positions, forces = (rows[: int(ATOMS * self.growth**batch_idx)] for rows in batch)
        if self.in_parts:
            energy, predicted = self.net(positions)
        else:
            energy = self.net(positions.requires_grad_())
            predicted = -torch.autograd.grad(energy, positions, create_graph=True)[0]
        return energy.square() + (predicted - forces).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Peaks(L.Callback):
    """The peak of each step: by the callback's own watch, or in plain training by a meter."""

    def __init__(self, rotor: RotorCallback | None = None) -> None:
        self.rotor, self.steps = rotor, list[int | None]()
        self._meter: StepMeter | None = None
        self._base_bytes = 0

    def on_train_batch_start(self, trainer: L.Trainer, model: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if self.rotor is not None:
            # So that a step which is not measured shows.
            self.rotor._planner.watch.peak_bytes = None  # type: ignore[union-attr]
            return
        self._meter = StepMeter(model.device)
        self._meter.start()
        self._base_bytes = allocated_bytes(model, trainer.optimizers, batch, model.device)

    def on_train_batch_end(self, *_: Any) -> None:
        if self._meter is not None:
            self.steps.append(self._base_bytes + self._meter.stop().peak_bytes)
        elif self.rotor is not None:
            self.steps.append(self.rotor.measured_peak_bytes)


def run(
    folder: Path, limit: int | str | None, *, steps: int = 5, **options: Any
) -> tuple[Any, list[int | None], BudgetError | None]:
    """The training, the peaks of its steps, and the error that ends it."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(400 * steps, 3, generator=generator) for _ in range(2)]
    rotor = None if limit is None else RotorCallback(limit, show_table=False)
    peaks = Peaks(rotor)
    try:
        trained = train(partial(Training, **options), rows, folder, callback=rotor, callbacks=[peaks], batch_size=400)
    except BudgetError as error:
        return None, peaks.steps, error
    return trained, peaks.steps, None


KINDS = [{"in_parts": False}, {"in_parts": True}, {"in_parts": True, "growth": 0.8}]


@pytest.mark.parametrize("kind", few(KINDS, KINDS[2]), ids=str)
def test_every_step_is_measured_although_its_sizes_are_measured_first(kind: dict[str, Any], tmp_path: Path) -> None:
    plain, plain_peaks, _ = run(tmp_path, None, **kind)
    planned, peaks, _ = run(tmp_path, "1GiB", **kind)
    assert_same_training(plain, planned)
    is_shrinking = kind.get("growth", 1.5) < 1
    assert peaks[1] is not None
    for plain_bytes, peak_bytes in list(zip(plain_peaks, peaks, strict=True))[1:]:
        if is_shrinking and peak_bytes is None:
            continue  # it runs under the plan of a larger size, whose steps were measured
        assert peak_bytes is not None
        assert plain_bytes is not None
        # A plan for several calls is made for each size; until then their stages run as lean as they can, one after another.
        assert 0.8 * plain_bytes < peak_bytes < 1.2 * plain_bytes


@pytest.mark.filterwarnings("ignore:the last step of this training")
@pytest.mark.parametrize("kind", few(KINDS, KINDS[0]), ids=str)
def test_no_step_that_follows_an_excess_exceeds_the_limit_unless_training_ends(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    _, plain_peaks, _ = run(tmp_path, None, **kind)
    limit = int(0.7 * max(filter(None, plain_peaks[1:])))
    _, peaks, error = run(tmp_path, limit, **kind)
    # One step may show it.
    assert sum(peak_bytes is None or peak_bytes > limit for peak_bytes in peaks[1:]) <= 1
    if error is None:
        assert len(peaks) == len(plain_peaks)
    else:
        assert error.minimum_bytes > limit
        assert error.stage


def test_gradients_linger_in_a_backward_of_the_training_step_and_the_named_minimum_knows(tmp_path: Path) -> None:
    of_one_size: dict[str, Any] = {"in_parts": False, "growth": 1.0, "steps": 3}
    _, _, error = run(tmp_path, "2KiB", **of_one_size)
    assert error is not None
    _, peaks, refused = run(tmp_path, error.minimum_bytes, **of_one_size)
    assert refused is None
    measured = [peak_bytes for peak_bytes in peaks[1:] if peak_bytes is not None]
    assert measured
    assert max(measured) <= error.minimum_bytes


def test_a_limit_that_plain_steps_keep_is_kept_although_the_model_as_a_whole_is_refused(tmp_path: Path) -> None:
    # The refusal's frames would hold the gradients of the first step.
    of_one_size: dict[str, Any] = {"in_parts": True, "growth": 1.0, "steps": 3}
    plain, plain_peaks, _ = run(tmp_path, None, **of_one_size)
    limit = int(1.02 * max(filter(None, plain_peaks[1:])))
    planned, peaks, error = run(tmp_path, limit, **of_one_size)
    assert error is None
    assert_same_training(plain, planned)
    assert all(peak_bytes <= limit for peak_bytes in peaks[1:] if peak_bytes is not None)


def critic() -> nn.Sequential:
    inner = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, 64), *inner, nn.Linear(64, 1))


class Penalty(L.LightningModule):
    """A critic whose gradient is to be of length 1, on batches of other sizes in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = critic()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        rows = rows[: (90, 140, 110, 150, 100)[batch_idx]]
        fake = rows.flip(0).tanh()
        mixed = (0.5 * rows + 0.5 * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(mixed).sum(), mixed, create_graph=True)
        return self.net(fake).mean() - self.net(rows).mean() + (gradient.norm(dim=1) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


class Adapted(Penalty):
    """A network that is trained to learn in one step, which runs with weights that this step has made."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        rows = rows[: (90, 140, 110, 150, 100)[batch_idx]]
        named = dict(self.net.named_parameters())
        loss = self.net(rows).square().mean()
        gradients = torch.autograd.grad(loss, [*named.values()], create_graph=True)
        adapted = {
            name: weight - 0.1 * gradient for (name, weight), gradient in zip(named.items(), gradients, strict=True)
        }
        return torch.func.functional_call(self.net, adapted, (rows.flip(0),)).square().mean()


@pytest.mark.parametrize("kind", few([Penalty, Adapted], Adapted))
def test_no_step_with_gradients_of_gradients_exceeds_a_limit_that_plain_steps_exceed(
    kind: type[Penalty], tmp_path: Path
) -> None:
    rows = [torch.randn(5 * 200, 16, generator=torch.Generator().manual_seed(0))]
    plain_peaks = Peaks()
    plain = train(kind, rows, tmp_path, callbacks=[plain_peaks], batch_size=200)
    limit = int(0.97 * max(filter(None, plain_peaks.steps[1:])))
    rotor = RotorCallback(limit, show_table=False)
    peaks = Peaks(rotor)
    planned = train(kind, rows, tmp_path, callback=rotor, callbacks=[peaks], batch_size=200)
    assert_same_training(plain, planned)
    measured = [peak_bytes for peak_bytes in peaks.steps[1:] if peak_bytes is not None]
    assert len(measured) >= 3
    assert max(measured) <= limit
