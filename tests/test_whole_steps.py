"""The limit is for every moment of a step, the optimizer's included: optimizers by models by limits, each step measured by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_rotor import BudgetError, RotorCallback, RotorWarning
from lightning_rotor.memory.resident_memory import allocated_bytes
from lightning_rotor.planned.step_state import State
from lightning_rotor.profiling import StepMeter
from tests.grids import few
from tests.training import train

STEPS = 8


def wide() -> nn.Module:
    """Parameters are most of it."""
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64, bias=False), nn.GELU())))


def deep() -> nn.Module:
    """Activations are most of it."""
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 64))))


class UsersOptimizer(torch.optim.Optimizer):
    """As users write them: a closure, and then each group."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self.update([each for each in group["params"] if each.grad is not None], group["lr"])
        return loss

    def update(self, learning: list[torch.Tensor], lr: float) -> None:
        raise NotImplementedError


class Lamb(UsersOptimizer):
    """Everything out of place, several lists at a time."""

    def update(self, learning: list[torch.Tensor], lr: float) -> None:
        for each in learning:
            if not self.state[each]:
                self.state[each].update(first=torch.zeros_like(each), second=torch.zeros_like(each))
        firsts = [0.9 * self.state[each]["first"] + 0.1 * each.grad for each in learning]
        seconds = [0.99 * self.state[each]["second"] + 0.01 * each.grad**2 for each in learning]
        updates = [one / (two.sqrt() + 1e-6) for one, two in zip(firsts, seconds, strict=True)]
        for each, first, second, update in zip(learning, firsts, seconds, updates, strict=True):
            self.state[each].update(first=first, second=second)
            each.sub_(update * lr * (each.norm() / (update.norm() + 1e-6)))


class Quantized(UsersOptimizer):
    """Keeps its moments in 8 bits, asks for values, and unpacks all of them at once."""

    def update(self, learning: list[torch.Tensor], lr: float) -> None:
        moments = []
        for each in learning:
            state = self.state[each]
            old = 0.9 * state["moment"].float() * state["scale"] if state else torch.zeros_like(each)
            moments.append(old + each.grad)
        for each, moment in zip(learning, moments, strict=True):
            scale = float(moment.abs().max()) / 127 + 1e-12
            assert moment.numpy() is not None  # no dry run can say this
            self.state[each].update(moment=(moment / scale).to(torch.int8), scale=scale)
            each.sub_(lr * moment)


