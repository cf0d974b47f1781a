"""What the user compiled as a whole runs as it is for as long as the limit is kept, and under a plan from then on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_rotor import BudgetError, Checkpointable, RotorCallback, RotorWarning
from lightning_rotor.planned.compiled_steps import CompiledSteps
from lightning_rotor.schedule import Schedule
from tests.grids import few
from tests.training import assert_same_bits

WIDTH, BATCH, STEPS = 32, 64, 6
ROOM, PRESSURE = "1GiB", "620KiB"  # plain training takes 820 KiB
INSIDE = "710KiB"
WAYS = ("training_step", "forward", "wrapped", "in place", "submodule", "whole", "decorated")


class Graphs:
    """A backend that counts the graphs that it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.number += 1
        return graph.forward


class Net(L.LightningModule):
    def __init__(self, way: str, backend: Any) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4))
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, 2)
        if way == "training_step":
            self.training_step = torch.compile(self.training_step, backend=backend)  # type: ignore[method-assign]
        elif way == "forward":
            self.body.forward = torch.compile(self.body.forward, backend=backend)  # type: ignore[method-assign]
        elif way == "wrapped":
            self.body = torch.compile(self.body, backend=backend)  # type: ignore[assignment]
        elif way == "in place":
            self.body.compile(backend=backend)
        elif way == "submodule":
            self.body = nn.Sequential(torch.compile(self.body, backend=backend))  # type: ignore[arg-type]
        elif way == "decorated":

            class Decorated(nn.Sequential):
                @torch.compile(backend=backend)
                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    for layer in self:
                        x = layer(x)
                    return x

            self.body = Decorated(*self.body)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(self.body(batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fit(
    folder: Path, way: str, callbacks: list[Any], *, sizes: tuple[int, ...] = (), backend: Any = None, **options: Any
) -> tuple[Any, int]:
    """Weights after a few steps, and the number of graphs that were compiled."""
    torch._dynamo.reset()
    L.seed_everything(3, verbose=False)
    graphs = Graphs()
    model: Any = Net(way, backend or graphs)
    if way == "whole":
        model = torch.compile(model, backend=graphs)
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(size, WIDTH, generator=generator) for size in sizes or [BATCH] * STEPS]
    data = DataLoader([(batch,) for batch in batches], batch_size=None)  # type: ignore[arg-type]
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "max_epochs": 1, "default_root_dir": folder}
    trainer = L.Trainer(**(quiet | options), callbacks=callbacks)
    trainer.fit(model, data)
    return list(trainer.lightning_module.parameters()), graphs.number


@pytest.mark.parametrize("way", few(WAYS, "submodule", "decorated"))
def test_with_room_the_same_graphs_run_to_the_same_bits(tmp_path: Path, way: str) -> None:
    rotor = RotorCallback(ROOM, show_table=False)
    plain, graphs = fit(tmp_path, way, [])
    watched, watched_graphs = fit(tmp_path, way, [rotor])
    assert graphs == watched_graphs == 1
    assert_same_bits(plain, watched)
    # A submodule of the planned one is a stage, as compiled blocks are, and stays compiled under a plan.
    assert rotor.plan is None or (way == "submodule" and not rotor.plan.recomputed)
    assert rotor.budget_bytes == 2**30
    assert rotor.measured_peak_bytes is not None
    assert 700 * 1024 < rotor.measured_peak_bytes < 1024 * 1024


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# That each way is seen is shown above; here, of the body compiled in five ways a module and a function.
@pytest.mark.parametrize("way", few([way for way in WAYS if way != "submodule"], "training_step"))
def test_under_pressure_a_plan_follows_on_the_first_step(tmp_path: Path, way: str) -> None:
    rotor = RotorCallback(PRESSURE, show_table=False)
    plain, _ = fit(tmp_path, way, [])
    with pytest.warns(RotorWarning, match=r"was compiled as a whole, but a plan takes it apart"):
        planned, _ = fit(tmp_path, way, [rotor])
    assert_same_bits(plain, planned)
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    assert rotor.measured_peak_bytes is not None
    assert rotor.measured_peak_bytes <= rotor.budget_bytes == 620 * 1024


# Of a module that is compiled in place, the test of a Checkpointable below shows it, too.
@pytest.mark.parametrize("way", few(["forward", "wrapped", "in place", "decorated"], "decorated"))
def test_under_pressure_one_graph_stays_one_graph_and_is_planned_inside(tmp_path: Path, way: str) -> None:
    rotor = RotorCallback(INSIDE, show_table=False)
    plain, _ = fit(tmp_path, way, [], backend="aot_eager")
    planned, _ = fit(tmp_path, way, [rotor], backend="aot_eager")
    assert_same_bits(plain, planned)
    assert rotor.plan is not None
    (stage,) = rotor.plan.chain.stages
    assert [option.name for option in stage.options] == ["keep", "planned inside"]
    assert rotor.plan.schedule == Schedule.parse("0:1")
    assert rotor.measured_peak_bytes is not None
    assert rotor.measured_peak_bytes <= rotor.budget_bytes == 710 * 1024


