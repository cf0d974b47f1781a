"""RotorPipelineStrategy under a real Trainer, on real processes, against the same training on one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from pipelines import Failure, Processes, good, processes
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.pipeline_models import Tail, Up
from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline import pipelined
from lightning_rotor.profiling import profile_chain
from lightning_rotor.strategies import RotorPipelineStrategy

ROWS, BATCH = 42, 8  # the last batch has two rows


@pytest.fixture(scope="module")
def group() -> Iterator[Processes]:
    with processes(4) as made:
        yield made


class Model(L.LightningModule):
    """A pipeline in the middle, and layers that learn on both sides of it."""

    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(8, 16)
        self.net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())])
        self.head = nn.Linear(16, 4)
        for parameter in [*self.stem.parameters(), *self.net.parameters()][: 2 * frozen]:
            parameter.requires_grad_(False)
        self.steps: list[tuple[float, float]] = []
        self.predicted: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(self.stem(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return {"loss": loss, "rows": batch[1]}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.elsewhere = {name for name, parameter in self.named_parameters() if parameter.is_meta}
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.equal(outputs["rows"], batch[1])
        self.steps.append((float(outputs["loss"]), float(self.trainer.callback_metrics["loss"])))


class SharedWeight(Model):
    """Its first and its last linear layer have one weight."""

    def __init__(self, frozen: int = 0) -> None:
        super().__init__(frozen)
        self.net[6].weight = self.net[0].weight


def loader(rows: int = ROWS, batch: int = BATCH, shuffle: bool = True) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(rows, 8, generator=generator), torch.randint(0, 4, (rows,), generator=generator))
    return DataLoader(data, batch, shuffle=shuffle)


def trainer(folder: str, strategy: RotorPipelineStrategy | None, world: int, **options: Any) -> L.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    where = {"strategy": strategy, "devices": world} if strategy is not None else {"devices": 1}
    return L.Trainer(accelerator="cpu", default_root_dir=folder, **{"max_epochs": 2, **quiet, **where, **options})


def fit(
    folder: str,
    strategy: RotorPipelineStrategy | None,
    world: int,
    *,
    frozen: int = 0,
    shuffle: bool = True,
    resume: str | None = None,
    rows: int = ROWS,
    batch: int = BATCH,
    kind: type[Model] = Model,
    **options: Any,
) -> tuple[Model, L.Trainer]:
    model = kind(frozen)
    L.seed_everything(3, verbose=False)
    made = trainer(folder, strategy, world, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(model, loader(rows, batch, shuffle), loader(rows, batch, False), ckpt_path=resume)
    return model, made


def seen(model: Model, made: L.Trainer) -> dict[str, Any]:
    return {
        "steps": model.steps,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "val_loss": float(made.callback_metrics["val_loss"]),
    }


def fitted(rank: int, folder: str, options: dict[str, Any], world: int, training: dict[str, Any]) -> dict[str, Any]:
    strategy = RotorPipelineStrategy("net", **options)
    return seen(*fit(folder, strategy, world, **training))


def alone(folder: Path, **training: Any) -> dict[str, Any]:
    return seen(*fit(str(folder), None, 1, **training))


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(found["steps"]) == len(expected["steps"])
    assert torch.allclose(torch.tensor(found["steps"]), torch.tensor(expected["steps"]), atol=1e-6, rtol=0)
    assert found["val_loss"] == pytest.approx(expected["val_loss"], abs=1e-6)
    for name, value in expected["weights"].items():
        assert torch.allclose(found["weights"][name], value, atol=1e-6, rtol=0), name


TRAININGS = [
    (2, {"micro_batches": 4}, {}),
    (3, {"micro_batches": 3, "schedule": "gpipe", "recompute": "always"}, {"gradient_clip_val": 0.3}),
    (2, {"micro_batches": 4, "schedule": "interleaved"}, {"accumulate_grad_batches": 2}),
    (2, {"micro_batches": 2, "recompute": "except_last", "balance": [3, 5]}, {"frozen": 3, "gradient_clip_val": 0.3}),
    (3, {"micro_batches": 4}, {"kind": SharedWeight, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3}),
]


# The first is part of the last, and the schedule of the second that of test_pipeline_runner.
@pytest.mark.parametrize(
    ("world", "options", "training"),
    [pytest.param(*each, marks=pytest.mark.wide if number < 2 else []) for number, each in enumerate(TRAININGS)],
)
def test_training_equals_that_of_one_process(
    group: Processes, tmp_path: Path, world: int, options: dict[str, Any], training: dict[str, Any]
) -> None:
    expected = alone(tmp_path, **training)
    for found in good(group.run(world, fitted, str(tmp_path), options, world, training)):
        assert_equal(found, expected)


def in_default(rank: int, folder: str, options: dict[str, Any], world: int) -> tuple[list[Any], str]:
    """Steps, and the module that was cut."""
    strategy = RotorPipelineStrategy(micro_batches=2, **options)
    model, _ = fit(folder, strategy, world, max_epochs=1)
    assert strategy.partition is not None  # for those who print it after the fit
    assert len(strategy.partition.balance) == world
    return model.steps, strategy.module_name


def test_the_module_with_most_of_the_compute_is_cut_and_a_sample_will_do(group: Processes, tmp_path: Path) -> None:
    expected = alone(tmp_path, max_epochs=1)["steps"]
    for world, options in ((2, {}), (1, {"module": "net"}), (2, {"module": "net", "sample": torch.randn(8, 16)})):
        for steps, name in good(group.run(world, in_default, str(tmp_path), options, world)):
            assert name == "net"
            assert torch.allclose(torch.tensor(steps), torch.tensor(expected), atol=1e-6)


def test_the_strategy_has_a_name() -> None:
    made = L.Trainer(strategy="rotor_pipeline", accelerator="cpu", devices=2, logger=False)
    assert isinstance(made.strategy, RotorPipelineStrategy)


# -------------------------------------------------------------------------------------------------- checkpoints


class Save(L.Callback):
    """Writes a checkpoint in the middle of the second epoch, from every process as Lightning's callbacks do."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == 5:
            trainer.save_checkpoint(self.path)


