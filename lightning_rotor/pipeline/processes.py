"""The processes of a pipeline, and what they give each other: values, tensors, and a common start."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_rotor.devices import kind_of
from lightning_rotor.errors import PipelineError, RotorError
from lightning_rotor.planned.agreement import answers_of_all
from lightning_rotor.stages.generators import GeneratorStates


@dataclass(frozen=True, slots=True)
class PipelineProcesses:
    """The processes of one pipeline, in its order: stage ``s`` of ``D`` processes is on process ``s % D``.

    Attributes:
        device: Of this process.
        group: Of the pipeline's processes; None for all.
        replicas: Group of those in the same place of other copies of the pipeline, which see other batches; None
            without copies.
    """

    device: torch.device
    group: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None

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
    # Launchers number processes machine by machine, so those of one pipeline, which talk most, are neighbours.
    mesh = init_device_mesh(device.type, (copies, stages), mesh_dim_names=("replica", "stage"))
    return PipelineProcesses(device, mesh.get_group("stage"), mesh.get_group("replica"))


def first(value: Any, group: dist.ProcessGroup | None = None, *, source: int = 0) -> Any:
    """The first process's value, or that of another one, on every process; an error is raised on every one."""
    box = [value]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(box, group=group, group_src=source)
    answer = box[0]
    # If one process alone raised, the others would wait for its next message for ever.
    if isinstance(answer, RotorError):
        raise answer
    return answer


def processes_with(flag: bool, group: dist.ProcessGroup | None = None) -> list[int]:
    """Numbers of the processes whose flag is True."""
    told = answers_of_all(flag, group)
    return [process for process, is_set in enumerate(told) if is_set]


def share(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, source: int = 0) -> None:
    """Copy a tensor's values, in any layout of memory, from one process to all."""
    if dist.get_world_size(group) == 1:
        return
    own = tensor.detach()
    for dimension in range(own.dim()):
        # Expanded, all entries along a dimension are one, and torch refuses to write them as a whole.
        if own.stride(dimension) == 0 and own.shape[dimension] > 1:
            own = own.narrow(dimension, 0, 1)
    # Messages are sent from contiguous memory.
    dense = own.contiguous()
    dist.broadcast(dense, group=group, group_src=source)
    if dense is not own:
        own.copy_(dense)


def share_start(model: nn.Module, processes: PipelineProcesses) -> None:
    """Give all processes the first one's parameters and buffers, and those of a pipeline its random generators."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors.update(model.named_buffers())
    own_facts = []
    for name, tensor in tensors.items():
        own_facts.append((name, tuple(tensor.shape), tensor.dtype))
    # Before tensors are sent: with other shapes, a broadcast would fail or hang.
    first_facts = first(own_facts)
    others = processes_with(own_facts != first_facts)
    if others:
        raise PipelineError(
            f"processes {others} have built other parameters and buffers than the first (names, shapes or dtypes): "
            "expected the same model on every process"
        )
    for tensor in tensors.values():
        share(tensor)
    first(GeneratorStates(torch.device("cpu")), processes.group).restore()
    # By itself, since each process has it on another device.
    kind = kind_of(processes.device)
    if kind.own_generator is not None:
        state = first(kind.generator_state(processes.device), processes.group)
        kind.set_generator_state(processes.device, state)
