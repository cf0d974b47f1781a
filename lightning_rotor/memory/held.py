"""What a training process holds besides activations: parameters, buffers, gradients, optimizer state.

Sizes are those of unique storages, so tied weights and views count once, and on the CPU they are exact to the byte. On
a GPU each storage is rounded up to the allocator's block, which is what ``torch.cuda.memory_allocated`` shows. What an
optimizer will hold before its first step is in :mod:`lightning_rotor.memory.optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lightning_rotor.errors import ModelError
from lightning_rotor.private.torch_names import identity_of, is_traceable_wrapper_subclass, sparse_parts
from lightning_rotor.units import BLOCK_BYTES, in_blocks


def parameter_bytes(module: nn.Module, device: torch.device | str | None = None) -> int:
    """Memory of a module's parameters.

    Args:
        module: Tied parameters count once.
        device: Count only what lies there; None counts all devices.
    Returns:
        Bytes of unique storages.
    Raises:
        ModelError: A parameter of a lazy module has no shape yet.
    """
    return storage_bytes(_initialized(module.named_parameters()), device)


def buffer_bytes(module: nn.Module, device: torch.device | str | None = None) -> int:
    """Memory of a module's buffers, persistent or not.

    Args:
        module: A buffer that shares memory with a parameter counts as that parameter and not here.
        device: Count only what lies there; None counts all devices.
    Returns:
        Bytes of unique storages.
    Raises:
        ModelError: A parameter or buffer of a lazy module has no shape yet.
    """
    parameters = set(_storages(_initialized(module.named_parameters())))
    return _sum(_storages(_initialized(module.named_buffers())), device, without=parameters)


def gradient_bytes(module: nn.Module, device: torch.device | str | None = None) -> int:
    """Memory of the gradients that a module holds once a backward has reached all its parameters.

    Args:
        module: Parameters that do not require gradients have none. Parameters that share memory each have a gradient.
        device: Count only what lies there; None counts all devices.
    Returns:
        Bytes of those that exist, plus those that a backward will add. An embedding with sparse gradients may need
        less.
    Raises:
        ModelError: A parameter of a lazy module has no shape yet.
    """
    parameters = list(_initialized(module.named_parameters()))
    missing = (p for p in parameters if p.requires_grad and p.grad is None)
    new_bytes = sum(_future_gradient_bytes(p) for p in missing if is_on(p.device, device))
    return existing_gradient_bytes(module, device) + new_bytes


def existing_gradient_bytes(module: nn.Module, device: torch.device | str | None = None) -> int:
    """Memory of the gradients that a module holds now.

    Args:
        module: Any module.
        device: Count only what lies there; None counts all devices.
    Returns:
        Bytes of unique storages.
    """
    return storage_bytes((p.grad for p in module.parameters() if p.grad is not None), device)


def optimizer_state_bytes(optimizer: torch.optim.Optimizer, device: torch.device | str | None = None) -> int:
    """Memory that an optimizer holds now, besides the parameters and gradients that it works on.

    Args:
        optimizer: With or without state.
        device: Count only what lies there; None counts all devices. Adam's step counters, for one, stay on the CPU when
            the parameters are on a GPU, unless ``capturable`` or ``fused`` is set.
    Returns:
        Bytes of unique storages.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = list(walk_tensors(list(optimizer.state.values())))
    return _sum(_storages(state), device, without=set(_storages([*parameters, *gradients])))


def storage_bytes(tensors: Iterable[torch.Tensor], device: torch.device | str | None = None) -> int:
    """Memory of tensors: unique storages, those of sparse tensors and wrappers included.

    Args:
        tensors: Any tensors; they may share memory.
        device: Count only what lies there; None counts all devices.
    Returns:
        Bytes.
    """
    return _sum(_storages(tensors), device)


def block_bytes(size_bytes: int, device: torch.device) -> int:
    """What an allocation of ``size_bytes`` adds to the allocator's count on a device."""
    return in_blocks(size_bytes, BLOCK_BYTES.get(device.type, 1))


def is_on(device: torch.device, wanted: torch.device | str | None) -> bool:
    """Whether ``device`` is the wanted one; ``"cuda"`` means any GPU, None any device."""
    if wanted is None:
        return True
    wanted = torch.device(wanted)
    if wanted.type == "cpu":  # its tensors have no index, whether or not the user writes "cpu:0"
        return device.type == "cpu"
    return wanted in (device, torch.device(device.type))


def walk_tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in nested mappings, lists, tuples and sets, where an optimizer may keep its state."""
    match value:
        case torch.Tensor():
            yield value
        case Mapping():
            for item in value.values():
                yield from walk_tensors(item)
        case list() | tuple() | set() | frozenset():
            for item in value:
                yield from walk_tensors(item)


def storages_of(tensor: Any) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor: several for a sparse one or a wrapper such as DTensor."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a DTensor lists its mesh as well
                yield from storages_of(part)
    elif tensor.layout is torch.sparse_coo:
        for part in sparse_parts(tensor):
            yield from storages_of(part)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
            yield from storages_of(part)
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values()):
            yield from storages_of(part)
    else:
        yield tensor.untyped_storage()


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Unique storages by identity. The address would not do: it is 0 for every tensor on ``meta``."""
    return {identity_of(storage): storage for tensor in tensors for storage in storages_of(tensor)}


def _sum(
    storages: dict[int, torch.UntypedStorage],
    device: torch.device | str | None,
    *,
    without: set[int] | frozenset[int] = frozenset(),
) -> int:
    return sum(
        block_bytes(storage.nbytes(), storage.device)
        for identity, storage in storages.items()
        if identity not in without and is_on(storage.device, device)
    )


def _initialized(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise ModelError(
                f"{name!r} belongs to a lazy module and has no shape yet: run one batch through the model first"
            )
        yield tensor


def _future_gradient_bytes(parameter: torch.Tensor) -> int:
    """A gradient is dense, whatever the parameter's strides are."""
    # Newer versions of torch let a parameter choose the type of its gradient; FSDP1's parameters are views between its
    # steps, which may not.
    dtype = (getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None) or parameter.dtype
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # a DTensor's shard
    return block_bytes(local.numel() * dtype.itemsize, parameter.device)
