"""Dry runs leave no trace: generators, globals, output, warnings and logs."""

from __future__ import annotations

import logging
import random
import warnings

import pytest
import torch
from torch import nn

from lightning_rotor import is_recomputing
from lightning_rotor.profiling.dry_run import run_dry, unlogged, without_trace

SEEN: list[int] = []


class Noting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(1)
        print("noted")  # noqa: T201
        warnings.warn("noted", UserWarning, stacklevel=1)
        return x * random.random() + torch.rand(())


def test_a_dry_run_leaves_generators_globals_and_the_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    net = Noting()
    states = random.getstate(), torch.get_rng_state()
    with without_trace(None, [net]) as generators:
        assert is_recomputing()
        run_dry(lambda: net(torch.ones(1)), generators)
    assert not SEEN
    assert capsys.readouterr().out == ""
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_it_is_put_back_where_the_run_fails() -> None:
    net, state = Noting(), torch.get_rng_state()

    def run() -> None:
        net(torch.ones(1))
        raise KeyError("lengths")

    def fail() -> None:
        with without_trace(None, [net]) as generators:
            run_dry(run, generators)

    with pytest.raises(KeyError, match="lengths"):
        fail()
    assert not SEEN
    assert torch.equal(torch.get_rng_state(), state)


def test_fake_tensors_log_as_before_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with unlogged():
        log.error("not heard")
    log.error("heard")
    assert [record.message for record in caplog.records] == ["heard"]
