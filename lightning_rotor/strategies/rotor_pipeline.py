"""Train a LightningModule whose layers are spread over several devices.

First batch ──► checked ──► what the module is called with ──► memory that is left ──► ``pipelined``

What a pipeline cannot train is refused before training, on every process, by a :class:`PipelineError` that says what
would work.
"""

from __future__ import annotations

import atexit
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torchmetrics import Metric
from typing_extensions import override

from lightning_rotor.callbacks.trainer_loop import TrainerLoop, first_call
from lightning_rotor.errors import PipelineError
from lightning_rotor.execution.isolated import kept_attributes
from lightning_rotor.execution.passes import is_recomputing
from lightning_rotor.execution.settings import Settings
from lightning_rotor.invertible.layers import accumulate
from lightning_rotor.memory.held import storage_bytes
from lightning_rotor.memory.optimizer_prediction import predict_optimizer_state_bytes
from lightning_rotor.pipeline.micro_batches import Call, join, largest_part, mean_by_rows, rows_in
from lightning_rotor.pipeline.partition import Partition, RecomputeMode
from lightning_rotor.pipeline.pipeline_schedule import PipelineScheduleName, check_numbers
from lightning_rotor.pipeline.pipelined import pipelined
from lightning_rotor.pipeline.placement import (
    PipelineProcesses,
    Placement,
    bytes_around,
    first,
    kept_bytes,
    processes_of,
    share,
    share_start,
    tensors_of,
)
from lightning_rotor.pipeline.runner import ForwardContext
from lightning_rotor.pipeline.step import PipelinedModule, PipelineOptions, current, never_called
from lightning_rotor.planned.target_search import Target
from lightning_rotor.private import lightning_names as private
from lightning_rotor.private.values import call_with, tree_map_only
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.units import parse_limit

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy
else:
    DDPStrategy = private.joined("strategies.DDPStrategy")

_AVERAGING = (*private.each("callbacks.StochasticWeightAveraging"), *private.each("callbacks.WeightAveraging"))
_MIXED_PRECISION = private.each("plugins.precision.MixedPrecision")
_WRAPPED_OPTIMIZER = private.each("core.optimizer.LightningOptimizer")
_move_data_to_device = private.function("strategies.strategy.move_data_to_device")


