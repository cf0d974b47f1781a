"""Private names of Lightning 2.6 and torchmetrics 1."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from lightning_rotor.private import lightning_packages as packages

TRAINERS = ("_trainer", "_fabric")
"""Attributes in which a LightningModule keeps who trains it. The public ``trainer`` cannot be hidden."""


trainer_of: Callable[[Any], Any | None] = attrgetter("_trainer")
"""The Trainer of a LightningModule. Without one, the public attribute raises."""
logs_this_step: Callable[[Any], bool] = attrgetter("_logger_connector.should_update_logs")
"""True if the Trainer gives numbers to its loggers after this step. Nothing public counts ``log_every_n_steps``."""
logging_step: Callable[[Any], int] = attrgetter("fit_loop.epoch_loop._batches_that_stepped")
"""The step under which the Trainer logs; ``global_step`` counts optimizers, of which there may be several."""
logs_hyperparameters: Callable[[Any], bool] = attrgetter("_log_hyperparams")
"""True if a module's or data module's hyperparameters are for loggers (``save_hyperparameters(logger=...)``)."""
last_value: Callable[[Any], Any] = attrgetter("_forward_cache")
"""Result of a metric of torchmetrics for the latest batch. In public it would compute over all batches."""


compiled_whole: Callable[[Any], Any | None] = attrgetter("_compiler_ctx")
"""What ``torch.compile`` of a whole LightningModule was told, which Lightning has taken apart again; else None."""
CLASS_PATH = "_class_path"
"""Names that LightningCLI puts among the hyperparameters for itself."""
toggled_parameters: Callable[[Any], dict[torch.nn.Parameter, bool]] = attrgetter("_param_requires_grad_state")
"""What ``requires_grad`` was of the parameters that ``toggle_optimizer`` has switched."""


def stands_in(optimizer: torch.optim.Optimizer) -> bool:
    """True for what a Trainer has in the place of an optimizer where ``configure_optimizers`` returns none."""
    return type(optimizer).__name__ == "_MockOptimizer"


def take_loader(loop: Any) -> Any | None:
    """The loader that a loop has set up; the loop sets up another one. Only loops draw their batches in public."""
    loader = loop._combined_loader
    # A loop that has a loader sets up no other one.
    loop._combined_loader = None
    return loader


def before_batch_transfer(module: Any, batch: Any, loader: int = 0) -> Any:
    """A batch after ``on_before_batch_transfer`` of the module or its data module. The public hooks do not choose."""
    return module._on_before_batch_transfer(batch, loader)


def reset_loaders(trainer: Any) -> None:
    """Let the Trainer ask for its loaders anew, as its batch size finder does after each size."""
    packages.function("tuner.batch_size_scaling._reset_dataloaders")(trainer)


def optimizers_of(module: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that ``configure_optimizers`` returns in its many forms. Only strategies make them in public."""
    make = packages.function("core.optimizer._init_optimizers_and_lr_schedulers")
    optimizers: list[torch.optim.Optimizer] = make(module)[0]
    return optimizers


def keep_batches_whole(trainer: Any) -> None:
    """Let no sampler divide the batches between processes: ``use_distributed_sampler=False``, but later."""
    trainer._accelerator_connector.use_distributed_sampler = False


def synchronizes_layers(strategy: Any) -> bool:
    """True under ``Trainer(sync_batchnorm=True)``, which a strategy is told and nobody else."""
    return strategy._layer_sync is not None


def set_last_value(metric: Any, value: Any) -> None:
    """Set what a metric returned for the latest batch."""
    metric._forward_cache = value
