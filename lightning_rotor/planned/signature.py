"""The signature of a call: everything that a plan for it depends on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.capture.sequentialize import Cut
from lightning_rotor.planning.size_bounds import Shapes
from lightning_rotor.private.autocast import AutocastState, autocast_state
from lightning_rotor.private.values import tensors_in, tree_leaves

Kind: TypeAlias = tuple[torch.dtype, torch.device, bool]
"""Type and device of a tensor, and whether a gradient is due for it."""
Modes: TypeAlias = tuple[tuple[bool, ...], tuple[tuple[bool, torch.dtype], ...]]
"""Which submodules train (dropout may be off), and which parameters learn, with their types."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The key of a plan.

    Attributes:
        shapes: Of the tensors that the chain takes; behind them, numbers of entries of packed sequences.
        kinds: Of the same tensors.
        cut: The stages.
        autocast: The state of autocast.
        modes: Flags of submodules and parameters.
    """

    shapes: Shapes
    kinds: tuple[Kind, ...]
    cut: Cut
    autocast: AutocastState
    modes: Modes

    @classmethod
    def of(cls, cut: Cut, value: Any, modes: Modes) -> Signature:
        """The signature of a call with this input of the chain."""
        tensors = tensors_in(value)
        # Behind the shapes stand numbers that only values tell: a packed sequence of the same shape may hold more
        # entries.
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if isinstance(cut, GraphCut):
            for total in cut.recording.guards.totals:
                shapes.append((total,))
        kinds = tuple(map(_kind_of, tensors))
        return cls(tuple(shapes), kinds, cut, autocast_state(), modes)

    def is_of(self, value: Any) -> bool:
        """True if a call with this input has the signature, as far as the facts of its module do not say."""
        # It runs at every call of a steady step, so it makes no signature, and compares what differs most often first.
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if tuple([tuple(tensor.shape) for tensor in tensors]) != self.shapes:
            return False
        if tuple(map(_kind_of, tensors)) != self.kinds:
            return False
        return autocast_state() == self.autocast

    @property
    def has_totals(self) -> bool:
        """True if it counts the entries of packed sequences, which are values."""
        return len(self.shapes) > len(self.kinds)

    @property
    def device(self) -> torch.device:
        """Where the chain runs."""
        return self.kinds[0][1]

    @property
    def family(self) -> Any:
        """Equal for signatures that differ in the sizes of tensors alone, and perhaps in the recording.

        For costs and schedules. An executor may run another call only if the two are of one recording, see
        :meth:`differs_in_sizes`.
        """
        names = tuple(stage.name for stage in self.cut.stages)
        dimensions = tuple(map(len, self.shapes))
        return (
            self.modes,
            self.kinds,
            self.autocast,
            self.cut.way,
            dimensions,
            names,
        )

    def differs_in_sizes(self, other: Signature) -> bool:
        """True if another one differs in the sizes of tensors at most, and its stages are the same objects."""
        return (
            other.cut is self.cut
            and other.kinds == self.kinds
            and other.autocast == self.autocast
            and list(map(len, other.shapes)) == list(map(len, self.shapes))
            and other.modes == self.modes
        )

    @property
    def size(self) -> int:
        """Elements of all tensors together."""
        # Only to find sizes near by: bytes need not be in proportion to it.
        return sum(map(math.prod, self.shapes))


def modes_of(module: nn.Module, submodules: Sequence[nn.Module]) -> Modes:
    """Flags of a module's submodules and parameters."""
    training = [submodule.training for submodule in submodules]
    # A frozen parameter has no gradient to take memory, and one that was cast has other bytes.
    learning = [(parameter.requires_grad, parameter.dtype) for parameter in module.parameters()]
    return tuple(training), tuple(learning)


def _kind_of(tensor: torch.Tensor) -> Kind:
    return tensor.dtype, tensor.device, tensor.requires_grad
