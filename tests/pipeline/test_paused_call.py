"""User code that waits in the middle for the pipeline: turns, random numbers, settings, errors, unwinding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.micro_batch_seeds import OUTSIDE, mixed
from lightning_rotor.pipeline.paused_call import PausedCall, current

CPU = torch.device("cpu")


class Net(nn.Module):
    """Calls the paused call of its thread, as a module that is cut does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        paused = current.get()
        assert paused is not None
        return paused(self, args, kwargs)


net = Net()


def paused(run: Callable[[], Any], place: int = 0) -> PausedCall:
    return PausedCall(run, place, CPU, seed=3, what="the step")


def test_code_stops_at_its_call_and_goes_on_with_the_answer() -> None:
    calls = [paused(lambda place=place: net(place, twice=2 * place) + 1, place) for place in range(3)]
    assert [call.start() for call in calls] == [((place,), {"twice": 2 * place}) for place in range(3)]
    assert [call.resume(10 * call.place) for call in reversed(calls)] == [21, 11, 1]
    assert current.get() is None
    for call in calls:
        call.abandon()


def test_each_code_draws_its_own_numbers_however_turns_alternate() -> None:
    def draw() -> tuple[float, float]:
        before = float(torch.rand(()))
        net()
        return before, float(torch.rand(()))

    torch.manual_seed(1)
    state = torch.get_rng_state()
    calls = [paused(draw, place) for place in range(2)]
    for call in calls:
        call.start()
    drawn = [call.resume() for call in calls]
    assert torch.equal(torch.get_rng_state(), state)
    for place, numbers in enumerate(drawn):
        torch.manual_seed(mixed(mixed(3, place), OUTSIDE))
        assert numbers == (float(torch.rand(())), float(torch.rand(())))


def test_settings_of_the_code_are_its_own() -> None:
    def run() -> bool:
        with torch.autocast("cpu", torch.bfloat16):
            net()
            return torch.is_autocast_enabled("cpu")

    call = paused(run)
    call.start()
    assert not torch.is_autocast_enabled("cpu")
    with call.context.restored():
        assert torch.is_autocast_enabled("cpu")
    assert call.resume() is True
    assert not torch.is_autocast_enabled("cpu")


def test_errors_of_the_code_are_raised_where_it_is_resumed() -> None:
    def fail() -> None:
        net()
        raise KeyError("behind the call")

    call = paused(fail)
    call.start()
    with pytest.raises(KeyError, match="behind the call"):
        call.resume()


def test_code_without_a_call_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"the step never called the module .*: expected one call of it"):
        paused(lambda: 1).start()


def test_a_second_call_is_refused() -> None:
    def run() -> None:
        net()
        net()

    call = paused(run)
    call.start()
    with pytest.raises(PipelineError, match="called the module that is cut into pipeline stages twice"):
        call.resume()


def test_a_call_without_gradients_is_refused() -> None:
    def run() -> None:
        with torch.no_grad():
            net()

    with pytest.raises(PipelineError, match="pipeline stages under no_grad: expected one call"):
        paused(run).start()


def test_code_that_is_abandoned_unwinds_past_its_own_handlers() -> None:
    steps: list[str] = []

    def run() -> None:
        try:
            net()
        except Exception:
            steps.append("swallowed")
        finally:
            steps.append("unwound")

    call = paused(run)
    call.start()
    call.abandon()
    call.abandon()
    assert steps == ["unwound"]
