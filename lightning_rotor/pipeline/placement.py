"""Which process has which weights, and the whole of them together.

Each process keeps the weights of its own stages, and of everything outside of the pipeline. In the place of the others stand parameters on
``meta``, so that names, shapes and the numbering of parameters in optimizers are those of the whole model everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_rotor.pipeline.schedule import PipelineError
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.state import GeneratorStates

# ----------------------------------------------------------------------------------------------------
# What the processes of a pipeline give each other, and what they start with alike: weights, buffers and random
# generators.


def first(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The first process's value, on every process."""
    box = [value]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """By process, its value."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def share(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, source: int = 0) -> None:
    """Give every process the values that a tensor has on one of them.

    Args:
        tensor: In any layout of memory.
        group: Of the processes; None are all.
        source: Of the values.
    """
    if dist.get_world_size(group) == 1:
        return
    own = tensor.detach()
    for dimension in range(own.dim()):
        if own.stride(dimension) == 0 and own.shape[dimension] > 1:
            own = own.narrow(dimension, 0, 1)  # expanded: it cannot be written as a whole
    dense = own.contiguous()
    dist.broadcast(dense, group=group, group_src=source)
    if dense is not own:
        own.copy_(dense)


def share_model(model: nn.Module) -> None:
    """Give all processes the first one's parameters and buffers, as DDP does.

    Args:
        model: Built on every process, with random numbers that may differ.
    Raises:
        PipelineError: The processes have built different models, or layers whose shapes are not known yet; on every process.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lazy = [name for name, tensor in tensors.items() if is_lazy(tensor)]
    if lazy:
        raise PipelineError(
            f"{lazy[0]!r} has no shape yet, since its layer is a lazy one: expected parameters with shapes. Run the model once before fit"
        )
    mine = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    whose = first(mine)
    odd = [process for process, alike in enumerate(gathered(mine == whose)) if not alike]
    if odd:
        here = next(
            (
                f"; here {own[0]!r} first differs from {other[0]!r}"
                for own, other in zip(mine, whose, strict=False)
                if own != other
            ),
            "",
        )
        raise PipelineError(
            f"processes {odd} have built other parameters and buffers than the first (names, shapes or dtypes){here}: expected the same model "
            "on every process"
        )
    for tensor in tensors.values():
        share(tensor)


