r"""Skip connections as values of a chain.

A layer of an ``nn.Sequential`` makes one value of one. A skippable one also makes what it stashes and takes what it pops::

    value 0 ──layer 0──► 1 ──layer 1──► 2 ──layer 2──► 3         the skip is value 4: layer 2 reads (2, 4)
                 └───────────────── 4 ─────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_rotor.skip.skippable import Key, Skippable
from lightning_rotor.skip.verify import verify_layers
from lightning_rotor.wiring import Wire, packed, unpacked


class ThreadedLayer(nn.Module):
    """A skippable layer that takes what it pops after its input, and gives what it stashes after its output.

    Args:
        layer: The user's own.
    """

    def __init__(self, layer: Skippable) -> None:
        super().__init__()
        self.layer = layer
        self._pops, self._stashes = layer.poppable(), layer.stashable()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ThreadedLayer)
            and self.layer is other.layer
            and (self._pops, self._stashes) == (other._pops, other._stashes)
        )

    def __hash__(self) -> int:
        return hash((id(self.layer), self._pops, self._stashes))

    def forward(self, value: Any) -> Any:
        """Run the layer with its hooks."""
        input, *popped = unpacked(value, 1 + len(self._pops))
        given = dict(zip(self._pops, popped, strict=True))
        del value, popped
        output, stashed = self.layer.threaded(input, given)
        return packed([output, *(stashed[key] for key in self._stashes)])


def thread_skips(layers: Sequence[tuple[str, nn.Module]]) -> list[tuple[nn.Module, Wire]]:
    """What runs each layer, and which values it takes and makes.

    Args:
        layers: In order, with their names.
    Returns:
        Layers without skips as they are; value ``i`` is the input of layer ``i``, and skips have the numbers behind those.
    Raises:
        SkipDeclarationError: Stashes and pops do not match.
    """
    threaded: list[tuple[nn.Module, Wire]] = []
    if any(isinstance(layer, Skippable) for _, layer in layers):
        verify_layers(layers)
    numbers: dict[Key, int] = {}
    for index, (_, layer) in enumerate(layers):
        if not isinstance(layer, Skippable):
            threaded.append((layer, Wire((index,), (index + 1,))))
            continue
        reads = tuple(numbers[key] for key in layer.poppable())
        writes = tuple(numbers.setdefault(key, len(layers) + 1 + len(numbers)) for key in layer.stashable())
        threaded.append((ThreadedLayer(layer), Wire((index, *reads), (index + 1, *writes))))
    return threaded
