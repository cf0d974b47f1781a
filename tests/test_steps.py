"""Steps that call several modules, in one limit: what the limit is, its minimum, and steps that are not like the first."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from benchmarks.step_models import SimClr, Task, Vae, Workload, convolutions
from benchmarks.steps import Followed, Peaks, least_limit, row, train
from lightning_rotor import BudgetError, RotorCallback
from tests.grids import few

IMAGES = (4, 3, 16, 16)


class SmallVae(Vae):
    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        return (torch.randn(IMAGES),)


class SmallSimClr(SimClr):
    batch = SmallVae.batch


@pytest.mark.parametrize("model", few([SmallVae, SmallSimClr]))
def test_the_minimum_that_an_error_names_trains(model: Any) -> None:
    workload, peaks = Workload(model), Peaks()
    plain = train(workload, [peaks])
    least = least_limit(workload)
    assert least < 0.7 * peaks.peaks[2]
    text, good = row("", workload, "least", least, plain, peaks.peaks[2])
    assert good, text


class Switching(Task):
    """Calls two towers in one order, and in the other; the third step has no loss of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = convolutions(3, 16, 16, 16), convolutions(3, 16, 16, 16)
        self.steps = 0

    def loss(self, images: Tensor) -> Tensor:
        self.steps += 1
        first, second = (self.left, self.right) if self.steps % 3 else (self.right, self.left)
        one, other = first(images), second(images)
        return one.square().mean() + other.abs().mean()

    batch = SmallVae.batch


class Forgetful(Switching):
    """Sometimes leaves a tower's output without a backward, or a whole step without a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        images = batch[0]
        one, other = self.left(images), self.right(images)
        if batch_idx == 5:
            return None
        loss = one.square().mean() if batch_idx % 2 else one.square().mean() + other.abs().mean()
        self.losses.append(loss.detach())
        return loss


class Cropping(Switching):
    """Calls one tower with the same size always, the other with another one every second time."""

    def loss(self, images: Tensor) -> Tensor:
        self.steps += 1
        other = self.right(images[:, :, 4 * (self.steps % 2) :])
        return self.left(images).square().mean() + other.abs().mean()


class Adversarial(Task):
    """Asks for the gradient of its input first, in backwards of its own, as adversarial training does."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = convolutions(3, 16, 16, 16, 16)

    def loss(self, images: Tensor) -> Tensor:
        change = torch.zeros_like(images).requires_grad_()
        for _ in range(2):
            (gradient,) = torch.autograd.grad(self.tower(images + change).square().mean(), change)
            change = (change + 0.01 * gradient.sign()).detach().requires_grad_()
        return self.tower(images + change.detach()).square().mean()

    batch = SmallVae.batch


@pytest.mark.parametrize("kind", few([Switching, Forgetful, Cropping, Adversarial], Switching, Forgetful, Adversarial))
@pytest.mark.filterwarnings("ignore:.*training_step.*returned.*")
def test_steps_that_are_not_like_the_first_keep_the_limit(kind: Any) -> None:
    workload, peaks = Workload(kind), Peaks()
    plain = train(workload, [peaks])
    limit = int(0.7 * peaks.peaks[2])
    rotor = RotorCallback(limit, show_table=False)
    followed, plans = Followed(rotor), list[Any]()
    model = train(workload, [rotor, followed, LambdaCallback(on_train_batch_end=lambda *_: plans.append(rotor.plan))])
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))
    assert all(map(torch.equal, plain.losses, model.losses))
    measured = [peak for peak in followed.peaks[1:] if peak is not None]
    assert max(measured) <= 1.01 * limit  # and planned again if it was more
    assert measured[-1] <= limit
    assert all(plan.solve_seconds > 0 for plan in plans)


class Pairs(SmallSimClr):
    """Two sizes in each step, and now and then a step that calls nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 4:
            return next(self.head.parameters()).square().mean()
        return super().training_step(batch, batch_idx)

    def loss(self, images: Tensor) -> Tensor:
        return self.backbone(images).mean() + self.backbone(images[:, :, 4:]).mean()


@pytest.mark.parametrize("max_plans", few([64, 1], 1))
def test_two_sizes_in_a_step_and_steps_without_a_call(max_plans: int) -> None:
    workload = Workload(Pairs, "backbone")
    plain = train(workload, [])
    model = train(workload, [RotorCallback("1GiB", "backbone", max_plans=max_plans, show_table=False)])
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))


class Breaking(Switching):
    """Fails between two calls."""

    def loss(self, images: Tensor) -> Tensor:
        self.steps += 1
        one = self.left(images)
        if self.steps == 4:
            raise ValueError("between two calls")
        return one.square().mean() + self.right(images).abs().mean()


def test_an_exception_between_two_calls_leaves_the_model_as_it_was() -> None:
    model = None

    def remembered() -> Breaking:
        nonlocal model
        model = Breaking()
        return model

    remembered.batch = SmallVae.batch  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="between two calls"):
        train(Workload(remembered), [RotorCallback("90%" if torch.cuda.is_available() else "1GiB", show_table=False)])
    assert model is not None
    assert not any("forward" in vars(module) for module in model.modules())
    model.loss(*SmallVae.batch()).backward()


def test_a_limit_far_too_low_leaves_the_weights() -> None:
    class Alone(Task):
        def __init__(self) -> None:
            super().__init__()
            self.net = convolutions(3, 16, 16, 16)
            self.before = [each.detach().clone() for each in self.net.parameters()]
            Alone.made = self

        def loss(self, images: Tensor) -> Tensor:
            return self.net(images).square().mean()

        batch = SmallVae.batch
        made: Any = None

    with pytest.raises(BudgetError, match=r"at least .* for activations and new gradients \(set by"):
        train(Workload(Alone), [RotorCallback("10KiB", show_table=False)])
    assert all(map(torch.equal, Alone.made.before, Alone.made.net.parameters()))


SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
HUB: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 60, "n_embd": 32, "n_layer": 3, "n_head": 2}),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES | {"intermediate_size": 64}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES | {"intermediate_size": 64}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 60, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "decoder_start_token_id": 0},
    ),
}


class Generator(Task):
    """A model of the hub called as its documentation calls it."""

    kind = "gpt2"

    def __init__(self) -> None:
        hub = pytest.importorskip("transformers")
        super().__init__()
        name, config, settings = HUB[self.kind]
        self.net = getattr(hub, name)(getattr(hub, config)(**settings)).train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(**batch)
        self.losses.append(output.loss.detach())
        return output.loss

    @staticmethod
    def batch() -> Any:
        ids = torch.randint(3, 60, (8, 24))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.parametrize("kind", few(HUB))
def test_a_model_of_the_hub_trains_without_its_cache(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    workload, peaks = Workload(type("Model", (Generator,), {"kind": kind})), Peaks()
    plain = train(workload, [peaks])
    limit = int(0.6 * peaks.peaks[2])
    rotor = RotorCallback(limit, show_table=False)
    with caplog.at_level(logging.INFO, "lightning_rotor"):
        model = train(workload, [rotor])
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))
    assert rotor.plan is not None
    assert len(rotor.plan.chain) > 20
    assert rotor.measured_peak_bytes is not None
    assert rotor.measured_peak_bytes <= limit
    if kind != "bert":  # which has no cache
        assert caplog.text.count("use_cache=False") == 1
        assert model.net.config.use_cache is True
        assert model.net(**Generator.batch()).past_key_values is not None
