"""Runs under a real Trainer, with and without the callback, and everything that they leave behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_rotor import BudgetError, RotorCallback


def generator_states() -> list[Any]:
    """torch's, Python's and NumPy's, comparable with ``==`` after ``str``."""
    host: Any = np.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), random.getstate(), host[1].tolist(), host[2:]]


class Witness(L.Callback):
    """Notes losses and generators, and lets a test look at the model while the callback is at work.

    Args:
        look: Called after each step with the live model.
        checkpoint: Where to write one after the last step, with the callback still attached.
    """

    def __init__(self, look: Callable[[L.LightningModule], None] | None, checkpoint: Path | None) -> None:
        self.losses: list[torch.Tensor] = []
        self.generators: list[Any] = []
        self._look = look
        self._checkpoint = checkpoint

    def on_train_batch_end(
        self, trainer: L.Trainer, model: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]
        self.losses.append(loss.detach().clone())
        self.generators = generator_states()
        if self._look is not None:
            self._look(model)

    def on_train_end(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        if self._checkpoint is not None:
            trainer.save_checkpoint(self._checkpoint)


@dataclass
class Run:
    """What a training leaves."""

    model: L.LightningModule
    optimizer_state: dict[int, Any]  # of each optimizer
    losses: list[torch.Tensor]
    generators: list[Any]
    callback: RotorCallback | None
    checkpoint: dict[str, Any] = field(default_factory=dict)


def train(
    make: Callable[[], L.LightningModule],
    tensors: Sequence[torch.Tensor],
    folder: Path,
    *,
    callback: RotorCallback | None = None,
    batch_size: int = 8,
    look: Callable[[L.LightningModule], None] | None = None,
    checkpoint: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    **options: Any,
) -> Run:
    """One epoch from fixed seeds; ``options`` are the Trainer's."""
    L.seed_everything(3, verbose=False)
    model = make()
    witness = Witness(look, checkpoint)
    quiet = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": folder,
    }  # fmt: skip
    trainer = L.Trainer(**quiet | options, callbacks=[*([] if callback is None else [callback]), *callbacks, witness])
    trainer.fit(model, DataLoader(TensorDataset(*tensors), batch_size))
    optimizer_state = {number: optimizer.state_dict() for number, optimizer in enumerate(trainer.optimizers)}
    return Run(model, optimizer_state, witness.losses, witness.generators, callback)


def tight_limit(
    make: Callable[[], L.LightningModule],
    tensors: Sequence[torch.Tensor],
    folder: Path,
    *,
    batch_size: int = 8,
    module: str | None = None,
    room: float = 0.1,
    **options: Any,
) -> int:
    """A limit hardly above the least that works: the loss takes a little (``room``) that nobody knows of before the first step."""
    callback = RotorCallback("1KiB", module, show_table=False)
    with pytest.raises(BudgetError, match="Raise mem_limit") as caught:
        train(make, tensors, folder, callback=callback, batch_size=batch_size, **options)
    return int((1 + room) * caught.value.minimum_bytes)


def assert_same_training(plain: Run, planned: Run) -> None:
    """Weights, buffers, optimizer state, losses and generators, bit for bit."""
    assert_same_bits(dict(plain.model.state_dict()), dict(planned.model.state_dict()))
    assert_same_bits(plain.optimizer_state, planned.optimizer_state)
    assert_same_bits(plain.losses, planned.losses)
    assert len(plain.losses) > 0
    assert plain.generators == planned.generators


def assert_same_bits(left: Any, right: Any, path: str = "") -> None:
    """Equal in structure, and every tensor in type and bits."""
    if isinstance(left, torch.Tensor):
        assert (left.shape, left.dtype) == (right.shape, right.dtype), path
        assert torch.equal(left, right), f"{path} differs"
    elif isinstance(left, dict):
        assert list(left) == list(right), path
        for key in left:
            assert_same_bits(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same_bits(*pair, f"{path}[{index}]")
    else:
        assert left == right, path


def appearance(model: nn.Module) -> dict[str, Any]:
    """What a user can see of a module, and which objects it is made of."""
    hooks = [key for key in vars(nn.Module()) if key.endswith("_hooks")]
    return {
        "repr": repr(model),
        "state_dict": [(key, id(value)) for key, value in model.state_dict(keep_vars=True).items()],
        "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters()],
        "buffers": [(name, id(buffer)) for name, buffer in model.named_buffers()],
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "types": [type(module) for module in model.modules()],
        "hooks": [[(key, list(getattr(module, key).items())) for key in hooks] for module in model.modules()],
        "modes": [module.training for module in model.modules()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
    }
