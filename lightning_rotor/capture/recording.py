"""A recording: the graph of one call of a module, with the conditions under which it holds for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx, nn

from lightning_rotor.capture.differences import first_difference
from lightning_rotor.capture.node_facts import OF, is_constant
from lightning_rotor.capture.notes import Notes
from lightning_rotor.capture.size_guards import SizeGuards
from lightning_rotor.capture.value_memory import OpMemory


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The operations of one call of a module.

    Attributes:
        memory: Bytes that each operation makes and saves.
        constants: Tensors that the forward made out of nothing.
        leaves: Modules that were one operation.
        guards: Sizes and values that the code asked for.
        notes: Values that the code read outside of modules.
    """

    graph: fx.Graph
    memory: Mapping[fx.Node, OpMemory]
    root: nn.Module
    constants: Sequence[torch.Tensor]
    leaves: Set[nn.Module]
    guards: SizeGuards
    notes: Notes

    @property
    def run_as_they_are(self) -> set[nn.Module]:
        """Modules whose code runs at each call, as their settings say then."""
        called = [node.meta[OF] for node in self.graph.nodes if node.op == "call_module"]
        modules: set[nn.Module] = set()
        for leaf in (*self.leaves, *called):
            modules.update(leaf.modules())
        return modules

    @property
    def bytes_by_operation(self) -> list[int]:
        """Bytes that each operation has made and saved in the recorded call."""
        return [memory.made_bytes + memory.saved_bytes for memory in self.memory.values()]

    def runs_the_same(self, other: Recording) -> bool:
        """True if another recording has the same operations on the same modules and tensors."""
        if first_difference(self.graph, other.graph):
            return False
        # Constants are made anew by each recording. Their bits have been compared above.
        for mine, theirs in zip(self.graph.nodes, other.graph.nodes, strict=True):
            if not is_constant(mine) and mine.meta.get(OF) != theirs.meta.get(OF):
                return False
        return True
