"""A :class:`~lightning_rotor.planned.PlannedForward` in the place of a module's ``forward``.

Nothing that a user can see changes: no wrapper, the same class, repr, parameters and state_dict keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

from torch import nn

from lightning_rotor.errors import ModelError
from lightning_rotor.private.torch_names import is_captured

_KEY = "_lightning_rotor"


class ForwardInPlace(Protocol):
    """What runs instead of a module's ``forward``. A copy of it, in a copied module, is inactive and runs the module plainly."""

    @property
    def active(self) -> bool:
        """Whether it is more than a copy."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module."""


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``type(self).forward``.

    A bound method in the instance's ``__dict__``, and named like the one it replaces: ``copy`` and ``pickle`` then bind it to the copy,
    which a closure or a wrapper would not survive.
    """
    # Whoever takes the computation down for another runtime wants the module as the user wrote it.
    if is_captured():
        return type(self).forward(self, *args, **kwargs)
    return self.__dict__[_KEY](self, args, kwargs)


def attach(module: nn.Module, planned: ForwardInPlace) -> None:
    """Run a module through a planned forward from now on.

    Raises:
        ModelError: Somebody has already replaced the module's ``forward``.
    """
    if "forward" in module.__dict__ and (_KEY not in module.__dict__ or is_attached(module)):
        raise ModelError(
            f"the forward of this {type(module).__name__} has been replaced already: expected a module that only one callback or patch works "
            "on. torch.compile of a whole LightningModule replaces its forward too: name one of its submodules"
        )
    module.__dict__[_KEY] = planned
    module.__dict__["forward"] = MethodType(forward, module)


def detach(module: nn.Module) -> None:
    """Undo :func:`attach`. Does nothing if it was undone before."""
    if module.__dict__.pop(_KEY, None) is not None:
        module.__dict__.pop("forward", None)


def is_attached(module: nn.Module) -> bool:
    """Whether a module runs through a planned forward."""
    planned: ForwardInPlace | None = module.__dict__.get(_KEY)
    return planned is not None and planned.active


@contextmanager
def attached(module: nn.Module, planned: ForwardInPlace) -> Iterator[None]:
    """:func:`attach` for one call."""
    attach(module, planned)
    try:
        yield
    finally:
        detach(module)
