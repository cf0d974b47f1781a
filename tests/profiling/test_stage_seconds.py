"""Seconds of stages: how often they run, which runs count, and what is left out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_rotor.profiling import stage_seconds
from lightning_rotor.profiling.meters import CpuMeter
from lightning_rotor.profiling.ranks import Ranks
from lightning_rotor.profiling.stage_seconds import StageSeconds, measure, seconds_by_turns
from tests.profiling.stage_runs import profiler_of


class Counting(nn.Module):
    """Counts its forwards; each takes a tick of the meter below."""

    def __init__(self, ticks: float) -> None:
        super().__init__()
        self.ticks, self.runs = ticks, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        Ticking.time += self.ticks
        return x.tanh()


class Ticking(CpuMeter):
    """A clock that stands still but for what a layer takes."""

    time = 0.0

    def now(self) -> float:
        return Ticking.time


class Together(Ranks):
    @property
    def together(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_interruptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work on this machine makes none of these runs again."""
    monkeypatch.setattr(stage_seconds, "_MOST_INTERRUPTED", 0)


@pytest.mark.parametrize(
    ("ticks", "runs"), [(1e-4, 9), (0.02, 3), (1.0, 1)], ids=["short ones more often", "as asked for", "long ones once"]
)
def test_the_shorter_a_stage_the_more_often_it_runs(ticks: float, runs: int) -> None:
    layer = Counting(ticks)
    (seconds,) = seconds_by_turns([profiler_of(layer, meter=Ticking(), repeats=3)])
    # One run more looks for the last saved tensor.
    assert layer.runs == runs + 1
    assert seconds.forward == pytest.approx(ticks)
    assert seconds.backward == 0.0


def test_processes_that_run_together_run_as_often_as_asked_for() -> None:
    layer = Counting(1.0)
    seconds_by_turns([profiler_of(layer, meter=Ticking(), repeats=3, ranks=Together())])
    assert layer.runs == 3 + 1


def test_a_clock_that_repeats_itself_is_asked_once() -> None:
    class Estimated(Ticking):
        repeats_itself = True

    layer = Counting(1e-4)
    seconds_by_turns([profiler_of(layer, meter=Estimated(), repeats=3)])
    assert layer.runs == 1 + 1


def test_options_run_by_turns() -> None:
    order = []

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order.append(self.name)
            Ticking.time += 0.02
            return x.tanh()

    profilers = [profiler_of(Named(name), meter=Ticking(), repeats=2) for name in "ab"]
    seconds_by_turns(profilers)
    assert "".join(order).startswith("abab")


@pytest.mark.parametrize(
    ("interrupted", "runs"), [([0, 1], 3), ([1, 2], 3), (range(100), 15)], ids=["first", "later", "always"]
)
def test_a_stage_runs_until_as_many_runs_as_count_are_undisturbed(
    monkeypatch: pytest.MonkeyPatch, interrupted: list[int], runs: int
) -> None:
    monkeypatch.setattr(stage_seconds, "_MOST_INTERRUPTED", 4)
    starts = []

    class Interruptions:
        def __init__(self, meter: CpuMeter) -> None:
            starts.append(len(starts))

        def any(self) -> bool:
            return len(starts) - 1 in interrupted

    monkeypatch.setattr(stage_seconds, "Interruptions", Interruptions)
    monkeypatch.setattr(stage_seconds, "_replayed_share", lambda profiler: 1.0)

    class Sleepy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Ticking.time += 0.01 if len(starts) - 1 in interrupted else 0.004
            return x.tanh()

    (seconds,) = seconds_by_turns([profiler_of(Sleepy(), meter=Ticking(), repeats=3)])
    assert seconds.forward == pytest.approx(0.01 if len(interrupted) == 100 else 0.004)
    assert len(starts) == runs


def test_a_replay_ends_at_the_last_saved_tensor() -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Ticking.time += 1.0
            y = x.tanh()
            Ticking.time += 3.0
            return y + 1

    (seconds,) = seconds_by_turns([profiler_of(Halves(), meter=Ticking())])
    assert (seconds.forward, seconds.replay) == (4.0, 1.0)


def test_a_stage_that_saves_nothing_has_nothing_to_replay() -> None:
    class Shift(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Ticking.time += 1.0
            return x + 1

    (seconds,) = seconds_by_turns([profiler_of(Shift(), meter=Ticking())])
    assert seconds.replay == 0.0


def test_a_discarded_forward_takes_as_long_as_a_recorded_one() -> None:
    measurement = measure(profiler_of(nn.Tanh()))
    cost = StageSeconds(3.0, 2.0, 5.0).of(measurement.cost)
    keep = cost.keep
    assert (keep.forward_seconds, keep.replay_seconds, keep.backward_seconds) == (3.0, 2.0, 5.0)
    assert cost.discard_seconds == 3.0
    assert keep.saved_output_bytes == measurement.cost.keep.saved_output_bytes
