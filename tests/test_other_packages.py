"""Kinds of programs that benchmarks/projects.py has found in other packages, in small."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

from lightning_rotor import RotorCallback
from lightning_rotor.errors import BudgetError, ModelError, RotorWarning
from lightning_rotor.profiling.step_compute import measure_compute
from tests.grids import few
from tests.training import assert_same_training, tight_limit, train


class Bundle:
    """A container that is registered without names for its parts, as darts registers its batches."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


register_pytree_node(Bundle, lambda bundle: (list(bundle.parts), None), lambda parts, _: Bundle(*parts))


class TakesBundles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)])

    def forward(self, bundle: Bundle) -> torch.Tensor:
        (first, second), scale = bundle.parts
        return self.layers(first + scale * second)


class Bundled(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = TakesBundles()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        return self.net(Bundle((rows, rows.square()), 2.0)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_containers_that_are_registered_without_names_are_taken(tmp_path: Path) -> None:
    rows = [torch.randn(64, 16, generator=torch.Generator().manual_seed(1))]
    limit = tight_limit(Bundled, rows, tmp_path, batch_size=16)
    callback = RotorCallback(limit, show_table=False)
    assert_same_training(
        train(Bundled, rows, tmp_path, batch_size=16), train(Bundled, rows, tmp_path, callback=callback, batch_size=16)
    )
    assert callback.plan is not None
    assert callback.plan.recomputed


class Reversible(nn.Module):
    """Normalizes at its first call, and undoes that at its second: statistics wait in attributes that it had not before."""

    def forward(self, rows: torch.Tensor, mode: str) -> torch.Tensor:
        if mode == "norm":
            self.mean = rows.mean(0).detach()
            self.deviation = rows.std(0).detach() + 1
            return (rows - self.mean) / self.deviation
        return rows * self.deviation + self.mean


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Reversible()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(self.norm(rows, "norm")), "denorm")


class Forecasting(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Forecaster()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        return self.net(rows).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_parts_are_planned_of_a_module_whose_stages_need_those_before_them(tmp_path: Path) -> None:
    rows = [torch.randn(1024, 16, generator=torch.Generator().manual_seed(1))]
    limit = tight_limit(Forecasting, rows, tmp_path, batch_size=256)
    callback = RotorCallback(limit, show_table=False)
    assert_same_training(
        train(Forecasting, rows, tmp_path, batch_size=256),
        train(Forecasting, rows, tmp_path, callback=callback, batch_size=256),
    )
    assert callback.plan is not None
    assert callback.plan.recomputed


def test_the_error_of_such_a_module_says_what_to_do_if_it_was_named(tmp_path: Path) -> None:
    rows = [torch.randn(64, 16)]
    with pytest.raises(ModelError, match=r"cannot be measured stage by stage: .* has no attribute .*skippable"):
        train(Forecasting, rows, tmp_path, callback=RotorCallback("1GiB", "net", show_table=False))


class Copying(L.LightningModule):
    """Makes deep copies in its step, as metrics do of the defaults of their states."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.total = torch.zeros(3)

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        state = deepcopy({"sum": torch.tensor(0.0), "total": self.total, "rows": rows})
        before = deepcopy(self.net)
        return self.net(state["rows"]).square().mean() + before(rows).mean() + state["sum"]


def test_a_dry_run_follows_a_step_that_makes_deep_copies() -> None:
    found = measure_compute(Copying(), torch.randn(8, 16), lambda model, rows: model.training_step(rows, 0))
    gc.collect()  # a broken copy ends the process here
    assert not found.stopped_at
    assert 0.4 < found.share("net") < 0.6


class Noisy(L.LightningModule):
    """Makes windows and noise before it calls the network, as diffusers' recipes and forecasting packages do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        windows = rows.unfold(1, 64, 16).reshape(-1, 64)
        noise = torch.randn_like(windows)
        return (self.net(windows + noise) - noise).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Followed(L.Callback):
    """The peaks that the callback has measured, by step."""

    def __init__(self, rotor: RotorCallback) -> None:
        self.peaks: dict[int, int] = {}
        self._rotor = rotor

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._rotor.measured_peak_bytes is not None:
            self.peaks[trainer.global_step] = self._rotor.measured_peak_bytes


class Scaled(Noisy):
    """Computes with gradients in front of the network, too little to be planned: what it saves stays until its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        windows = rows.unfold(1, 64, 16).reshape(-1, 64)
        for _ in range(4):
            windows = (windows * self.scale).tanh()
        return self.net(windows).square().mean()


class Checked(Noisy):
    """Makes more than its dry run reaches, which assumes that masks are true, and calls the network twice."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        windows = rows.unfold(1, 64, 8).reshape(-1, 64)
        noise = [torch.randn_like(windows) for _ in range(8)]
        if (windows + self.net[0][0].weight[0]).isnan().any():
            raise ValueError("no numbers")
        once = self.net(windows)
        return (once - self.net(windows + sum(noise))).square().mean()


def at_four_fifths(model: Any, following: Any, rows: list[torch.Tensor], folder: Path) -> tuple[RotorCallback, Any]:
    """The callback of a training at four fifths of the peak with room for everything, and what followed its peaks."""
    room = RotorCallback("1GiB", show_table=False)
    train(model, rows, folder, callback=room, batch_size=64)
    assert room.measured_peak_bytes is not None
    callback = RotorCallback(int(0.8 * room.measured_peak_bytes), show_table=False)
    followed = following(callback)
    train(model, rows, folder, callback=callback, batch_size=64, callbacks=[followed])
    return callback, followed


@pytest.mark.parametrize("model", [Noisy, Scaled, Checked])
def test_what_is_made_in_front_of_the_first_call_counts_from_the_second_step_on(
    model: type[Noisy], tmp_path: Path
) -> None:
    rows = [torch.randn(6 * 64, 256, generator=torch.Generator().manual_seed(1))]
    stopped_at = measure_compute(model(), (rows[0][:64],), lambda model, rows: model.training_step(rows, 0)).stopped_at
    assert bool(stopped_at) == (model is Checked)
    callback, followed = at_four_fifths(model, Followed, rows, tmp_path)
    later = [peak for steps, peak in followed.peaks.items() if steps > 1]
    assert later[-1] > 0.8 * callback.budget_bytes
    assert max(later) <= callback.budget_bytes


class Head(nn.Module):
    """Called, but no chain of several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(rows.flatten(1))


class Unforeseen(Noisy):
    """Asks for a value before all else, so that no dry run comes to the network."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        if rows.abs().max() < 2:
            raise ValueError("there are no windows")
        windows = rows.unfold(1, 64, 16).reshape(-1, 64)
        noise = torch.randn(2, *windows.shape)
        return (self.head(self.net(windows + noise[0])) - noise[1]).square().mean()


@pytest.mark.parametrize("share", few([0.4, 0.7], 0.4))
def test_a_module_that_the_first_step_shows_keeps_the_limit_in_the_second(share: float, tmp_path: Path) -> None:
    rows = [torch.randn(6 * 64, 256, generator=torch.Generator().manual_seed(1))]
    with pytest.raises(BudgetError, match="below the minimum") as caught:
        train(Unforeseen, rows, tmp_path, callback=RotorCallback("1KiB", show_table=False), batch_size=64)
    room = RotorCallback("1GiB", show_table=False)
    train(Unforeseen, rows, tmp_path, callback=room, batch_size=64)
    least, most = caught.value.minimum_bytes, room.measured_peak_bytes
    assert most is not None
    callback = RotorCallback(int(least + share * (most - least)), show_table=False)
    followed = Followed(callback)
    train(Unforeseen, rows, tmp_path, callback=callback, batch_size=64, callbacks=[followed])
    later = [peak for steps, peak in followed.peaks.items() if steps > 1]
    assert len(later) > 3
    assert max(later) <= callback.budget_bytes


class Tripled(Noisy):
    """Makes three times what the network returns, in its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        output = self.net(rows.unfold(1, 64, 16).reshape(-1, 64))
        return torch.cat([output, output.exp(), output.cos()]).square().mean()


class Forgetting(Followed):
    """Plans anew without what measured steps have taught in one number, as for another peak than that plan's."""

    def on_train_batch_end(self, trainer: L.Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        planner = self._rotor._planner
        if batch_idx == 4 and planner is not None:
            (module,) = planner.modules
            assert module.plans.plan is not None
            planner.limit.corrections.search_for(module.plans.plan.chain).correction_bytes = 0
            module.plans.cache.keep_only_plans(lambda plan: False)


def test_a_plan_that_is_made_anew_keeps_the_limit_from_its_first_step_on(tmp_path: Path) -> None:
    rows = [torch.randn(12 * 64, 256, generator=torch.Generator().manual_seed(1))]
    callback, followed = at_four_fifths(Tripled, Forgetting, rows, tmp_path)
    later = [peak for steps, peak in followed.peaks.items() if steps > 2]
    assert later[-1] > 0.8 * callback.budget_bytes
    assert max(later) <= callback.budget_bytes


class EdgeNetwork(L.LightningModule):
    """One convolution three times, on another graph at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        hidden = rows[: 40 + batch_idx * 7 % 20]
        for _ in range(3):
            hidden = hidden + self.conv(hidden)
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_limit_that_no_size_keeps_ends_training_where_sizes_change_at_every_step(tmp_path: Path) -> None:
    rows = [torch.randn(64 * 12, 16)]
    with pytest.raises(BudgetError, match="a measured step has taken"):
        train(EdgeNetwork, rows, tmp_path, callback=RotorCallback("20KiB", show_table=False), batch_size=64)


def test_sizes_that_change_at_every_step_are_not_measured_each_where_calls_share_a_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [torch.randn(64 * 12, 16)]
    callback = RotorCallback("20KiB", show_table=False, on_infeasible="warn")
    with caplog.at_level(logging.INFO), pytest.warns(RotorWarning, match="training goes on beyond the limit"):
        planned = train(EdgeNetwork, rows, tmp_path, callback=callback, batch_size=64)
    assert_same_training(train(EdgeNetwork, rows, tmp_path, batch_size=64), planned)
    assert 1 <= caplog.text.count("costs measured in") <= 3


class Growing(L.LightningModule):
    """Twice as many rows in each step, so that each size is measured, for two towers."""

    def __init__(self) -> None:
        super().__init__()
        left, right = ([layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())] for _ in range(2))
        self.left, self.right = nn.Sequential(*left), nn.Sequential(*right)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        rows = rows[: 4 << batch_idx]
        return (self.left(rows) - self.right(rows)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.wide
def test_steps_whose_sizes_are_measured_first_are_compared_with_the_limit(tmp_path: Path) -> None:
    rows = [torch.randn(512 * 8, 16)]
    with pytest.raises(BudgetError, match=r"a measured step has taken .* under the plan that takes least") as caught:
        train(Growing, rows, tmp_path, callback=RotorCallback("10KiB", show_table=False), batch_size=512)
    assert caught.value.minimum_bytes > 10 * 1024
    assert caught.value.stage
    with_room = RotorCallback("1GiB", show_table=False)
    planned = train(Growing, rows, tmp_path, callback=with_room, batch_size=512)
    assert with_room.measured_peak_bytes is not None
    assert_same_training(train(Growing, rows, tmp_path, batch_size=512), planned)


class Masked(nn.Module):
    """One of the layers behind which padding is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (rows + self.down(torch.tanh(self.up(rows)))) * mask


def longest_as_an_item(lengths: torch.Tensor) -> int:
    return int(torch.max(lengths).item())


def longest_of_a_list(lengths: torch.Tensor) -> int:
    return max(lengths.tolist())


class Ragged(nn.Module):
    """Reads its size from values: all shapes that it is given are those of the longest batch."""

    def __init__(self, longest_of: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(6))
        self.longest_of = longest_of

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = self.longest_of(lengths)
        mask = torch.arange(longest)[None] < lengths[:, None]
        rows = rows[:, :longest]
        for layer in self.layers:
            rows = layer(rows, mask[..., None].float())
        return rows


class RaggedTraining(L.LightningModule):
    def __init__(self, longest_of: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        self.net = Ragged(longest_of)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        longest = (20, 41, 33, 44, 20)[batch_idx]
        return self.net(rows, torch.tensor([longest - number for number in range(8)])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("longest_of", few([longest_as_an_item, longest_of_a_list], longest_as_an_item))
def test_what_was_measured_for_a_shorter_length_that_values_tell_is_no_bound(
    longest_of: Callable[[torch.Tensor], int], tmp_path: Path
) -> None:
    rows = [torch.randn(8 * 5, 50, 32, generator=torch.Generator().manual_seed(0))]
    make = partial(RaggedTraining, longest_of)
    callback = RotorCallback("850KiB", show_table=False)  # six tenths of what plain steps take
    followed = Followed(callback)
    planned = train(make, rows, tmp_path, callback=callback, callbacks=[followed])
    assert_same_training(train(make, rows, tmp_path), planned)
    assert 600 * 1024 < max(followed.peaks.values()) <= 850 * 1024
