"""Offloading as users ask for it: the same bits inside limits, what is refused by name, and plans as before without it."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from benchmarks.random_chains import KINDS, random_chain, random_moves, random_schedule
from lightning_rotor import Checkpointable, Offload, OffloadError, OptionError, RotorCallback, RotorWarning, UnitError
from lightning_rotor.errors import ScheduleError
from lightning_rotor.link import Link
from lightning_rotor.offload import parse_offload
from lightning_rotor.planning.joint_chain import concatenated, joined, split
from lightning_rotor.planning.plan import Plan, from_plain
from lightning_rotor.simulator import simulate
from tests.training import assert_same_training, tight_limit, train

FAST = (1e9, 1e9)


def deep(width: int = 64, blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def gradients(net: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    torch.manual_seed(1)
    net(batch).square().sum().backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


# ---------------------------------------------------------------------------------------------------- on the CPU


def test_a_module_trains_below_the_least_limit_of_recomputation_to_the_same_bits(tmp_path: Path) -> None:
    net, batch = deep(), torch.randn(512, 64)
    plain = gradients(net, batch)
    without = Checkpointable(net, batch, "1GiB")
    least = without.frontier().points[0].peak_bytes
    offload = Offload(f"disk:{tmp_path}", bandwidth=FAST)
    planned = Checkpointable(net, batch, least, offload=offload)
    assert planned.plan is not None
    assert planned.plan.seconds < without.compute_sequence(least).seconds
    assert planned.plan.moved
    assert planned.plan.host_bytes > 0
    for _ in range(2):
        assert all(map(torch.equal, plain, gradients(planned, batch)))
    assert "Moved" in str(planned.plan)
    assert "keep, move" in str(planned.plan)


def test_the_link_is_measured_where_nobody_gives_it(tmp_path: Path) -> None:
    net, batch = deep(), torch.randn(64, 64)
    planned = Checkpointable(net, batch, "1GiB", offload=f"disk:{tmp_path}")
    assert planned.plan is not None
    link = planned.plan.link
    assert link is not None
    assert link.out > 1e6
    assert link.back > 1e6
    assert link.room_bytes is not None
    assert link.room_bytes > 2**20
    # Two digits, so that plans from a file are those of the next process, mostly.
    assert link.out == float(f"{link.out:.1e}")
    assert not list(tmp_path.iterdir())


def test_nothing_changes_without_offload() -> None:
    net, batch = deep(), torch.randn(64, 64)
    plan = Checkpointable(net, batch, "1GiB").plan
    assert plan is not None
    assert plan.link is None
    assert plan.conditions == {"gradients_exist": False, "lingering_bytes": 0}
    assert "Moved stages" not in str(plan)


def test_a_limit_of_the_other_memory_is_kept(tmp_path: Path) -> None:
    net, batch = deep(), torch.randn(512, 64)
    tight = 600 * 2**10
    roomy = Checkpointable(net, batch, tight, offload=Offload(f"disk:{tmp_path}", bandwidth=FAST)).plan
    assert roomy is not None
    room = roomy.host_bytes // 2
    planned = Checkpointable(net, batch, tight, offload=Offload(f"disk:{tmp_path}", limit=room, bandwidth=FAST))
    assert planned.plan is not None
    assert 0 < planned.plan.host_bytes <= room
    assert all(map(torch.equal, gradients(net, batch), gradients(planned, batch)))


class Deep(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = deep(blocks=5)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.body(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def test_a_training_inside_a_tight_limit_has_the_weights_of_plain_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = [torch.randn(1024, 64)]
    limit = tight_limit(Deep, data, tmp_path, batch_size=256)
    plain = train(Deep, data, tmp_path, batch_size=256)
    rotor = RotorCallback(limit, offload=Offload(f"disk:{tmp_path}", bandwidth=FAST), show_table=False)
    caplog.set_level("INFO")
    planned = train(Deep, data, tmp_path, batch_size=256, callback=rotor)
    assert_same_training(plain, planned)
    assert rotor.plan is not None
    assert rotor.plan.moved
    assert rotor.measured_peak_bytes is not None
    assert rotor.measured_peak_bytes <= limit
    assert " moved, measuring took" in caplog.text


class TwoCalls(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.other = deep(blocks=5)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.body(batch[0]) * self.other(batch[0])).square().mean()
        return loss


@pytest.mark.wide
def test_calls_that_wait_together_move_nothing_and_say_so(tmp_path: Path) -> None:
    data = [torch.randn(1024, 64)]
    limit = tight_limit(TwoCalls, data, tmp_path, batch_size=256, room=0.3)
    plain = train(TwoCalls, data, tmp_path, batch_size=256)
    rotor = RotorCallback(limit, offload=Offload(f"disk:{tmp_path}", bandwidth=FAST), show_table=False)
    with pytest.warns(RotorWarning, match="moves nothing in this training, whatever offload says"):
        planned = train(TwoCalls, data, tmp_path, batch_size=256, callback=rotor)
    assert_same_training(plain, planned)
    assert rotor.plan is not None
    assert not rotor.plan.moved


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("value", ["cpu", "disk:", "disk", "nvme:/x", "", "Host"])
def test_an_unknown_target_lists_those_that_there_are(value: str) -> None:
    with pytest.raises(
        OptionError, match=r'offload is .*: expected "host" or "host:20GiB" for pinned memory .*"disk:/'
    ):
        Checkpointable(deep(), offload=value)
    with pytest.raises(OptionError, match=r"offload is "):
        RotorCallback("1GiB", offload=value)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(OptionError, match="offload is 5 of type int: expected"):
        parse_offload(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["host:much", "host:", "host:0GiB"])
def test_a_limit_that_is_no_size_is_refused(value: str) -> None:
    with pytest.raises(UnitError, match=r"memory limit|size"):
        parse_offload(value)


@pytest.mark.parametrize("bandwidth", [0, -1.0, float("inf"), (1e9,), (1e9, 0), (1e9, 1e9, 1e9)])
def test_a_speed_that_is_none_is_refused(bandwidth: Any) -> None:
    with pytest.raises(
        OptionError, match=r"bandwidth of offload is .*: expected a positive number of bytes per second"
    ):
        Offload("host", bandwidth=bandwidth)


def test_the_host_is_no_other_memory_for_the_cpu() -> None:
    with pytest.raises(OffloadError, match=r"moves from a GPU .* on 'cpu': expected offload=\"disk:/a/folder\""):
        Checkpointable(deep(), torch.randn(8, 64), "1GiB", offload="host")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"no file can be made in .*missing.* \(No such file or directory\)"):
        Checkpointable(deep(), torch.randn(8, 64), "1GiB", offload=f"disk:{tmp_path / 'missing'}")


def test_a_plan_that_moves_needs_offload(tmp_path: Path) -> None:
    net, batch = deep(), torch.randn(512, 64)
    plan = Checkpointable(net, batch, 600 * 2**10, offload=Offload(f"disk:{tmp_path}", bandwidth=FAST)).plan
    assert plan is not None
    assert plan.moved
    with pytest.raises(ScheduleError, match=r'no other memory to move it to: .* offload="host"'):
        Checkpointable(net, batch).use(plan)


# ---------------------------------------------------------------------------------------------------- plans of steps


@pytest.mark.parametrize("seed", range(20))
def test_moves_of_calls_are_those_of_the_step_and_back(seed: int) -> None:
    rng = random.Random(seed)
    chains = [random_chain(rng, rng.randint(2, 5), rng.choice(KINDS)) for _ in range(rng.randint(1, 3))]
    schedules = [random_moves(rng, chain, random_schedule(rng, chain)) for chain in chains]
    together = concatenated(schedules)
    assert split(together, [len(chain) for chain in chains]) == schedules
    step = joined(["call"] * len(chains), chains)
    link = Link(1e9, 1e9)
    stays = concatenated([type(each)(each.items) for each in schedules])
    assert simulate(step, together, link=link).peak_bytes <= simulate(step, stays, link=link).peak_bytes
    if len(chains) == 1:
        alone = simulate(chains[0], schedules[0], link=link)
        assert simulate(step, together, link=link).host_bytes == alone.host_bytes


def test_a_plan_with_moves_is_read_again(tmp_path: Path) -> None:
    net, batch = deep(), torch.randn(512, 64)
    offload = Offload(f"disk:{tmp_path}", bandwidth=FAST)
    planned = Checkpointable(net, batch, 600 * 2**10, offload=offload)
    plan = planned.plan
    assert plan is not None
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json", plan.chain)
    assert again.schedule == plan.schedule
    assert planned.use(again).moved == plan.moved
    assert from_plain({**plan.to_plain(), "solve_seconds": 0.0}, plan.chain).link == plan.link
    gc.collect()
