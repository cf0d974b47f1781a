"""Train a LightningModule whose layers are spread over several devices."""

from __future__ import annotations

import atexit
import gc
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import override

from lightning_rotor.pipeline.failure_watch import Lifeline, explain, forget_frames
from lightning_rotor.pipeline.partition import Partition, RecomputeMode
from lightning_rotor.pipeline.pipelined import PipelinedModule
from lightning_rotor.pipeline.placement import first, share, share_generators, share_model
from lightning_rotor.pipeline.schedule import PipelineError, PipelineScheduleName
from lightning_rotor.planned.forward import attach, detach
from lightning_rotor.planned.target import Target
from lightning_rotor.private import lightning_names as private
from lightning_rotor.strategies import checks
from lightning_rotor.strategies.building import PipelineBuilder, PipelineSettings
from lightning_rotor.strategies.first_call import MetricsInCommon
from lightning_rotor.strategies.steps import PipelineSteps
from lightning_rotor.units import parse_limit


class RotorPipelineStrategy(DDPStrategy):
    """Pipeline parallelism: one module is cut into stages, one or more on each device, each under its own recomputation plan.

    The user's ``training_step`` is unchanged. It runs once for each micro-batch, on every process, and its loss counts as many times as the
    micro-batch has rows, so a loss that is a mean over samples gives the gradients of the whole batch. What is outside of the cut module runs
    on every process. ``self.log`` logs the batch's value, once.

    Args:
        module: Dotted name of the submodule to cut. By default the one with most of the compute, as for
            :class:`~lightning_rotor.RotorCallback`.
        balance: ``"auto"`` for the fastest cuts that fit, or how many stages of the model each pipeline stage gets.
        micro_batches: Into how many parts a batch is split.
        schedule: ``"1f1b"``, ``"gpipe"`` or ``"interleaved"``: two stages on each device, or as many as ``balance`` says.
        recompute: ``"rotor"`` for the plan that is best within the memory, ``"always"``, ``"except_last"`` or ``"never"``.
        mem_limit: What the process may use of each device, as for :class:`~lightning_rotor.RotorCallback`.
        pipeline_stages: Over how many devices one copy of the model is spread; by default all.
        deferred_batch_norm: Update running statistics of BatchNorm once for each batch, with those of all its rows. Micro-batches are
            normalized by their own in any case.
        sample: Input of the module for a batch, a tuple for several arguments and a dict for keywords. By default the first training batch
            shows it.
        options: Of Lightning's ``DDPStrategy``: ``timeout``, ``process_group_backend``, ``start_method``.
    Raises:
        PipelineError: Arguments without sense; in ``setup``, on every process, whatever speaks against a pipeline of this model.
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
            module=module,
            balance=balance,
            micro_batches=micro_batches,
            schedule=schedule,
            recompute=recompute,
            limit=parse_limit(mem_limit),
            pipeline_stages=pipeline_stages,
            deferred_batch_norm=deferred_batch_norm,
            sample=sample,
        )
        self._pipelined: PipelinedModule | None = None
        self._partition: Partition | None = None
        self._metrics: MetricsInCommon | None = None
        self._steps: PipelineSteps | None = None
        self._target: Target | None = None
        self._group: dist.ProcessGroup | None = None
        self._replicas: dist.ProcessGroup | None = None
        self._lifeline: Lifeline | None = None
        self._failed = self._ends_group = False
        self._optimizer_states: dict[int, dict[str, Any]] = {}

    @property
    def partition(self) -> Partition | None:
        """How the model is cut, or was by the last run; None before it has been set up."""
        return self._partition

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
        return {
            "num_replicas": self.world_size // self._devices_per_pipeline,
            "rank": self.global_rank // self._devices_per_pipeline,
        }

    # ---------------------------------------------------------------- setting up

    @override
    def setup_distributed(self) -> None:
        super().setup_distributed()
        if self.world_size > 1 and self._lifeline is None:
            environment = self.cluster_environment
            assert environment is not None
            self._lifeline = Lifeline(
                self.global_rank, self.world_size, host=environment.main_address, from_first=self.broadcast
            )

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self._failed = False
        self._optimizer_states = {}
        if not self._ends_group:
            # Else the group's threads outlive the interpreter, and the process aborts at its very end.
            atexit.register(_end_group)
            self._ends_group = True
        self._check(trainer)
        if self.world_size == self._devices_per_pipeline:
            private.keep_batches_whole(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self._make_groups()
        share_model(trainer.lightning_module)
        share_generators(self.root_device, self._group)
        if self._devices_per_pipeline > 1:
            self._metrics = MetricsInCommon(trainer.lightning_module, self._replicas)
        self._build(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            checks.check_optimizers(self.optimizers)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def _check(self, trainer: pl.Trainer) -> None:
        checks.check_devices(
            stages=self._devices_per_pipeline,
            world=self.world_size,
            schedule=self._settings.schedule,
            micro_batches=self._settings.micro_batches,
        )
        if private.synchronizes_layers(self):
            raise PipelineError("sync_batchnorm=True is not for pipelines: expected sync_batchnorm=False")
        if trainer.state.fn == TrainerFn.FITTING:
            checks.check_precision(self.precision_plugin)
            checks.check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
            checks.check_optimization(trainer.lightning_module, self._settings.schedule)

    def _make_groups(self) -> None:
        stages = self._devices_per_pipeline
        if self.world_size == stages or self._group is not None:
            return
        mesh = init_device_mesh(
            self.root_device.type, (self.world_size // stages, stages), mesh_dim_names=("replica", "stage")
        )
        self._group, self._replicas = mesh.get_group("stage"), mesh.get_group("replica")

    def _build(self, trainer: pl.Trainer) -> None:
        builder = PipelineBuilder(
            self._settings,
            precision=self.precision_plugin,
            device=self.root_device,
            group=self._group,
            replicas=self._replicas,
            neighbours=self.num_processes,
            to_device=lambda batch: self.batch_to_device(batch, self.root_device),
        )
        built = builder.build(trainer, self._target)
        if built is None:
            return
        self._target, self._pipelined = built
        self._partition = self._pipelined.partition
        self._pipelined.ownership.give_up()
        self._steps = PipelineSteps(
            trainer.lightning_module,
            self._pipelined,
            context=self.precision_plugin.train_step_context,
            replicas=self._replicas,
        )
        attach(self._target.module, self._pipelined)

    # ---------------------------------------------------------------- steps

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._devices_per_pipeline > 1:
            # Every process of a pipeline works on the same batch, whatever their loaders drew.
            batch = first(batch, self._group)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._steps is not None
        assert not kwargs
        self._share_buffers()
        return self._steps.run(*args)

    @override
    def on_validation_start(self) -> None:
        self._share_buffers()
        super().on_validation_start()

    def _share_buffers(self) -> None:
        """Give copies of the pipeline the first one's buffers, as DDP does before each forward: they have seen other batches."""
        model = self.lightning_module
        if self._replicas is not None and model is not None:
            for buffer in model.buffers():
                if buffer.device.type != "meta":
                    share(buffer, self._replicas)

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        assert self._steps is not None
        found = closure_loss

        def backward() -> None:
            nonlocal found
            found = super(RotorPipelineStrategy, self).backward(closure_loss, optimizer, *args, **kwargs)

        self._steps.backward(backward)
        return found

    @override
    def reduce(
        self, tensor: torch.Tensor, group: Any = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> torch.Tensor:
        """Processes of one pipeline hold the same, which counts once in a sum that ``self.log`` asks for by name."""
        reduced = super().reduce(tensor, group, reduce_op)
        if group is None and isinstance(reduce_op, str) and reduce_op.lower() == "sum":
            return reduced / self._devices_per_pipeline
        return reduced

    def _clip_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: int | float) -> None:
        assert self._pipelined is not None
        self._pipelined.ownership.clip_by_norm(self.precision_plugin.main_params(optimizer), float(clip_val))

    # ---------------------------------------------------------------- checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        own = super().lightning_module_state_dict()
        return own if self._pipelined is None or self._failing else self._pipelined.ownership.whole_state_dict(own)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
            super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self._pipelined is None or self._failing:
            return self._optimizer_states.get(id(optimizer)) or super().optimizer_state(optimizer)
        return self._pipelined.ownership.whole_optimizer_state(
            optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._pipelined is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(self._pipelined.ownership.own_optimizer_state(optimizer, state))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._failing:
            warnings.warn(
                "no checkpoint is written, since the other processes' part of it is out of reach after an error",
                stacklevel=2,
            )
            return
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
        if self._lifeline is not None:
            explain(exception, self._lifeline)
            self._lifeline.fail(exception)
        forget_frames(exception)

    @override
    def teardown(self) -> None:
        if self._pipelined is not None and self._target is not None:
            detach(self._target.module)
            self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
            self._pipelined.runner.release()
            if not self._failing:
                self._share_buffers()
                # For checkpoints behind the fit.
                self._optimizer_states = {id(each): self.optimizer_state(each) for each in self.optimizers}
            self._pipelined.ownership.restore(values=not self._failing)
            self._pipelined = self._steps = None
        if self._metrics is not None:
            self._metrics.release()
            self._metrics = None
        super().teardown()
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        if self._failing and dist.is_initialized() and dist.get_backend() == "gloo":
            # Who waits for this process wakes up, even if it lives on. NCCL would wait for what is pending.
            self._group = self._replicas = None
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
