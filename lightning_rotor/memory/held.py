"""What a training process holds besides activations: parameters, buffers, gradients, optimizer state.

Sizes are those of unique storages on ``device``, or on all devices for None: tied weights and views count once. On the
CPU they are exact to the byte. On a GPU each storage is rounded up to the allocator's block, as
``torch.cuda.memory_allocated`` shows it. Lazy modules, whose tensors have no shape yet, raise ``ModelError``.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lightning_rotor.errors import ModelError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import plain_parts, tensors_in
from lightning_rotor.profiling.dry_run import AssumedValues, fake_copy, without_trace
from lightning_rotor.units import BLOCK_BYTES, in_blocks


def parameter_bytes(module: nn.Module, device: torch.device | str | None = None) -> int:
    """Bytes of a module's parameters, tied ones counted once."""
    return storage_bytes(_initialized(module.named_parameters()), device)


def buffer_bytes(module: nn.Module, device: torch.device | str | None = None) -> int:
    """Bytes of a module's buffers, persistent or not, except those that share memory with a parameter."""
    return _bytes_beside(_initialized(module.named_buffers()), _initialized(module.named_parameters()), device)


def gradient_bytes(module: nn.Module, device: torch.device | str | None = None) -> int:
    """Bytes of a module's gradients once a backward has reached all its parameters; sparse ones may need less."""
    parameters = list(_initialized(module.named_parameters()))
    missing = (p for p in parameters if p.requires_grad and p.grad is None)
    new_bytes = sum(_dense_bytes(p, _gradient_type(p)) for p in missing if is_on(p.device, device))
    return existing_gradient_bytes(module, device) + new_bytes


def existing_gradient_bytes(module: nn.Module, device: torch.device | str | None = None) -> int:
    """Bytes of the gradients that a module holds now."""
    return storage_bytes((p.grad for p in module.parameters() if p.grad is not None), device)


def own_gradients(module: nn.Module) -> list[torch.Tensor]:
    """The gradients of a module whose memory goes with them. DDP's may be views of its buckets."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [
        each for each in gradients if each.layout is torch.strided and each.nbytes == each.untyped_storage().nbytes()
    ]


def optimizer_state_bytes(optimizer: torch.optim.Optimizer, device: torch.device | str | None = None) -> int:
    """Bytes that an optimizer holds now, besides parameters and gradients. Adam's step counters may stay on the CPU."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return _bytes_beside(tensors_in(list(optimizer.state.values())), [*parameters, *gradients], device)


def storage_bytes(tensors: Iterable[torch.Tensor], device: torch.device | str | None = None) -> int:
    """Bytes of the unique storages of tensors, those of sparse tensors and wrappers included."""
    return sum(_sizes(tensors, device).values())


def block_bytes(size_bytes: int, device: torch.device) -> int:
    """What an allocation of ``size_bytes`` adds to the allocator's count on a device."""
    return in_blocks(size_bytes, BLOCK_BYTES.get(device.type, 1))


def is_on(device: torch.device, wanted: torch.device | str | None) -> bool:
    """True if ``device`` is the wanted one; ``"cuda"`` means any GPU, None any device."""
    if wanted is None:
        return True
    wanted = torch.device(wanted)  # tensors on the CPU have no index, whether or not the user writes "cpu:0"
    return wanted.type == device.type and (wanted.type == "cpu" or wanted.index in (None, device.index))


def _sizes(tensors: Iterable[torch.Tensor], device: torch.device | str | None) -> dict[int, int]:
    """Bytes of unique storages by identity. The address would not do: it is 0 for every tensor on ``meta``."""
    return {
        private.identity_of(part.untyped_storage()): block_bytes(part.untyped_storage().nbytes(), tensor.device)
        for tensor in tensors
        if is_on(tensor.device, device)
        for part in plain_parts(tensor)
    }


def _bytes_beside(
    tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor], device: torch.device | str | None
) -> int:
    """Bytes of the storages under some tensors that are under no others."""
    known = _sizes(others, None)
    return sum(size for identity, size in _sizes(tensors, device).items() if identity not in known)


