"""What a LightningModule's code may not ask while it is traced: its Trainer, whose answers change in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from lightning_rotor.private.lightning_names import TRAINERS
from lightning_rotor.tracing.modules import UntraceableError


class _Hidden:
    """Stands in for a Trainer."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UntraceableError(
            f"it asks the Trainer for {name!r} (as self.global_step, self.current_epoch and self.log do), which is another in every step"
        )


def hide_trainers(module: nn.Module, is_opaque: Callable[[nn.Module], bool]) -> None:
    """Put something that answers nothing in the place of the Trainers of a module and of what is in it. The caller puts them back.

    Args:
        module: Its code is about to be traced.
        is_opaque: Says of a submodule whether its code runs as it is.
    """
    attributes: dict[str, Any] = module.__dict__
    attributes.update({name: _Hidden() for name in TRAINERS if attributes.get(name) is not None})
    for child in module.children():
        if not is_opaque(child):
            hide_trainers(child, is_opaque)
