"""One training step under automatic and under manual optimization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_rotor.pipeline.parts import ForwardContext
from lightning_rotor.pipeline.phases import Phases
from lightning_rotor.pipeline.pipelined import PipelinedModule
from lightning_rotor.pipeline.seeding import OUTSIDE, mixed, seeded
from lightning_rotor.pipeline.splitting import rows_in, sizes_of, split
from lightning_rotor.pipeline.step import train_step
from lightning_rotor.pipeline_schedule import PipelineError
from lightning_rotor.strategies.deferred_loss import GradientsApart, deferred, loss_of, together
from lightning_rotor.strategies.micro_batch_logs import MicroBatchLogs
from lightning_rotor.strategies.pipeline_memory import outside


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

    def run(self, *args: Any) -> Any:
        """What ``training_step`` returns for a batch."""
        return self._automatic(*args) if self._model.automatic_optimization else self._manual(*args)

    def backward(self, backward: Callable[[], None]) -> None:
        """A backward that user code asks for, whose gradients go on into the pipeline."""
        if self._model.automatic_optimization:
            backward()  # hands over what is there
            return
        phases = self._pipelined.phases
        assert phases is not None
        if self._replicas is None:
            phases.backward(backward)
            return
        with GradientsApart(self._parameters, replicas=self._replicas, keep=True) as apart:
            phases.backward(backward)
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
        self._pipelined.phases = phases = Phases(self._pipelined, seed)
        try:
            with seeded(mixed(mixed(seed, 0), OUTSIDE)):
                return self._user_step(*args)
        finally:
            self._pipelined.phases = None
            phases.abandon()
