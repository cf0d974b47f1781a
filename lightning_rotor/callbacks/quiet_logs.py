"""``self.log`` inside of a planned module counts once: what is measured or recomputed logs nothing."""

from __future__ import annotations

from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import LightningModule

from lightning_rotor.recomputation import is_recomputing
from lightning_rotor.tracing.modules import require_untraced


def log(self: LightningModule, *args: Any, **kwargs: Any) -> None:
    """Stands in for ``type(self).log``. Bound, and named like it, so that copies and pickles of the module get their own."""
    require_untraced("it logs (self.log), which no trace would do again")
    if not is_recomputing():
        type(self).log(self, *args, **kwargs)


def hush(model: pl.LightningModule) -> None:
    """Let a model, and those inside of it, log nothing while their code runs again."""
    for module in model.modules():
        if isinstance(module, LightningModule) and "log" not in module.__dict__:
            module.__dict__["log"] = MethodType(log, module)


def unhush(model: pl.LightningModule) -> None:
    """Undo :func:`hush`."""
    for module in model.modules():
        if getattr(module.__dict__.get("log"), "__func__", None) is log:
            del module.__dict__["log"]
