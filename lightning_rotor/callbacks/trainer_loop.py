"""A Lightning Trainer as the loop around a planned module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from typing_extensions import Self, override

from lightning_rotor.capture.recorder import require_unrecorded
from lightning_rotor.errors import ProfilingError
from lightning_rotor.execution.isolated import kept_attributes, lent_buffers, undisturbed
from lightning_rotor.execution.passes import is_recomputing
from lightning_rotor.execution.settings import Settings
from lightning_rotor.pipeline.micro_batches import Call
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.target_search import Target, TargetSearch, named_target
from lightning_rotor.private import lightning_names as private
from lightning_rotor.private import lightning_packages as packages
from lightning_rotor.private.torch_names import (
    has_step_hooks,
    is_compiled_function,
    is_compiler_wrapper,
    outside_of_graphs,
)
from lightning_rotor.profiling.step_compute import StepCompute, measure_compute
from lightning_rotor.stages.holders import PLAIN
from lightning_rotor.stages.sequential import Stage

if TYPE_CHECKING:
    import lightning.pytorch as pl

_takes_argument = packages.function("utilities.signature_utils.is_param_in_hook_signature")

# A ``training_step`` that leaves nothing behind: run on a copy without values, cut off from the Trainer.


def _isolate(module: nn.Module, trainer: _TrainerStandIn) -> None:
    # Compiled methods of the original stand in the place of the copy's.
    if private.compiled_whole(module) is not None:
        for name in ("forward", "training_step", "validation_step", "test_step", "predict_step"):
            module.__dict__.pop(name, None)
    if is_compiled_function(module.__dict__.get("training_step")):
        del module.__dict__["training_step"]
    module.__dict__.update(
        silenced(trainer.optimizers, trainer.lr_scheduler_configs),
        _trainer=trainer,
        all_gather=lambda data, *_, **__: data,
    )


def silenced(optimizers: list[Any], schedulers: list[Any]) -> dict[str, Any]:
    """Methods of a LightningModule that do nothing; those that return something give what is there."""
    methods: dict[str, Any] = dict.fromkeys(_SILENT, Silence())
    # With whatever arguments: ``use_pl_optimizer`` is for those that step.
    methods["optimizers"] = lambda *_, **__: _one_or_all(optimizers)
    methods["lr_schedulers"] = lambda: _one_or_all(schedulers) or None
    return methods


# A backward, and what prepares or uses gradients, has nothing to work on in a run without values.
_SILENT = (
    "log",
    "log_dict",
    "print",
    "manual_backward",
    "toggle_optimizer",
    "untoggle_optimizer",
    "clip_gradients",
)


def _one_or_all(values: list[Any]) -> Any:
    # As Lightning's own ``optimizers()`` answers.
    return values[0] if len(values) == 1 else values


class Silence:
    """Takes every call and every question, and does nothing."""

    def __getattr__(self, name: str) -> Self:
        # Python asks for such names to find out what an object can do: copying it, say.
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Self:
        """Take any arguments."""
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    __getitem__ = __enter__ = __call__
    __setitem__ = __exit__ = lambda *_: None


class _TrainerStandIn:
    """Shows plain values of a Trainer, and keeps to itself what is set."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._real = trainer

    def __getattr__(self, name: str) -> Any:
        return _harmless(getattr(self._real, name))


