"""A batch of Lightning's training, run through a pipeline micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_rotor.errors import PipelineError
from lightning_rotor.invertible.layers import accumulate
from lightning_rotor.pipeline.micro_batches import join
from lightning_rotor.pipeline.part import ForwardContext
from lightning_rotor.pipeline.pipelined_module import PipelinedModule
from lightning_rotor.private.values import tree_map_only
from lightning_rotor.strategies.micro_batch_logs import MicroBatchLogs

if TYPE_CHECKING:
    import lightning.pytorch as pl


def train_batch(
    model: pl.LightningModule,
    pipelined: PipelinedModule,
    context: ForwardContext,
    batch: Any,
    *rest: Any,
) -> Any:
    """Result of ``training_step`` for a batch, which it sees micro-batch by micro-batch, each in a context.

    Lightning calls ``training_step``, then ``zero_grad``, then ``backward`` of the loss. A pipeline has run its
    backwards when ``training_step`` returns. So the new gradients wait, apart from their parameters, until Lightning
    asks for the backward::

        training_step ─ forwards and backwards ─ gradients taken away
        zero_grad       at the begin of an accumulation
        backward        gradients handed over
    """
    trainer = model.trainer
    epoch = trainer.fit_loop.epoch_loop
    accumulated = trainer.accumulate_grad_batches
    is_first_of_accumulation = epoch.batch_idx % accumulated == 0
    replicas = pipelined.processes.replicas
    sizes = pipelined.sizes(batch)
    logs = MicroBatchLogs(model, sizes)

    def run(part: Any) -> Any:
        with context():
            return model.training_step(part, *rest)

    # Only gradients that are to be zeroed or averaged are taken away; the others add up where they are.
    apart: list[torch.Tensor] = []
    if is_first_of_accumulation or replicas is not None:
        # Parameters of other processes are on meta, and get their gradients there.
        apart = [parameter for parameter in model.parameters() if not parameter.is_meta]
    before = _taken(apart)
    if is_first_of_accumulation:
        # They are about to be zeroed, and take memory until then.
        before.clear()
    with logs.caught():
        number = epoch.total_batch_idx
        # Lightning divides the loss by the accumulated batches behind training_step, which is too late here.
        results, loss = pipelined.train(run, batch, number=number, scale=1 / accumulated)
    if replicas is not None:
        _average(apart, replicas)
    gradients = _taken(apart)
    if not is_first_of_accumulation:
        accumulate(apart, before)
    # Lightning makes what adds up an epoch in the default dtype.
    with context():
        logs.write()
    hand_over = partial(accumulate, apart, gradients)
    whole_loss = _deferred(loss, 1 / accumulated, hand_over)
    if not isinstance(results[0], Mapping):
        return whole_loss
    others = []
    for result in results:
        others.append({key: value for key, value in result.items() if key != "loss"})
    # Lightning keeps results for hooks, and a graph would stay alive with them.
    detached = tree_map_only(torch.Tensor, torch.Tensor.detach, others)
    return {"loss": whole_loss, **join(detached, sizes)}


def _taken(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients, which the parameters then hold no longer."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def _average(parameters: Sequence[torch.Tensor], replicas: dist.ProcessGroup) -> None:
    """Let gradients be the mean over copies of the pipeline."""
    for parameter in parameters:
        if parameter.grad is not None:
            # The sum first: gloo knows no mean.
            dist.all_reduce(parameter.grad, group=replicas)
            parameter.grad.div_(dist.get_world_size(replicas))


def _deferred(loss: torch.Tensor, scale: float, add: Callable[[], None]) -> torch.Tensor:
    """A loss whose backward is already done; it hands over the gradients when asked for it."""

    def hand_over(given: torch.Tensor) -> None:
        # The gradients are made, and nothing scales them after the fact.
        if abs(float(given) - scale) > 1e-6 * scale:
            raise PipelineError(
                f"the loss was scaled by {float(given):g} behind training_step, but the pipeline has run its backward "
                f"with {scale:g} (accumulate_grad_batches): expected LightningModule.backward to leave the loss alone"
            )
        add()

    # The loss is a leaf: its hook runs when Lightning's backward reaches it, and there is nothing behind it.
    loss.requires_grad_().register_hook(hand_over)
    return loss
