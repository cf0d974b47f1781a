"""Invertible modules in a row, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from lightning_rotor.invertible.protocol import Invertible, require_invertible
from lightning_rotor.sequential import has_own_call


class InvertibleSequential(nn.Sequential):
    """An ``nn.Sequential`` of invertible modules, with their inverses in reverse order.

    :func:`~lightning_rotor.invertible.invertible_checkpoint` and the planner take it apart, so that its members need no more memory than one of them.
    Modules in it that draw random numbers are undone only there: in :meth:`inverse` nobody knows in which state each found the generators.

    Args:
        *modules: As for ``nn.Sequential``.
    Raises:
        InverseError: One of them has no inverse.
    """

    def __init__(self, *modules: Any) -> None:
        super().__init__(*modules)
        self._require_inverses()

    def inverse(self, output: Any) -> Any:
        """The input that made an output."""
        self._require_inverses()  # members may have been added since
        for module in reversed(self._modules.values()):
            output = cast("Invertible", module).inverse(output)
        return output

    def _require_inverses(self) -> None:
        for name, module in self._modules.items():
            require_invertible(module, name=labelled(module, name))


class Reversed(nn.Module):
    """A module with forward and inverse swapped: what :func:`reverse` makes.

    Args:
        module: With ``forward`` and ``inverse``. Its parameters are shared.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        require_invertible(module, name=type(module).__name__)
        self.module = module

    def forward(self, x: Any) -> Any:
        """The module's inverse."""
        return cast("Invertible", self.module).inverse(x)

    def inverse(self, output: Any) -> Any:
        """The module's forward."""
        return self.module(output)


def reverse(module: nn.Module) -> nn.Module:
    """Swap forward and inverse of a module: a flow's sampler from its encoder.

    Args:
        module: With ``forward`` and ``inverse``; nothing is copied. Reversing an :class:`InvertibleSequential` reverses its members.
    Returns:
        The reversed module; of a reversed one, the module itself.
    Raises:
        InverseError: It has no inverse.
    """
    if isinstance(module, Reversed):
        return module.module
    if type(module) is InvertibleSequential and not has_own_call(module):
        return InvertibleSequential(*map(reverse, reversed(list(module._modules.values()))))
    return Reversed(module)


def members(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """A module, or the modules that it runs in a row, each with a name for error messages."""
    if type(module) is InvertibleSequential and not has_own_call(module):
        for name, member in module._modules.items():  # a module that appears twice counts twice
            if member is not None:
                yield from members(member, f"{path}.{name}" if path else name)
    else:
        yield labelled(module, path), module


def labelled(module: nn.Module, path: str) -> str:
    """How a module is called in error messages: ``2.0 (AdditiveCoupling)``."""
    kind = type(module).__name__
    return f"{path} ({kind})" if path else kind
