"""Do stashes and pops match?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lightning_rotor.skip.errors import SkipDeclarationError
from lightning_rotor.skip.skippable import Key, Skippable


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every skip connection is stashed once, and popped once by a later layer.

    Args:
        module: Its layers may be sequential containers themselves.
    Raises:
        SkipDeclarationError: They do not match; says all that is wrong.
    Example:
        >>> verify_skippables(nn.Sequential(Layer1(), Layer2()))  # doctest: +SKIP
    """
    verify_layers(list(_layers(module, "")))


def verify_layers(layers: Sequence[tuple[str, nn.Module]]) -> None:
    """The same for layers in a row, with their names."""
    complaints = _complaints(layers)
    if complaints:
        listed = "\n".join(f"* {complaint}" for complaint in complaints)
        raise SkipDeclarationError(f"one or more pairs of stash and pop do not match:\n\n{listed}")


def _layers(module: nn.Sequential, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if type(child).forward is nn.Sequential.forward and isinstance(child, nn.Sequential):
            yield from _layers(child, f"{prefix}{name}.")
        elif child is not None:
            yield f"{prefix}{name}", child


def _complaints(layers: Sequence[tuple[str, nn.Module]]) -> list[str]:
    stashed: set[Key] = set()
    popped: set[Key] = set()
    complaints = []
    for layer_name, layer in layers:
        if not isinstance(layer, Skippable):
            continue
        both = layer.stashable_names & layer.poppable_names
        complaints += [f"{layer_name!r} declared {name!r} both as stashable and as poppable" for name in sorted(both)]
        for key in layer.stashable():
            if key[1] in both:
                continue
            if key in stashed:
                complaints.append(f"{layer_name!r} redeclared {key[1]!r} as stashable but not isolated by namespace")
            stashed.add(key)
        for key in layer.poppable():
            if key[1] in both:
                continue
            if key in popped:
                complaints.append(f"{layer_name!r} redeclared {key[1]!r} as poppable but not isolated by namespace")
            elif key not in stashed:
                complaints.append(f"{layer_name!r} declared {key[1]!r} as poppable but it was not stashed")
            else:
                popped.add(key)
    left = sorted((key for key in stashed - popped), key=lambda key: key[1])
    return complaints + [f"no module declared {name!r} as poppable but stashed" for _, name in left]
