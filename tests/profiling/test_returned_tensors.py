"""What a step makes of the tensors that its modules return, and what a plan keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_rotor import BudgetError, RotorCallback
from lightning_rotor.profiling.returned_tensors import ReturnedTensors
from lightning_rotor.profiling.step_compute import StepCompute, measure_compute
from tests.grids import few

WORDS, WIDTH = 3000, 16


class LanguageModel(nn.Module):
    """Returns its loss and its logits, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.layers(self.words(batch)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch.flatten()), "logits": logits}


def loss_alone(task: Any, batch: Tensor) -> Tensor:
    return task.net(batch)["loss"]


def also_a_metric(task: Any, batch: Tensor) -> Tensor:
    output = task.net(batch)
    task.hits = (output["logits"].argmax(-1) == batch).float().mean().detach()
    return output["loss"]


def also_a_penalty(task: Any, batch: Tensor) -> Tensor:
    output = task.net(batch)
    return output["loss"] + 1e-3 * output["logits"].square().mean()


def also_kept(task: Any, batch: Tensor) -> Tensor:
    task.last = task.net(batch)
    return task.last["loss"]


class Task(L.LightningModule):
    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = LanguageModel()
        self.step = step
        self.last: Any = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.step(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def compute_of(step: Callable[[Any, Tensor], Tensor]) -> StepCompute:
    return measure_compute(Task(step), torch.randint(WORDS, (4, 32)), lambda copy, batch: copy.step(copy, batch))


@pytest.mark.parametrize(
    ("step", "unused"),
    [(loss_alone, {1}), (also_a_metric, set()), (also_a_penalty, set()), (also_kept, set())],
)
def test_a_tensor_that_the_step_makes_nothing_of_is_told(
    step: Callable[[Any, Tensor], Tensor], unused: set[int]
) -> None:
    assert compute_of(step).returned.unused("net") == unused


def test_a_step_that_is_not_followed_to_its_end_tells_nothing() -> None:
    def stops(task: Any, batch: Tensor) -> Tensor:
        loss = loss_alone(task, batch)
        raise RuntimeError("no further")
        return loss

    compute = compute_of(stops)
    assert compute.stopped_at
    assert compute.returned.unused("net") == frozenset()


def test_one_call_of_several_that_uses_a_tensor_counts() -> None:
    def twice(task: Any, batch: Tensor) -> Tensor:
        return loss_alone(task, batch) + also_a_penalty(task, batch)

    assert compute_of(twice).returned.unused("net") == frozenset()


def trained(step: Callable[[Any, Tensor], Tensor], *callbacks: L.Callback) -> dict[str, Tensor]:
    task = Task(step)
    batches = torch.randint(WORDS, (4, 4, 32), generator=torch.Generator().manual_seed(1))
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(task, DataLoader(list(batches), batch_size=None))
    return {name: tensor.clone() for name, tensor in task.state_dict().items()}


@pytest.mark.parametrize("step", few([loss_alone, also_a_metric, also_a_penalty, also_kept], also_a_penalty))
def test_the_named_minimum_trains_and_nothing_below_it(step: Callable[[Any, Tensor], Tensor]) -> None:
    plain = trained(step)
    with pytest.raises(BudgetError, match="is below the minimum") as refused:
        trained(step, RotorCallback("1KiB", show_table=False))
    minimum = refused.value.minimum_bytes
    rotor = RotorCallback(minimum, show_table=False)
    received = trained(step, rotor)
    assert all(torch.equal(plain[name], received[name]) for name in plain)
    assert rotor.measured_peak_bytes is not None
    assert rotor.measured_peak_bytes <= minimum
    with pytest.raises(BudgetError, match="is below the minimum"):
        trained(step, RotorCallback(int(0.985 * minimum), show_table=False))


def test_logits_that_the_step_lets_go_of_are_not_kept() -> None:
    alone, kept = RotorCallback("1GiB", show_table=False), RotorCallback("1GiB", show_table=False)
    trained(loss_alone, alone)
    trained(also_kept, kept)
    logits_bytes = 4 * 32 * WORDS * 4
    assert alone.predicted_peak_bytes is not None
    assert kept.predicted_peak_bytes is not None
    assert alone.measured_peak_bytes is not None
    assert abs(alone.predicted_peak_bytes - alone.measured_peak_bytes) <= 64
    assert kept.predicted_peak_bytes >= alone.predicted_peak_bytes + logits_bytes


def test_a_tensor_is_used_by_an_operation_outside_of_its_module() -> None:
    returned = ReturnedTensors()
    loss, logits, states = torch.zeros(()), torch.zeros(2), torch.zeros(3)
    returned.follow("net", (loss, logits, states))
    returned.note_operation((loss,), running=[])
    # What the module itself does with a view of its output is none of its caller's.
    returned.note_operation((logits[:1],), running=["net"])
    assert returned.unused("net") == frozenset(), "the step is not over"
    del loss, logits, states
    returned.end_step()
    assert returned.unused("net") == {1, 2}
    assert returned.unused("other") == frozenset()


def test_what_is_still_held_when_the_step_ends_is_used() -> None:
    returned = ReturnedTensors()
    held = torch.zeros(2)
    returned.follow("net", {"first": torch.zeros(1), "second": held})
    returned.end_step()
    assert returned.unused("net") == {0}


def test_one_call_that_uses_a_tensor_is_enough() -> None:
    returned = ReturnedTensors()
    # All there at once, since a storage that is gone may give its identity to another.
    calls = [(torch.zeros(1), torch.zeros(1)) for _ in range(2)]
    for tensors in calls:
        returned.follow("net", tensors)
    del tensors
    returned.note_operation(calls[1][1], running=[])
    calls.clear()
    returned.end_step()
    assert returned.unused("net") == {0}


def test_calls_that_return_unlike_tensors_tell_nothing() -> None:
    returned = ReturnedTensors()
    returned.follow("net", (torch.zeros(1), torch.zeros(1)))
    returned.follow("net", (torch.zeros(1), torch.zeros(1), torch.zeros(1)))
    returned.end_step()
    assert returned.unused("net") == frozenset()


def test_the_only_tensor_of_a_call_counts_as_used() -> None:
    returned = ReturnedTensors()
    returned.follow("net", torch.zeros(1))
    returned.end_step()
    assert returned.unused("net") == frozenset()