def saving(rank: int, folder: str, world: int, options: dict[str, Any]) -> dict[str, Any]:
    path = f"{folder}/piped.ckpt"
    model, made = fit(folder, RotorPipelineStrategy("net", **options), world, shuffle=False, callbacks=[Save(path)])
    made.save_checkpoint(f"{folder}/behind.ckpt")
    return seen(model, made)


def resuming(rank: int, folder: str, world: int, options: dict[str, Any]) -> dict[str, Any]:
    return seen(
        *fit(folder, RotorPipelineStrategy("net", **options), world, shuffle=False, resume=f"{folder}/alone.ckpt")
    )


def test_checkpoints_are_those_of_one_process_and_resume_in_both_directions(group: Processes, tmp_path: Path) -> None:
    expected = seen(*fit(str(tmp_path), None, 1, shuffle=False, callbacks=[Save(f"{tmp_path}/alone.ckpt")]))
    options = {"micro_batches": 2, "balance": [3, 5]}
    for found in good(group.run(2, saving, str(tmp_path), 2, options)):
        assert_equal(found, expected)
    one, two = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("alone", "piped"))
    assert list(one["state_dict"]) == list(two["state_dict"])
    assert one["optimizer_states"][0]["param_groups"] == two["optimizer_states"][0]["param_groups"]
    for key, value in one["optimizer_states"][0]["state"].items():
        for name, tensor in value.items():
            assert torch.allclose(two["optimizer_states"][0]["state"][key][name], tensor, atol=1e-6), (key, name)
    behind = torch.load(tmp_path / "behind.ckpt", weights_only=True)["optimizer_states"][0]
    assert behind["state"].keys() == one["optimizer_states"][0]["state"].keys()
    assert {int(state["step"]) for state in behind["state"].values()} == {12}
    # On the other kind of Trainer each goes on for the second epoch.
    rest = {**expected, "steps": expected["steps"][6:]}
    assert_equal(seen(*fit(str(tmp_path), None, 1, shuffle=False, resume=f"{tmp_path}/piped.ckpt")), rest)
    for found in good(group.run(3, resuming, str(tmp_path), 3, {"micro_batches": 3})):
        assert_equal(found, rest)


# -------------------------------------------------------------------------------------------------- what else a Trainer does


def evaluate(model: Model, made: L.Trainer) -> Any:
    """Predictions and losses outside of a fit, and the whole model's output behind it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        predictions = torch.cat(made.predict(model, loader(shuffle=False)))
        losses = [
            made.validate(model, loader(shuffle=False), verbose=False)[0]["val_loss"],
            made.test(model, loader(shuffle=False), verbose=False)[0]["test_loss"],
        ]
    x = next(iter(loader(shuffle=False)))[0]
    with torch.no_grad():
        return predictions, torch.tensor(losses), model(x)


def evaluating(rank: int, folder: str, name: str | None, first: bool) -> Any:
    strategy = RotorPipelineStrategy(name, micro_batches=3, balance=[4, 4])
    model, made = fit(folder, strategy, 2, max_epochs=1) if first else (Model(), trainer(folder, strategy, 2))
    return *evaluate(model, made), model.elsewhere


@pytest.mark.parametrize(("name", "first"), [("net", True), (None, False)], ids=["behind a fit", "without one"])
def test_evaluation_outside_of_a_fit_runs_in_the_pipeline(
    group: Processes, tmp_path: Path, name: str | None, first: bool
) -> None:
    expected = evaluate(
        *(fit(str(tmp_path), None, 1, max_epochs=1) if first else (Model(), trainer(str(tmp_path), None, 1)))
    )
    answers = good(group.run(2, evaluating, str(tmp_path), name, first))
    for rank, found in enumerate(answers):
        for mine, theirs in zip(found[:3], expected, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5)
        # Each process has the weights of its stages, and of what is outside.
        assert found[3] == {f"net.{n}.{kind}" for n in ((4, 6) if rank == 0 else (0, 2)) for kind in ("weight", "bias")}


class Paired(Model):
    """Batches from two loaders at once."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(
            [torch.cat(column) for column in zip(batch["one"], batch["other"], strict=True)], batch_idx
        )


