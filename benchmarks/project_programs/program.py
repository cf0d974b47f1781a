"""What programs are made of: a name, the package it comes from, and a function that trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader

STEPS = 12


@dataclass(frozen=True)
class Run:
    """One training of a program, plain or with a limit: what it hands to the Trainer."""

    callbacks: Sequence[L.Callback]

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of a Trainer, also of one that a package makes by itself."""
        return {
            "accelerator": "cpu", "devices": 1, "max_epochs": -1, "max_steps": STEPS, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "callbacks": list(self.callbacks), "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
        }  # fmt: skip

    def fit(self, model: Any, batches: Any, *, trainer: type[Any] = L.Trainer, **settings: Any) -> None:
        """Train on a loader of a package, or on a list of batches."""
        loader = DataLoader(batches, batch_size=None) if isinstance(batches, list) else batches
        trainer(**{**self.settings, **settings}).fit(model, loader)


@dataclass(frozen=True)
class Program:
    """A program of a package."""

    name: str
    package: str
    train: Callable[[Run], None]

    @property
    def says(self) -> str:
        """The recipe in a line."""
        return (self.train.__doc__ or "").partition("\n")[0]


PROGRAMS: dict[str, Program] = {}


def program(package: str) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Register a function as a program of a package, under its own name."""

    def register(train: Callable[[Run], None]) -> Callable[[Run], None]:
        name = train.__name__
        PROGRAMS[name] = Program(name, package, train)
        return train

    return register


class Task(L.LightningModule):
    """A LightningModule around a package's module, as most users write it; subclasses have the ``training_step``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Parameters that learn, in AdamW."""
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], 1e-4)


class OwnLoss(Task):
    """Around a module that takes a batch by keywords and returns its loss, as those of transformers do."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        """Loss of the package's own."""
        return self.net(**batch).loss
