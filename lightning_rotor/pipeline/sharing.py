"""What the processes of a pipeline give each other, and what they start with alike: weights, buffers and random generators."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_rotor.generators import GeneratorStates
from lightning_rotor.pipeline_schedule import PipelineError


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
