"""The best batch size under a memory limit, before training starts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from lightning_rotor.callbacks.trainer_loop import TrainerLoop, first_call
from lightning_rotor.errors import ModelError, RotorError
from lightning_rotor.execution.isolated import kept_attributes, undisturbed
from lightning_rotor.planned.agreement import is_spread
from lightning_rotor.planned.batch_sizes import BatchSizeAdvice, advice_from, measured_costs
from lightning_rotor.planned.target_search import check_names
from lightning_rotor.private import lightning_names as private
from lightning_rotor.private import lightning_packages as packages
from lightning_rotor.private.values import tensors_in
from lightning_rotor.shown import show
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.units import format_bytes, parse_limit

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch import Callback
else:
    Callback = packages.joined("callbacks.Callback")

_log = logging.getLogger(__name__)


class RotorBatchSizeAdvice(Callback):
    """Finds the batch size with the best predicted samples per second under a limit, and sets it if asked to.

    Lightning's ``BatchSizeFinder`` trains with one size after another until memory runs out, and takes the largest.
    This measures the planned module with one batch and with half of it, predicts all other sizes with their plans, and
    takes the fastest. Training stays as it is but, with ``set_batch_size``, for the attribute and its dataloaders.

    Of several processes each measures its own batch; all take the smallest size that any finds best, within the least
    of their limits. Parameters must be in one piece on each, as under DDP.

    Args:
        mem_limit: As for :class:`RotorCallback`, which is to train with the same limit.
        module: As for :class:`RotorCallback`.
        set_batch_size: Set the attribute, reload the dataloaders, and train with the best size. By default it is only
            reported.
        batch_arg_name: The attribute of the LightningModule, its ``hparams`` or the LightningDataModule, as for
            ``BatchSizeFinder``.
        batch_sizes: Candidates; by default powers of two and halfway between, up to the first that does not fit.
        show_table: Print the candidates.
    Raises:
        ModelError: ``module`` is no name. When training starts: no such module or attribute, or ``training_step`` does
            not call the module.
        SampleError: When training starts: the module's input is no batch of two samples or more.
        BudgetError: When training starts: none of the sizes fits.
    Example:
        >>> callbacks = [RotorBatchSizeAdvice("2GiB", set_batch_size=True), RotorCallback("2GiB")]
    """

    def __init__(
        self,
        mem_limit: int | float | str | None = None,
        module: str | None = None,
        *,
        set_batch_size: bool = False,
        batch_arg_name: str = "batch_size",
        batch_sizes: list[int] | None = None,
        show_table: bool = True,
    ) -> None:
        super().__init__()
        self._limit = parse_limit(mem_limit)
        check_names(module, several=False)
        self._module_name = module
        self._set_batch_size = set_batch_size
        self._batch_arg_name = batch_arg_name
        self._batch_sizes = batch_sizes
        self._show_table = show_table
        # Of the training that has started last.
        self.advice: BatchSizeAdvice | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure with the first batch of the training dataloader, and predict."""
        # Before anything is measured, which would be for nothing.
        has_attribute = packages.function("utilities.parsing.lightning_hasattr")
        if self._set_batch_size and not has_attribute(pl_module, self._batch_arg_name):
            raise ModelError(
                f"there is no attribute {self._batch_arg_name!r} to set: expected one of the LightningModule, its "
                "hparams or the LightningDataModule. Name another one with batch_arg_name, or leave out "
                "set_batch_size"
            )
        trainer.fit_loop.setup_data()
        loader: Any = trainer.train_dataloader
        # An iterator of a dataloader draws its seed.
        with undisturbed(pl_module.device):
            batch = trainer.strategy.batch_to_device(next(iter(loader)))
        loop = TrainerLoop(trainer, pl_module)
        limit_bytes = min(loop.answers_of_all(loop.limit_bytes(self._limit, tensors_in(batch))))
        outcome: BatchSizeAdvice | RotorError
        try:
            outcome = self._advise(loop, batch, limit_bytes)
        except RotorError as error:
            # Whoever ends alone leaves others waiting.
            outcome = error
        advices = []
        for told in loop.answers_of_all(outcome):
            if isinstance(told, RotorError):
                raise told
            advices.append(told)
        # Batches of processes differ. A size that is too large for one of them would end the training of all.
        self.advice = min(advices, key=lambda advice: advice.best.batch_size)
        if self._show_table and trainer.is_global_zero:
            show(self.advice)
        best = self.advice.best
        _log.info("best batch size within %s: %d", format_bytes(self.advice.limit_bytes), best.batch_size)
        if self._set_batch_size:
            set_attribute = packages.function("utilities.parsing.lightning_setattr")
            set_attribute(pl_module, self._batch_arg_name, best.batch_size)
            # They have been made with the size of before.
            private.reset_loaders(trainer)

    def _advise(self, loop: TrainerLoop, batch: Any, limit_bytes: int) -> BatchSizeAdvice:
        model = loop.model
        if is_spread(model):
            raise ModelError(
                f"the parameters of {type(model).__name__} are spread over processes, so that no module runs by "
                "itself: expected parameters in one piece. Ask for advice on one device, or under DDP"
            )
        chosen = loop.target(self._module_name, batch, may_be_whole=loop.may_be_whole)
        if chosen is None:
            raise ModelError(
                f"{type(model).__name__} holds no submodule that can be planned: expected one with several layers"
            )
        target = chosen.module
        whole = Stage("", (model,))
        precision = loop.trainer.precision_plugin
        # Without copies of parameters, as nothing trains here.
        with kept_attributes(whole, keep_parameters=False), precision.train_step_context():
            # Before the first epoch, a Trainer may have left it in evaluation.
            model.train()
            call = first_call(model, target, batch)
            if call is None:
                raise ModelError(
                    f"training_step does not call the {type(target).__name__} that was to be planned: name another "
                    "with module="
                )
            (args, kwargs), _ = call
            costs = measured_costs(target, args, kwargs)
        device = torch.device(costs.chains[0].device)
        resident = loop.resident(target, tensors_in(batch), device)
        return advice_from(
            costs,
            resident,
            limit_bytes=limit_bytes,
            batch_sizes=self._batch_sizes,
        )
