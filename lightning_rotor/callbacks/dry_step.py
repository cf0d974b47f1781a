"""A ``training_step`` that leaves nothing behind: run on a copy without values, and cut off from the Trainer.

What the step reads from the Trainer as a number, a string or a flag is true; everything else there, and what it sends
away (logs, optimizer steps, backwards), ends in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import Self

from lightning_rotor.errors import ProfilingError
from lightning_rotor.planned.compute import StepCompute, measure_compute
from lightning_rotor.private.lightning_names import is_compiled

_PLAIN = (bool, int, float, str, bytes, type(None), torch.device, torch.dtype)


def compute_of_training_step(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    batch: Any,
    batch_idx: int,
    *,
    prepare: Callable[[pl.LightningModule], object] = lambda copy: None,
) -> StepCompute:
    """Where the next training step will compute.

    Args:
        trainer: Stays as it is.
        model: Stays as it is.
        batch: As ``training_step`` will get it.
        batch_idx: Likewise.
        prepare: Called with the copy that runs dry, before it does.
    Raises:
        ProfilingError: The step cannot be run dry.
    """
    if is_param_in_hook_signature(model.training_step, "dataloader_iter", explicit=True):
        raise ProfilingError("its training_step takes batches from dataloader_iter by itself")
    arguments = (
        (batch, batch_idx) if is_param_in_hook_signature(model.training_step, "batch_idx", min_args=2) else (batch,)
    )
    stand_in = _TrainerStandIn(trainer)

    def step(copy: pl.LightningModule, inputs: tuple[Any, ...]) -> None:
        for module in copy.modules():
            if isinstance(module, pl.LightningModule):
                _isolate(module, stand_in)
        prepare(copy)
        with trainer.precision_plugin.train_step_context():
            copy.on_train_batch_start(inputs[0], batch_idx)
            copy.training_step(*inputs)

    return measure_compute(model, arguments, step, replacements={id(trainer): stand_in})


def _isolate(module: pl.LightningModule, trainer: _TrainerStandIn) -> None:
    if is_compiled(module):  # Lightning has put compiled methods of the original in the place of the copy's
        for name in ("forward", "training_step", "validation_step", "test_step", "predict_step"):
            module.__dict__.pop(name, None)
    silence = Silence()
    names = ("log", "log_dict", "print", "manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients")
    module.__dict__.update(dict.fromkeys(names, silence))
    module.__dict__.update(
        _trainer=trainer,
        optimizers=lambda *_, **__: _one_or_all(trainer.optimizers),
        lr_schedulers=lambda: _one_or_all(trainer.lr_scheduler_configs) or None,
        all_gather=lambda data, *_, **__: data,
    )


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


class Silence:
    """Takes every call and every question, and does nothing."""

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Self:
        """Take any arguments."""
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def _ignore(self, *_: Any) -> None:
        return None

    __getitem__ = __enter__ = __call__
    __setitem__ = __exit__ = _ignore


class _TrainerStandIn:
    """Shows plain values of a Trainer, and keeps to itself what is set."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._real = trainer

    def __getattr__(self, name: str) -> Any:
        return _harmless(getattr(self._real, name))


def _harmless(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [_harmless(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _harmless(item) for key, item in value.items()}
    return Silence()
