"""State of stages, sorted by what a recomputation must do about it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_rotor.execution.segment_state import SegmentState, Statistic, state_of
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.snapshot import SMALL_BYTES


class WithBuffer(nn.Module):
    """Code of the user's with a buffer of some bytes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(count))

    def forward(self, x: Any) -> Any:
        """The same."""
        return x


SMALL, LARGE = 4, SMALL_BYTES


def state_for(*modules: nn.Module, updating: Any = ()) -> SegmentState:
    """The state of a stage that runs these modules."""
    return state_of(Stage("stage", modules), updating, {})


def test_normalization_writes_its_statistics_to_scratch() -> None:
    norm = nn.BatchNorm2d(3)
    state = state_for(norm)
    assert {statistic.name for statistic in state.statistics} == {"running_mean", "running_var", "num_batches_tracked"}
    assert all(statistic.scratch.shape == norm._buffers[statistic.name].shape for statistic in state.statistics)
    assert state.remembered == ()
    assert state.layers == (norm,)


def test_scratch_is_shared_by_stages() -> None:
    norm, scratch = nn.BatchNorm2d(3), dict[Any, Statistic]()
    first, second = (state_of(Stage("stage", (norm,)), (), scratch) for _ in range(2))
    assert first.statistics == second.statistics
    assert len((first + second).statistics) == 3


def test_statistics_that_code_around_may_read_are_remembered() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

    around = Around()
    state = state_for(around)
    assert state.statistics == ()
    assert state.remembered == (around.norm,)


def test_buffers_of_user_code_are_remembered_if_small_or_seen_to_change_and_watched_if_large() -> None:
    small, large, updating = WithBuffer(SMALL), WithBuffer(LARGE), WithBuffer(LARGE)
    state = state_for(small, large, updating, updating=[updating])
    assert set(state.remembered) == {small, updating}
    assert state.watched == (large,)
    assert set(state.attributed) == {small, large, updating}
    assert state.buffered == (large,)
    assert state.remembered_bytes(1) == 4 * (SMALL + LARGE)
    assert state.remembered_bytes(512) == 512 + 4 * LARGE


def test_a_buffer_that_another_stage_updates_is_not_read_as_it_is() -> None:
    shared = WithBuffer(SMALL)
    reader = SegmentState(buffered=(shared,), direct_reads=((shared, "seen"),))
    both = reader + SegmentState(remembered=(shared,))
    assert (both.buffered, both.direct_reads) == ((), ())
    assert (reader + SegmentState()).direct_reads == ((shared, "seen"),)


def test_names_in_messages_are_the_users() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = SegmentState(parametrized=(net[0],), buffered=(net[1],))
    assert state.name_of_tensor(net[0]._parameters, "weight") == "parameter 'weight' of Linear"
    rooted = SegmentState(parametrized=(net[0],), buffered=(net[1],), root=(net, "trunk"))
    assert rooted.name_of_tensor(net[0]._parameters, "weight") == "parameter 'trunk.0.weight'"
    assert rooted.name_of_tensor(net[1]._buffers, "running_mean") == "buffer 'trunk.1.running_mean'"
    assert (state + rooted).root == (net, "trunk")


def test_bytes_of_all_copies_have_scratch_and_buffers() -> None:
    state = state_for(nn.BatchNorm1d(4), WithBuffer(SMALL))
    assert state.copied_bytes(1) == 2 * 16 + 8 + 16
    # All of one type lie in one block.
    assert state.copied_bytes(512) == 2 * 512
