"""A backward inside of a backward: gradients for inputs and parameters that touch no ``grad`` and fire no hook of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_rotor.errors import ExecutionError


def stand_ins(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves with the memory of parameters and gradients of their own, to compute with in the parameters' place.

    A parameter itself would not do: its hooks, and those of its accumulation (DistributedDataParallel's), would see a gradient twice.
    """
    return [
        nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        if isinstance(parameter, nn.Parameter)
        else parameter.detach().requires_grad_(parameter.requires_grad)
        for parameter in parameters
    ]


def learning(tensor: torch.Tensor, *, wanted: bool = True) -> torch.Tensor:
    """A leaf with the memory of a tensor that receives a gradient, if it can have one and that is wanted."""
    return tensor.detach().requires_grad_(wanted and (tensor.is_floating_point() or tensor.is_complex()))


class Roots:
    """Where a backward begins: outputs of a forward, of which only the graph is kept.

    Args:
        outputs: Those without a graph have no part in the backward.
        gradients: Of the loss, for each.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        pairs = [
            (get_gradient_edge(output), gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output.requires_grad
        ]
        self._edges: list[GradientEdge] = [edge for edge, _ in pairs]
        self._gradients = [gradient for _, gradient in pairs]

    def gradients_for(self, inputs: Sequence[torch.Tensor], *, name: str) -> list[torch.Tensor | None]:
        """Run the backward.

        Args:
            inputs: Leaves; for those that require no gradient, and those that had no part in the outputs, there is None.
            name: Of the module, for error messages.
        Raises:
            ExecutionError: The outputs depend on a tensor that is not among the inputs and would silently go without its gradient.
        """
        learning = [tensor for tensor in inputs if tensor.requires_grad]
        if not (self._edges and learning):
            return [None for _ in inputs]
        self._require_no_other_leaves(learning, name)
        found = iter(torch.autograd.grad(self._edges, learning, self._gradients, allow_unused=True))
        return [next(found) if tensor.requires_grad else None for tensor in inputs]

    def _require_no_other_leaves(self, known: Sequence[torch.Tensor], name: str) -> None:
        numbers = {id(tensor) for tensor in known}
        pending: list[Any] = [edge.node for edge in self._edges]
        seen = set(pending)
        while pending:
            node = pending.pop()
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor) and id(leaf) not in numbers:
                raise ExecutionError(
                    f"{name!r} uses a tensor of shape {tuple(leaf.shape)} that requires a gradient and is neither its input nor one of its "
                    "parameters: expected no other, for its gradient would be lost. Give it as an input (in a tuple), or register it"
                )
            fresh = [
                following for following, _ in node.next_functions if following is not None and following not in seen
            ]
            seen.update(fresh)
            pending.extend(fresh)


def accumulate(tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add gradients to those that tensors have, as a backward does."""
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is not None:
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient


def first_derivatives_only(name: str, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """Gradients; if somebody wants gradients of them, such that ask for the reason why there are none.

    Args:
        name: Of the module that made them.
        gradients: Made without a graph, in a backward.
    """
    if not torch.is_grad_enabled():
        return gradients
    numbers = [number for number, gradient in enumerate(gradients) if gradient is not None]
    anchor = torch.zeros((), requires_grad=True)
    guarded = _NoSecondDerivative.apply(name, anchor, *(gradients[number] for number in numbers))
    result = list(gradients)
    for number, gradient in zip(numbers, guarded, strict=True):
        result[number] = gradient
    return result


class _NoSecondDerivative(torch.autograd.Function):
    """The identity, for gradients that have none themselves."""

    @staticmethod
    def forward(ctx: Any, name: str, anchor: torch.Tensor, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.name = name
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        raise ExecutionError(
            f"gradients of the gradients of {ctx.name!r} are wanted, but its backward rebuilt its input outside of autograd's graph: expected first "
            "derivatives alone. Call the module plainly where create_graph=True is needed"
        )
