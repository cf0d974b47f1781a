"""Tensors that autograd saves while a call is recorded: dropped at once, but for code that goes back through itself.

A recording takes no more memory than a forward without gradients, since nobody goes back through it. Code that is one
operation may: a layer that returns the gradient of an energy asks for what its own operations have saved::

    energy = net(positions).sum()                                        saved, and kept while the layer runs
    forces, = torch.autograd.grad(energy, positions, create_graph=True)  asks for it
    return forces                                                        dropped
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import ReferenceType, ref

import torch

from lightning_rotor.capture.operations import UntraceableError


class SavedTensor:
    """Stands in for a tensor that autograd saves, which is None in it once it has been dropped."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor


class SavedInCode:
    """Tensors that are saved while code runs that is one operation."""

    def __init__(self) -> None:
        self._is_running = False
        # Weakly: what a backward inside of the code has freed is gone.
        self._saved: list[ReferenceType[SavedTensor]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of code that is one operation. What was saved in it can be asked for until it ends.

        It does not nest, as nothing is recorded inside of an operation.
        """
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            for reference in self._saved:
                saved = reference()
                if saved is not None:
                    saved.tensor = None
            self._saved.clear()

    def save(self, tensor: torch.Tensor) -> SavedTensor:
        """Take a tensor from autograd, which holds the answer in its place."""
        if not self._is_running:
            return SavedTensor(None)
        # The node of a result would hold the result, which holds its node. Autograd gives its answer the history back.
        saved = SavedTensor(tensor.detach())
        self._saved.append(ref(saved))
        return saved

    @staticmethod
    def get(saved: SavedTensor) -> torch.Tensor:
        """The tensor, for autograd; ``UntraceableError`` if it was dropped."""
        if saved.tensor is None:
            raise UntraceableError("it computes gradients in its forward, which a recording cannot hold")
        return saved.tensor
