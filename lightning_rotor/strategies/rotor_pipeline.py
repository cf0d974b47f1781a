"""Train a LightningModule whose layers are spread over several devices."""

import atexit
import gc
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from typing_extensions import override

from lightning_rotor.pipeline.failure_watch import FailureWatch, forget_frames
from lightning_rotor.pipeline.partition import Partition, RecomputeMode
from lightning_rotor.pipeline.placement import (
    PipelineProcesses,
    Placement,
    first,
    processes_of,
    share,
    share_generators,
    share_model,
)
from lightning_rotor.pipeline.schedule import PipelineError, PipelineScheduleName
from lightning_rotor.planned.modules import Target
from lightning_rotor.private import lightning_names as private
from lightning_rotor.strategies.building import PipelineBuilder, PipelineSettings
from lightning_rotor.strategies.steps import PipelineSteps, metrics_in_common
from lightning_rotor.units import parse_limit


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
        self._steps: PipelineSteps | None = None  # of a model that is cut
        self._undo = ExitStack()  # of what lasts until teardown
        self._processes: PipelineProcesses | None = None
        self._watch: FailureWatch | None = None
        self._failed = False
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

    @override
    def setup_distributed(self) -> None:
        super().setup_distributed()
        if self.world_size > 1 and self._watch is None:
            assert self.cluster_environment is not None
            host = self.cluster_environment.main_address
            self._watch = FailureWatch(self.global_rank, self.world_size, host=host, from_first=self.broadcast)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self._failed, self._optimizer_states = False, {}
        # Else the group's threads outlive the interpreter, and the process aborts at exit.
        atexit.register(_end_group)
        model, stages = trainer.lightning_module, self._devices_per_pipeline
        fits = trainer.state.fn == TrainerFn.FITTING
        self._settings.check_devices(self.world_size, stages)
        if private.synchronizes_layers(self):
            raise PipelineError("sync_batchnorm=True is not for pipelines: expected sync_batchnorm=False")
        if fits:
            self._settings.check_fit(model, self.precision_plugin, trainer.callbacks)  # type: ignore[attr-defined]
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self.world_size == stages:
            private.keep_batches_whole(trainer)
        self._processes = processes = self._processes or processes_of(self.root_device, stages)
        share_model(model)
        share_generators(processes)
        if stages > 1:
            self._undo.enter_context(metrics_in_common(model, processes.replicas))
        built = PipelineBuilder(self._settings, trainer, processes).build(self._target)
        if built is not None:
            self._target, cut = built
            self.partition = cut.partition
            self._steps = PipelineSteps(model, cut, self.precision_plugin.train_step_context)
            cut.start()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
            self._undo.callback(self.precision_plugin.__dict__.pop, "clip_grad_by_norm", None)

    # ---------------------------------------------------------------- steps

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._devices_per_pipeline > 1:
            # Every process of a pipeline works on the same batch, whatever their loaders drew.
            batch = first(batch, None if self._processes is None else self._processes.group)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._steps is not None
        self._share_buffers()
        return self._steps.run(*args)

    @override
    def on_validation_start(self) -> None:
        self._share_buffers()
        super().on_validation_start()

    def _share_buffers(self) -> None:
        """Give copies of the pipeline the first one's buffers, as DDP does: they have seen other batches."""
        model, replicas = self.lightning_module, None if self._processes is None else self._processes.replicas
        for buffer in model.buffers() if model is not None and replicas is not None else ():
            if not buffer.is_meta:
                share(buffer, replicas)

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        assert self._steps is not None
        return self._steps.backward(partial(super().backward, closure_loss, optimizer, *args, **kwargs))

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
        assert self._steps is not None
        self._steps.pipelined.placement.clip_by_norm(self.precision_plugin.main_params(optimizer), float(clip_val))

    @property
    def _placement(self) -> Placement | None:
        """Placement of a model that is cut, as long as the other processes can be asked."""
        return None if self._steps is None or self._failing else self._steps.pipelined.placement

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
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
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
        return self._failed or (trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED)

    # ---------------------------------------------------------------- the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self._watch is not None:
            self._watch.fail(exception)
        forget_frames(exception)

    @override
    def teardown(self) -> None:
        if self._steps is not None:
            if not self._failing:
                self._share_buffers()
                # For checkpoints behind the fit.
                self._optimizer_states = {id(each): self.optimizer_state(each) for each in self.optimizers}
            self._steps.pipelined.stop(values=not self._failing)
            self._steps = None
        self._undo.close()
        super().teardown()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._failing and dist.is_initialized() and dist.get_backend() == "gloo":
            # Processes that wait for this one wake up, even if it lives on. NCCL would wait for pending work.
            self._processes = None
            _end_group()


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


StrategyRegistry.register(
    RotorPipelineStrategy.strategy_name,
    RotorPipelineStrategy,
    description="Pipeline parallelism, each stage under its own recomputation plan",
)
