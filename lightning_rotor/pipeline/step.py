"""One training step: user code for each micro-batch around a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_rotor.pipeline.micro_batches import join, rows_in, sizes_of, split
from lightning_rotor.pipeline.paused_step import SuspendedCall, suspended_call
from lightning_rotor.pipeline.pipelined import PipelinedModule
from lightning_rotor.pipeline.schedule import PipelineError
from lightning_rotor.pipeline.surroundings import OUTSIDE, Surroundings, mixed
from lightning_rotor.private.values import tensors_in, tree_flatten, tree_map, tree_unflatten


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


# ----------------------------------------------------------------------------------------------------
# Manual optimization: a pipeline's forwards when the module is called, its backwards when user code asks for them.


class ManualStep:
    """The pipeline in one step under manual optimization.

    Args:
        pipelined: Runs under GPipe's schedule.
        seed: Of the step.
    """

    def __init__(self, pipelined: PipelinedModule, seed: int) -> None:
        self._pipelined, self._seed, self._forwards = pipelined, seed, 0
        self._waiting: SuspendedCall | None = None
        self._inputs: list[Sequence[Any]] = []
        self._leaves: list[torch.Tensor] = []
        self._spent: list[torch.Tensor] = []
        self._rows: list[list[int]] = []

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output for a batch, on every process; its tensors are leaves.

        Raises:
            PipelineError: The last forward still waits for its backward.
        """
        if self._waiting is not None:
            raise PipelineError(
                "training_step called the module that is cut into pipeline stages again before manual_backward: expected a backward for each "
                "call before the next one, since a pipeline holds one batch at a time. Or call it under torch.no_grad()"
            )
        pipelined, seed = self._pipelined, mixed(self._seed, self._forwards)
        self._forwards += 1
        sizes = sizes_of(rows_in((args, kwargs)), pipelined.options.micro_batches)
        self._inputs, around = pipelined.inputs(split((args, kwargs), sizes)), Surroundings()

        def schedule() -> Any:
            return pipelined.runner.train_in_phases(
                self._inputs, _hand_over, seed=seed, signature=pipelined.signature(), around=around
            )

        waiting = SuspendedCall(schedule, seed=seed, device=pipelined.device, what="the pipeline")
        (outputs, asking), _ = waiting.start()
        return self._joined(outputs, asking, waiting)

    def _joined(self, outputs: Sequence[Any], asking: Sequence[bool], waiting: SuspendedCall) -> Any:
        columns, specs = zip(*(tree_flatten(output) for output in outputs), strict=True)
        leaves: list[Any] = [join(list(column)) for column in zip(*columns, strict=True)]
        self._leaves, self._rows = [], []
        tensors = iter(asking)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[place] = leaf = leaf.detach().requires_grad_(next(tensors))
                self._leaves.append(leaf)
                self._rows.append([len(column[place]) if leaf.dim() else 1 for column in columns])
        if any(asking):
            self._waiting = waiting
        else:
            self._give_up(waiting)  # nothing in the pipeline learns
        return tree_unflatten(leaves, specs[0])

    def backward(self, backward: Callable[[], None]) -> None:
        """Run a backward, and the pipeline's if gradients have reached its output.

        Args:
            backward: That of the loss.
        Raises:
            PipelineError: Gradients have reached an output whose backward is done.
        """
        backward()
        if any(leaf.grad is not None for leaf in self._spent):
            raise PipelineError(
                "a second manual_backward has reached an output of the module that is cut into pipeline stages: expected one backward for each "
                "call, since the pipeline has let go of what it needs. Add up the losses, or call the module again"
            )
        if self._waiting is None or all(leaf.grad is None for leaf in self._leaves):
            return
        waiting, self._waiting = self._waiting, None
        by_tensor = [_shared_out(leaf, rows) for leaf, rows in zip(self._leaves, self._rows, strict=True)]
        done = waiting.finish(list(zip(*by_tensor, strict=True)))
        for leaf in self._leaves:
            leaf.grad = None
        self._spent += self._leaves
        inputs, self._inputs = self._inputs, []
        backward_of_inputs(inputs, done.input_gradients)

    def abandon(self) -> None:
        """The step is over."""
        if self._waiting is not None:
            self._give_up(self._waiting)
            self._waiting = None

    def _give_up(self, waiting: SuspendedCall) -> None:
        waiting.abandon()
        self._pipelined.runner.release()  # torch's stages hold what has no backward


def _hand_over(outputs: tuple[Any, ...], asking: tuple[bool, ...]) -> Any:
    """In the schedule's thread: let user code go on until it has gradients."""
    schedule = suspended_call()
    assert schedule is not None
    return schedule.call((outputs, asking), {})


def _shared_out(leaf: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor | None]:
    """By micro-batch, the gradient of what :func:`join` made one tensor of."""
    if leaf.grad is None or not leaf.dim():
        return [leaf.grad, *[None] * (len(rows) - 1)]
    return list(leaf.grad.split(list(rows)))
