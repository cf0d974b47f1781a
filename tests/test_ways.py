"""The three ways to make a chain, under a real Trainer: the model looks the same, trains to the same bits, and its checkpoints are plain."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_rotor import RotorCallback, sequentialize
from tests.training import Run, appearance, assert_same_bits, assert_same_training, tight_limit, train

# -------------------------------------------------------------------- one model for each way


def nested() -> nn.Module:
    """Sequentials in Sequentials, with what a recomputation could spoil: statistics, random numbers, operations in place."""

    def block(inputs: int, outputs: int) -> nn.Sequential:
        convolution = nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs))
        return nn.Sequential(convolution, nn.ReLU(inplace=True), nn.Sequential(nn.Dropout2d(0.2)))

    body = nn.Sequential(block(3, 8), nn.Sequential(block(8, 8), block(8, 8)), nn.MaxPool2d(2))
    return nn.Sequential(body, block(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


class UNet(nn.Module):
    """Skips from the way down to the way up, through a trace of symbols."""

    def __init__(self) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Module:
            layers = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
            return nn.Sequential(*layers, nn.Dropout2d(0.1))

        self.down = nn.ModuleList([block(3, 8), block(8, 8), block(8, 8)])
        self.up = nn.ModuleDict({"deep": block(16, 8), "wide": block(16, 8)})
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        wide = self.down[0](images)
        deep = self.down[1](F.max_pool2d(wide, 2))
        x = self.down[2](F.max_pool2d(deep, 2))
        x = self.up["deep"](torch.cat([F.interpolate(x, scale_factor=2.0), deep], 1))
        x = self.up["wide"](torch.cat([F.interpolate(x, scale_factor=2.0), wide], 1))
        return self.head(x.mean((2, 3)))


class GPT(nn.Module):
    """Looks at sizes, so that it must be recorded; dropout, tied embedding and head, and a statistic of its own."""

    def __init__(self, words: int = 40, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.longest = 16
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(self.longest, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "mlp": nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                }
            )
            for _ in range(layers)
        )
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, *, shift: torch.Tensor | None = None) -> torch.Tensor:
        batch, length = ids.shape
        if length > self.longest:
            raise ValueError(f"cannot read {length} words")
        x = self.words(ids) + self.places(torch.arange(length))
        x = F.dropout(x if shift is None else x + shift, 0.1, self.training)
        for layer in self.layers:
            q, k, v = (
                part.view(batch, length, 2, -1).transpose(1, 2) for part in layer["qkv"](layer["norm"](x)).chunk(3, -1)
            )
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
            x = x + y.transpose(1, 2).reshape(x.shape)
            x = x + F.dropout(layer["mlp"](x), 0.1, self.training)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


@dataclass(frozen=True)
class Kind:
    """A model and the way that it goes."""

    way: str
    make: Callable[[], nn.Module]
    tensors: tuple[torch.Tensor, torch.Tensor]


def kinds() -> list[Kind]:
    generator = torch.Generator().manual_seed(4)
    images, labels = torch.randn(20, 3, 16, 16, generator=generator), torch.randint(5, (20,), generator=generator)
    ids = torch.randint(40, (20, 12), generator=generator)
    return [
        Kind("sequential", nested, (images, labels)),
        Kind("graph", UNet, (images, labels)),
        Kind("graph of a transformer", GPT, (ids, ids.roll(-1, 1))),
    ]


class Task(L.LightningModule):
    """Batches of 8, 8 and 4: the last one is smaller."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        (kind,) = (kind for kind in kinds() if kind.way == way)
        self.model = kind.make()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch[0]) * self.scale
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


# -------------------------------------------------------------------- one pair of runs for each way


@dataclass
class Pair:
    """A training without the callback and one with it, at a limit that forces recomputation."""

    kind: Kind
    plain: Run
    planned: Run
    before: dict[str, Any]
    during: list[dict[str, Any]]
    copies: list[nn.Module]
    plain_checkpoint: Path
    planned_checkpoint: Path


