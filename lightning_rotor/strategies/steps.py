"""One training step under automatic and under manual optimization."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_rotor.pipeline.micro_batches import join, rows_in, sizes_of, split
from lightning_rotor.pipeline.pipelined import PipelinedModule
from lightning_rotor.pipeline.schedule import PipelineError
from lightning_rotor.pipeline.stage_runner import ForwardContext
from lightning_rotor.pipeline.step import ManualStep, train_step
from lightning_rotor.pipeline.surroundings import OUTSIDE, mixed, seeded
from lightning_rotor.private.values import tree_flatten, tree_unflatten
from lightning_rotor.strategies.building import outside
from lightning_rotor.strategies.micro_batch_logs import MicroBatchLogs

# ----------------------------------------------------------------------------------------------------
# Gradients that are there before Lightning asks for the backward, and a loss that hands them over then.


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


# ----------------------------------------------------------------------------------------------------


class PipelineSteps:
    """Runs ``training_step`` around a pipeline.

    Args:
        model: Whose.
        pipelined: Its module.
        context: Of user code in training, autocast for one.
        replicas: Processes with the same stages, and other batches.
    """

    def __init__(
        self,
        model: pl.LightningModule,
        pipelined: PipelinedModule,
        *,
        context: ForwardContext,
        replicas: dist.ProcessGroup | None,
    ) -> None:
        self._model, self._pipelined, self._context, self._replicas = model, pipelined, context, replicas
        self._step: ManualStep | None = None  # the one that runs, under manual optimization

    def run(self, *args: Any) -> Any:
        """What ``training_step`` returns for a batch."""
        return self._automatic(*args) if self._model.automatic_optimization else self._manual(*args)

    def backward(self, backward: Callable[[], None]) -> None:
        """A backward that user code asks for, whose gradients go on into the pipeline."""
        if self._model.automatic_optimization:
            backward()  # hands over what is there
            return
        step = self._step
        assert step is not None
        if self._replicas is None:
            step.backward(backward)
            return
        with GradientsApart(self._parameters, replicas=self._replicas, keep=True) as apart:
            step.backward(backward)
        apart.add()

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for parameter in self._model.parameters() if parameter.device.type != "meta"]

    def _user_step(self, *args: Any) -> Any:
        with self._context():
            return self._model.training_step(*args)

    def _automatic(self, batch: Any, *rest: Any) -> Any:
        """Once for each micro-batch."""
        trainer = self._model.trainer
        epoch = trainer.fit_loop.epoch_loop
        rows, scale = rows_in(batch), 1 / trainer.accumulate_grad_batches
        if not rows:
            raise PipelineError(
                f"batch {epoch.batch_idx} of epoch {trainer.current_epoch} is empty: expected at least one row, since the loss of a pipeline is a "
                "mean over rows. Leave such batches out"
            )
        sizes = sizes_of(rows, self._pipelined.options.micro_batches)
        logs = MicroBatchLogs(self._model, sizes)

        def run(part: Any) -> Callable[[], Any]:
            return lambda: self._user_step(part, *rest)

        def step() -> list[Any]:
            return train_step(
                self._pipelined,
                [run(part) for part in split(batch, sizes)],
                loss_of,
                weights=[scale * size / rows for size in sizes],
                number=epoch.total_batch_idx,
                outside_learns=any(
                    tensor.requires_grad
                    for tensor in outside(self._model, self._pipelined.module)
                    if isinstance(tensor, torch.nn.Parameter)
                ),
                on_turn=logs.begin,
            )

        # zero_grad comes between this step and the backward that Lightning asks for: the new gradients wait until then.
        anew = epoch.batch_idx % trainer.accumulate_grad_batches == 0
        waits = anew or self._replicas is not None
        apart = GradientsApart(self._parameters, replicas=self._replicas, keep=not anew) if waits else None
        with logs.caught():
            if apart is None:
                results = step()
            else:
                with apart:
                    results = step()
        with self._context():  # Lightning makes what adds up an epoch in the default dtype
            logs.write()
        losses = [loss_of(result).detach() * (size / rows) for result, size in zip(results, sizes, strict=True)]
        return together(results, sizes, deferred(torch.stack(losses).sum(), apart, scale))

    def _manual(self, *args: Any) -> Any:
        """Once for the batch: it asks for the backward itself, and may go on behind it."""
        seed = self._pipelined.seed(self._model.trainer.fit_loop.epoch_loop.total_batch_idx)
        self._step = step = ManualStep(self._pipelined, seed)
        self._pipelined.called = step.forward
        try:
            with seeded(mixed(mixed(seed, 0), OUTSIDE)):
                return self._user_step(*args)
        finally:
            self._step = self._pipelined.called = None
            step.abandon()
