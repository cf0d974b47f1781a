"""The processes of one distributed training, as far as a plan must know of them.

They meet once, when the first batch starts: a moment that all of them reach, whatever their batches look like. There the least of their limits
becomes the limit of all, and rank 0's choice of a module that of all. How they come to one plan after that is in
:mod:`lightning_rotor.planned.ranks`.
"""

from __future__ import annotations

import uuid
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_rotor.errors import BudgetError
from lightning_rotor.memory.held import existing_gradient_bytes, gradient_bytes, storage_bytes
from lightning_rotor.planned.ranks import Agreement, JointPlans, PublishedPlans, communicates
from lightning_rotor.planned.target import Target
from lightning_rotor.planning import Plan
from lightning_rotor.private.torch_names import has_rebuilt_buckets, store_of_processes
from lightning_rotor.stages.sharding import messages_bytes


class Ranks:
    """An :class:`~lightning_rotor.planned.ranks.Agreement` that is no constraint until the processes have met, and for one alone.

    Args:
        beyond: Where no plan fits, go on with the one that takes least.
    Attributes:
        limit_bytes: The least limit of any process, or None before they have met.
    """

    def __init__(self, *, beyond: bool = False) -> None:
        self._beyond = beyond
        self.limit_bytes: int | None = None
        self._agreement: Agreement | None = None

    def meet(self, trainer: pl.Trainer, model: pl.LightningModule, limit_bytes: int) -> None:
        """Called by all processes at the same point of their training; each waits for all others.

        Args:
            trainer: Its strategy carries the messages.
            model: Decides on the way in which they will agree on plans.
            limit_bytes: Of this process.
        """
        if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
            return
        self.limit_bytes = least_limit_bytes(trainer, limit_bytes)
        # Plans of one training must not be taken for those of another: the store lives as long as the processes do.
        token = str(trainer.strategy.broadcast(uuid.uuid4().hex))
        if communicates(model):
            self._agreement = JointPlans(dist.new_group(backend="gloo"), beyond=self._beyond)
        else:
            distributed: Any = dist
            store = store_of_processes()
            self._agreement = PublishedPlans(distributed.PrefixStore(token, store))

    @property
    def together(self) -> bool:
        """As in :class:`~lightning_rotor.planned.ranks.Agreement`."""
        return self._agreement is not None and self._agreement.together

    def must_start_afresh(self, *, ready: bool) -> bool:
        """As in :class:`~lightning_rotor.planned.ranks.Agreement`."""
        return self._agreement is not None and self._agreement.must_start_afresh(ready=ready)

    def settle(self, call: str, outcome: Plan | BudgetError) -> Plan:
        """As in :class:`~lightning_rotor.planned.ranks.Agreement`."""
        if self._agreement is not None:
            return self._agreement.settle(call, outcome)
        if isinstance(outcome, BudgetError):
            raise outcome
        return outcome


def least_limit_bytes(trainer: pl.Trainer, limit_bytes: int) -> int:
    """The least of all processes' limits. Each waits for all others."""
    limit = torch.tensor(limit_bytes, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(limit, reduce_op="min"))


def same_target(trainer: pl.Trainer, model: nn.Module, target: Target | None) -> Target | None:
    """Rank 0's choice: batches of different shapes may speak for different modules. Each process waits for all others."""
    name = trainer.strategy.broadcast(None if target is None else target.name)
    if name is None or (target is not None and target.name == name):
        return target if name is not None else None
    return Target(name, model.get_submodule(name), "as on rank 0")


def processes_sharing(trainer: pl.Trainer, device: torch.device) -> int:
    """How many processes of this training take their memory from the device that this one uses."""
    return int(trainer.num_devices) if device.type == "cpu" else 1


def communication_bytes(trainer: pl.Trainer, model: nn.Module) -> int:
    """Memory that a strategy takes for messages: the buckets of DDP, as large as all gradients; under FSDP the gradients on their way.

    Under FSDP also the shards that parameters are gathered from, which the model does not show in its forward.
    """
    wrapped = trainer.strategy.model
    if isinstance(wrapped, DistributedDataParallel):
        ignored: set[str] = wrapped.parameters_to_ignore
        learning = (p for name, p in wrapped.module.named_parameters() if p.requires_grad and name not in ignored)
        return sum(parameter.numel() * parameter.element_size() for parameter in learning)
    shards = _shards(trainer)
    return _hidden_bytes(shards, model) + gradient_bytes(model) + messages_bytes(model) if shards else 0


def unnamed_bytes(trainer: pl.Trainer, model: nn.Module) -> int:
    """The part of :func:`communication_bytes` that is there now, and that neither parameters nor gradients of the model show."""
    wrapped: Any = trainer.strategy.model
    if not isinstance(wrapped, DistributedDataParallel):
        return _hidden_bytes(_shards(trainer), model)
    shown = existing_gradient_bytes(model) if wrapped.gradient_as_bucket_view else 0
    return max(0, communication_bytes(trainer, model) - shown)


def _shards(trainer: pl.Trainer) -> list[torch.Tensor]:
    """What optimizers have of parameters that are spread over processes."""
    trained = [p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]]
    return [parameter for parameter in trained if hasattr(parameter, "device_mesh")]


def _hidden_bytes(shards: list[torch.Tensor], model: nn.Module) -> int:
    """Of shards that the model does not show, since it has the gathered parameters in their places."""
    shown = set(map(id, model.parameters()))
    return storage_bytes(shard for shard in shards if id(shard) not in shown)


def may_take_new_buckets(trainer: pl.Trainer) -> bool:
    """Whether DDP could exchange its buckets in the next step, as it does once to put them into the order of the first backward."""
    wrapped = trainer.strategy.model
    if not isinstance(wrapped, DistributedDataParallel) or trainer.fit_loop.total_batch_idx < 1:
        return False
    if wrapped.find_unused_parameters and not wrapped.static_graph:
        return False
    return not has_rebuilt_buckets(wrapped)
