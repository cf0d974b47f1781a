r"""Manual optimization: a pipeline's forwards when the module is called, its backwards when user code asks for them.

GPipe's schedule has a place where every forward is done and no backward has begun. The schedule runs in a thread of its own up to that place,
and waits there while user code makes a loss of the whole batch's output; of both only one runs at a time::

    user code     net(x) ──┐            ┌─► loss ─► manual_backward ──┐               ┌─► what is before net, optimizer.step ...
    the schedule           └► F0 F1 F2 ─┘      gradient of the output └─► B0 B1 B2 ───┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_rotor.pipeline.seeding import mixed
from lightning_rotor.pipeline.splitting import join, rows_in, sizes_of, split
from lightning_rotor.pipeline.step import backward_of_inputs
from lightning_rotor.pipeline.surroundings import Surroundings
from lightning_rotor.pipeline.suspended import SuspendedCall, suspended_call
from lightning_rotor.pipeline_schedule import PipelineError
from lightning_rotor.private.pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from lightning_rotor.pipeline.pipelined import PipelinedModule


class Phases:
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
