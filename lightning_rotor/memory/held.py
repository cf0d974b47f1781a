"""Memory that a training process holds besides activations: parameters, buffers, gradients, optimizer state.

Sizes are those of unique storages on ``device``, or on all devices for None: tied weights and views count once. On the
CPU they are exact to the byte. On a GPU each storage is rounded up to the allocator's block, as
``torch.cuda.memory_allocated`` shows it. Lazy modules, whose tensors have no shape yet, raise ``ModelError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_rotor.devices import block_bytes_of
from lightning_rotor.errors import ModelError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.sharding import is_dtensor
from lightning_rotor.private.values import plain_parts, tensors_in
from lightning_rotor.units import in_blocks

AnyDevice: TypeAlias = torch.device | str | None
"""A device, all of its kind if it has no number, or None for all there are."""


def parameter_bytes(module: nn.Module, device: AnyDevice = None) -> int:
    """Bytes of a module's parameters, tied ones counted once."""
    return storage_bytes(_initialized(module.named_parameters()), device)


def buffer_bytes(module: nn.Module, device: AnyDevice = None) -> int:
    """Bytes of a module's buffers, persistent or not, except those that share memory with a parameter."""
    buffers = _initialized(module.named_buffers())
    parameters = _initialized(module.named_parameters())
    return _bytes_beside(buffers, parameters, device)


def gradient_bytes(module: nn.Module, device: AnyDevice = None) -> int:
    """Bytes of a module's gradients once a backward has reached all its parameters; sparse ones may need less."""
    new_bytes = 0
    for parameter in _initialized(module.named_parameters()):
        is_missing = parameter.requires_grad and _gradient_of(parameter) is None
        if is_missing and is_on(parameter.device, device):
            new_bytes += dense_bytes(parameter, _gradient_type(parameter))
    return existing_gradient_bytes(module, device) + new_bytes


def existing_gradient_bytes(module: nn.Module, device: AnyDevice = None) -> int:
    """Bytes of the gradients that a module holds now."""
    return storage_bytes(_gradients_of(module.parameters()), device)


def replaceable(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Gradients and optimizer state whose memory goes with them, as a step may replace them.

    Views are not among them: DDP's gradients may be views of its buckets. Shards are: FSDP2's gradients are views of
    the message that has brought them, which goes with the last of them.
    """
    tensors = _gradients_of(module.parameters())
    for optimizer in optimizers:
        tensors += tensors_in(list(optimizer.state.values()))
    replaceable_tensors = []
    for tensor in tensors:
        # A DTensor or a quantized tensor has its memory in the plain tensors inside.
        if is_dtensor(tensor) or all(map(_has_storage_alone, plain_parts(tensor))):
            replaceable_tensors.append(tensor)
    return replaceable_tensors


def _has_storage_alone(part: torch.Tensor) -> bool:
    """True if a dense tensor is all that its storage holds, so that this goes with it."""
    return part.nbytes == part.untyped_storage().nbytes()


def optimizer_state_bytes(optimizer: Optimizer, device: AnyDevice = None) -> int:
    """Bytes that an optimizer holds now, besides parameters and gradients. Adam's step counters may stay on the CPU."""
    parameters: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    others = [*parameters, *_gradients_of(parameters)]
    # Some optimizers keep a parameter or its gradient in their state, as it is.
    state = tensors_in(list(optimizer.state.values()))
    return _bytes_beside(state, others, device)


def storage_bytes(tensors: Iterable[torch.Tensor], device: AnyDevice = None) -> int:
    """Bytes of the unique storages of tensors, those of sparse tensors and wrappers included."""
    return sum(_sizes(tensors, device).values())


def block_bytes(size_bytes: int, device: torch.device) -> int:
    """Bytes that an allocation of ``size_bytes`` adds to the allocator's count on a device."""
    return in_blocks(size_bytes, block_bytes_of(device.type))


def is_on(device: torch.device, wanted: AnyDevice) -> bool:
    """True if ``device`` is the wanted one; a device without a number means any of its kind, None any."""
    if wanted is None:
        return True
    wanted = torch.device(wanted)
    if wanted.type != device.type:
        return False
    # Tensors on the CPU have no index, whether or not the user writes "cpu:0".
    return wanted.type == "cpu" or wanted.index in (None, device.index)


def _sizes(tensors: Iterable[torch.Tensor], device: AnyDevice) -> dict[int, int]:
    """Bytes of unique storages by identity. The address would not do: it is 0 for every tensor on ``meta``."""
    sizes = {}
    for tensor in tensors:
        if not is_on(tensor.device, device):
            continue
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            # A view keeps all of its storage alive, so the storage's size counts, and not the view's.
            storage_size = block_bytes(storage.nbytes(), tensor.device)
            sizes[private.identity_of(storage)] = storage_size
    return sizes


def _bytes_beside(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor], device: AnyDevice) -> int:
    """Bytes of the storages under some tensors that are under no others."""
    # On all devices: a storage has one, and asking for it again would only take time.
    counted_elsewhere = _sizes(others, None)
    size_bytes = 0
    for identity, storage_size in _sizes(tensors, device).items():
        if identity not in counted_elsewhere:
            size_bytes += storage_size
    return size_bytes


def _initialized(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise ModelError(
                f"{name!r} belongs to a lazy module and has no shape yet: run one batch through the model first"
            )
        yield tensor


def _gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that parameters have now."""
    gradients = map(_gradient_of, parameters)
    return [gradient for gradient in gradients if gradient is not None]


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that a parameter has now."""
    # While ``torch.func.functional_call`` runs, weights may have been computed: torch warns where their gradients are
    # asked for, which they never get.
    return parameter.grad if parameter.is_leaf else None


def _gradient_type(parameter: torch.Tensor) -> torch.dtype:
    # In newer torch a parameter may choose its gradient's type, but not FSDP1's, which are views between steps.
    chosen: torch.dtype | None = None
    if parameter.is_leaf:
        chosen = getattr(parameter, "grad_dtype", None)
    return chosen or parameter.dtype


def dense_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Bytes of a dense tensor of this type and a tensor's shape, whatever its strides are."""
    local = tensor
    if hasattr(tensor, "to_local"):
        # A DTensor's shard: its own shape is that of all shards together.
        local = tensor.to_local()
    return block_bytes(local.numel() * dtype.itemsize, tensor.device)
