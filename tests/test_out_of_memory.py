"""A device that runs out of memory in the planned module: the forward runs again with less, to the same bits, or says what to set."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_rotor import Checkpointable, RotorCallback, RotorWarning, ShortageError
from lightning_rotor.planned.step_planner import StepPlanner
from lightning_rotor.planning import Plan
from tests.training import assert_same_bits, generator_states

HUGE = 2**60
# By layer, in how many forwards it fails next. Here, for a forward that runs again sets back what its layers hold.
FAILS: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()


class Greedy(nn.Module):
    """Asks for an exabyte in some of its training forwards, as a device does that somebody else has filled."""

    def __init__(self, *fails: int, changes_input: bool = False) -> None:
        super().__init__()
        self.changes_input, self.armed = changes_input, False
        FAILS[self] = list(fails)
        self.register_buffer("seen", torch.zeros(1))

    @property
    def fails(self) -> list[int]:
        return FAILS.setdefault(self, [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.armed and self.fails and torch.is_grad_enabled():
            self.fails[0] -= 1
            if not self.fails[0]:
                self.fails.pop(0)
                torch.empty(HUGE, dtype=torch.uint8)
        return x * 2


def network(greedy: Greedy) -> nn.Sequential:
    torch.manual_seed(2)
    blocks = [[nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh()] for _ in range(4)]
    return nn.Sequential(*(layer for block in blocks for layer in block), greedy, nn.Linear(16, 1))


def step(net: Any, batch: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(5)
    net.zero_grad()
    net(batch).sum().backward()
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    return {"gradients": gradients, "buffers": dict(net.named_buffers()), "generators": str(generator_states())}


@pytest.mark.parametrize("budget", ["1GiB", "150KiB"], ids=["nothing recomputed", "some recomputed"])
def test_a_forward_that_fails_runs_again_with_less_and_gives_the_same_bits(budget: str) -> None:
    batch, greedy = torch.randn(256, 16), Greedy(1)
    plain = copy.deepcopy(network(Greedy()))
    net = Checkpointable(network(greedy), batch, budget)
    assert net.plan is not None
    before = net.plan.peak_bytes
    for number in range(3):
        greedy.armed = number == 1
        assert_same_bits(step(plain, batch), step(net, batch))
    assert not greedy.fails
    assert net.plan.peak_bytes < before
    assert net.plan.recomputed


def test_a_forward_that_keeps_failing_says_what_to_set() -> None:
    batch, greedy = torch.randn(256, 16), Greedy(*[1] * 9)
    net = Checkpointable(network(greedy), batch, "1GiB")
    greedy.armed = True
    expected = (
        r"out of memory inside mem_limit 1\.00 GiB: the plan was to peak at .* KiB\. No plan takes "
        r"less\. Set mem_limit to less .* lower the batch size.* torch said: .*DefaultCPUAllocator"
    )
    with pytest.raises(ShortageError, match=expected) as caught:
        step(net, batch)
    assert len(greedy.fails) >= 9 - 4
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (copied.limit_bytes, copied.predicted_bytes) == (2**30, caught.value.predicted_bytes)
    greedy.fails.clear()
    assert_same_bits(step(copy.deepcopy(net.module), batch)["gradients"], step(net, batch)["gradients"])


@pytest.mark.filterwarnings("ignore:stage .* gives other bits when it runs again:lightning_rotor.RotorWarning")
def test_a_forward_that_has_changed_its_input_does_not_run_again() -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    batch, greedy = torch.randn(256, 16), Greedy(1)
    net = Checkpointable(nn.Sequential(InPlace(), *network(greedy)), mem_limit="1GiB", show_progress=False)
    step(net, batch.clone())
    greedy.armed = True
    with pytest.raises(
        ShortageError, match="The forward has changed its input or a large buffer, so it cannot run again"
    ):
        step(net, batch.clone())


class SlopedBySize(nn.Module):
    """Does something else for large batches, if ``threshold`` says so; asks for an exabyte while a file is there."""

    def __init__(self, threshold: int, flag: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.threshold, self.flag = threshold, flag

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = 0.5 if self.threshold and len(x) > self.threshold else 0.1
        for layer in self.layers:
            x = nn.functional.leaky_relu(layer(x), slope)
        # A recording does not know of files, as it would of a counter.
        if torch.is_grad_enabled() and Path(self.flag).exists():
            Path(self.flag).unlink()
            torch.empty(HUGE, dtype=torch.uint8)
        return x


@pytest.mark.parametrize("threshold", [0, 20])
def test_a_smaller_batch_that_nobody_has_looked_at_runs_again_by_its_own_code(threshold: int, tmp_path: Path) -> None:
    flag = tmp_path / "fails"
    torch.manual_seed(2)
    plain = SlopedBySize(threshold, str(flag))
    net = Checkpointable(copy.deepcopy(plain), mem_limit="1GiB", show_progress=False)
    for size in (40, 40, 30, 12):  # from the second on, they run plainly without a question
        batch = torch.randn(size, 8)
        expected = step(plain, batch)
        if size == 12:
            flag.touch()
        if size == 12 and threshold:
            with pytest.raises(ShortageError, match="The forward does something else for this size, so it cannot run"):
                step(net, batch)
            expected = step(plain, batch)
        assert_same_bits(expected, step(net, batch))
    assert not flag.exists()


def test_other_errors_go_through_as_they_are() -> None:
    class Broken(Greedy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.armed:
                raise RuntimeError("a bug of the user")
            return super().forward(x)

    batch, broken = torch.randn(8, 16), Broken()
    net = Checkpointable(network(broken), batch, "1GiB")
    broken.armed = True
    with pytest.raises(RuntimeError, match=r"^a bug of the user$"):
        step(net, batch)


# -------------------------------------------------------------------- where nothing can run again


class GreedyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, greedy: Any) -> torch.Tensor:
        ctx.greedy = greedy
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.greedy.armed:
            torch.empty(HUGE, dtype=torch.uint8)
        return gradient * 2, None


class Once(nn.Module):
    """Asks for an exabyte when the trouble comes: in the backward, or in a forward that cannot be undone."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.armed = where, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "backward":
            return GreedyBackward.apply(x, self)
        if self.armed:
            x.detach().add_(0)  # has changed, for all that anybody can tell
            torch.empty(HUGE, dtype=torch.uint8)
        return x * 2


