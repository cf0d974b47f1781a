"""The two packages that Lightning comes as, and private names of Lightning 2.6 and torchmetrics 1; none is required."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch

# ----- Lightning is published as two packages with the same code, whose classes are different ones. A Trainer takes
# callbacks, strategies and models of its own package alone, and programs of others are written for either.

LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")
_OLDEST = (2, 6)


@cache
def installed() -> tuple[ModuleType, ...]:
    """Packages of Lightning that are installed, and new enough. The second one costs a quarter of a second."""
    found = []
    for name in LIGHTNINGS:
        try:
            package = import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
            continue
        version = import_module(name.partition(".")[0]).__version__
        if tuple(int(part) for part in version.split(".")[:2]) >= _OLDEST:
            found.append(package)
    return tuple(found)


@cache
def each(path: str) -> tuple[Any, ...]:
    """Objects of each installed Lightning under a path, such as the classes ``"loggers.TensorBoardLogger"``."""
    module, _, name = path.rpartition(".")
    return tuple(getattr(import_module(f".{module}", package.__name__), name) for package in installed())


def function(path: str) -> Any:
    """A function of Lightning by its path, of either package: one that asks for no object's class."""
    return each(path)[0]


@cache
def joined(path: str, first: str = LIGHTNINGS[0]) -> Any:
    """A class to derive from that is one of each installed Lightning; the code that runs is the ``first`` one's."""
    found = sorted(each(path), key=lambda kind: not _is_of(kind, first))
    if len(found) == 1:
        return found[0]
    # LightningCLI looks for classes below those that can be imported.
    name = f"_{found[0].__name__}_of_{first.partition('.')[0]}_first"
    globals()[name] = made = type(found[0])(name, tuple(found), {"__module__": __name__})
    return made


def follow(kind: type, path: str, part: Any) -> None:
    """Let a class that derives from :func:`joined` run the code of the Lightning that a part of the Trainer is of.

    Strategies assert that models are of their own Lightning. Trainers of both in one process take turns.
    """
    name = next((name for name in LIGHTNINGS if any(_is_of(base, name) for base in type(part).__mro__)), LIGHTNINGS[0])
    if kind.__bases__ != (base := (joined(path, name),)):
        kind.__bases__ = base


def _is_of(kind: type, package: str) -> bool:
    return kind.__module__.startswith(f"{package}.")


def lightning_module_class(module: Any) -> type | None:
    """The LightningModule that an object's class derives from, or None. No Lightning is imported for the answer."""
    return next(
        (
            kind
            for kind in type(module).__mro__
            if kind.__name__ == "LightningModule" and any(_is_of(kind, package) for package in LIGHTNINGS)
        ),
        None,
    )


def is_overridden(name: str, module: Any) -> bool:
    """True if a LightningModule has a method of its own."""
    from lightning_utilities.core.overrides import is_overridden as differs

    parent = lightning_module_class(module)
    return parent is not None and bool(differs(name, module, parent))


def overrides_hook(callback: Any, name: str) -> bool:
    """True if a callback has a hook of its own, whichever Lightning its class is from."""
    owner = next(kind for kind in type(callback).__mro__ if name in vars(kind))
    return not any(_is_of(owner, package) for package in LIGHTNINGS) or owner.__name__ != "Callback"


# -------------------------------------------------------------------- private names

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
"""What a metric of torchmetrics returned for the latest batch. In public it would compute over all batches."""


compiled_whole: Callable[[Any], Any | None] = attrgetter("_compiler_ctx")
"""What ``torch.compile`` of a whole LightningModule was told, which Lightning has taken apart again; else None."""
CLASS_PATH = "_class_path"
"""What LightningCLI puts among the hyperparameters for itself."""
toggled_parameters: Callable[[Any], dict[torch.nn.Parameter, bool]] = attrgetter("_param_requires_grad_state")
"""What ``requires_grad`` was of the parameters that ``toggle_optimizer`` has switched."""


def take_loader(loop: Any) -> Any | None:
    """The loader that a loop has set up; the loop sets up another one. Only loops draw their batches in public."""
    loader, loop._combined_loader = loop._combined_loader, None
    return loader


def before_batch_transfer(module: Any, batch: Any, loader: int = 0) -> Any:
    """A batch after ``on_before_batch_transfer`` of the module or its data module. The public hooks do not choose."""
    return module._on_before_batch_transfer(batch, loader)


def reset_loaders(trainer: Any) -> None:
    """Let the Trainer ask for its loaders anew, as its batch size finder does after each size."""
    function("tuner.batch_size_scaling._reset_dataloaders")(trainer)


def optimizers_of(module: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that ``configure_optimizers`` returns in its many forms. Only strategies make them in public."""
    make = function("core.optimizer._init_optimizers_and_lr_schedulers")
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
