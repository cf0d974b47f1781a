"""Train a LightningModule whose layers are spread over several devices."""

from __future__ import annotations

import atexit
import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from lightning_rotor.attaching import attach, attached, detach
from lightning_rotor.callbacks.dry_step import best_by_compute
from lightning_rotor.generators import GeneratorStates
from lightning_rotor.optimizer_prediction import predict_optimizer_state_bytes
from lightning_rotor.pipeline.lifeline import Lifeline, explain, forget_frames
from lightning_rotor.pipeline.pipelined import PipelinedModule, PipelineOptions, pipelined
from lightning_rotor.pipeline.splitting import join, rows_in, sizes_of, split
from lightning_rotor.pipeline.step import train_step
from lightning_rotor.pipeline.suspended import SuspendedCall, suspended_call
from lightning_rotor.pipeline_schedule import PipelineError, PipelineScheduleName, check_numbers
from lightning_rotor.planning.partition import Partition, PipelineDevice, RecomputeMode
from lightning_rotor.planning.partition.problem import RECOMPUTE_MODES
from lightning_rotor.sequential import Stage
from lightning_rotor.strategies.micro_batch_logs import MicroBatchLogs
from lightning_rotor.target import Target, TargetSearch, named_target
from lightning_rotor.tensors import tensors_in
from lightning_rotor.training_memory import process_limit_bytes
from lightning_rotor.training_state import block_bytes, storage_bytes
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
        check_numbers(schedule, pipeline_stages or 1, 1 if schedule == "interleaved" else micro_batches, 1)
        check_numbers("gpipe", 1, micro_batches, 1)
        if recompute not in RECOMPUTE_MODES:
            raise PipelineError(f"recompute is {recompute!r}: expected one of {', '.join(map(repr, RECOMPUTE_MODES))}")
        if isinstance(balance, str) and balance != "auto":
            raise PipelineError(f'balance is {balance!r}: expected "auto" or numbers such as [3, 4, 2]')
        self._module_name, self._balance, self._micro_batches = module, balance, micro_batches
        self._schedule, self._recompute, self._pipeline_stages = schedule, recompute, pipeline_stages
        self._deferred_batch_norm = deferred_batch_norm
        self._limit, self._sample = parse_limit(mem_limit), sample
        self._pipelined: PipelinedModule | None = None
        self._target: Target | None = None
        self._group: dist.ProcessGroup | None = None
        self._replicas: dist.ProcessGroup | None = None
        self._lifeline: Lifeline | None = None
        self._failed = self._ends_group = False

    @property
    def partition(self) -> Partition | None:
        """How the model is cut; known once training has been set up."""
        return None if self._pipelined is None else self._pipelined.partition

    @property
    def module_name(self) -> str | None:
        """Dotted name of the module that is cut, once known."""
        return self._module_name if self._target is None else self._target.name

    @property
    def _devices_per_pipeline(self) -> int:
        return self._pipeline_stages or self.world_size

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
        if not self._ends_group:
            # Else the group's threads outlive the interpreter, and the process aborts at its very end.
            atexit.register(_end_group)
            self._ends_group = True
        self._check(trainer)
        if self.world_size == self._devices_per_pipeline:
            trainer._accelerator_connector.use_distributed_sampler = False
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self._make_groups()
            self._build(trainer)
            self.setup_optimizers(trainer)
            self._check_optimizers()
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def _check(self, trainer: pl.Trainer) -> None:
        stages, world = self._devices_per_pipeline, self.world_size
        if world % stages:
            raise PipelineError(
                f"pipeline_stages is {stages}, but there are {world} devices: expected a number of devices that is a multiple, such as "
                f"devices={stages * max(world // stages, 1)}"
            )
        if self._schedule == "1f1b" and self._micro_batches < stages:
            raise PipelineError(
                f"micro_batches is {self._micro_batches} for {stages} devices: expected at least as many micro-batches as devices under "
                f'schedule "1f1b". Use micro_batches={stages}, or schedule="gpipe"'
            )
        if isinstance(self.precision_plugin, MixedPrecision) and self.precision_plugin.scaler is not None:
            raise PipelineError(
                'precision "16-mixed" scales the loss by what the gradients of all stages allow, which a pipeline cannot know in time: expected '
                '"bf16-mixed", or "32-true"'
            )
        if self._layer_sync is not None:
            raise PipelineError("sync_batchnorm=True is not for pipelines: expected sync_batchnorm=False")

    def _check_optimizers(self) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise PipelineError(
                    "LBFGS evaluates the loss several times in a step and needs all parameters in one place: expected an optimizer that takes "
                    "one step for each gradient, such as AdamW or SGD"
                )

    def _make_groups(self) -> None:
        stages = self._devices_per_pipeline
        if self.world_size == stages or self._group is not None:
            return
        mesh = init_device_mesh(
            self.root_device.type, (self.world_size // stages, stages), mesh_dim_names=("replica", "stage")
        )
        self._group, self._replicas = mesh.get_group("stage"), mesh.get_group("replica")

    def _build(self, trainer: pl.Trainer) -> None:
        model = self.lightning_module
        assert model is not None
        if not model.automatic_optimization:
            raise PipelineError(
                "manual optimization is not supported by RotorPipelineStrategy: expected automatic optimization"
            )
        batch, batch_bytes = self._first_batch(trainer)
        self._target = target = self._find_target(trainer, model, batch)
        with self.precision_plugin.train_step_context():
            call = self._call_of(model, target.module, batch)
            outside = list(_outside(model, target.module))
            factor, outside_bytes = self._optimizer_bytes(model), 0
            outside_bytes = storage_bytes(outside) + round(
                (1 + factor) * sum(p.numel() * p.element_size() for p in outside if p.requires_grad)
            )
            limit = process_limit_bytes(self._limit, model, (), (), self.root_device)
            if self._limit is None and self.root_device.type == "cpu":
                limit //= self.num_processes
            self._pipelined = pipelined(
                model,
                target.module,
                call,
                options=PipelineOptions(
                    self._micro_batches,
                    self._schedule,
                    self._recompute,
                    self._balance,
                    self._stages_per_device,
                    self._deferred_batch_norm,
                ),
                devices=self._devices(limit - outside_bytes - batch_bytes),
                state_bytes=lambda stages: [_state_bytes(stage, factor, self.root_device) for stage in stages],
                device=self.root_device,
                group=self._group,
                context=self.precision_plugin.train_step_context,
            )
        self._pipelined.ownership.give_up()
        attach(target.module, self._pipelined)

    @property
    def _stages_per_device(self) -> int:
        if self._schedule != "interleaved":
            return 1
        return 2 if isinstance(self._balance, str) else max(len(self._balance) // self._devices_per_pipeline, 1)

    def _devices(self, memory_bytes: int) -> list[PipelineDevice]:
        found: list[Any] = [None] * self._devices_per_pipeline
        dist.all_gather_object(found, max(memory_bytes, 0), group=self._group)
        return [PipelineDevice(each) for each in found]

    def _optimizer_bytes(self, model: pl.LightningModule) -> float:
        """Bytes of optimizer state for each byte of trained parameters."""
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        states = GeneratorStates()
        made = pl.core.optimizer._init_optimizers_and_lr_schedulers(model)[0]
        states.restore()
        return sum(predict_optimizer_state_bytes(each, self.root_device).bytes for each in made) / max(trained, 1)

    def _first_batch(self, trainer: pl.Trainer) -> tuple[Any, int]:
        """The first training batch, or None if it is not needed, and the bytes of what the user's step is given."""
        if self._sample is not None and self._module_name is not None:
            return None, storage_bytes(tensors_in(self._sample))
        states = GeneratorStates()
        trainer.fit_loop.setup_data()
        loader = trainer.fit_loop._combined_loader
        assert loader is not None
        batch = next(iter(CombinedLoader(loader.iterables, "max_size_cycle")))[0]
        # As if nobody had looked: the loop asks for its loader itself, and draws the same random numbers then.
        trainer.fit_loop._combined_loader = None
        states.restore()
        batch = self.batch_to_device(batch, self.root_device)
        rows = rows_in(batch)
        if rows < self._micro_batches:
            raise PipelineError(
                f"the first batch has {rows} rows for {self._micro_batches} micro-batches: expected at least one row for each. Use a larger batch, "
                f"or micro_batches={rows}"
            )
        return batch, storage_bytes(tensors_in(batch))

    def _find_target(self, trainer: pl.Trainer, model: pl.LightningModule, batch: Any) -> Target:
        if self._module_name is not None:
            return named_target(model, self._module_name)
        search = TargetSearch(model, may_be_whole=False)
        found = best_by_compute(search, trainer, model, batch, 0)
        if found is None:
            raise PipelineError(
                f"{type(model).__name__} holds no submodule with several layers that its training_step calls: expected one to cut into pipeline "
                "stages"
            )
        return found

    def _call_of(
        self, model: pl.LightningModule, module: nn.Module, batch: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the module for the largest micro-batch."""
        if self._sample is not None:
            sample = self._sample
            call: Any = (
                ((), sample) if isinstance(sample, dict) else (sample if isinstance(sample, tuple) else (sample,), {})
            )
            found: tuple[tuple[Any, ...], dict[str, Any]] = split(call, sizes_of(rows_in(call), self._micro_batches))[0]
            return found
        part = split(batch, sizes_of(rows_in(batch), self._micro_batches))[0]
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        step = SuspendedCall(lambda: self._user_step(model, part, 0), seed=0, device=self.root_device)
        with attached(module, _Stop()), MicroBatchLogs(model, [rows_in(part)]).caught():
            try:
                return step.start()
            finally:
                step.abandon()
                with torch.no_grad():
                    for buffer, value in buffers:
                        buffer.copy_(value)

    # ---------------------------------------------------------------- steps

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._devices_per_pipeline > 1:
            # Every process of a pipeline works on the same batch, whatever their loaders drew.
            box = [batch]
            dist.broadcast_object_list(box, group=self._group, group_src=0)
            batch = box[0]
        return super().batch_to_device(batch, device, dataloader_idx)

    def _user_step(self, model: pl.LightningModule, *args: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return model.training_step(*args)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        model, pipeline = self.lightning_module, self._pipelined
        assert model is not None
        assert pipeline is not None
        assert not kwargs
        trainer = model.trainer
        batch, rest = args[0], args[1:]
        batch_idx = trainer.fit_loop.epoch_loop.batch_idx
        sizes = sizes_of(rows_in(batch), self._micro_batches)
        rows, scale = sum(sizes), 1 / trainer.accumulate_grad_batches
        logs = MicroBatchLogs(model, sizes)

        def run(number: int, part: Any) -> Callable[[], Any]:
            return lambda: self._user_step(model, part, *rest)

        parameters = [p for p in model.parameters() if p.device.type != "meta"]
        anew = batch_idx % trainer.accumulate_grad_batches == 0
        before = None if anew and self._replicas is None else [p.grad for p in parameters]
        if anew or self._replicas is not None:
            # zero_grad comes between this step and the backward that Lightning asks for: the new gradients wait until then.
            for parameter in parameters:
                parameter.grad = None
        module = self._target.module if self._target is not None else model
        with logs.caught():
            results = train_step(
                pipeline,
                [run(number, part) for number, part in enumerate(split(batch, sizes))],
                _loss_of,
                weights=[scale * size / rows for size in sizes],
                number=trainer.fit_loop.epoch_loop.total_batch_idx,
                outside_learns=any(p.requires_grad for p in _outside(model, module) if isinstance(p, nn.Parameter)),
                on_turn=logs.begin,
            )
        logs.write()
        loss = torch.stack(
            [_loss_of(result).detach() * (size / rows) for result, size in zip(results, sizes, strict=True)]
        ).sum()
        if anew or self._replicas is not None:
            gradients = [p.grad for p in parameters]
            self._average(gradients)
            old = [None] * len(parameters) if anew or before is None else before
            for parameter, gradient in zip(parameters, old, strict=True):
                parameter.grad = gradient
        else:
            gradients = [None] * len(parameters)
        loss = _Deferred.apply(loss, torch.zeros((), requires_grad=True), parameters, gradients, scale)
        return _together(results, sizes, loss)

    def _average(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The mean over replicas."""
        if self._replicas is None:
            return
        count = dist.get_world_size(self._replicas)
        for gradient in gradients:
            if gradient is not None:
                dist.all_reduce(gradient, group=self._replicas)
                gradient.div_(count)

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
            return super().optimizer_state(optimizer)
        return self._pipelined.ownership.whole_optimizer_state(getattr(optimizer, "_optimizer", optimizer))

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
        trainer = None if model is None else model._trainer
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
            self._pipelined.ownership.restore(values=not self._failing)
            self._pipelined = None
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


class _Stop:
    """In the place of a module: whoever calls it waits, and never goes on."""

    active = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        waiting = suspended_call()
        assert waiting is not None
        return waiting.call(args, kwargs)


class _Deferred(torch.autograd.Function):
    """A loss whose backward was done before it was asked for."""

    @staticmethod
    def forward(ctx: Any, loss: Any, anchor: Any, parameters: Any, gradients: Any, scale: float) -> Any:
        ctx.ready = parameters, gradients
        ctx.scale = scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (given,) = grads
        if abs(float(given) - ctx.scale) > 1e-6 * ctx.scale:
            raise PipelineError(
                f"the loss was scaled by {float(given):g} behind training_step, but the pipeline has run its backward with {ctx.scale:g} "
                "(accumulate_grad_batches): expected LightningModule.backward to leave the loss as it is"
            )
        for parameter, gradient in zip(*ctx.ready, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return None, torch.zeros(()), None, None, None


def _loss_of(result: Any) -> torch.Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, torch.Tensor):
        raise PipelineError(
            f"training_step returned {type(result).__name__} without a loss: expected a tensor, or a dict with a tensor under 'loss'"
        )
    return loss


def _together(results: Sequence[Any], sizes: Sequence[int], loss: torch.Tensor) -> Any:
    """What training_step would have returned for the batch: rows one behind the other, numbers as means."""
    if not isinstance(results[0], Mapping):
        return loss
    rest = [tree_flatten({key: value for key, value in result.items() if key != "loss"}) for result in results]
    leaves = []
    for column in zip(*(each[0] for each in rest), strict=True):
        if all(isinstance(value, torch.Tensor) and value.is_floating_point() and not value.dim() for value in column):
            leaves.append(sum(value.detach() * (size / sum(sizes)) for value, size in zip(column, sizes, strict=True)))
        else:
            leaves.append(join([value.detach() if isinstance(value, torch.Tensor) else value for value in column]))
    return {"loss": loss, **tree_unflatten(leaves, rest[0][1])}


def _outside(model: nn.Module, module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers that are not the module's."""
    inside = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in inside]


def _state_bytes(stage: Stage, factor: float, device: torch.device) -> int:
    """Weights, buffers and optimizer state of a stage."""
    parameters = list(stage.parameters())
    buffers = {id(b): b for _, m in stage.submodules() for b in m._buffers.values() if b is not None}
    weights = sum(block_bytes(t.numel() * t.element_size(), device) for t in (*parameters, *buffers.values()))
    learned = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    return weights + round(factor * learned)


StrategyRegistry.register(
    RotorPipelineStrategy.strategy_name,
    RotorPipelineStrategy,
    description="Pipeline parallelism, each stage under its own recomputation plan",
)
