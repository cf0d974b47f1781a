"""Skip connections of an ``nn.Sequential`` as values of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_rotor.skip import Key, Skippable, verify_layers
from lightning_rotor.stages.wiring import Wire, packed, unpacked


class ThreadedLayer(nn.Module):
    """A skippable layer that takes what it pops after its input, and gives what it stashes after its output."""

    def __init__(self, layer: Skippable) -> None:
        super().__init__()
        self.layer = layer
        self._pops = layer.poppable()
        self._stashes = layer.stashable()

    def forward(self, value: Any) -> Any:
        """Run the layer with its hooks."""
        input, *popped = unpacked(value, 1 + len(self._pops))
        given = dict(zip(self._pops, popped, strict=True))
        # No name may hold a value longer than the layer does: memory would be taken that the plan does not know of.
        del value, popped
        output, stashed = self.layer.threaded(input, given)
        return packed([output, *(stashed[key] for key in self._stashes)])


def thread_skips(layers: Sequence[tuple[str, nn.Module]]) -> list[tuple[nn.Module, Wire]]:
    """The module that runs each layer, and the values that it takes and makes.

    Layers without skips stay as they are. Value ``i`` is the input of layer ``i``; skips have the numbers behind those.
    Raises ``SkipDeclarationError`` if stashes and pops do not match.
    """
    threaded: list[tuple[nn.Module, Wire]] = []
    if any(isinstance(layer, Skippable) for _, layer in layers):
        verify_layers(layers)
    numbers: dict[Key, int] = {}
    for index, (_, layer) in enumerate(layers):
        if not isinstance(layer, Skippable):
            threaded.append((layer, Wire((index,), (index + 1,))))
            continue
        popped = [numbers[key] for key in layer.poppable()]
        stashed = []
        for key in layer.stashable():
            numbers.setdefault(key, len(layers) + 1 + len(numbers))
            stashed.append(numbers[key])
        threaded.append((ThreadedLayer(layer), Wire((index, *popped), (index + 1, *stashed))))
    return threaded