def _initialized(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise ModelError(
                f"{name!r} belongs to a lazy module and has no shape yet: run one batch through the model first"
            )
        yield tensor


def _gradient_type(parameter: torch.Tensor) -> torch.dtype:
    # In newer torch a parameter may choose its gradient's type, but not FSDP1's, which are views between steps.
    return (getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None) or parameter.dtype


def _dense_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Bytes of a dense tensor of this type and a tensor's shape, whatever its strides are."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor's shard
    return block_bytes(local.numel() * dtype.itemsize, tensor.device)


# ----------------------------------- What an optimizer's state will take, found in a dry step of a copy without values.

_log = logging.getLogger(__name__)

# A copy fires no hooks, and a scheduler's or compiler's replacement of ``step`` on the instance is not for it.
_GROWING = ("params", "state", "param_groups")
_NOT_COPIED = frozenset((*private.OPTIMIZER_HOOKS, "step", "grad_scale", "found_inf"))


def predict_optimizer_state_bytes(optimizer: torch.optim.Optimizer, device: torch.device | str | None = None) -> int:
    """Predict the bytes of an optimizer's state after its next step. The optimizer stays as it is.

    Every parameter that requires a gradient is taken to get one. Exact for every optimizer of ``torch.optim`` but
    LBFGS, which fills its history over many steps. Two tensors per parameter, like Adam's, if no dry step works.

    Example:
        >>> weight = nn.Parameter(torch.zeros(1000))
        >>> predict_optimizer_state_bytes(torch.optim.Adam([weight]))  # two moments and a step counter
        8004
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return _full_history_bytes(optimizer, device)
    facts = _facts(optimizer, device)
    known = _predicted.get(optimizer)
    if known is None or known[0] != facts:
        known = _predicted[optimizer] = facts, _bytes_after_next_step(optimizer, device)
    return known[1]


_predicted: WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, int]] = WeakKeyDictionary()  # with what it depends on


def _facts(optimizer: torch.optim.Optimizer, device: torch.device | str | None) -> list[Any]:
    """All that may change what a step keeps: settings, parameters with their marks, and how much state there is."""
    # Of a number with a fraction it counts whether it is zero: schedulers change learning rates at every step.
    settings = [
        (key, value != 0 if isinstance(value, float) else value if isinstance(value, (int, str)) else id(value))
        for group in (vars(optimizer), *optimizer.param_groups)
        for key, value in group.items()
        if key not in _GROWING
    ]
    parameters = [
        (id(each), each.shape, each.dtype, each.device, each.requires_grad, each.layout, *vars(each))
        for group in optimizer.param_groups
        for each in group["params"]
    ]
    return [str(device), settings, parameters, [len(each) for each in optimizer.state.values()]]


def _trained(optimizer: torch.optim.Optimizer, device: torch.device | str | None) -> list[torch.Tensor]:
    """Parameters on a device that get a gradient in a backward."""
    return [
        p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and is_on(p.device, device)
    ]


def _full_history_bytes(optimizer: torch.optim.LBFGS, device: torch.device | str | None) -> int:
    parameters = _trained(optimizer, device)
    if not parameters:
        return 0
    # Vectors: two per entry, direction, last gradient. Scalars: two per entry, scale of the Hessian, step size.
    entries: int = 2 * optimizer.param_groups[0]["history_size"] + 2
    vector = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return entries * sum(block_bytes(each, parameters[0].device) for each in (vector, parameters[0].element_size()))


def _bytes_after_next_step(optimizer: torch.optim.Optimizer, device: torch.device | str | None) -> int:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    modes = [parameter.fake_mode for parameter in parameters if isinstance(parameter, private.FakeTensor)]
    # An operator without a shape rule would run on real tensors otherwise.
    mode = modes[0] if modes else private.FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    try:
        with without_trace():
            clone = _copy(optimizer, mode, {id(parameter): _stand_in(parameter, mode) for parameter in parameters})
            with mode, torch.no_grad(), AssumedValues(0.5):  # NAdam divides by 1 minus a number that it reads
                _take_step(clone)
            return optimizer_state_bytes(clone, device)
    except Exception as error:  # whatever a step does that was written for real tensors
        _log.debug("no dry step of %s: %s", type(optimizer).__name__, error)
    return 2 * sum(_dense_bytes(parameter, parameter.dtype) for parameter in _trained(optimizer, device))


def _stand_in(parameter: torch.Tensor, mode: private.FakeTensorMode) -> nn.Parameter:
    fake = mode.from_tensor(parameter.detach(), static_shapes=True)
    stand_in = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    # Some optimizers look at marks that the user put on parameters.
    vars(stand_in).update({**vars(parameter), **vars(stand_in)})
    if parameter.requires_grad:
        with mode:
            stand_in.grad = torch.empty_like(stand_in)
    return stand_in


def _copy(
    optimizer: torch.optim.Optimizer, mode: private.FakeTensorMode, stand_ins: dict[int, nn.Parameter]
) -> torch.optim.Optimizer:
    """Copy by attribute: constructors may want unknown arguments, ``__getstate__`` drops those of subclasses."""
    clone: torch.optim.Optimizer = object.__new__(type(optimizer))
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _NOT_COPIED}
    vars(clone).update(fake_copy(attributes, mode, {**stand_ins, id(optimizer): clone}))
    vars(clone).update({name: OrderedDict() for name in private.OPTIMIZER_HOOKS})
    clone.defaults["differentiable"] = False
    for group in clone.param_groups:
        # What has no shape rule is off. Step counters lie where they did: an accelerator's fused kernels want them
        # there, as do capturable ones, refused on the CPU and on meta.
        accelerated = any(parameter.device.type not in ("cpu", "meta") for parameter in group["params"])
        on_device = accelerated and bool(group.get("fused") or group.get("capturable"))
        plain = {"fused": False, "differentiable": False, "capturable": on_device}
        group.update({name: value for name, value in plain.items() if name in group})
    return clone


def _take_step(clone: torch.optim.Optimizer) -> None:
    """Take one step as the class defines it, without the wrapper that fires all optimizers' hooks."""
    step: Any = type(clone).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    closure = inspect.signature(step).parameters.get("closure")
    arguments = [lambda: torch.zeros(())] if closure is not None and closure.default is closure.empty else []
    step(clone, *arguments)