def validating(rank: int, folder: str, world: int) -> float:
    strategy = RotorPipelineStrategy("net", micro_batches=3) if world > 1 else None
    loaders = CombinedLoader({name: loader(shuffle=False) for name in ("one", "other")}, "min_size")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer(folder, strategy, world).validate(Paired(), loaders, verbose=False)[0]["val_loss"]


def test_loaders_are_combined_as_the_user_says_outside_of_a_fit(group: Processes, tmp_path: Path) -> None:
    expected = validating(0, str(tmp_path), 1)
    assert good(group.run(2, validating, str(tmp_path), 2)) == pytest.approx([expected] * 2, abs=1e-5)


def in_two_copies(rank: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    def measured(*args: Any, **kwargs: Any) -> Any:
        """The second copy finds another layer to be the slowest, and alone would be cut elsewhere."""
        found = profile_chain(*args, **kwargs)
        costs = []
        for place, cost in enumerate(found.chain):
            seconds = 9.0 if place == (0 if rank < 2 else len(found.chain) - 1) else 1.0
            times = dict.fromkeys(("forward_seconds", "replay_seconds", "backward_seconds"), seconds)
            options = tuple(replace(option, **times) for option in cost.options)
            costs.append(replace(cost, discard_seconds=seconds, options=options))
        return replace(found, chain=replace(found.chain, stages=tuple(costs)))

    strategy = RotorPipelineStrategy("net", micro_batches=2, pipeline_stages=2, **options)
    with patch.object(pipelined, "profile_chain", measured):
        return seen(*fit(folder, strategy, 4, max_epochs=6, batch=4, rows=8, gradient_clip_val=0.3))


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"schedule": "gpipe"}, marks=pytest.mark.wide)], ids=["1f1b", "gpipe"]
)
def test_two_copies_of_a_pipeline_share_the_batches(group: Processes, tmp_path: Path, options: dict[str, Any]) -> None:
    """Two copies, each with half of the eight rows, are one process with all of them."""
    expected = alone(tmp_path, max_epochs=6, rows=8, gradient_clip_val=0.3)
    answers = good(group.run(4, in_two_copies, str(tmp_path), options))
    for found in answers:
        for name, value in expected["weights"].items():
            assert torch.allclose(found["weights"][name], value, atol=1e-6, rtol=0), name
    for (one, _), (two, _), (whole, _) in zip(answers[0]["steps"], answers[3]["steps"], expected["steps"], strict=True):
        assert (one + two) / 2 == pytest.approx(whole, abs=1e-6)


def test_bfloat16_mixed_is_that_of_one_process_but_for_rounding(group: Processes, tmp_path: Path) -> None:
    training = {"precision": "bf16-mixed", "max_epochs": 1}
    expected = alone(tmp_path, **training)
    for found in good(group.run(2, fitted, str(tmp_path), {"micro_batches": 4, "recompute": "always"}, 2, training)):
        assert torch.allclose(torch.tensor(found["steps"]), torch.tensor(expected["steps"]), atol=2e-2)
        assert found["val_loss"] == pytest.approx(expected["val_loss"], abs=2e-2)


# -------------------------------------------------------------------------------------------------- what is refused


class Lbfgs(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class ByHand(Model):
    automatic_optimization = False


class Never(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x))


class Twice(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(self.net(self.stem(x))))


class Still(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.net(self.stem(x))
        return self.head(x)


class Shared(Model):
    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        self.net[6] = self.net[0] = nn.BatchNorm1d(16)


class Tied(Model):
    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.stem.weight = self.net[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([x, x], 1))


class Short(Model):
    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh())


class Numbers(Model):
    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), Tail(0), Tail(1), nn.Linear(16, 16))


class Unmatched(Model):
    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), Up(16, 16))


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