class Lookahead(UsersOptimizer):
    """Averages with older weights in every fifth step, which its own counter tells."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.01)
        self.steps = 0

    def update(self, learning: list[torch.Tensor], lr: float) -> None:
        self.steps += 1
        for each in learning:
            each.sub_(each.grad, alpha=lr)
            if not self.state[each]:
                self.state[each]["slow"] = each.clone()
        if self.steps % 5 == 0:
            slow = [self.state[each]["slow"] for each in learning]
            new = torch._foreach_add(slow, torch._foreach_mul(torch._foreach_sub(learning, slow), 0.5))
            torch._foreach_copy_(slow, new)
            torch._foreach_copy_(learning, new)


class Preconditioned(UsersOptimizer):
    """Takes a matrix apart in every fourth step, which the state of each parameter tells."""

    def update(self, learning: list[torch.Tensor], lr: float) -> None:
        for each in learning:
            state = self.state[each]
            if not state:
                state.update(step=0, products=torch.eye(len(each)), root=torch.eye(len(each)))
            state["step"] += 1
            state["products"] += each.grad @ each.grad.T
            if state["step"] % 4 == 0:
                values, vectors = torch.linalg.eigh(state["products"])
                state["root"] = (vectors * values.clamp_min(1e-3) ** -0.25) @ vectors.T
            each.sub_(state["root"] @ each.grad, alpha=lr)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01),
    "Adam foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, foreach=False),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "Adadelta foreach": lambda parameters: torch.optim.Adadelta(parameters, foreach=True),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, 0.1, max_iter=3, history_size=4),
    "Lamb": lambda parameters: Lamb(parameters, 0.01),
    "Lookahead": Lookahead,
    "8 bits": lambda parameters: Quantized(parameters, 0.01),
    "Muon": lambda parameters: torch.optim.Muon([each for each in parameters if each.ndim == 2]),
}


class Task(L.LightningModule):
    """One module, and a loss outside of it."""

    def __init__(self, make: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net, self.optimizer = make(), optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


class WholeSteps(L.Callback):
    """Peaks of whole steps: the rotor's own while it measures, and the allocator's of all others."""

    def __init__(self, rotor: RotorCallback | None = None) -> None:
        self.rotor, self.peaks = rotor, list[int]()
        self._meter: StepMeter | None = None
        self._base = 0

    def on_train_batch_start(self, trainer: L.Trainer, model: L.LightningModule, batch: Any, batch_idx: int) -> None:
        planner = None if self.rotor is None else self.rotor._planner
        if planner is not None and not (planner.state is State.STEADY and planner.limit.knows_final_peak):
            return
        if planner is not None and planner.watch.running:
            return
        self._meter = StepMeter(torch.device("cpu"))
        self._meter.start()
        self._base = allocated_bytes(model, trainer.optimizers, batch, torch.device("cpu"))

    def on_train_batch_end(self, *_: Any) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            self.peaks.append(self._base + meter.stop().peak_bytes)
        elif self.rotor is not None and self.rotor.measured_peak_bytes is not None:
            self.peaks.append(self.rotor.measured_peak_bytes)

    def on_exception(self, *_: Any) -> None:
        if self._meter is not None:
            self._meter.stop()


def run(
    model: Callable[[], L.LightningModule],
    folder: Path,
    limit: int | None,
    *,
    batch_size: int,
    on_infeasible: Any = "raise",
    callbacks: Sequence[L.Callback] = (),
    **options: Any,
) -> tuple[WholeSteps, RotorCallback | None, BudgetError | None]:
    """Peaks, and the error that ended training."""
    rotor = None if limit is None else RotorCallback(limit, show_table=False, on_infeasible=on_infeasible)
    peaks = WholeSteps(rotor)
    data = [torch.randn(batch_size * STEPS, 64)]
    everyone = [*callbacks, *([] if rotor is None else [rotor]), peaks]
    try:
        train(model, data, folder, batch_size=batch_size, callbacks=everyone, **options)
    except BudgetError as error:
        return peaks, rotor, error
    return peaks, rotor, None


def assert_a_minimum_is_one(
    model: Callable[[], L.LightningModule], folder: Path, *, batch_size: int, **options: Any
) -> BudgetError:
    """Training keeps the limit that an error names, and more; a little below it ends in an error again."""
    _, _, error = run(model, folder, 1024, batch_size=batch_size, **options)
    assert error is not None
    for factor in (1.0, 1.1, 1.5):
        limit = int(factor * error.minimum_bytes)
        peaks, rotor, another = run(model, folder, limit, batch_size=batch_size, **options)
        assert another is None, f"{factor}: {another}"
        assert len(peaks.peaks) == STEPS
        assert max(peaks.peaks[1:]) <= limit, f"{factor}: {peaks.peaks} of {limit}"
        assert rotor is not None
        assert rotor.predicted_peak_bytes is not None
        # What lies around the plan counts as if it were there throughout, so that a prediction may be above it.
        assert 0.97 * max(peaks.peaks[1:]) <= rotor.predicted_peak_bytes <= 1.2 * max(peaks.peaks[1:])
    _, _, below = run(model, folder, int(error.minimum_bytes * 0.99), batch_size=batch_size, **options)
    assert below is not None
    assert below.minimum_bytes == pytest.approx(error.minimum_bytes, rel=0.01)
    return error


@pytest.mark.parametrize("name", few(OPTIMIZERS, "Adam foreach", "LBFGS", "8 bits"))
@pytest.mark.feature("Memory", "the optimizer's own step, with all that it allocates, is inside `mem_limit`")
def test_the_step_of_an_optimizer_counts(tmp_path: Path, name: str) -> None:
    error = assert_a_minimum_is_one(lambda: Task(wide, OPTIMIZERS[name]), tmp_path, batch_size=8)
    kind = type(OPTIMIZERS[name](list(wide().parameters()))).__name__
    if name not in ("SGD", "AdamW fused"):
        assert error.stage == f"{kind}.step"
        assert f"set by '{kind}.step'" in str(error)


def test_an_optimizer_that_takes_what_nobody_predicts_in_every_fourth_step_ends_training_there(tmp_path: Path) -> None:
    def model() -> Task:
        return Task(wide, lambda parameters: Preconditioned(parameters, 0.01))

    _, _, error = run(model, tmp_path, 1024, batch_size=8)
    errors = 0
    # What takes a matrix apart has a workspace of its own, of which no tensor tells. So minima are named one after the
    # other, and no step is above one in silence.
    while error is not None:
        limit = error.minimum_bytes
        peaks, _, error = run(model, tmp_path, limit, batch_size=8)
        above = [peak for peak in peaks.peaks[1:] if peak > limit]
        assert len(above) <= (error is not None)  # the step that ends training
        if error is not None:
            errors += 1
            assert error.stage == "Preconditioned.step"
            assert error.minimum_bytes > limit
    assert 1 <= errors <= 3


@pytest.mark.parametrize("name", few(OPTIMIZERS, "8 bits"))
def test_where_activations_are_most_of_it_the_loss_sets_the_minimum(tmp_path: Path, name: str) -> None:
    if name == "LBFGS":
        pytest.skip("its minimum is a few percent too high, where its vectors count at moments when they are not there")
    error = assert_a_minimum_is_one(lambda: Task(deep, OPTIMIZERS[name]), tmp_path, batch_size=256)
    assert error.stage == "behind net"


class Divided(nn.Module):
    """Layers before and behind one that torch's checkpoint runs, so that two modules are planned."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.middle, self.behind = deep(), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), deep()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        middle: torch.Tensor = checkpoint(self.middle, self.before(input), use_reentrant=True)
        return self.behind(middle)


@pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint by itself")
def test_the_minimum_of_several_calls_is_that_of_the_plan_that_takes_least(tmp_path: Path) -> None:
    def model() -> Task:
        return Task(Divided, OPTIMIZERS["SGD"])

    # The first plan is made before anything is known of the loss, and takes more than the second.
    _, _, error = run(model, tmp_path, 1024, batch_size=256)
    assert error is not None
    peaks, _, another = run(model, tmp_path, error.minimum_bytes, batch_size=256)
    assert another is None, another
    assert max(peaks.peaks[1:]) <= error.minimum_bytes
    # The way to the least plan of several calls depends on the limit, so a minimum has 1.5 % of what plans change in it.
    _, _, below = run(model, tmp_path, int(error.minimum_bytes * 0.98), batch_size=256)
    assert below is not None


class Words(L.LightningModule):
    """A table with sparse gradients, and layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4000, 16, sparse=True)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        words = (batch[0].abs() * 1000).long() % 4000
        loss = self.net(self.table(words)).square().mean()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SparseAdam(self.table.parameters()), torch.optim.Adam(self.net.parameters())]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_count_in_the_step_that_takes_them(tmp_path: Path) -> None:
    _, _, error = run(Words, tmp_path, 1024, batch_size=32)
    assert error is not None
    for factor in (1.0, 1.1, 1.5):
        limit = int(factor * error.minimum_bytes)
        peaks, _, another = run(Words, tmp_path, limit, batch_size=32)
        assert another is None, another
        assert max(peaks.peaks[1:]) <= limit


class OfItsOwn(Task):
    """Keeps its optimizer from the Trainer, which counts no steps then."""

    def __init__(self) -> None:
        super().__init__(deep, lambda parameters: torch.optim.SGD(parameters, 0.01))
        self.automatic_optimization = False
        self.kept = [self.optimizer(self.parameters())]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept[0].zero_grad()
        self.manual_backward(loss)
        self.kept[0].step()
        return loss

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
def test_a_limit_is_one_where_the_trainer_has_no_optimizer(tmp_path: Path) -> None:
    _, _, error = run(OfItsOwn, tmp_path, 1024, batch_size=256)
    assert error is not None
    peaks, _, another = run(OfItsOwn, tmp_path, error.minimum_bytes, batch_size=256)
    assert another is None, another
    assert max(peaks.peaks[1:]) <= error.minimum_bytes <= 1.01 * max(peaks.peaks[1:])


class Averaging(L.Callback):
    """A moving average of weights, with temporaries for all of them at once."""

    def on_train_batch_end(self, trainer: L.Trainer, model: L.LightningModule, *_: Any) -> None:
        weights = [each.detach() for each in model.parameters()]
        new = torch._foreach_mul(weights, 0.9)
        more = torch._foreach_mul(weights, 0.1)
        torch._foreach_add_(new, more)


class Noise(L.Callback):
    """Makes a copy of all gradients before the optimizer steps."""

    def on_before_optimizer_step(self, trainer: L.Trainer, model: L.LightningModule, *_: Any) -> None:
        three = [each.grad.repeat(3, 1) for each in model.parameters() if each.grad is not None]
        assert all(each.isfinite().all() for each in three)


@pytest.mark.parametrize("callback", [Averaging, Noise])
def test_callbacks_behind_the_backward_count(tmp_path: Path, callback: type[L.Callback]) -> None:
    def make() -> L.LightningModule:
        return Task(wide, OPTIMIZERS["SGD"])

    options: dict[str, Any] = {"batch_size": 8, "callbacks": [callback()]}
    _, _, error = run(make, tmp_path, 1024, **options)
    assert error is not None
    assert error.stage in ("behind the backward", "SGD.step")
    peaks, _, another = run(make, tmp_path, error.minimum_bytes, **options)
    assert another is None
    assert max(peaks.peaks[1:]) <= error.minimum_bytes
    _, _, alone = run(make, tmp_path, 1024, batch_size=8)
    assert alone is not None
    assert error.minimum_bytes > 1.1 * alone.minimum_bytes


def test_an_error_says_what_makes_the_optimizer_take_less(tmp_path: Path) -> None:
    def many() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))

    _, _, error = run(lambda: Task(many, OPTIMIZERS["Adam foreach"]), tmp_path, 1024, batch_size=8)
    assert error is not None
    assert "Pass foreach=False to Adam, which then takes" in str(error)


def test_weights_stay_where_a_limit_is_refused_for_the_optimizer(tmp_path: Path) -> None:
    task = Task(wide, OPTIMIZERS["Adam foreach"])
    before = [each.detach().clone() for each in task.parameters()]
    with pytest.raises(BudgetError, match=r"the step of Adam, with hooks and clipping around it, takes besides"):
        L.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[RotorCallback(1024, show_table=False)],
        ).fit(task, torch.utils.data.DataLoader([[torch.randn(8, 64)]], batch_size=None))  # fmt: skip
    assert all(map(torch.equal, before, task.parameters()))


def test_beyond_the_limit_it_says_so_once(tmp_path: Path) -> None:
    model = lambda: Task(wide, OPTIMIZERS["Adam foreach"])  # noqa: E731
    with pytest.warns(RotorWarning, match="training goes on beyond the limit") as caught:
        peaks, rotor, _ = run(model, tmp_path, 230_000, batch_size=8, on_infeasible="warn")
    messages = [str(each.message) for each in caught if "beyond the limit" in str(each.message)]
    assert len(messages) == 1
    assert "set by 'Adam.step'" in messages[0]
    assert rotor is not None
    assert rotor.predicted_peak_bytes == pytest.approx(max(peaks.peaks[1:]), rel=0.01)


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.5}], ids=str)
def test_accumulation_and_clipping(tmp_path: Path, options: dict[str, Any]) -> None:
    def make() -> L.LightningModule:
        return Task(wide, OPTIMIZERS["Adam foreach"])

    _, _, error = run(make, tmp_path, 1024, batch_size=8, **options)
    assert error is not None
    peaks, _, another = run(make, tmp_path, error.minimum_bytes, batch_size=8, **options)
    assert another is None, another
    assert max(peaks.peaks[3:]) <= error.minimum_bytes


class Twice(Task):
    """Two calls that wait together."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) + self.net(batch[0].flip(0))).square().mean()


