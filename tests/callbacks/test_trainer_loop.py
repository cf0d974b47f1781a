"""A Trainer as the loop around planned modules: what it answers, and what a step runs on that must leave nothing."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping
from torch import nn

from lightning_rotor.callbacks.trainer_loop import (
    Silence,
    TrainerLoop,
    _TrainerStandIn,
    first_call,
    hush,
    silenced,
    unhush,
)
from lightning_rotor.errors import ModelError
from lightning_rotor.execution.passes import repeating


class Net(L.LightningModule):
    """Two layers, of which a step calls the second with what the first has made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        self.log("calls", self.calls)
        self.optimizers().zero_grad()
        self.second.weight.requires_grad_(False)
        return self.second(self.first(batch), scale=batch_idx).sum() if batch_idx else self.second(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer_with(*callbacks: L.Callback, **options: Any) -> Any:
    return L.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def loop_with(model: Any, *callbacks: L.Callback, **options: Any) -> TrainerLoop:
    return TrainerLoop(trainer_with(*callbacks, **options), model)


def test_silence_takes_every_call_and_says_nothing() -> None:
    silence = Silence()
    assert silence.optimizer.step(closure=None) is silence
    assert list(silence) == []
    silence["key"] = 3
    with silence as inside:
        assert inside is silence
    assert not hasattr(silence, "__deepcopy__")


def test_a_silenced_module_still_finds_its_optimizers() -> None:
    one, other = object(), object()
    assert silenced([one], [])["optimizers"](use_pl_optimizer=False) is one
    assert silenced([one, other], [])["optimizers"]() == [one, other]
    assert silenced([one], [])["lr_schedulers"]() is None
    assert silenced([one], [other])["lr_schedulers"]() is other
    assert isinstance(silenced([], [])["log"]("loss", 1.0), Silence)


def test_a_stand_in_shows_plain_values_and_keeps_what_is_set_to_itself() -> None:
    real: Any = SimpleNamespace(
        global_step=3, weights=torch.ones(2), limits=(1, {"most": 2.5}), strategy=object(), name="fit"
    )
    stand_in: Any = _TrainerStandIn(real)
    assert (stand_in.global_step, stand_in.name) == (3, "fit")
    assert stand_in.limits == [1, {"most": 2.5}]
    assert isinstance(stand_in.strategy.barrier(), Silence)
    stand_in.weights.zero_()
    stand_in.global_step = 7
    assert torch.equal(real.weights, torch.ones(2))
    assert real.global_step == 3


def test_the_first_call_of_a_module_is_found_and_nothing_is_left_behind() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    batch = torch.ones(2, 4)
    found = first_call(model, model.second, batch)
    assert found is not None
    (args, kwargs), settings = found
    assert args[0] is batch
    assert kwargs == {}
    assert settings.dtypes[0] is torch.float32
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert "forward" not in model.second.__dict__
    assert model.second.weight.requires_grad
    assert "log" not in model.__dict__


def test_a_module_that_the_step_does_not_call_has_no_first_call() -> None:
    model = Net()
    assert first_call(model, model.first, torch.ones(2, 4)) is None


@pytest.mark.parametrize("accumulates", [1, 2])
def test_gradients_linger_where_each_step_frees_them(accumulates: int) -> None:
    loop = loop_with(Net(), accumulate_grad_batches=accumulates)
    assert loop.gradients_linger() == (accumulates == 1)
    loop.model.automatic_optimization = False
    assert not loop.gradients_linger()


def test_hooks_behind_the_backward_are_seen_wherever_they_stand() -> None:
    class Clipping(Net):
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            pass

    class Averaging(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            pass

    class Watching(L.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            pass

    assert not loop_with(Net(), EarlyStopping("calls"), Watching()).has_hooks_at_end()
    assert loop_with(Clipping()).has_hooks_at_end()
    assert loop_with(Net(), Averaging()).has_hooks_at_end()
    hooked = loop_with(Net())
    optimizer = torch.optim.SGD(hooked.model.parameters(), 0.1)
    hooked.trainer.strategy.optimizers = [optimizer]
    assert not hooked.has_hooks_at_end()
    optimizer.register_step_post_hook(lambda *_: None)
    assert hooked.has_hooks_at_end()


def test_what_is_compiled_as_a_whole_may_not_rest_while_a_tuner_tries_batch_sizes() -> None:
    assert loop_with(Net(), EarlyStopping("calls")).may_run_as_compiled
    assert not loop_with(Net(), BatchSizeFinder()).may_run_as_compiled


def test_a_trial_is_known_by_the_callbacks_that_a_tuner_takes_out() -> None:
    callback = L.Callback()
    trainer = trainer_with(callback)
    loop = TrainerLoop(trainer, Net(), callback)
    assert not loop.is_trial()
    trainer.callbacks = []
    assert loop.is_trial()
    assert not TrainerLoop(trainer, Net()).is_trial()


def test_a_step_is_counted_on_a_copy_that_asks_its_trainer_for_plain_values() -> None:
    class Asking(Net):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.trainer.custom_count = 1
            return self.second(self.first(batch)).sum() * (1 + self.trainer.current_epoch)

    model = Asking()
    trainer = trainer_with()
    model.trainer = trainer
    loop = TrainerLoop(trainer, model)
    assert loop.compute(torch.ones(2, 4), 0).calls["first"] == 1
    assert not hasattr(trainer, "custom_count")
    assert loop.target(None, torch.ones(2, 4), may_be_whole=False) is None  # single layers are no chains
    with pytest.raises(ModelError, match="Linear is a single layer"):
        loop.target("second", None, may_be_whole=False)


def test_what_runs_again_logs_nothing() -> None:
    logged = []

    class Logging(Net):
        def log(self, name: str, value: Any, **options: Any) -> None:
            logged.append(name)

    model = Logging()
    hush(model)
    model.log("once", 1)
    with repeating():
        model.log("again", 1)
    assert logged == ["once"]
    unhush(model)
    with repeating():
        model.log("plainly", 1)
    assert logged == ["once", "plainly"]
    assert "log" not in model.__dict__