def _harmless(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        # A step may change it in place.
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [_harmless(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _harmless(item) for key, item in value.items()}
    # Loaders, strategies and loggers: whatever is asked of them is not asked of the real ones.
    return Silence()


class _ReachedError(BaseException):
    """Ends a step where it calls a module. A user's ``except Exception`` does not stop it."""


def first_call(
    model: pl.LightningModule, module: nn.Module, batch: Any, *, step: str = "training_step"
) -> tuple[Call, Settings] | None:
    """Arguments of a step's first call of a module, and the settings around it; None if it never calls it.

    The step runs up to there and leaves nothing behind; its optimizer accepts everything.
    """
    run = getattr(model, step)
    calls: list[tuple[Call, Settings]] = []
    silence = Silence()
    arguments = [batch]
    for number, name in enumerate(("batch_idx", "dataloader_idx"), 2):
        if _takes_argument(run, name, min_args=number):
            arguments.append(0)

    @outside_of_graphs
    def reached(*args: Any, **kwargs: Any) -> NoReturn:
        # The settings are those of this moment: a step may open autocast around the call.
        calls.append(((args, kwargs), Settings()))
        raise _ReachedError

    # A step may freeze some of them, as a GAN's does, and ends here before it sets them free again.
    learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    whole = Stage("", (model,))
    with suppress(_ReachedError), undisturbed(model.device), kept_attributes(whole), lent_buffers(whole):
        model.__dict__.update(silenced([silence], [silence]))
        module.__dict__["forward"] = reached
        run(*arguments)
    for parameter, learns in learning:
        parameter.requires_grad_(learns)
    if not calls:
        return None
    return calls[0]


_HARMLESS_CALLBACKS = (
    "progress",
    "model_checkpoint",
    "early_stopping",
    "timer",
    "device_stats_monitor",
    "lr_monitor",
    "on_exception_check",
)
"""Callbacks whose hooks at the end of a step allocate nothing worth a word."""
_HARMLESS = ["lightning_rotor."]
# Both names of Lightning, whose classes are different ones.
for _package in ("lightning.pytorch", "pytorch_lightning"):
    for _name in _HARMLESS_CALLBACKS:
        _HARMLESS.append(f"{_package}.callbacks.{_name}")


class TrainerLoop(TrainingLoop):
    """The loop of a Trainer, for a callback of it if there is one."""

    model: pl.LightningModule

    def __init__(self, trainer: pl.Trainer, model: pl.LightningModule, callback: pl.Callback | None = None) -> None:
        self.model = model
        self.trainer = trainer
        self.warned_of = set()
        self.is_compiled = private.compiled_whole(model) is not None
        # Compiled as a whole, it leaves its forward to torch.compile.
        self.may_be_whole = packages.is_overridden("forward", model) and not self.is_compiled
        # The tuner wants to hear in the forward that a batch is too large. As compiled, only the step's end would tell.
        finder = packages.from_each("callbacks.BatchSizeFinder")
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self.may_run_as_compiled = not any(isinstance(other, finder) for other in callbacks)
        self.is_lead = not trainer.global_rank
        self.local_processes = int(trainer.num_devices)
        profiler = getattr(trainer, "profiler", None)
        self.profiler_is_taken = isinstance(profiler, packages.from_each("profilers.PyTorchProfiler"))
        # Questions from here on, since a Trainer moves the model and makes optimizers after its callbacks are set up.
        # Tuners take all callbacks out while one tries another batch.
        self.is_trial = lambda: callback is not None and callback not in trainer.callbacks  # type: ignore[attr-defined]
        self.device = lambda: model.device
        # Of optimizers that a user keeps to himself, the Trainer has a stand-in, which never steps.
        self.optimizers = lambda: [each for each in trainer.optimizers if not private.stands_in(each)]
        self.wrapped = lambda: trainer.strategy.model
        # zero_grad runs between forward and backward, unless several backwards add up or the user decides.
        self.gradients_linger = lambda: model.automatic_optimization and trainer.accumulate_grad_batches == 1
        self.steps = lambda: trainer.global_step

    @override
    def has_hooks_at_end(self) -> bool:
        """True if the user's code runs between a backward and the end of a step, whose memory nobody knows before."""
        for name in (
            "optimizer_step",
            "on_before_optimizer_step",
            "configure_gradient_clipping",
            "on_train_batch_end",
        ):
            if packages.is_overridden(name, self.model):
                return True
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if type(callback).__module__.startswith(tuple(_HARMLESS)):
                continue
            for name in ("on_before_optimizer_step", "on_train_batch_end"):
                if packages.overrides_hook(callback, name):
                    return True
        return any(map(has_step_hooks, self.trainer.optimizers))

    @override
    def compute(self, batch: Any, batch_idx: int) -> StepCompute:
        """FLOPs of the next step, as far as a dry run of ``training_step`` on a copy comes."""
        training_step = self.model.training_step
        stand_in = _TrainerStandIn(self.trainer)
        if _takes_argument(training_step, "dataloader_iter", explicit=True):
            # A batch that a dry run took would be missing in the training.
            raise ProfilingError("its training_step takes batches from dataloader_iter by itself")
        numbered = _takes_argument(training_step, "batch_idx", min_args=2)

        def step(copy: pl.LightningModule, inputs: tuple[Any, ...]) -> Any:
            for module in copy.modules():
                # A compiled forward calls the original, which it was made for.
                if not is_compiler_wrapper(module) and is_compiled_function(module.__dict__.get("forward")):
                    del module.__dict__["forward"]
                # A model may have others in it, each with a Trainer to ask.
                if packages.lightning_module_class(module) is not None:
                    _isolate(module, stand_in)
            with self.trainer.precision_plugin.train_step_context():
                # The step may read what the hook before it sets.
                copy.on_train_batch_start(inputs[0], batch_idx)
                return copy.training_step(*inputs)

        arguments = (batch, batch_idx) if numbered else (batch,)
        # A copy of the Trainer would be a copy of the data set, too.
        return measure_compute(
            self.model,
            arguments,
            step,
            replacements={id(self.trainer): stand_in},
        )

    def target(self, name: str | None, batch: Any, *, may_be_whole: bool) -> Target | None:
        """The submodule of this name; without one, that with most compute in a step, or most parameters (no batch)."""
        if name is not None:
            return named_target(self.model, name)
        search = TargetSearch(self.model, may_be_whole=may_be_whole)
        if batch is not None:
            search.count(lambda: self.compute(batch, 0))
        return search.best()

    @override
    @contextmanager
    def untoggled(self) -> Iterator[None]:
        """Context in which ``toggle_optimizer`` is undone: the other parameters train later in the same step."""
        # What Lightning has noted of them: their state before the optimizer's turn began.
        toggled = private.toggled_parameters(self.model)
        now = {parameter: parameter.requires_grad for parameter in toggled}
        try:
            for parameter, state in toggled.items():
                parameter.requires_grad = state
            yield
        finally:
            for parameter, state in now.items():
                parameter.requires_grad = state


# ``self.log`` inside of a planned module counts once: what is measured or recomputed logs nothing.


@outside_of_graphs
def log(self: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
    """Stands in for ``type(self).log``. Bound and named like it: copies and pickles of modules then get their own."""
    require_unrecorded("it logs (self.log), which no trace would do again")
    if not is_recomputing():
        type(self).log(self, *args, **kwargs)


class _Told:
    """Stands in for the ``on_exception`` of a strategy, and tells some listeners before."""

    def __init__(self, strategy: Any) -> None:
        self.own = vars(strategy).get("on_exception")
        self.listeners: list[Callable[[BaseException], None]] = []
        self._on_exception = strategy.on_exception

    def __call__(self, exception: BaseException) -> None:
        # A listener leaves when it hears of an error.
        for hear in list(self.listeners):
            hear(exception)
        self._on_exception(exception)


@contextmanager
def told_of_errors(strategy: Any, hear: Callable[[BaseException], None]) -> Iterator[None]:
    """Context in which a strategy tells of an exception that ends a fit.

    A tuner takes all callbacks out for its trials, so that an exception in one of them finds none to tell.
    """
    attributes = vars(strategy)
    told = attributes.get("on_exception")
    if not isinstance(told, _Told):
        told = attributes["on_exception"] = _Told(strategy)
    told.listeners.append(hear)
    try:
        yield
    finally:
        # Several callbacks of a training leave in any order.
        told.listeners.remove(hear)
        if not told.listeners:
            del attributes["on_exception"]
            if told.own is not None:
                attributes["on_exception"] = told.own


def hush(model: pl.LightningModule) -> None:
    """Let a model and all modules in it log nothing while their code runs again."""
    for module in model.modules():
        # In the instance alone. What somebody else has put there stays: it could not be put back.
        if packages.lightning_module_class(module) is not None and "log" not in module.__dict__:
            module.__dict__["log"] = MethodType(log, module)


def unhush(model: nn.Module) -> None:
    """Undo :func:`hush`."""
    for module in model.modules():
        if getattr(module.__dict__.get("log"), "__func__", None) is log:
            del module.__dict__["log"]
