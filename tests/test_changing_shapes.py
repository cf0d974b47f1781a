"""Shapes that change from step to step: plans for what was never measured, within the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_rotor.planned.module_plans
from lightning_rotor import Checkpointable, OptionError, RotorCallback
from lightning_rotor.planned import step_watch
from lightning_rotor.planned.measurements import Measurements
from lightning_rotor.planned.module_plans import ModulePlans
from lightning_rotor.profiling import StepMeter, profile_chain
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from tests.training import Witness, assert_same_bits


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.hidden, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        x = x + self.dropout((query @ key.transpose(-2, -1)).softmax(-1) @ value)
        return x + self.out(torch.relu(self.hidden(x)))


class Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


class Recorded(nn.Sequential):
    """Looks at the values of its input, at every call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if bool(x.isfinite().all()) else x.nan_to_num())


class Reader(L.LightningModule):
    def __init__(self, kind: type[nn.Sequential]) -> None:
        super().__init__()
        self.body = kind(*(Block(16) for _ in range(2)), Loss())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.body(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class PeakOfEachStep(L.Callback):
    def __init__(self, rotor: RotorCallback) -> None:
        self.rotor, self.peaks = rotor, []

    def on_train_batch_end(self, *_: Any) -> None:
        self.peaks.append(self.rotor.measured_peak_bytes)


def train(kind: type[nn.Sequential], lengths: list[int], folder: Path, rotor: RotorCallback | None = None) -> Any:
    L.seed_everything(3, verbose=False)
    model, witness = Reader(kind), Witness(None, None)
    callbacks: list[L.Callback] = [witness]
    if rotor is not None:
        callbacks = [rotor, witness, PeakOfEachStep(rotor)]
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(model, DataLoader([torch.randn(8, length, 16) for length in lengths], batch_size=None))
    return model, witness, callbacks[-1]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The samples with which the model is measured. Every step is watched, so that every peak is known."""
    samples: list[Any] = []

    def noting(stages: Any, sample: Any, **options: Any) -> Any:
        samples.append(sample)
        return profile_chain(stages, sample, **options)

    monkeypatch.setattr(lightning_rotor.planned.call_profiler, "profile_chain", noting)
    monkeypatch.setattr(step_watch, "_STEPS", 10**6)
    return samples


@pytest.mark.parametrize(
    ("kind", "number"),
    [pytest.param(nn.Sequential, 30, marks=pytest.mark.wide), (Recorded, 20)],
    ids=["plain", "looking"],
)
@pytest.mark.feature(
    "Shapes", "sequences of many lengths: inside the limit at every step, with a handful of measurements"
)
def test_many_lengths(tmp_path: Path, measured: list[Any], kind: type[nn.Sequential], number: int) -> None:
    lengths = (torch.randperm(50, generator=torch.Generator().manual_seed(1))[:number] + 14).tolist()
    roomy = RotorCallback("1GiB", "body", show_table=False)
    train(kind, [max(lengths)], tmp_path, roomy)
    assert roomy.measured_peak_bytes is not None
    limit = int(0.7 * roomy.measured_peak_bytes)
    measured.clear()
    rotor = RotorCallback(limit, "body", show_table=False)
    planned, left, watch = train(kind, lengths, tmp_path, rotor)
    plain, right, _ = train(kind, lengths, tmp_path)
    assert rotor.plan is not None
    assert max(watch.peaks) <= limit
    assert max(watch.peaks) >= 0.8 * limit
    assert len(measured) <= 5
    assert_same_bits(dict(planned.state_dict()), dict(plain.state_dict()))
    assert_same_bits(left.losses, right.losses)


class WithCodeAround(Reader):
    """Holds much around its call, in proportion to the length."""

    def __init__(self, kind: type[nn.Sequential]) -> None:
        super().__init__(kind)
        self.scale = nn.Parameter(torch.ones(16))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        wide = (self.scale * batch).repeat(1, 1, 6)
        return self.body(batch) + 1e-3 * wide.square().mean()


@pytest.mark.usefixtures("measured")
def test_what_lies_around_a_call_is_foretold_for_a_larger_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest length was 12 % over this limit, though all before had kept it and shown what lies around."""
    monkeypatch.setattr("tests.test_changing_shapes.Reader", WithCodeAround)
    roomy = RotorCallback("1GiB", "body", show_table=False)
    train(nn.Sequential, [60], tmp_path, roomy)
    assert roomy.measured_peak_bytes is not None
    limit = int(0.9 * roomy.measured_peak_bytes)
    _, _, watch = train(nn.Sequential, [20, 44, 21, 41, 60], tmp_path, RotorCallback(limit, "body", show_table=False))
    assert max(watch.peaks[1:]) <= limit


def test_the_plans_used_last_are_kept(tmp_path: Path, measured: list[Any]) -> None:
    rotor = RotorCallback("1GiB", "body", max_plans=2, show_table=False)
    train(nn.Sequential, [16, 20, 18, 16, 20], tmp_path, rotor)
    assert rotor.plan is not None
    assert len(measured) == 1
    with pytest.raises(OptionError, match="max_plans is 0: expected a positive integer"):
        train(nn.Sequential, [16], tmp_path, RotorCallback("1GiB", "body", max_plans=0, show_table=False))


def test_another_size_takes_a_known_schedule_until_a_search_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    body = nn.Sequential(*(Block(16) for _ in range(4)), Loss())
    net, searched = Checkpointable(body, torch.randn(8, 48, 16)), []
    assert net.chain is not None
    limit = int(0.6 * simulate(net.chain, Schedule.keep_all(len(net.chain))).peak_bytes)
    net.compute_sequence(limit)
    solve = ModulePlans._solve_if_easy
    monkeypatch.setattr(
        ModulePlans,
        "_solve_if_easy",
        lambda plans, profile, budget: searched.append(1) or solve(plans, profile, budget),
    )

    def schedule_for(length: int, seconds: float) -> Schedule:
        # What a look at other schedules is known to take, and what a search is.
        net._planned.plans._estimating.price_seconds = net._planned.plans._searching.price_seconds = seconds
        x = torch.randn(8, length, 16)
        found = []
        for module in (net, body):
            body.zero_grad()
            torch.manual_seed(1)
            module(x).backward()
            found.append({name: parameter.grad for name, parameter in body.named_parameters()})
        assert_same_bits(*found)
        assert net.plan is not None
        assert net.plan.peak_bytes <= limit
        return net.plan.schedule

    longest = schedule_for(48, 1e9)
    assert longest.recomputed
    assert schedule_for(46, 1e9) == schedule_for(44, 1e9) == longest
    assert not searched
    better = schedule_for(45, 0.0)  # nothing may be lost
    assert len(searched) == 1
    assert schedule_for(44, 0.0) == better  # the second time, too, and it has the same bounds
    assert schedule_for(44, 0.0) == better
    assert len(searched) == 1


def test_a_size_that_fits_without_recomputation_is_measured_once_that_pays_and_no_profiler_records() -> None:
    body = nn.Sequential(*(Block(16) for _ in range(4)), Loss())
    net = Checkpointable(body, torch.randn(8, 48, 16))
    assert net.chain is not None
    net.compute_sequence(int(0.6 * simulate(net.chain, Schedule.keep_all(len(net.chain))).peak_bytes))

    def recomputes(length: int) -> bool:
        net(torch.randn(8, length, 16)).backward()
        assert net.plan is not None
        return bool(net.plan.recomputed)

    plans = net._planned.plans
    plans._measuring.price_seconds = 1e9
    assert recomputes(48)
    assert recomputes(16)  # under the plan of the longer one
    plans._measuring.price_seconds = 1.5 * plans.cache.latest[1].costs.rough_seconds
    plans._measuring.lost_seconds = plans.cache.latest[1].costs.rough_seconds
    with torch.autograd.profiler.profile(use_kineto=False):
        assert recomputes(16)
    assert not recomputes(16)


@pytest.mark.feature(
    "Shapes", "another length in nearly every step: plans are searched for, and steps watched, ever less"
)
def test_steps_of_ever_other_lengths_settle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(2)
    lengths = torch.randint(8, 120, (160,), generator=draw).tolist()
    roomy = RotorCallback("1GiB", "body", show_table=False)
    train(nn.Sequential, [max(lengths)], tmp_path, roomy)
    assert roomy.measured_peak_bytes is not None
    limit = int(0.7 * roomy.measured_peak_bytes)
    counts: dict[str, list[int]] = {"searched": [], "estimated": [], "watched": []}
    steps = [0]

    def counted(owner: Any, method: str, kind: str) -> None:
        plain = getattr(owner, method)

        def noting(*args: Any, **options: Any) -> Any:
            counts[kind].append(steps[0])
            return plain(*args, **options)

        monkeypatch.setattr(owner, method, noting)

    class Counts(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            steps[0] += 1

    counted(ModulePlans, "_solve", "searched")
    counted(Measurements, "estimate", "estimated")
    counted(StepMeter, "start", "watched")
    monkeypatch.setattr(Reader, "configure_callbacks", lambda _: [Counts()])
    rotor = RotorCallback(limit, "body", show_table=False)
    planned, left, watch = train(nn.Sequential, lengths, tmp_path, rotor)
    monkeypatch.undo()
    plain, right, _ = train(nn.Sequential, lengths, tmp_path)
    late = {kind: sum(number > 80 for number in numbers) for kind, numbers in counts.items()}
    assert late["searched"] <= 8
    assert late["estimated"] <= 20
    assert late["watched"] <= 20
    assert max(peak for peak in watch.peaks[1:] if peak is not None) <= limit
    assert_same_bits(dict(planned.state_dict()), dict(plain.state_dict()))
    assert_same_bits(left.losses, right.losses)


def test_a_larger_length_is_watched_for_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[bool] = []
    stop = step_watch.StepWatch.stop

    def noted(watch: step_watch.StepWatch) -> bool:
        watched.append(watch.running)
        return stop(watch)

    monkeypatch.setattr(step_watch.StepWatch, "stop", noted)
    train(nn.Sequential, [32, 32, 32, 40, 24, 32, 40], tmp_path, RotorCallback("1GiB", "body", show_table=False))
    # The schedule is new in the first step. In the fourth, only the length is.
    assert watched == [True, True, True, True, False, False, False]


def test_a_smaller_length_shares_what_runs_a_larger_one() -> None:
    body = nn.Sequential(*(Block(16) for _ in range(4)), Loss())
    net = Checkpointable(body, torch.randn(8, 48, 16))
    assert net.chain is not None
    limit = int(0.6 * simulate(net.chain, Schedule.keep_all(len(net.chain))).peak_bytes)
    net.compute_sequence(limit)
    for length in [48] * 12 + [47]:  # the first calls are timed, and may lead to another plan
        net(torch.randn(8, length, 16)).backward()
    entries = {signature.shapes[0][1]: prepared for signature, prepared in net._planned.plans.cache.planned()}
    assert entries[48].is_settled
    assert entries[47].costs.origin == "larger size"
    assert entries[47].executor is entries[48].executor
    assert entries[47].profile.state is entries[48].profile.state
    assert entries[47].plan.chain.stages[0].takes != entries[48].plan.chain.stages[0].takes