def averaging() -> list[L.Callback]:
    return [EMAWeightAveraging()]


REFUSED = [
    (Model, {"pipeline_stages": 3}, {}, "devices=3"),
    (Model, {"micro_batches": 1}, {}, 'Use micro_batches=2, or schedule="gpipe"'),
    (Model, {"micro_batches": 9}, {}, "the first batch has 8 rows for 9 micro-batches"),
    (Model, {"module": "nothing"}, {}, "no submodule 'nothing'"),
    (Model, {"mem_limit": 2000}, {}, "no partition fits 2 devices.*at least"),
    (Model, {"balance": [8]}, {}, "expected 2 positive integers that add up to 8, such as balance=\\[4, 4\\]"),
    (Model, {}, {"sync_batchnorm": True}, "expected sync_batchnorm=False"),
    (Lbfgs, {}, {}, "LBFGS evaluates the loss several times"),
    (Never, {}, {}, "never called the module"),
    (Shared, {"balance": [4, 4]}, {}, "pipeline stages 0 and 1 share the buffer 'net.0.running_mean'"),
    (Tied, {}, {}, "shares the parameter 'stem.weight' with what is outside"),
    (Short, {"balance": [1, 1, 1, 1], "schedule": "interleaved"}, {}, "the chain has only 2 stages"),
    (Numbers, {"balance": [2, 2]}, {}, "hands over int: expected tensors"),
    (Unmatched, {}, {}, "declared .skip. as poppable but it was not stashed"),
    (Model, {"sample": torch.randn(3, 16)}, {}, "sample has 3 rows for 4 micro-batches"),
    (Model, {}, {"plugins": scaled}, '"16-mixed" scales the loss.*expected "bf16-mixed"'),
    (Model, {}, {"callbacks": averaging}, "EMAWeightAveraging averages the weights of the whole model"),
    (ByHand, {}, {}, "manual optimization .*expected automatic optimization"),
    *(
        pytest.param(
            *(ByHand, {"schedule": schedule}, {}, "manual optimization .*expected automatic optimization"),
            marks=pytest.mark.wide,
        )
        for schedule in ("gpipe", "interleaved")
    ),
]


class NeverBegins(L.Callback):
    def on_train_start(self, *_: Any) -> None:
        raise AssertionError("training has begun")


def refused(rank: int, folder: str, kind: type[Model], options: dict[str, Any], training: dict[str, Any]) -> None:
    strategy = RotorPipelineStrategy(**{"module": "net", "micro_batches": 4, **options})
    training = {name: value() if callable(value) else value for name, value in training.items()}
    fit(folder, strategy, 2, kind=kind, **{"callbacks": [NeverBegins()], **training})


@pytest.mark.parametrize(("kind", "options", "training", "message"), REFUSED)
def test_what_cannot_be_trained_is_refused_on_every_process(
    group: Processes, tmp_path: Path, kind: type[Model], options: dict[str, Any], training: dict[str, Any], message: str
) -> None:
    for answer in group.run(2, refused, str(tmp_path), kind, options, training):
        assert isinstance(answer, Failure)
        assert answer.kind in {"PipelineError", "PartitionError", "ModelError", "SkipDeclarationError"}, answer.text
        assert re.search(message, answer.message), answer.message


def refused_in_its_step(rank: int, folder: str, kind: type[Model]) -> None:
    fit(folder, RotorPipelineStrategy("net", micro_batches=4), 2, kind=kind)


# Half a minute, most of which is waiting.
@pytest.mark.wide
def test_a_step_that_calls_the_module_twice_or_without_gradients_ends_all(tmp_path: Path) -> None:
    """The last process finds out about a second call, in its first step."""
    called = "training_step called the module that is cut into pipeline stages"
    # These processes stay when a job fails, so the first one waits for its message for as long as gloo does.
    with processes(2, patience_seconds=50) as group:
        first, last = group.run(2, refused_in_its_step, str(tmp_path), Twice)
        assert isinstance(first, Failure)
        assert last.kind == "PipelineError"
        assert last.message.startswith(
            f"{called} twice: expected one call of it, with gradients. Let one call take both"
        )
        for answer in group.run(2, refused_in_its_step, str(tmp_path), Still):
            assert answer.kind == "PipelineError"
            assert answer.message.startswith(f"{called} under no_grad: expected one call of it, with gradients")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"schedule": "zero-bubble"}, "schedule is 'zero-bubble'"),
        ({"recompute": "some"}, "recompute is 'some'"),
        ({"balance": "fair"}, "balance is 'fair'"),
        ({"pipeline_stages": -1}, "devices is -1"),
    ],
)
def test_arguments_without_sense_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        RotorPipelineStrategy(**options)
