"""Which process has which weights, and what the processes of a pipeline give each other.

Each process keeps the weights of its own stages and of everything outside of the pipeline. Parameters on ``meta`` stand
for the others, so names, shapes and parameter numbers in optimizers are those of the whole model everywhere.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_rotor.devices import kind_of
from lightning_rotor.errors import PipelineError, RotorError
from lightning_rotor.memory.held import storage_bytes
from lightning_rotor.planned.agreement import told_by_all
from lightning_rotor.private.values import tensors_in, tree_map_only
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.sequential import Stage


@dataclass(frozen=True, slots=True)
class PipelineProcesses:
    """The processes of one pipeline, in its order: stage ``s`` of ``D`` processes is on process ``s % D``."""

    device: torch.device
    group: dist.ProcessGroup | None = None  # None for all
    replicas: dist.ProcessGroup | None = None  # same place in copies of the pipeline, which see other batches

    @property
    def rank(self) -> int:
        """Number of this process."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Number of processes."""
        return dist.get_world_size(self.group)


def processes_of(device: torch.device, stages: int) -> PipelineProcesses:
    """The processes of this job's pipelines of so many stages."""
    copies = dist.get_world_size() // stages
    if copies == 1:
        return PipelineProcesses(device)
    mesh = init_device_mesh(device.type, (copies, stages), mesh_dim_names=("replica", "stage"))
    return PipelineProcesses(device, mesh.get_group("stage"), mesh.get_group("replica"))


def first(value: Any, group: dist.ProcessGroup | None = None, *, source: int = 0) -> Any:
    """The first process's value, or that of another one, on every process; an error is raised on every one."""
    box = [value]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(box, group=group, group_src=source)
    if isinstance(box[0], RotorError):
        raise box[0]
    return box[0]


def processes_with(found: bool, group: dist.ProcessGroup | None = None) -> list[int]:
    """Numbers of the processes that have found something."""
    return [process for process, each in enumerate(told_by_all(found, group)) if each]


def share(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, source: int = 0) -> None:
    """Copy a tensor's values, in any layout of memory, from one process to all."""
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


def share_start(model: nn.Module, processes: PipelineProcesses) -> None:
    """Give all processes the first one's parameters and buffers, and those of a pipeline its random generators."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    mine = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    whose = first(mine)
    if odd := processes_with(mine != whose):
        raise PipelineError(
            f"processes {odd} have built other parameters and buffers than the first (names, shapes or dtypes): "
            "expected the same model on every process"
        )
    for tensor in tensors.values():
        share(tensor)
    group, device = processes.group, processes.device
    first(GeneratorStates(torch.device("cpu")), group).restore()
    kind = kind_of(device)
    if kind.own_generator is not None:
        kind.set_generator_state(device, first(kind.generator_state(device), group))


def tensors_of(stage: Stage) -> list[torch.Tensor]:
    """Parameters and buffers of a stage."""
    modules = (module for _, module in stage.submodules())
    buffers = {id(b): b for module in modules for b in module._buffers.values() if b is not None}
    return [*stage.parameters(), *buffers.values()]


class _Slot(NamedTuple):
    """A tensor of a module, and the process that owns it."""

    table: dict[str, Any]
    name: str
    original: torch.Tensor
    owner: int


class Placement:
    """Which process of a pipeline has which tensors of a model; a PipelineError if a parameter is in two places."""

    def __init__(self, model: nn.Module, stages: Sequence[Sequence[Stage]], processes: PipelineProcesses) -> None:
        self._device, self._group = processes.device, processes.group
        self._rank, self._size = processes.rank, processes.size
        self._stage_of = _stages_of_tensors(model, stages)
        self._slots = [
            _Slot(table, name, tensor, self._stage_of[id(tensor)] % self._size)
            for module in model.modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None and id(tensor) in self._stage_of
        ]
        self._owner_by_name = {
            name: self._stage_of[id(tensor)] % self._size
            for name, tensor in model.state_dict(keep_vars=True).items()
            if id(tensor) in self._stage_of
        }

    def stage_of(self, tensor: torch.Tensor) -> int | None:
        """Pipeline stage of a tensor of the model; None is outside."""
        return self._stage_of.get(id(tensor))

    def give_up(self) -> None:
        """Replace the parameters and buffers of other processes by ones without memory."""
        stand_ins: dict[int, torch.Tensor] = {}
        for slot in self._slots:
            original = slot.original
            if slot.owner == self._rank:
                continue
            if id(original) not in stand_ins:
                made: torch.Tensor = torch.empty_like(original, device="meta")
                learns = isinstance(original, nn.Parameter)
                stand_ins[id(original)] = nn.Parameter(made, original.requires_grad) if learns else made
                # Other holders of the tensor then hold no memory.
                original.data = original.new_empty(0)
            slot.table[slot.name] = stand_ins[id(original)]

    def restore(self, *, values: bool = True) -> None:
        """Put back everything, in the original objects."""
        done: set[int] = set()
        for slot in self._slots:
            original, stand_in = slot.original, slot.table[slot.name]
            if id(original) not in done:
                done.add(id(original))
                if slot.owner != self._rank:
                    original.data = torch.empty(stand_in.shape, dtype=stand_in.dtype, device=self._device)
                    if not values and original.is_floating_point():
                        original.data.fill_(math.nan)
                if values:
                    share(original.data, self._group, source=slot.owner)
            if isinstance(original, nn.Parameter) and stand_in is not None:
                original.requires_grad_(stand_in.requires_grad)
            slot.table[slot.name] = original

    # ---------------------------------------------------------------- checkpoints

    def whole_state_dict(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The whole model's state on the first process, in the order of its keys; elsewhere the local state."""
        mine = {name: value for name, value in own.items() if self._owner_by_name.get(name) == self._rank}
        return {**own, **self._together(mine)}

    def whole_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """State of an optimizer for all parameters, on the pipeline's first process."""
        state = optimizer.state_dict()
        together = self._together(state["state"]) | state["state"]
        return {**state, "state": {key: together[key] for key in sorted(together)}}

    def own_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a whole optimizer state that belongs here."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        here = {number for number, parameter in zip(numbers, parameters, strict=False) if not parameter.is_meta}
        return {**state, "state": {key: value for key, value in state["state"].items() if key in here}}

    def _together(self, part: Mapping[Any, Any]) -> dict[Any, Any]:
        """Entries of all processes on the first one, of several the earlier process's; elsewhere nothing."""
        if self._size == 1:
            return dict(part)
        parts: list[Any] | None = [None] * self._size if self._rank == 0 else None
        sent = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), dict(part)) if self._rank else part
        dist.gather_object(sent, parts, group=self._group, group_dst=0)
        return {key: value for each in reversed(parts or []) for key, value in each.items()}

    def clip_by_norm(self, parameters: Iterable[torch.Tensor], limit: float) -> torch.Tensor:
        """Clip gradients by their norm over all processes, and return the norm before."""
        parameters = list(parameters)
        # By place in the list, the norm and how many have it: what is outside of the pipeline counts once.
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