# Sequential models train in test_callback and most others, and skips of one that symbols trace in test_skips.
@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[] if kind.make is GPT else pytest.mark.wide, id=kind.way) for kind in kinds()],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp(kind.way)
    before: dict[str, Any] = {}
    during: list[dict[str, Any]] = []
    copies: list[nn.Module] = []

    def make() -> L.LightningModule:
        return Task(kind.way)

    def make_and_note() -> L.LightningModule:
        model = make()
        before.update(appearance(model))
        return model

    def look(model: L.LightningModule) -> None:
        during.append(appearance(model))
        assert "forward" in model.model.__dict__  # the callback is at work
        copies[:] = [copy.deepcopy(model.model), pickle.loads(pickle.dumps(model.model))]

    limit = tight_limit(make, kind.tensors, folder)
    plain = train(make, kind.tensors, folder, checkpoint=folder / "plain.ckpt")
    callback = RotorCallback(limit, show_table=False)
    planned = train(
        make_and_note, kind.tensors, folder, callback=callback, look=look, checkpoint=folder / "planned.ckpt"
    )
    return Pair(kind, plain, planned, before, during, copies, folder / "plain.ckpt", folder / "planned.ckpt")


def test_each_model_goes_its_way_and_is_recomputed(pair: Pair) -> None:
    model, images = pair.kind.make(), pair.kind.tensors[0][:8]
    assert pair.kind.way.startswith(sequentialize(model, (images,)).way)
    assert pair.planned.callback is not None
    assert pair.planned.callback.plan is not None
    assert pair.planned.callback.plan.recomputed


def test_weights_buffers_optimizer_losses_and_generators_are_those_of_plain_training(pair: Pair) -> None:
    assert len(pair.plain.losses) == 3
    assert_same_training(pair.plain, pair.planned)
    statistics = [
        value for key, value in pair.planned.model.state_dict().items() if key.endswith("num_batches_tracked")
    ]
    assert statistics
    assert all(value == 3 for value in statistics)


def test_the_model_looks_the_same_while_the_callback_works_and_afterwards(pair: Pair) -> None:
    assert len(pair.during) == 3
    for then in (*pair.during, appearance(pair.planned.model)):
        for aspect, seen in pair.before.items():
            assert then[aspect] == seen, aspect
    fresh = Task(pair.kind.way)
    for mine, theirs in zip(pair.planned.model.model.modules(), fresh.model.modules(), strict=True):
        assert list(mine.__dict__) == list(theirs.__dict__)


def test_a_checkpoint_written_under_the_callback_is_one_of_plain_training(pair: Pair) -> None:
    plain, planned = (torch.load(path, weights_only=True) for path in (pair.plain_checkpoint, pair.planned_checkpoint))
    own = {key for key in planned["callbacks"] if "RotorCallback" in key}
    assert planned["callbacks"].keys() - plain["callbacks"].keys() == own
    planned["callbacks"] = {key: planned["callbacks"][key] for key in plain["callbacks"]}
    assert_same_bits(plain, planned)
    loaded = Task.load_from_checkpoint(pair.planned_checkpoint)
    assert_same_bits(dict(loaded.state_dict()), dict(pair.plain.model.state_dict()))
    assert "forward" not in loaded.model.__dict__


def test_copies_of_the_live_model_compute_the_same_bits_with_their_own_weights(pair: Pair) -> None:
    images = pair.kind.tensors[0][:8]
    original = pair.plain.model.model

    def step(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(9)
        output = model(images)
        output.square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert len(gradients) == len(list(model.parameters()))
        return [output.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]

    assert len(pair.copies) == 2
    state = copy.deepcopy(original.state_dict())
    expected = step(original)
    for duplicate in pair.copies:
        assert_same_bits(dict(state), dict(duplicate.state_dict()))
        assert_same_bits(expected, step(duplicate))
        with torch.no_grad():
            for parameter in duplicate.parameters():
                parameter.zero_()
        assert duplicate(images).abs().sum() == 0
    original.load_state_dict(state)
    assert_same_bits(expected, step(original))
