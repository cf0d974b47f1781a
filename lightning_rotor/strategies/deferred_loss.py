"""Gradients that are there before Lightning asks for the backward, and a loss that hands them over then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_rotor.pipeline.splitting import join
from lightning_rotor.pipeline_schedule import PipelineError
from lightning_rotor.private.pytree import tree_flatten, tree_unflatten


class GradientsApart:
    """Context in which gradients begin at none; behind it parameters have those again that they had.

    Args:
        parameters: Whose.
        replicas: Processes that have the same parameters and other batches: their gradients are averaged.
        keep: False lets go of the gradients that were there, for they are about to be zeroed.

    Attributes:
        made: By parameter, those of the context.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *, replicas: dist.ProcessGroup | None, keep: bool) -> None:
        self._parameters, self._replicas = parameters, replicas
        self._before = [parameter.grad if keep else None for parameter in parameters]
        self.made: list[torch.Tensor | None] = []

    def __enter__(self) -> GradientsApart:
        for parameter in self._parameters:
            parameter.grad = None
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.made = [parameter.grad for parameter in self._parameters]
        if kind is None and self._replicas is not None:
            count = dist.get_world_size(self._replicas)
            for gradient in self.made:
                if gradient is not None:
                    dist.all_reduce(gradient, group=self._replicas)
                    gradient.div_(count)
        for parameter, before in zip(self._parameters, self._before, strict=True):
            parameter.grad = before

    def add(self) -> None:
        """Add what was made to what was there."""
        for parameter, gradient in zip(self._parameters, self.made, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class _Deferred(torch.autograd.Function):
    """A loss whose backward was done before it was asked for."""

    @staticmethod
    def forward(ctx: Any, loss: Any, anchor: Any, apart: GradientsApart | None, scale: float) -> Any:
        ctx.apart, ctx.scale = apart, scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (given,) = grads
        if abs(float(given) - ctx.scale) > 1e-6 * ctx.scale:
            raise PipelineError(
                f"the loss was scaled by {float(given):g} behind training_step, but the pipeline has run its backward with {ctx.scale:g} "
                "(accumulate_grad_batches): expected LightningModule.backward to leave the loss as it is"
            )
        if ctx.apart is not None:
            ctx.apart.add()
        return None, torch.zeros(()), None, None


def deferred(loss: torch.Tensor, apart: GradientsApart | None, scale: float) -> torch.Tensor:
    """A loss whose backward adds gradients that were made before.

    Args:
        loss: Its value.
        apart: The gradients; None if they were added as they were made.
        scale: What the loss is multiplied with before the backward.
    """
    found: torch.Tensor = _Deferred.apply(loss, torch.zeros((), requires_grad=True), apart, scale)
    return found


def loss_of(result: Any) -> torch.Tensor:
    """The loss in what training_step returned.

    Raises:
        PipelineError: There is none.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, torch.Tensor):
        raise PipelineError(
            f"training_step returned {type(result).__name__} without a loss: expected a tensor, or a dict with a tensor under 'loss'"
        )
    return loss


def together(results: Sequence[Any], sizes: Sequence[int], loss: torch.Tensor) -> Any:
    """What training_step would have returned for the batch: rows one behind the other, numbers as means."""
    if not isinstance(results[0], Mapping):
        return loss
    rest = [tree_flatten({key: value for key, value in result.items() if key != "loss"}) for result in results]
    leaves = []
    for column in zip(*(each[0] for each in rest), strict=True):
        if all(isinstance(value, torch.Tensor) and value.is_floating_point() and not value.dim() for value in column):
            leaves.append(sum(value.detach() * (size / sum(sizes)) for value, size in zip(column, sizes, strict=True)))
        else:
            leaves.append(join([value.detach() if isinstance(value, torch.Tensor) else value for value in column]))
    return {"loss": loss, **tree_unflatten(leaves, rest[0][1])}