def _stages_of_tensors(model: nn.Module, stages: Sequence[Sequence[Stage]]) -> dict[int, int]:
    """Pipeline stage by id of a parameter or buffer of the chain."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[int, int] = {}
    inside: set[int] = set()
    for number, parts in enumerate(stages):
        for stage in parts:
            inside.update(id(module) for _, module in stage.submodules())
            for tensor in tensors_of(stage):
                other = found.setdefault(id(tensor), number)
                if other != number and isinstance(tensor, nn.Parameter):
                    raise PipelineError(
                        f"pipeline stages {other} and {number} share the parameter {names.get(id(tensor), '?')!r}: "
                        "expected each parameter in one stage, since every device has its own. Choose a balance that "
                        "keeps its layers together, or untie the weights"
                    )
    # A traced forward may read parameters of modules that it never calls: only outside modules hold those.
    held = [set(map(id, module._parameters.values())) for module in model.modules() if id(module) in inside]
    held_inside = set[int]().union(*held)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items() if id(module) not in inside else ():
            if id(parameter) not in found or id(parameter) not in held_inside:
                continue
            raise PipelineError(
                f"pipeline stage {found[id(parameter)]} shares the parameter {f'{name}.{key}'.lstrip('.')!r} with what "
                "is outside of the pipeline: expected each parameter in one place. Let module=... name a module that "
                "holds both, or untie the weights"
            )
    return found


def outside(model: nn.Module, module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of the model that are not the module's."""
    inside = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in inside]


def kept_bytes(tensors: Sequence[torch.Tensor], optimizer_scale: float) -> int:
    """Bytes of parameters and buffers, and of optimizer state, so many for each byte that learns."""
    learning = storage_bytes(tensor for tensor in tensors if tensor.requires_grad)
    return storage_bytes(tensors) + round(optimizer_scale * learning)


def bytes_around(model: nn.Module, module: nn.Module, batch: Any, optimizer_scale: float) -> int:
    """Bytes that a process holds besides the stages of a module: what is outside, its gradients, and the batch."""
    around = outside(model, module)
    gradients = storage_bytes(tensor for tensor in around if tensor.requires_grad)
    return kept_bytes(around, optimizer_scale) + gradients + storage_bytes(tensors_in(batch))
