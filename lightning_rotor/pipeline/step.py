"""A module that runs as a pipeline: training steps around it, and whole batches without gradients.

user code of each micro-batch ──► waits at the call ──► PipelineRunner ──► goes on as outputs arrive
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_rotor.pipeline.micro_batches import join, rows_in, sizes_of, split
from lightning_rotor.pipeline.partition import RecomputeMode
from lightning_rotor.pipeline.partition.problem import check_recompute
from lightning_rotor.pipeline.placement import Placement, first, outside
from lightning_rotor.pipeline.run_context import OUTSIDE, PausedCall, current, mixed
from lightning_rotor.pipeline.runner import PipelineRunner
from lightning_rotor.pipeline.schedule import PipelineError, PipelineScheduleName, check_numbers
from lightning_rotor.pipeline.stage_runner import run_backward
from lightning_rotor.planned.forward import PlannedForward, attach, detach, inactive
from lightning_rotor.private.values import tensors_in, tree_map_only


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How to pipeline."""

    micro_batches: int = 8
    schedule: PipelineScheduleName = "1f1b"
    recompute: RecomputeMode = "rotor"  # see partition.Problem
    balance: Literal["auto"] | Sequence[int] = "auto"  # or how many stages of the chain each pipeline stage gets
    stages_per_device: int = 1  # more than one for "interleaved" only
    deferred_batch_norm: bool = False  # running statistics are updated once for each batch

    def __post_init__(self) -> None:
        check_numbers(self.schedule, 1, self.micro_batches, 1)
        check_recompute(self.recompute)
        if isinstance(self.balance, str) and self.balance != "auto":
            raise PipelineError(f'balance is {self.balance!r}: expected "auto" or numbers such as [3, 4, 2]')


class PipelinedModule:
    """Runs a module as a pipeline, in the place of its ``forward``."""

    active = True  # a copy has False
    caller = "training_step"  # what messages call the user's code around it

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        placement: Placement,
        runner: PipelineRunner,
        evaluation: PipelineRunner,
    ) -> None:
        self._model, self.module, self.placement = model, module, placement
        self.runner, self._evaluation = runner, evaluation
        self.partition, self.processes = runner.partition, runner.processes
        self._seed = first(torch.initial_seed(), self.processes.group)
        self._evaluations = 0

    # A copy of a live module computes with its own weights, plainly.
    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        return inactive()

    def __reduce__(self) -> tuple[Any, ...]:
        return inactive, ()

    def start(self) -> None:
        """Replace the module's forward, and keep this process's part of the weights."""
        self.placement.give_up()
        attach(self.module, self)

    def stop(self, *, values: bool = True) -> None:
        """Undo :meth:`start`, with all weights as they are now or, after an error, with the local ones."""
        detach(self.module)
        self.runner.release()
        self.placement.restore(values=values)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In a training step, wait for the pipeline; without gradients, run forward."""
        if (paused := current.get()) is not None:
            return paused(module, args, kwargs)
        if not torch.is_grad_enabled():
            return self.evaluate(args, kwargs)
        raise PipelineError(
            f"{type(module).__name__} is cut into pipeline stages and was called with gradients outside of "
            f"{self.caller}: expected calls in {self.caller}, or under torch.no_grad()"
        )

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Rows of each micro-batch of a batch."""
        return sizes_of(rows, self.partition.problem.micro_batches)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output for a whole batch, on every process, without gradients."""
        runner = self.runner if self.module.training else self._evaluation
        calls = split((args, kwargs), self.sizes(rows_in((args, kwargs))))
        self._evaluations += 1
        seed = mixed(self.seed(0), self._evaluations)  # for dropout that is on without gradients
        return join(runner.forward(runner.inputs(calls), seed=seed))

    def seed(self, step: int) -> int:
        """Seed of a step, from its number."""
        return mixed(self._seed, step)

    def train(
        self,
        run: Callable[..., Any],
        batch: Any,
        loss_of: Callable[[Any], torch.Tensor],
        *,
        number: int,
        scale: float = 1.0,
        on_turn: Callable[[int], None] = lambda number: None,
    ) -> tuple[list[Any], torch.Tensor]:
        """Run forward and backward of all micro-batches; gradients of the scaled loss are added to existing ones.

        ``run`` is user code that takes a micro-batch and calls the module once. Behind the pipeline, every process has
        all outputs and runs the rest of that code, so results and gradients outside are the same on all. Returns the
        result of each micro-batch, and the loss of the batch: their mean by rows, not scaled.
        """
        rows = rows_in(batch)
        sizes = self.sizes(rows)
        outside_learns = any(tensor.requires_grad for tensor in outside(self._model, self.module))
        seed, device = self.seed(number), self.processes.device
        calls = [
            PausedCall(partial(run, part), seed=mixed(mixed(seed, place), OUTSIDE), device=device, what=self.caller)
            for place, part in enumerate(split(batch, sizes))
        ]
        results: dict[int, Any] = {}

        def loss(output: Any, place: int) -> torch.Tensor:
            on_turn(place)
            results[place] = calls[place].resume(output)
            return loss_of(results[place]) * (scale * sizes[place] / rows)

        try:
            given = []
            for place, call in enumerate(calls):
                on_turn(place)
                given.append(call.start())
            inputs = self.runner.inputs(given)
            del given
            outputs, gradients = self.runner.train(inputs, loss, seed=seed, context=calls[0].context)
            for place, output in enumerate(outputs):
                if place in results:
                    continue
                if outside_learns:  # detached tensors ask for gradients as the output does
                    output = tree_map_only(
                        torch.Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), output
                    )
                value = loss(output, place)
                if outside_learns and value.requires_grad:
                    value.backward()
        finally:
            for call in calls:
                call.abandon()
        run_backward(tensors_in(inputs), chain.from_iterable(gradients))
        made = [results[place] for place in range(len(calls))]
        losses = [loss_of(result).detach() * (size / rows) for result, size in zip(made, sizes, strict=True)]
        return made, torch.stack(losses).sum()


@contextmanager
def gradients_apart(
    parameters: Sequence[torch.Tensor], *, replicas: dist.ProcessGroup | None, keep: bool
) -> Iterator[Callable[[], None]]:
    """Context in which the parameters' gradients begin at none, and behind which the earlier ones are back.

    New gradients are averaged over ``replicas``; what the context yields adds them to the earlier ones, behind it.
    ``keep=False`` frees the earlier ones, for they are about to be zeroed.
    """
    before = [parameter.grad if keep else None for parameter in parameters]
    made: list[torch.Tensor | None] = []

    def add() -> None:
        for parameter, gradient in zip(parameters, made, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    for parameter in parameters:
        parameter.grad = None
    try:
        yield add
        for parameter in parameters if replicas is not None else ():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=replicas)
                parameter.grad.div_(dist.get_world_size(replicas))
    finally:
        made += [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
