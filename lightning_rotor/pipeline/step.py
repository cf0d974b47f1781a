"""One training step: user code for each micro-batch around a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_rotor.pipeline.pipelined import PipelinedModule
from lightning_rotor.pipeline.seeding import OUTSIDE, mixed
from lightning_rotor.pipeline.suspended import SuspendedCall
from lightning_rotor.private.pytree import tree_map
from lightning_rotor.tensors import tensors_in


def train_step(
    pipelined: PipelinedModule,
    runs: Sequence[Callable[[], Any]],
    loss_of: Callable[[Any], torch.Tensor],
    *,
    weights: Sequence[float],
    number: int,
    outside_learns: bool,
    on_turn: Callable[[int], None] = lambda number: None,
) -> list[Any]:
    """Run forward and backward of all micro-batches; gradients are added to those that are there.

    Behind the pipeline, every process has all outputs and runs what is left of the user's code, so that all have the same results, and the
    same gradients of what is outside of the pipeline.

    Args:
        pipelined: Called once by each of ``runs``.
        runs: By micro-batch, the user's code.
        loss_of: The loss in what that returns.
        weights: By micro-batch, what its loss counts in the gradients.
        number: Of the step.
        outside_learns: There are parameters to train outside of the pipeline.
        on_turn: Called before the code of a micro-batch goes on.
    Returns:
        By micro-batch, what its run returned.
    """
    seed, device = pipelined.seed(number), pipelined.device
    calls = [
        SuspendedCall(run, seed=mixed(mixed(seed, place), OUTSIDE), device=device) for place, run in enumerate(runs)
    ]
    results: dict[int, Any] = {}

    def loss(output: Any, place: int) -> torch.Tensor:
        on_turn(place)
        results[place] = calls[place].finish(output)
        return loss_of(results[place]) * weights[place]

    try:
        given = []
        for place, call in enumerate(calls):
            on_turn(place)
            given.append(call.start())
        inputs = pipelined.inputs(given)
        del given
        around = calls[0].surroundings
        done = pipelined.runner.train(inputs, loss, seed=seed, signature=pipelined.signature(), around=around)
        for place, output in enumerate(done.outputs):
            if place in results:
                continue
            value = loss(_leaves(output) if outside_learns else output, place)
            if outside_learns and value.requires_grad:
                value.backward()
    finally:
        for call in calls:
            call.abandon()
    backward_of_inputs(inputs, done.input_gradients)
    return [results[place] for place in range(len(runs))]


def backward_of_inputs(inputs: Sequence[Sequence[Any]], gradients: Sequence[Sequence[torch.Tensor | None]]) -> None:
    """Go on with the backward before the pipeline.

    Args:
        inputs: By micro-batch, the values that it took.
        gradients: Likewise, one for each tensor in them.
    """
    pairs = [
        (tensor, gradient)
        for values, found in zip(inputs, gradients, strict=True)
        for tensor, gradient in zip(tensors_in(list(values)), found, strict=True)
        if gradient is not None
    ]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def _leaves(output: Any) -> Any:
    """The same tensors, asking for gradients as an output does."""
    return tree_map(
        lambda value: (
            value.detach().requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        ),
        output,
    )