def share_generators(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Give Python's, NumPy's and torch's generators the states of the first process, since user code draws the same on all of them.

    Args:
        device: Where this process computes.
        group: Processes of one pipeline.
    """
    first(GeneratorStates(torch.device("cpu")), group).restore()
    if device.type == "cuda":
        torch.cuda.set_rng_state(first(torch.cuda.get_rng_state(device), group), device)


# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """A tensor of a module that another process has."""

    module: nn.Module
    name: str
    is_parameter: bool
    original: torch.Tensor
    owner: int

    @property
    def tensors(self) -> dict[str, Any]:
        return self.module._parameters if self.is_parameter else self.module._buffers


class Ownership:
    """Which process of a pipeline has which tensors of a model.

    Args:
        model: The whole.
        stages: By pipeline stage, its stages of the chain.
        group: Processes of the pipeline, in its order: stage ``s`` of ``D`` processes is on process ``s % D``.
    Raises:
        PipelineError: Two pipeline stages share a parameter, or one shares it with what is outside of the pipeline.
    """

    def __init__(
        self, model: nn.Module, stages: Sequence[Sequence[Stage]], group: dist.ProcessGroup | None = None
    ) -> None:
        self._model, self._group = model, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._stage_of = _stages_of_tensors(model, stages)
        self._slots = [
            _Slot(module, name, is_parameter, tensor, self._stage_of[id(tensor)] % self._size)
            for module in model.modules()
            for is_parameter, tensors in ((True, module._parameters), (False, module._buffers))
            for name, tensor in tensors.items()
            if tensor is not None and id(tensor) in self._stage_of
        ]
        self._owner_by_name = {
            name: self._stage_of[id(tensor)] % self._size
            for name, tensor in model.state_dict(keep_vars=True).items()
            if id(tensor) in self._stage_of
        }

    def stage_of(self, tensor: torch.Tensor) -> int | None:
        """The pipeline stage that a tensor of the model belongs to; None is outside."""
        return self._stage_of.get(id(tensor))

    def give_up(self) -> None:
        """Put parameters and buffers without memory in the place of those that others have."""
        stand_ins: dict[int, torch.Tensor] = {}
        for slot in self._slots:
            if slot.owner == self._rank:
                continue
            if id(slot.original) not in stand_ins:
                stand_ins[id(slot.original)] = torch.empty_like(slot.original, device="meta")
                if isinstance(slot.original, nn.Parameter):
                    stand_ins[id(slot.original)] = nn.Parameter(
                        stand_ins[id(slot.original)], requires_grad=slot.original.requires_grad
                    )
                # Whoever else holds on to it holds no memory.
                slot.original.data = slot.original.new_empty(0)
            slot.tensors[slot.name] = stand_ins[id(slot.original)]

    def restore(self, *, values: bool = True) -> None:
        """Put everything back, in the original objects.

        Args:
            values: With the weights as they are now, from whoever has them. False, after an error, asks nobody and leaves NaN.
        """
        done: set[int] = set()
        for slot in self._slots:
            stand_in = slot.tensors[slot.name]
            if id(slot.original) not in done:
                done.add(id(slot.original))
                if slot.owner != self._rank:
                    slot.original.data = torch.empty(stand_in.shape, dtype=stand_in.dtype, device=self._device)
                    if not values and slot.original.is_floating_point():
                        slot.original.data.fill_(math.nan)
                if values:
                    share(slot.original.data, self._group, source=slot.owner)
            if slot.is_parameter and stand_in is not None:
                slot.original.requires_grad_(stand_in.requires_grad)
            slot.tensors[slot.name] = slot.original

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self._model.parameters() if p.device.type != "meta"), torch.device("cpu"))

    # ---------------------------------------------------------------- checkpoints

    def whole_state_dict(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The whole model's state on the pipeline's first process, in the order of its keys; elsewhere what is there."""
        mine = {name: value for name, value in own.items() if self._owner_by_name.get(name) == self._rank}
        gathered = self._gathered({name: _on_host(value) for name, value in mine.items()} if self._rank else {})
        if gathered is None:
            return dict(own)
        found = {name: value for part in gathered for name, value in part.items()}
        return {name: found.get(name, value) for name, value in own.items()}

    def whole_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimizer for all parameters on the pipeline's first process."""
        state = optimizer.state_dict()
        gathered = self._gathered({key: _on_host(value) for key, value in state["state"].items()} if self._rank else {})
        if gathered is not None:
            together = {key: value for part in reversed(gathered) for key, value in part.items()} | state["state"]
            state["state"] = {key: together[key] for key in sorted(together)}
        return state

    def own_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a whole optimizer state that belongs here."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        here = {
            number for number, parameter in zip(numbers, parameters, strict=False) if parameter.device.type != "meta"
        }
        return {**state, "state": {key: value for key, value in state["state"].items() if key in here}}

    def _gathered(self, part: dict[Any, Any]) -> list[dict[Any, Any]] | None:
        if self._size == 1:
            return [part]
        gathered: list[Any] | None = [None] * self._size if self._rank == 0 else None
        dist.gather_object(part, gathered, group=self._group, group_dst=0)
        return gathered

    # ---------------------------------------------------------------- gradients

    def clip_by_norm(self, parameters: Iterable[torch.Tensor], limit: float) -> torch.Tensor:
        """Clip gradients by the norm of all of them, wherever they are.

        Args:
            parameters: Whose gradients to clip.
            limit: Largest norm.
        Returns:
            The norm before.
        """
        parameters = list(parameters)
        # By place in the list, the norm and how many have it: what is outside of the pipeline is everywhere, and counts once.
        told = torch.zeros(2, len(parameters), dtype=torch.float64, device=self._device)
        for place, parameter in enumerate(parameters):
            if parameter.grad is not None and (self._rank == 0 or self.stage_of(parameter) is not None):
                told[0, place] = torch.linalg.vector_norm(parameter.grad)
                told[1, place] = 1
        if self._size > 1:
            dist.all_reduce(told, group=self._group)
        norms = [told[0, place].to(parameters[place].dtype) for place in told[1].nonzero().flatten().tolist()]
        # In the order and the precision of one process, for the same bits.
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=self._device)
        torch.nn.utils.clip_grads_with_norm_([p for p in parameters if p.grad is not None], limit, norm)
        return norm


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_host(entry) for key, entry in value.items()}
    return value


def _stages_of_tensors(model: nn.Module, stages: Sequence[Sequence[Stage]]) -> dict[int, int]:
    """By id of a parameter or buffer of the chain, its pipeline stage."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[int, int] = {}
    inside: set[int] = set()
    for number, parts in enumerate(stages):
        for stage in parts:
            modules = [module for _, module in stage.submodules()]
            inside.update(map(id, modules))
            for tensor in (
                *stage.parameters(),
                *(b for module in modules for b in module._buffers.values() if b is not None),
            ):
                other = found.setdefault(id(tensor), number)
                if other != number and isinstance(tensor, nn.Parameter):
                    raise PipelineError(
                        f"pipeline stages {other} and {number} share the parameter {names.get(id(tensor), '?')!r}: expected each parameter in one "
                        "stage, since every device has its own. Choose a balance that keeps its layers together, or untie the weights"
                    )
    outside = {
        id(tensor): f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        if id(module) not in inside
        for key, tensor in module._parameters.items()
        if tensor is not None
    }
    for tensor_id, name in outside.items():
        if tensor_id in found and _is_apart(model, tensor_id, inside):
            raise PipelineError(
                f"pipeline stage {found[tensor_id]} shares the parameter {name!r} with what is outside of the pipeline: expected each parameter "
                "in one place. Let module=... name a module that holds both, or untie the weights"
            )
    return found


def _is_apart(model: nn.Module, tensor_id: int, inside: set[int]) -> bool:
    """Whether modules inside and outside of the stages hold the tensor. A traced forward may read parameters of modules that it never calls."""
    holders = [id(module) for module in model.modules() if any(id(t) == tensor_id for t in module._parameters.values())]
    return any(holder in inside for holder in holders) and any(holder not in inside for holder in holders)