class RotorPipelineStrategy(DDPStrategy):
    """Pipeline parallelism: one module is cut into stages, one or more on each device, each under its own plan.

    The user's ``training_step`` is unchanged. It runs once for each micro-batch, on every process, and its loss counts
    as many times as the micro-batch has rows, so a mean over samples gives the gradients of the whole batch. What is
    outside of the cut module runs on every process. ``self.log`` logs the batch's value, once.

    Args:
        module: Dotted name of the submodule to cut. By default the one with most of the compute, as for
            :class:`~lightning_rotor.RotorCallback`.
        balance: ``"auto"`` for the fastest cuts that fit, or how many stages of the model each pipeline stage gets.
        micro_batches: Into how many parts a batch is split.
        schedule: ``"1f1b"``, ``"gpipe"`` or ``"interleaved"``: two stages on each device, or as ``balance`` says.
        recompute: ``"rotor"`` for the best plan within the memory, ``"always"``, ``"except_last"``, ``"never"``.
        mem_limit: What the process may use of each device, as for :class:`~lightning_rotor.RotorCallback`.
        pipeline_stages: Over how many devices one copy of the model is spread; by default all.
        deferred_batch_norm: Update running statistics of BatchNorm once for each batch, with those of all its rows.
            Micro-batches are normalized by their own in any case.
        sample: Input of the module for a batch, a tuple for several arguments and a dict for keywords. By default the
            first training batch shows it.
        options: Of Lightning's ``DDPStrategy``: ``timeout``, ``process_group_backend``, ``start_method``.
    Attributes:
        partition: How the model is cut, or was by the last run; None before it has been set up.
    Raises:
        PipelineError: Wrong arguments; in ``setup``, on every process, whatever speaks against a pipeline.
        PartitionError: In ``setup``: no partition fits; says the least memory per device that would.
    Example:
        >>> trainer = L.Trainer(strategy=RotorPipelineStrategy(micro_batches=8), devices=4)  # doctest: +SKIP
    """

    strategy_name = "rotor_pipeline"

    def __init__(
        self,
        module: str | None = None,
        balance: Literal["auto"] | list[int] = "auto",
        micro_batches: int = 8,
        schedule: PipelineScheduleName = "1f1b",
        recompute: RecomputeMode = "rotor",
        mem_limit: int | float | str | None = None,
        pipeline_stages: int | None = None,
        deferred_batch_norm: bool = False,
        sample: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._settings = PipelineSettings(
            micro_batches=micro_batches,
            schedule=schedule,
            recompute=recompute,
            balance=balance,
            deferred_batch_norm=deferred_batch_norm,
            module=module,
            limit=parse_limit(mem_limit),
            pipeline_stages=pipeline_stages,
            sample=sample,
        )
        self.partition: Partition | None = None
        self._target: Target | None = None
        self._cut: PipelinedModule | None = None
        self._undo = ExitStack()  # of what lasts until teardown
        self._processes: PipelineProcesses | None = None
        self._optimizer_states: dict[int, dict[str, Any]] = {}

    @property
    def module_name(self) -> str | None:
        """Dotted name of the module that is cut, once known."""
        return self._settings.module if self._target is None else self._target.name

    @property
    def _devices_per_pipeline(self) -> int:
        return self._settings.pipeline_stages or self.world_size

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        stages = self._devices_per_pipeline
        return {"num_replicas": self.world_size // stages, "rank": self.global_rank // stages}

    # ---------------------------------------------------------------- setting up

    @property
    @override
    def accelerator(self) -> Any:
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        private.follow(RotorPipelineStrategy, "strategies.DDPStrategy", accelerator)  # the first that a Trainer sets
        self._accelerator = accelerator

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self._optimizer_states = {}
        # Else the group's threads outlive the interpreter, and the process aborts at exit.
        atexit.register(_end_group)
        model, stages = trainer.lightning_module, self._devices_per_pipeline
        fits = trainer.state.fn == "fit"
        self._settings.check_devices(self.world_size, stages)
        if private.synchronizes_layers(self):
            raise PipelineError("sync_batchnorm=True is not for pipelines: expected sync_batchnorm=False")
        if fits:
            self._settings.check_fit(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self.world_size == stages:
            private.keep_batches_whole(trainer)
        self._processes = processes = self._processes or processes_of(self.root_device, stages)
        share_start(model, processes)
        if stages > 1:
            # Metrics are synchronized among copies alone: processes of one pipeline see the same batches.
            replicas = processes.replicas
            name, value = ("distributed_available_fn", bool) if replicas is None else ("process_group", replicas)
            for metric in (module for module in model.modules() if isinstance(module, Metric)):
                self._undo.callback(setattr, metric, name, getattr(metric, name))
                setattr(metric, name, value)
        built = PipelineBuilder(self._settings, trainer, processes).build(self._target)
        if built is not None:
            self._target, self._cut = built
            self.partition = self._cut.partition
            self._cut.start()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
            self._undo.callback(self.precision_plugin.__dict__.pop, "clip_grad_by_norm", None)

    # ---------------------------------------------------------------- steps

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # Every process of a pipeline works on the same batch, whatever their loaders drew.
        batch = first(batch, None if self._processes is None else self._processes.group)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._cut is not None
        self._share_buffers()
        assert self.lightning_module is not None
        return _train(self.lightning_module, self._cut, self.precision_plugin.train_step_context, *args)

    def _share_buffers(self) -> None:
        """Give copies of the pipeline the first one's buffers, as DDP does: they have seen other batches."""
        model, replicas = self.lightning_module, None if self._processes is None else self._processes.replicas
        for buffer in model.buffers() if model is not None and replicas is not None else ():
            if not buffer.is_meta:
                share(buffer, replicas)

    @override
    def reduce(
        self, tensor: torch.Tensor, group: Any = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> torch.Tensor:
        """Reduce a tensor; processes of one pipeline hold the same, which counts once in a sum for ``self.log``."""
        reduced = super().reduce(tensor, group, reduce_op)
        if group is None and isinstance(reduce_op, str) and reduce_op.lower() == "sum":
            return reduced / self._devices_per_pipeline
        return reduced

    def _clip_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: int | float) -> None:
        assert self._cut is not None
        self._cut.placement.clip_by_norm(self.precision_plugin.main_params(optimizer), float(clip_val))

    @property
    def _placement(self) -> Placement | None:
        """Placement of a model that is cut, as long as the other processes can be asked."""
        return None if self._cut is None or self._failing else self._cut.placement

    # ---------------------------------------------------------------- checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        own = super().lightning_module_state_dict()
        return own if self._placement is None else self._placement.whole_state_dict(own)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
            super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self._placement is None:
            return self._optimizer_states.get(id(optimizer)) or super().optimizer_state(optimizer)
        plain = optimizer.optimizer if isinstance(optimizer, _WRAPPED_OPTIMIZER) else optimizer
        return self._placement.whole_optimizer_state(plain)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._placement is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
                optimizer.load_state_dict(self._placement.own_optimizer_state(optimizer, state))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._failing:
            missing = "no checkpoint is written, since the other processes' part of it is out of reach after an error"
            warnings.warn(missing, stacklevel=2)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @property
    def _failing(self) -> bool:
        model = self.lightning_module
        trainer = None if model is None else private.trainer_of(model)
        return trainer is not None and trainer.state.status == "interrupted"

    @override
    def teardown(self) -> None:
        if self._cut is not None:
            if not self._failing:
                self._share_buffers()
                # For checkpoints behind the fit.
                self._optimizer_states = {id(each): self.optimizer_state(each) for each in self.optimizers}
            self._cut.stop(values=not self._failing)
            self._cut = None
        self._undo.close()
        super().teardown()
        if self._failing and dist.is_initialized() and dist.get_backend() == "gloo":
            # Processes that wait for this one wake up, even if it lives on. NCCL would wait for pending work.
            self._processes = None
            _end_group()


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


@dataclass(frozen=True, slots=True, eq=False)
class PipelineSettings(PipelineOptions):
    """Arguments of :class:`~lightning_rotor.strategies.RotorPipelineStrategy`; the limit is parsed."""

    module: str | None = None
    limit: Any = None
    pipeline_stages: int | None = None
    sample: Any = None

    def __post_init__(self) -> None:
        PipelineOptions.__post_init__(self)
        check_numbers("gpipe", self.pipeline_stages or 1, self.micro_batches, 1)

    def options(self, devices: int) -> PipelineOptions:
        """Options of a pipeline over some devices."""
        if self.schedule != "interleaved":
            return self
        by_hand = not isinstance(self.balance, str)
        return replace(self, stages_per_device=max(len(self.balance) // devices, 1) if by_hand else 2)

    def check_devices(self, world: int, stages: int) -> None:
        """Refuse numbers of devices that make no pipelines of so many stages."""
        if world % stages:
            raise PipelineError(
                f"pipeline_stages is {stages}, but there are {world} devices: expected a number of devices that is a "
                f"multiple, such as devices={stages * max(world // stages, 1)}"
            )
        if self.schedule == "1f1b" and self.micro_batches < stages:
            raise PipelineError(
                f"micro_batches is {self.micro_batches} for {stages} devices: expected at least as many micro-batches "
                f'as devices under schedule "1f1b". Use micro_batches={stages}, or schedule="gpipe"'
            )

    def check_fit(self, trainer: pl.Trainer) -> None:
        """Refuse scaled losses, manual optimization, and callbacks that average weights."""
        precision = trainer.precision_plugin
        if isinstance(precision, _MIXED_PRECISION) and precision.scaler is not None:
            raise PipelineError(
                'precision "16-mixed" scales the loss by gradients of all stages: expected "bf16-mixed" or "32-true"'
            )
        if not trainer.lightning_module.automatic_optimization:
            raise PipelineError(
                "manual optimization asks for each backward itself, but a pipeline runs them as scheduled: expected "
                "automatic optimization, one optimizer and a training_step that returns the loss"
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, _AVERAGING):
                raise PipelineError(
                    f"{type(callback).__name__} averages the weights of the whole model, of which each process of a "
                    "pipeline has a part: expected no such callback. Average the weights of checkpoints after training"
                )

    def check_rows(self, batch: Any, what: str) -> None:
        """Refuse fewer rows than micro-batches."""
        if (rows := rows_in(batch)) < self.micro_batches:
            raise PipelineError(
                f"{what} has {rows} rows for {self.micro_batches} micro-batches: expected at least one row for each. "
                f"Use a larger batch, or micro_batches={rows}"
            )


class PipelineBuilder:
    """Cuts a Trainer's model on all processes of a pipeline at once."""

    def __init__(self, settings: PipelineSettings, trainer: pl.Trainer, processes: PipelineProcesses) -> None:
        self._settings, self._trainer, self._model = settings, trainer, trainer.lightning_module
        self._loop, self._fits = TrainerLoop(trainer, self._model), trainer.state.fn == "fit"
        self._precision, self._processes, self._device = trainer.precision_plugin, processes, processes.device
        self._task: str = trainer.state.fn.value  # type: ignore[union-attr]

    def build(self, last: Target | None) -> tuple[Target, PipelinedModule] | None:
        """Cut the module. Evaluation outside of a fit is cut for time alone, since it keeps no activations."""
        settings, model, fits = self._settings, self._model, self._fits
        by_sample = settings.sample is not None and settings.module is not None
        batch = None if by_sample else self._first_batch()
        if batch is None and not by_sample:
            return None
        target = self._target(batch, last)
        factor = self._optimizer_scale() if fits else 0.0
        with self._precision.train_step_context():
            call, context = self._call_of(target, batch)
        limit_bytes = None
        if fits:
            given = settings.sample if batch is None else batch
            limit_bytes = self._loop.limit_bytes(settings.limit, ()) - bytes_around(model, target.module, given, factor)
        with context.restored():
            made = pipelined(
                model,
                target.module,
                call,
                options=settings.options(self._processes.size),
                memory_bytes=limit_bytes,
                state_bytes=lambda stages: [kept_bytes(tensors_of(stage), factor) for stage in stages],
                processes=self._processes,
            )
        return target, made

    def _first_batch(self) -> Any:
        """The first batch of the Trainer's task, as a step sees it; None if there is none."""
        states, loop = GeneratorStates(), getattr(self._trainer, f"{self._task}_loop")
        with kept_attributes(Stage("", (self._model,))):
            loop.setup_data()
            # The loop asks for another loader itself, and draws the same random numbers then.
            loader = private.take_loader(loop)
            found = None if loader is None else next(iter(loader), None)
            if found is None:
                return None
            # What Lightning's loops do with a batch before a step sees it.
            batch = private.before_batch_transfer(self._model, self._precision.convert_input(found[0]))
            batch = self._trainer.strategy.batch_to_device(batch, self._device)
        states.restore()
        if self._fits:
            self._settings.check_rows(batch, "the first batch")
        return batch

    def _target(self, batch: Any, last: Target | None) -> Target:
        """The module that the user names, outside of a fit the last one, or that with most compute in a step."""
        name = self._settings.module or (None if last is None or self._fits else last.name)
        found = self._loop.target(name, batch if self._fits else None, may_be_whole=False)
        if found is None:
            raise PipelineError(
                f"{type(self._model).__name__} holds no submodule with several layers that its training_step calls: "
                "expected one to cut into pipeline stages"
            )
        return found

    def _optimizer_scale(self) -> float:
        """Bytes of state for each byte that learns, asked of optimizers that are made for it."""
        states = GeneratorStates()
        made = private.optimizers_of(self._model)
        states.restore()
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in made):
            raise PipelineError(
                "LBFGS evaluates the loss several times in a step and needs all parameters in one place: expected an "
                "optimizer that takes one step for each gradient, such as AdamW or SGD"
            )
        learning = storage_bytes(parameter for parameter in self._model.parameters() if parameter.requires_grad)
        return sum(predict_optimizer_state_bytes(each, self._device) for each in made) / max(learning, 1)

    def _call_of(self, target: Target, batch: Any) -> tuple[Call, Settings]:
        """Arguments of the module for the largest micro-batch, and the settings around the call."""
        settings = self._settings
        if settings.sample is not None:
            sample = self._precision.convert_input(_move_data_to_device(call_with(settings.sample), self._device))
            settings.check_rows(sample, "sample")
            return largest_part(sample, settings.micro_batches), Settings()
        step = {"fit": "training", "validate": "validation"}.get(self._task, self._task) + "_step"
        called = first_call(self._model, target.module, largest_part(batch, settings.micro_batches), step=step)
        if called is None:
            raise never_called(step)
        return called


def _train(
    model: pl.LightningModule, pipelined: PipelinedModule, context: ForwardContext, batch: Any, *rest: Any
) -> Any:
    """Result of ``training_step`` for a batch, which it sees micro-batch by micro-batch, each in a context."""
    trainer, replicas = model.trainer, pipelined.processes.replicas
    epoch, accumulated = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
    sizes, anew = pipelined.sizes(batch), epoch.batch_idx % accumulated == 0
    logs = _MicroBatchLogs(model, sizes)

    def run(part: Any) -> Any:
        with context():
            return model.training_step(part, *rest)

    # zero_grad comes between this step and the backward that Lightning asks for: the new gradients wait until then.
    learning = [parameter for parameter in model.parameters() if not parameter.is_meta]
    apart = learning if anew or replicas is not None else []
    before = _taken(apart)
    if anew:
        before.clear()  # they are about to be zeroed
    with logs.caught():
        results, loss = pipelined.train(run, batch, number=epoch.total_batch_idx, scale=1 / accumulated)
    for parameter in apart if replicas is not None else ():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=replicas)
            parameter.grad.div_(dist.get_world_size(replicas))
    made = _taken(apart)
    if not anew:
        accumulate(apart, before)
    with context():  # Lightning makes what adds up an epoch in the default dtype
        logs.write()
    whole = _deferred(loss, 1 / accumulated, partial(accumulate, apart, made))
    if not isinstance(results[0], Mapping):
        return whole
    rest_of = [{key: value for key, value in result.items() if key != "loss"} for result in results]
    return {"loss": whole, **join(tree_map_only(torch.Tensor, torch.Tensor.detach, rest_of), sizes)}


def _taken(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients, which the parameters then hold no longer."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def _deferred(loss: torch.Tensor, scale: float, add: Callable[[], None]) -> torch.Tensor:
    """A loss whose backward is already done; it hands over the gradients when asked for it."""

    def hand_over(given: torch.Tensor) -> None:
        if abs(float(given) - scale) > 1e-6 * scale:
            raise PipelineError(
                f"the loss was scaled by {float(given):g} behind training_step, but the pipeline has run its backward "
                f"with {scale:g} (accumulate_grad_batches): expected LightningModule.backward to leave the loss alone"
            )
        add()

    loss.requires_grad_().register_hook(hand_over)
    return loss


class _MicroBatchLogs:
    """Collects what micro-batches log, and logs their mean (or sum, or extreme, as ``reduce_fx`` says) once.

    A torchmetrics metric has seen all micro-batches by then: exact for the epoch, for the step a mean over rows.
    """

    def __init__(self, model: pl.LightningModule, sizes: Sequence[int]) -> None:
        self._model, self._sizes = model, tuple(sizes)
        self._seen: dict[str, list[tuple[int, Metric | None, Any, dict[str, Any]]]] = {}  # by name

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Context that collects logs."""
        before = self._model.__dict__.get("log")
        self._model.__dict__["log"] = self._note
        try:
            yield
        finally:
            del self._model.__dict__["log"]
            if before is not None:
                self._model.__dict__["log"] = before

    def write(self) -> None:
        """Log what was collected, outside of the context."""
        for name, entries in self._seen.items():
            numbers, metrics, values, options = zip(*sorted(entries, key=itemgetter(0)), strict=True)
            batch_sizes = [each.get("batch_size") for each in options]
            if all(batch_sizes):
                options[0]["batch_size"] = sum(batch_sizes)
            sizes = [self._sizes[number] for number in numbers]
            self._model.log(name, _logged(metrics[0], values, sizes, options[0].get("reduce_fx", "mean")), **options[0])

    def _note(self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **options: Any) -> None:
        if is_recomputing():
            return
        metric = value if isinstance(value, Metric) else None
        if metric is not None:
            value = private.last_value(metric)
        elif isinstance(value, torch.Tensor):
            value = value.detach()
        options = {"prog_bar": prog_bar, "logger": logger, **options}
        paused = current.get()  # None in a layer of the pipeline
        number = 0 if paused is None else paused.place
        self._seen.setdefault(name, []).append((number, metric, value, options))


def _logged(metric: Metric | None, values: Sequence[Any], sizes: Sequence[int], how: Any) -> Any:
    """Values to log for those of micro-batches; a metric's are what its forwards returned, None without a forward."""
    if isinstance(values[0], dict):
        return values[0]  # Lightning refuses it
    if metric is not None and any(value is None for value in values):
        return metric
    tensors = list(map(torch.as_tensor, values))
    # In the type that one process would log.
    numbers = [(each if each.is_floating_point() else each.to(torch.get_default_dtype())).mean() for each in tensors]
    if metric is not None:
        # Lightning logs for the step what the metric's last forward returned: let that be the batch's.
        private.set_last_value(metric, mean_by_rows(numbers, sizes))
        return metric
    if how in ("mean", "avg"):
        return mean_by_rows(numbers, sizes)
    column = torch.stack(numbers)
    return getattr(column, how)() if isinstance(how, str) else how(column)


for _registry in private.each("strategies.StrategyRegistry"):
    _registry.register(
        RotorPipelineStrategy.strategy_name,
        RotorPipelineStrategy,
        description="Pipeline parallelism, each stage under its own recomputation plan",
    )