def test_predictions_for_several_calls_know_nothing_of_a_limit_far_away(tmp_path: Path) -> None:
    peaks, rotor, _ = run(lambda: Twice(deep, OPTIMIZERS["SGD"]), tmp_path, 2**33, batch_size=64)
    assert rotor is not None
    assert rotor.predicted_peak_bytes is not None
    assert rotor.predicted_peak_bytes <= 1.1 * max(peaks.peaks[1:])


class Skipping(nn.Module):
    """Layers are skipped at random, by one generator or another."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.draw() > 0.5:
                x = x + layer(x)
        return x


class Routing(nn.Module):
    """An expert takes as many rows as the values say."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.expert = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x[:, 0] > 0.5).nonzero()[:, 0]
        return x.index_add(0, rows, self.expert(x[rows]))


class WholeDraws(L.Callback):
    """Stands before the callback, and asks behind each step what it has measured."""

    def __init__(self, limit: int) -> None:
        self.limit, self.peaks, self.rotor = limit, list[tuple[bool, int]](), None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        (rotor,) = (each for each in trainer.callbacks if isinstance(each, RotorCallback))
        if rotor.measured_peak_bytes is not None:  # of the step before
            self.peaks.append((rotor._planner._draws.are_seen, rotor.measured_peak_bytes))

    def assert_said(self, error: BudgetError | None, *, differs: bool) -> None:
        """Draws were noticed, and a plan followed each step that was too large, or an error."""
        assert error is not None or not differs or any(are_seen for are_seen, _ in self.peaks)
        for (_, one), (_, following) in pairwise(self.peaks[1:]):
            assert one <= self.limit or following < one
        assert error is not None or self.peaks[-1][1] <= self.limit