def test_a_graph_that_no_plan_inside_makes_small_enough_is_taken_apart(tmp_path: Path) -> None:
    rotor = RotorCallback("660KiB", show_table=False)
    plain, _ = fit(tmp_path, "wrapped", [], backend="aot_eager")
    with pytest.warns(RotorWarning, match=r"a plan takes it apart \(the compiled graph takes at least"):
        planned, _ = fit(tmp_path, "wrapped", [rotor], backend="aot_eager")
    assert_same_bits(plain, planned)
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    assert rotor.measured_peak_bytes is not None
    assert rotor.measured_peak_bytes <= rotor.budget_bytes == 660 * 1024


class HeavyLoss(Net):
    """Its loss takes as much as several layers, and no part of the planned module shows it."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.body(batch[0]).repeat(1, 6).exp().log1p().square().mean()


class Peaks(L.Callback):
    def __init__(self, rotor: RotorCallback) -> None:
        self.rotor = rotor
        self.bytes: list[int | None] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.bytes.append(self.rotor.measured_peak_bytes)


def test_what_the_loss_takes_is_known_from_the_step_that_ran_as_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Net", HeavyLoss)
    rotor = RotorCallback("760KiB", show_table=False)
    peaks = Peaks(rotor)
    plain, _ = fit(tmp_path, "wrapped", [], backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RotorWarning)
        planned, _ = fit(tmp_path, "wrapped", [rotor, peaks], backend="aot_eager")
    assert_same_bits(plain, planned)
    assert rotor.plan is not None
    # The first step ran as it was compiled. Without what it has shown, the second took 925,524 bytes.
    later = [peak for peak in peaks.bytes[1:] if peak is not None]
    assert later
    assert max(later) <= 760 * 1024


def test_a_larger_batch_that_would_exceed_the_limit_is_planned_before_it_runs(tmp_path: Path) -> None:
    rotor = RotorCallback("1MiB", show_table=False)
    sizes = (BATCH, BATCH, BATCH, BATCH, 2 * BATCH, 2 * BATCH)
    plain, _ = fit(tmp_path, "in place", [], sizes=sizes)
    with pytest.warns(RotorWarning, match=r"was compiled as a whole"):
        planned, _ = fit(tmp_path, "in place", [rotor], sizes=sizes)
    assert_same_bits(plain, planned)
    assert rotor.plan is not None
    assert rotor.plan.chain.stages[0].takes[0].startswith(f"float32[{2 * BATCH}, ")
    assert rotor.measured_peak_bytes is not None
    assert rotor.measured_peak_bytes <= 2**20


def test_a_limit_that_no_plan_keeps_ends_training(tmp_path: Path) -> None:
    with (
        pytest.warns(RotorWarning, match="was compiled as a whole"),
        pytest.raises(BudgetError, match="is below the minimum"),
    ):
        fit(tmp_path, "in place", [RotorCallback("300KiB", show_table=False)])


def test_an_excess_in_the_last_step_is_told(tmp_path: Path) -> None:
    with pytest.warns(RotorWarning, match="the last step of this training has taken"):
        fit(tmp_path, "in place", [RotorCallback(PRESSURE, show_table=False)], sizes=(BATCH,))


def test_gradients_that_add_up_later_are_foreseen(tmp_path: Path) -> None:
    rotor = RotorCallback(ROOM, show_table=False)
    plain, graphs = fit(tmp_path, "in place", [], accumulate_grad_batches=3)
    watched, watched_graphs = fit(tmp_path, "in place", [rotor], accumulate_grad_batches=3)
    assert graphs == watched_graphs
    assert_same_bits(plain, watched)


def test_larger_batches_are_foreseen_in_proportion() -> None:
    steps, small, large = CompiledSteps(), [torch.zeros(10)], [torch.zeros(20)]
    assert steps.is_new(small)
    assert not steps.foresees_excess(small, 0)
    steps.note(small, held_bytes=100, peak_bytes=300)
    assert not steps.is_new(small)
    assert steps.is_new(large)
    assert not steps.foresees_excess(large, 500)
    assert steps.foresees_excess(large, 499)
    assert not steps.foresees_excess(small, 0)


def test_a_checkpointable_says_that_a_compiled_forward_is_taken_apart() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net.forward = torch.compile(net.forward, backend="eager")  # type: ignore[method-assign]
    with pytest.warns(RotorWarning, match=r"was compiled as a whole, but a plan takes it apart"):
        planned = Checkpointable(net, mem_limit="1MiB")
    compiled = net.forward
    planned(torch.randn(2, 4)).sum().backward()
    assert net.forward is compiled
    assert planned.plan is not None


def test_a_checkpointable_with_dropout_is_planned_inside_and_evaluates_in_between() -> None:
    layers = (layer for _ in range(4) for layer in (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(0.1)))
    net, x = nn.Sequential(*layers), torch.randn(256, 32)
    net.compile(backend="aot_eager")

    def train(module: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        net.zero_grad()
        module(x).square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        with torch.no_grad():
            return [*gradients, module.eval()(x), module.train()(x)]

    expected = train(net)
    planned = Checkpointable(net, mem_limit="1GiB")
    assert_same_bits(expected, train(planned))
    assert planned.plan is not None
    limit = int(0.7 * planned.plan.peak_bytes)
    assert planned.compute_sequence("1GiB").schedule == Schedule.parse("0")
    planned = Checkpointable(net, mem_limit=limit)
    for _ in range(2):
        assert_same_bits(expected, train(planned))
    assert planned.plan is not None
    assert planned.plan.schedule == Schedule.parse("0:1")
    assert planned.plan.peak_bytes <= limit
