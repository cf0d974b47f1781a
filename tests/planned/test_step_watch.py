"""The peaks of watched steps, to the byte, whatever gives back what older steps have made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.step_watch import StepWatch
from lightning_rotor.planning.step_phases import PhaseKind
from lightning_rotor.private.torch_names import is_profiling

WIDTH = 256
SIZE = WIDTH * WIDTH * 4


class Replacing(torch.optim.Optimizer):
    """Makes its state anew in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mean"] = parameter.grad * 0.1


class Loop(TrainingLoop):
    """A training of one layer."""

    def __init__(self) -> None:
        self.model = nn.Linear(WIDTH, WIDTH, bias=False)
        self.optimizer = Replacing(self.model.parameters())
        self.profiler_is_taken = False
        self.is_lead = True
        self.warned_of = set()
        self.device = lambda: torch.device("cpu")
        self.optimizers = lambda: [self.optimizer]
        self.wrapped = lambda: self.model
        self.steps = lambda: 0
        self.gradients_linger = lambda: True

    def train(self, watch: StepWatch | None = None) -> None:
        """One step, whose gradient is its own."""
        batch = torch.ones(1, WIDTH)
        if watch is not None:
            assert watch.start(self, [batch])
        marks = watch or StepWatch()
        self.model.zero_grad()
        marks.mark(PhaseKind.LOSS)
        self.model(batch).sum().backward()
        marks.mark(PhaseKind.OPTIMIZER, optimizer="Replacing")
        self.optimizer.step()
        marks.mark(PhaseKind.END)


def phases_of(watch: StepWatch) -> dict[str, tuple[int, int]]:
    """Start and peak of each phase, in multiples of the weight, rounded."""
    return {
        phase.kind.name: (round(phase.start_bytes / SIZE), round(phase.peak_bytes / SIZE)) for phase in watch.phases
    }


def test_consecutive_steps_show_weight_gradient_and_state() -> None:
    loop, watch = Loop(), StepWatch()
    watch.renew([])
    loop.train(watch)
    assert watch.stop()
    assert phases_of(watch)["OPTIMIZER"] == (2, 3)
    loop.train(watch)
    assert watch.stop()
    assert phases_of(watch)["LOSS"] == (2, 3)  # weight and state; the gradient is new
    assert phases_of(watch)["OPTIMIZER"] == (3, 4)  # both states for a moment
    assert phases_of(watch)["END"] == (3, 3)
    assert watch.is_exact
    assert watch.due
    loop.train(watch)
    watch.stop()
    assert not watch.due


def test_a_sample_after_unwatched_steps_is_exact_at_the_latest_when_repeated() -> None:
    loop, watch = Loop(), StepWatch()
    loop.train(watch)
    watch.stop()
    for _ in range(3):
        loop.train()
    loop.train(watch)
    watch.stop()
    assert phases_of(watch)["LOSS"] == (2, 3)  # an older gradient that goes is seen at the mark
    watch.repeat()
    assert watch.due
    loop.train(watch)
    watch.stop()
    assert watch.is_exact
    assert phases_of(watch)["OPTIMIZER"] == (3, 4)


def test_what_is_measured_in_a_pause_does_not_count() -> None:
    loop, watch = Loop(), StepWatch()
    assert watch.start(loop, [])
    before = torch.empty(WIDTH, WIDTH)
    watch.pause()
    assert watch.running
    assert not is_profiling()
    large = torch.empty(4 * WIDTH, WIDTH)
    with torch.autograd.profiler.profile(use_kineto=False):
        del large
    watch.mark(PhaseKind.FORWARD, call=0)
    del before
    after = torch.empty(2 * WIDTH, WIDTH)
    assert watch.stop()
    # The weight, and what was made before and behind the pause, of which the older part goes first.
    assert phases_of(watch)["FORWARD"] == (2, 3)
    del after


def test_a_profiler_of_the_users_that_begins_in_a_pause_ends_the_watch() -> None:
    loop, watch = Loop(), StepWatch()
    assert watch.start(loop, [])
    watch.pause()
    with torch.autograd.profiler.profile(use_kineto=False):
        watch.mark(PhaseKind.FORWARD, call=0)
    assert not watch.running
    assert not watch.stop()
    assert watch.start(loop, [])
    assert watch.stop()


@pytest.mark.parametrize("crossing", ["begins", "ends"])
def test_a_range_of_the_users_may_reach_over_a_pause(crossing: str) -> None:
    loop, watch = Loop(), StepWatch()
    assert watch.start(loop, [])
    with torch.autograd.profiler.record_function("of the user's"):
        watch.pause()
        if crossing == "ends":
            watch.resume()
            torch.empty(WIDTH, WIDTH)
    watch.resume()
    assert watch.stop()


def test_a_profiler_of_the_users_goes_first() -> None:
    loop, watch = Loop(), StepWatch()
    watch.renew([])
    with torch.autograd.profiler.profile(use_kineto=False), pytest.warns(UserWarning, match="cannot measure the peak"):
        assert not watch.start(loop, [])
    assert not watch.due
    loop.profiler_is_taken = True
    assert not watch.start(loop, [])