DRAWS: dict[str, tuple[type[nn.Module], Callable[[], float]]] = {
    "random": (Skipping, random.random),
    "numpy": (Skipping, np.random.rand),
    "torch": (Skipping, lambda: float(torch.rand(()))),
    "values": (Routing, random.random),
}


@pytest.mark.parametrize("name", few(DRAWS, "random", "values"))
@pytest.mark.feature("Memory", "steps whose sizes are draws (layers skipped at random, experts) are watched")
def test_a_size_that_is_a_draw_is_never_exceeded_in_silence(tmp_path: Path, name: str) -> None:
    kind, draw = DRAWS[name]

    def make() -> L.LightningModule:
        layers = nn.Sequential(nn.Linear(64, 64), kind(draw), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        return Task(lambda: layers, OPTIMIZERS["SGD"])

    steps: dict[str, Any] = {"batch_size": 64, "max_epochs": 4}
    _, _, error = run(make, tmp_path, 1024, **steps)
    assert error is not None
    limit = error.minimum_bytes
    for _ in range(4):
        seen = WholeDraws(limit)
        _, rotor, another = run(make, tmp_path, limit, callbacks=[seen], **steps)
        assert rotor is not None
        seen.assert_said(another, differs=kind is Skipping)
        if another is None:
            return
        limit = another.minimum_bytes
    raise AssertionError("no limit that an error names is enough")
