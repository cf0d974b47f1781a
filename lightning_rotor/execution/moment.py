"""One call of a module that will be undone and repeated, and its gradients by another forward or a fused backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_rotor.execution.first_pass import FirstPass, passing_first
from lightning_rotor.execution.lent_tensors import Slot, buffers_of
from lightning_rotor.execution.nested_backward import Tensors, gradients_for, roots_of
from lightning_rotor.execution.passes import forget_casts, repeating, run_stage
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.execution.tensors_read import TensorsRead, slots_read
from lightning_rotor.private.values import TreeSpec, same_bits, tree_unflatten
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.inverses import require_tensors
from lightning_rotor.stages.sequential import Stage


class Moment:
    """The state that one call of a module saw: generators (if it drew), buffers that it changed, attributes, settings.

    The rules are those of ``passes``.
    """

    def __init__(self, device: torch.device, state: Callable[[], SegmentState], *, may_draw: bool = True) -> None:
        self._device = device
        self._state = state
        self._may_draw = may_draw
        # Scratch is made when it is needed.
        self.first_pass = FirstPass(replace(state(), statistics=()))

    @property
    def draws_random(self) -> bool:
        """True if the first call drew random numbers."""
        return self.first_pass.generators is not None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Context of the first call; raises ExecutionError if it changes parameters or large buffers it reads later."""
        first_pass = self.first_pass
        buffers = list(buffers_of(first_pass.state.remembered))
        with passing_first(first_pass):
            before: GeneratorStates | None = None
            if self._may_draw:
                before = GeneratorStates(self._device)
            first_pass.generators = before
            yield
            # Most modules draw nothing. Without states, a second call sets nothing back, which costs a copy of 5 KB a
            # generator.
            if before is not None and before.equals(GeneratorStates(self._device)):
                first_pass.generators = None
        # Buffers that did not change are read as they are (rule 2), and need no copy (rule 4).
        unchanged: list[Slot] = []
        changed = []
        for (module, name, buffer), row in zip(buffers, first_pass.values, strict=True):
            _, _, value = row
            # By value: the kernels of normalization write without a new version.
            if module._buffers.get(name) is buffer and same_bits(buffer, value):
                unchanged.append((module._buffers, name, buffer))
            else:
                changed.append(row)
        state = first_pass.state
        first_pass.read = TensorsRead([*slots_read(state), *unchanged], state.name_of_tensor)
        first_pass.values = changed

    @contextmanager
    def again(self, parameters: Tensors = ()) -> Iterator[list[torch.Tensor]]:
        """Context that sees what the first call saw; yields leaves that stand in the place of parameters meanwhile.

        The hooks of parameters (DistributedDataParallel's) would fire twice.
        """
        # Leaves of their own take the gradients, and the parameters' own ones accumulate once, when autograd gets them
        # from the node.
        leaves = list(map(_leaf_like, parameters))
        substitutes = dict(zip(map(id, parameters), leaves, strict=True))
        # A copy, since the first pass itself may be repeated once more, by another backward.
        repeated = copy(self.first_pass)
        repeated.state = replace(
            repeated.state,
            statistics=self._state().statistics,
        )
        repeated.read = repeated.read.standing_in(substitutes)
        with repeating(), repeated.replayed():
            try:
                yield leaves
            finally:
                # Weights cast without gradients must not serve a forward with them.
                forget_casts()


def _leaf_like(parameter: torch.Tensor) -> torch.Tensor:
    """A leaf with a parameter's memory and of its class, without its hooks."""
    alone = parameter.detach()
    if isinstance(parameter, nn.Parameter):
        return nn.Parameter(alone, requires_grad=parameter.requires_grad)
    return alone.requires_grad_(parameter.requires_grad)


def plain_gradients(
    stage: Stage,
    moment: Moment,
    inputs: Tensors,
    taken: TreeSpec,
    parameters: Tensors,
    gradients: Tensors,
) -> list[torch.Tensor | None]:
    """Autograd's gradients for leaves of the input and for parameters, by another forward."""
    with torch.enable_grad(), moment.again(parameters) as substitutes:
        again = run_stage(stage, tree_unflatten(inputs, taken))
        outputs = require_tensors(again, name=stage.name, what="output")
        roots = roots_of(outputs, gradients)
        # The roots hold the graph. The output itself would be memory that nobody reads.
        del again, outputs
    return gradients_for([*inputs, *substitutes], roots, name=stage.name)


def fused_gradients(
    module: Any,
    moment: Moment,
    outputs: list[torch.Tensor],
    made: TreeSpec,
    parameters: Tensors,
    gradients: Tensors,
) -> tuple[Any, Any, list[torch.Tensor | None]]:
    """The input, and gradients for it and for parameters, by a fused backward. Empties the list of outputs."""
    with moment.again(parameters) as substitutes:
        # No name here has the outputs meanwhile, so the module's code may let go of each.
        rebuilt, for_input = module.reversible_backward(
            tree_unflatten(drained(outputs), made),
            tree_unflatten(gradients, made),
        )
    return rebuilt, for_input, [substitute.grad for substitute in substitutes]


def drained(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a list, which is emptied: whoever takes them may let each go."""
    content = tensors[:]
    # The list is the caller's last reference. Without this the input would be rebuilt while all outputs are alive.
    tensors.clear()
    return content
