"""A module that runs as a pipeline: training steps around it, and whole batches without gradients."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.micro_batch_seeds import mixed
from lightning_rotor.pipeline.micro_batch_stage import run_backward
from lightning_rotor.pipeline.micro_batches import join, rows_in, sizes_of, split
from lightning_rotor.pipeline.paused_call import PausedCall, current
from lightning_rotor.pipeline.placement import Placement, outside
from lightning_rotor.pipeline.processes import first
from lightning_rotor.pipeline.runner import PipelineRunner
from lightning_rotor.planned.attachment import attach, detach, inactive
from lightning_rotor.private.values import tensors_in, tree_map_only


class PipelinedModule:
    """Runs a module as a pipeline, in the place of its ``forward``.

    Attributes:
        active: False for a copy of the module, which runs plainly.
        caller: The user's code around the module, as messages call it.
    """

    active = True
    compiled = None
    caller = "training_step"

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        placement: Placement,
        runner: PipelineRunner,
        evaluation: PipelineRunner,
    ) -> None:
        self.module, self.placement, self.runner = module, placement, runner
        self.partition, self.processes = runner.partition, runner.processes
        self._model, self._evaluation = model, evaluation
        # The first process's, as users may seed each process in its own way, and all must draw alike.
        self._seed = first(torch.initial_seed(), self.processes.group)
        self._evaluations = 0

    # A copy of a live module computes with its own weights, plainly.
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
        paused = current.get()
        if paused is not None:
            return paused(module, args, kwargs)
        if not torch.is_grad_enabled():
            return self.evaluate(args, kwargs)
        raise PipelineError(
            f"{type(module).__name__} is cut into pipeline stages and was called with gradients outside of "
            f"{self.caller}: expected calls in {self.caller}, or under torch.no_grad()"
        )

    def sizes(self, batch: Any) -> tuple[int, ...]:
        """Rows of each micro-batch of a batch."""
        return sizes_of(rows_in(batch), self.partition.problem.micro_batches)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output for a whole batch, on every process, without gradients."""
        runner = self.runner if self.module.training else self._evaluation
        sizes = self.sizes((args, kwargs))
        self._evaluations += 1
        # For dropout that is on without gradients.
        seed = mixed(mixed(self._seed, 0), self._evaluations)
        inputs = runner.inputs(split((args, kwargs), sizes))
        outputs, _ = runner.run(inputs, None, seed=seed)
        return join(outputs, sizes)

    def train(
        self,
        run: Callable[..., Any],
        batch: Any,
        *,
        number: int,
        scale: float = 1.0,
    ) -> tuple[list[Any], torch.Tensor]:
        """Results by micro-batch and the batch's loss; gradients of the scaled loss are added to existing ones.

        ``run`` is user code that calls the module once. Every process runs all of it, so gradients outside are alike.
        """
        sizes = self.sizes(batch)
        # A mean over the batch is the mean of micro-batches weighted by their rows.
        shares = [size / sum(sizes) for size in sizes]
        outside_learns = any(tensor.requires_grad for tensor in outside(self._model, self.module))
        seed = mixed(self._seed, number)
        device = self.processes.device
        calls = []
        for place, part in enumerate(split(batch, sizes)):
            code = partial(run, part)
            calls.append(PausedCall(code, place, device, seed=seed, what=self.caller))
        results: dict[int, Any] = {}
        self.placement.shared_gradients.begin()

        def loss(output: Any, place: int) -> torch.Tensor:
            results[place] = calls[place].resume(output)
            own_scale = scale * sizes[place] / sum(sizes)
            return self._loss_of(results[place]) * own_scale

        try:
            arguments = [call.start() for call in calls]
            # A recording holds for calls under the same autocast.
            with calls[0].context.restored():
                inputs = self.runner.inputs(arguments)
            settings = calls[0].context
            outputs, gradients = self.runner.run(inputs, loss, seed=seed, context=settings)
            for place, output in enumerate(outputs):
                # The last stage's process has run this code in the schedule.
                if place in results:
                    continue
                if outside_learns:
                    output = tree_map_only(torch.Tensor, _asking_for_gradients, output)
                value = loss(output, place)
                # For what is behind the module: each process has its own copy of that, and none is sent its gradient.
                if outside_learns and value.requires_grad:
                    value.backward()
        finally:
            # A thread that waits would keep the user's objects alive for ever.
            for call in calls:
                call.abandon()
        # What user code computes before the module.
        run_backward(tensors_in(inputs), chain.from_iterable(gradients))
        self.placement.shared_gradients.add_up()
        ordered = [results[place] for place in range(len(calls))]
        losses = []
        for result, share in zip(ordered, shares, strict=True):
            # All backwards are done, and a loss that was logged must not keep their graphs alive.
            losses.append(self._loss_of(result).detach() * share)
        return ordered, torch.stack(losses).sum()

    def _loss_of(self, result: Any) -> torch.Tensor:
        """The loss in what user code returned."""
        loss = result
        if isinstance(result, Mapping):
            loss = result.get("loss")
        if not isinstance(loss, torch.Tensor):
            raise PipelineError(
                f"{self.caller} returned {type(result).__name__} without a loss: expected a tensor, or a dict with a "
                "tensor under 'loss'"
            )
        return loss


def _asking_for_gradients(tensor: torch.Tensor) -> torch.Tensor:
    """A detached tensor that asks for gradients as the last stage's output does."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())