class Task(L.LightningModule):
    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.once = Once(where)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)]
        self.body = nn.Sequential(*blocks[:4], self.once, *blocks[4:])
        if where == "forward":
            self.body = nn.Sequential(self.once, *blocks)
        self.fails_at: int | None = 3

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.once.armed = batch_idx == self.fails_at
        return self.body(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: Task, folder: Path, callbacks: list[L.Callback]) -> None:
    trainer = L.Trainer(
        accelerator="cpu", default_root_dir=folder, callbacks=callbacks, max_steps=8, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(7)
    trainer.fit(model, DataLoader([torch.randn(256, 16) for _ in range(8)], batch_size=None))


@pytest.mark.parametrize(
    ("where", "error", "reason"),
    [
        ("backward", RuntimeError, "A step cannot run again from where it failed"),
        ("forward", ShortageError, "has changed its input"),
    ],
)
def test_the_next_training_plans_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: type[Exception], reason: str
) -> None:
    made: list[Plan] = []
    monkeypatch.setattr(
        StepPlanner,
        "_plan_made",
        lambda self, plan, *of, _real=StepPlanner._plan_made: (made.append(plan), _real(self, plan, *of)),
    )
    rotor, model = RotorCallback("64MiB", "body", show_table=False), Task(where)
    expected = r"mem_limit 64\.0 MiB.*next training with this callback plans with less"
    with (
        pytest.warns(RotorWarning, match=expected) as warned,
        pytest.raises(error, match="DefaultCPUAllocator") as caught,
    ):
        fit(model, tmp_path, [rotor])
    told = str(caught.value) + "".join(str(entry.message) for entry in warned)
    assert told.count(reason) == 1
    (first,) = made
    assert not first.recomputed
    assert "forward" not in model.body.__dict__
    model.fails_at = None
    plain = copy.deepcopy(model)
    fit(model, tmp_path, [rotor])
    _, second = made  # nor does the closed loop take what the device did not have
    assert second.recomputed
    assert second.peak_bytes < first.peak_bytes
    assert second.chain == first.chain  # measured once
    fit(plain, tmp_path, [])
    assert_same_bits(dict(plain.state_dict()), dict(model.state_dict()))
