"""Train a LightningModule whose layers are spread over several devices.

First batch ──► checked ──► what the module is called with ──► memory that is left ──► ``pipelined``

What a pipeline cannot train is refused before training, on every process, by a :class:`PipelineError` that says what
would work.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_rotor.errors import PipelineError, RotorWarning
from lightning_rotor.pipeline.partition import Partition, RecomputeMode
from lightning_rotor.pipeline.pipeline_options import check_names
from lightning_rotor.pipeline.pipeline_schedule import PipelineScheduleName
from lightning_rotor.pipeline.pipelined_module import PipelinedModule
from lightning_rotor.pipeline.placement import Placement
from lightning_rotor.pipeline.processes import PipelineProcesses, first, processes_of, share, share_start
from lightning_rotor.planned.key_value_caches import KeyValueCaches
from lightning_rotor.planned.target_search import Target
from lightning_rotor.private import lightning_names as private
from lightning_rotor.private import lightning_packages as packages
from lightning_rotor.strategies.micro_batch_training import train_batch
from lightning_rotor.strategies.pipeline_builder import PipelineBuilder
from lightning_rotor.strategies.pipeline_settings import PipelineSettings
from lightning_rotor.units import parse_limit

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy
else:
    DDPStrategy = packages.joined("strategies.DDPStrategy")

# Of Lightning's strategy; it hands others to DDP, which a pipeline has none of, and which would say nothing.
_LIGHTNINGS_OPTIONS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
)
_WRAPPED_OPTIMIZER = packages.from_each("core.optimizer.LightningOptimizer")


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
        # LightningCLI gives all options that it finds, of DDP, too, by their defaults.
        defaults: dict[str, Any] = {}
        for method in (nn.parallel.DistributedDataParallel.__init__, super().__init__):
            for name, parameter in inspect.signature(method).parameters.items():
                defaults[name] = parameter.default
        chosen = [name for name, value in options.items() if name not in defaults or value != defaults[name]]
        own_names = inspect.signature(RotorPipelineStrategy.__init__).parameters
        check_names(chosen, [*_LIGHTNINGS_OPTIONS, *own_names])
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
        # Of what lasts until teardown.
        self._undo = ExitStack()
        self._processes: PipelineProcesses | None = None
        # By the optimizer's identity, whole states that outlive the cut.
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

    # ---------------------------------------------------------------- setup

    @property
    @override
    def accelerator(self) -> Any:
        # Only for the setter, which a property cannot replace alone.
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        # The first part that a Trainer sets shows which Lightning it is of.
        packages.follow(RotorPipelineStrategy, "strategies.DDPStrategy", accelerator)
        self._accelerator = accelerator

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        # In the place of DDP's own setup, which would wrap the model and average all gradients over all processes.
        self.accelerator.setup(trainer)
        self._optimizer_states = {}
        # Else the group's threads outlive the interpreter, and the process aborts at exit.
        atexit.register(_end_group)
        model = trainer.lightning_module
        stages = self._devices_per_pipeline
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
            self._synchronize_metrics(model, processes.replicas)
        self._return_no_caches(model)
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

    def _synchronize_metrics(self, model: pl.LightningModule, replicas: dist.ProcessGroup | None) -> None:
        """Let metrics be synchronized among copies alone: processes of one pipeline see the same batches."""
        for metric in model.modules():
            if not isinstance(metric, Metric):
                continue
            if replicas is None:
                # ``bool()`` is False: nothing is distributed.
                self._set_until_teardown(metric, "distributed_available_fn", bool)
            else:
                self._set_until_teardown(metric, "process_group", replicas)

    def _return_no_caches(self, model: nn.Module) -> None:
        """Let models of transformers return no keys and values for a next token, unless their caller asks for them.

        Each device would have those of its own layers, in an object that no other device can get.
        """
        caches = KeyValueCaches(model)
        if not caches:
            return
        self._undo.enter_context(caches.off())
        if self.is_global_zero:
            warnings.warn(
                f"RotorPipelineStrategy sets use_cache=False in the configuration of {type(model).__name__} until it "
                "is done: in a pipeline a model returns no past_key_values. Expected use_cache=False",
                RotorWarning,
                stacklevel=2,
            )

    def _set_until_teardown(self, owner: Any, name: str, value: Any) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    # ---------------------------------------------------------------- steps

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # Every process of a pipeline works on the same batch, whatever their loaders drew.
        group = None if self._processes is None else self._processes.group
        batch = first(batch, group)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._cut is not None
        self._share_buffers()
        assert self.lightning_module is not None
        return train_batch(self.lightning_module, self._cut, self.precision_plugin.train_step_context, *args)

    def _share_buffers(self) -> None:
        """Give copies of the pipeline the first one's buffers, as DDP does: they have seen other batches."""
        model = self.lightning_module
        replicas = None if self._processes is None else self._processes.replicas
        if model is None or replicas is None:
            return
        for buffer in model.buffers():
            # Of the layers on other devices of this copy, their own processes share.
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
        if self._cut is None or self._failing:
            return None
        return self._cut.placement

    # ---------------------------------------------------------------- checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        own = super().lightning_module_state_dict()
        if self._placement is None:
            return own
        return self._placement.whole_state_dict(own)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with warnings.catch_warnings():
            # Parameters of other processes stay on ``meta``.
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
            return
        # A checkpoint has the state of the whole model; each process takes that of the layers it has.
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
        """True once training has ended in an exception, here: other processes may wait for ever for an answer."""
        model = self.lightning_module
        trainer = None if model is None else private.trainer_of(model)
        return trainer is not None and trainer.state.status == "interrupted"

    @override
    def teardown(self) -> None:
        if self._cut is not None:
            if not self._failing:
                self._share_buffers()
                # For checkpoints behind the fit.
                for optimizer in self.optimizers:
                    self._optimizer_states[id(optimizer)] = self.optimizer_state(optimizer)
            self._cut.stop(values=not self._failing)
            self._cut = None
        self._undo.close()
        super().teardown()
        if self._failing and dist.is_initialized() and dist.get_backend() == "gloo":
            # Processes that wait for this one wake up, even if it lives on. NCCL would wait for pending work.
            self._processes = None
            _end_group()


def _end_group() -> None:
    """Leave the group of processes, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # The group ends with its last holder, which may be a cycle of garbage.
        gc.collect()


for _registry in packages.from_each("strategies.StrategyRegistry"):
    _registry.register(
        RotorPipelineStrategy.strategy_name,
        RotorPipelineStrategy,
        description="Pipeline parallelism, each stage under its own recomputation plan",
    )
