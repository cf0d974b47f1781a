"""What a training process holds besides activations: parameters, buffers, gradients, optimizer state.

Sizes are those of unique storages on ``device``, or on all devices for None: tied weights and views count once. On the
CPU they are exact to the byte. On a GPU each storage is rounded up to the allocator's block, as
``torch.cuda.memory_allocated`` shows it. Lazy modules, whose tensors have no shape yet, raise ``ModelError``.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_rotor.errors import ModelError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import plain_parts, tensors_in, tree_map
from lightning_rotor.profiling.assumed_values import AssumedValues
from lightning_rotor.profiling.dry_run import run_dry, without_trace
from lightning_rotor.profiling.fake_copies import fake_copy
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


def replaceable(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Gradients and optimizer state whose memory goes with them, as a step may replace them.

    Views are not among them: DDP's gradients may be views of its buckets.
    """
    tensors = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    for optimizer in optimizers:
        tensors += tensors_in(list(optimizer.state.values()))
    return [tensor for tensor in tensors if all(map(_has_storage_alone, plain_parts(tensor)))]


def _has_storage_alone(part: torch.Tensor) -> bool:
    """True if a dense tensor is all that its storage holds, so that this goes with it."""
    return part.nbytes == part.untyped_storage().nbytes()


def optimizer_state_bytes(optimizer: torch.optim.Optimizer, device: torch.device | str | None = None) -> int:
    """Bytes that an optimizer holds now, besides parameters and gradients. Adam's step counters may stay on the CPU."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return _bytes_beside(tensors_in(list(optimizer.state.values())), [*parameters, *gradients], device)


def storage_bytes(tensors: Iterable[torch.Tensor], device: torch.device | str | None = None) -> int:
    """Bytes of the unique storages of tensors, those of sparse tensors and wrappers included."""
    return sum(_sizes(tensors, device).values())


def block_bytes(size_bytes: int, device: torch.device) -> int:
    """Bytes that an allocation of ``size_bytes`` adds to the allocator's count on a device."""
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


# -------------------- What an optimizer's state and its steps will take, found in dry steps of a copy without values.

_log = logging.getLogger(__name__)

# A copy fires no hooks, and a scheduler's or compiler's replacement of ``step`` on the instance is not for it.
_GROWING = ("params", "state", "param_groups")
_NOT_COPIED = frozenset((*private.OPTIMIZER_HOOKS, "step", "grad_scale", "found_inf"))


def predict_optimizer_state_bytes(optimizer: torch.optim.Optimizer, device: torch.device | str | None = None) -> int:
    """Predict the bytes of an optimizer's state after its next step. The optimizer stays as it is.

    Every parameter that requires a gradient is taken to get one. Exact for every optimizer of ``torch.optim`` but
    LBFGS, which fills its history over many steps. If no dry step works, what there is, and before the first step two
    tensors per parameter, like Adam's.

    Example:
        >>> weight = nn.Parameter(torch.zeros(1000))
        >>> predict_optimizer_state_bytes(torch.optim.Adam([weight]))  # two moments and a step counter
        8004
    """
    return _dry_steps(optimizer, device).state_bytes


def predict_optimizer_temporary_bytes(
    optimizer: torch.optim.Optimizer, device: torch.device | str | None = None
) -> int | None:
    """Predict the most bytes that an optimizer allocates at once in a step, state that exists not included.

    The first step, which makes the state, takes no more than this and the state. None if no dry step works.

    Example:
        >>> weights = [nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(3000))]
        >>> predict_optimizer_temporary_bytes(torch.optim.RMSprop(weights, foreach=True))  # a root of each
        16000
    """
    return _dry_steps(optimizer, device).temporary_bytes


def predict_closure_bytes(optimizer: torch.optim.Optimizer, device: torch.device | str | None = None) -> int:
    """Predict what an optimizer holds besides its state while its closure trains, which LBFGS calls several times."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return 0
    return _lbfgs_vectors(optimizer)[0] * _vector_bytes(optimizer, device)


def temporary_bytes_one_by_one(
    optimizer: torch.optim.Optimizer, device: torch.device | str | None = None
) -> int | None:
    """Predict the same with ``foreach=False``; None if an optimizer has no such switch, or does not use it."""
    groups = optimizer.param_groups
    if not all("foreach" in group for group in groups) or all(group["foreach"] is False for group in groups):
        return None
    if isinstance(optimizer, torch.optim.LBFGS) or _is_fused(optimizer):
        return None
    return _take_dry_steps(optimizer, device, foreach=False).temporary_bytes


@dataclass(frozen=True, slots=True)
class _DrySteps:
    """Bytes of the state after a step, and the most that another one allocates meanwhile, None if unknown."""

    state_bytes: int
    temporary_bytes: int | None


def _dry_steps(optimizer: torch.optim.Optimizer, device: torch.device | str | None) -> _DrySteps:
    if isinstance(optimizer, torch.optim.LBFGS):
        most_bytes = _lbfgs_vectors(optimizer)[1] * _vector_bytes(optimizer, device)
        return _DrySteps(_full_history_bytes(optimizer, device), most_bytes)
    facts = _facts(optimizer, device)
    known = _predicted.get(optimizer)
    if known is None or known[0] != facts:
        known = _predicted[optimizer] = facts, _take_dry_steps(optimizer, device)
    return known[1]


# Each with what it depends on.
_predicted: WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, _DrySteps]] = WeakKeyDictionary()


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


def _lbfgs_vectors(optimizer: torch.optim.LBFGS) -> tuple[int, int]:
    """Vectors of all parameters beside the state: while a closure runs, and at most. Its step holds them."""
    group = optimizer.param_groups[0]
    if group["line_search_fn"] is not None:
        return 5, 6
    return (3, 5) if group["max_iter"] > 1 else (0, 3)


def _vector_bytes(optimizer: torch.optim.LBFGS, device: torch.device | str | None) -> int:
    parameters = _trained(optimizer, device)
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return block_bytes(size_bytes, parameters[0].device) if parameters else 0


def _full_history_bytes(optimizer: torch.optim.LBFGS, device: torch.device | str | None) -> int:
    parameters = _trained(optimizer, device)
    if not parameters:
        return 0
    # Vectors: two per entry, direction, last gradient. Scalars: two per entry, scale of the Hessian, step size.
    entries: int = 2 * optimizer.param_groups[0]["history_size"] + 2
    scalar_bytes = block_bytes(parameters[0].element_size(), parameters[0].device)
    return entries * (_vector_bytes(optimizer, device) + scalar_bytes)


def _take_dry_steps(
    optimizer: torch.optim.Optimizer, device: torch.device | str | None, *, foreach: bool | None = None
) -> _DrySteps:
    """Take two dry steps: the first makes the state, the second shows what later ones allocate."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    modes = [parameter.fake_mode for parameter in parameters if isinstance(parameter, private.FakeTensor)]
    # An operator without a shape rule would run on real tensors otherwise.
    mode = modes[0] if modes else private.FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    state_bytes = None

    def take_steps() -> _DrySteps:
        nonlocal state_bytes
        clone = _copy(optimizer, mode, {id(parameter): _stand_in(parameter, mode) for parameter in parameters})
        for group in clone.param_groups if foreach is not None else ():
            group["foreach"] = foreach
        with mode, torch.no_grad(), AssumedValues(0.5):  # NAdam divides by 1 minus a number that it reads
            _take_step(clone)
        state_bytes = optimizer_state_bytes(clone, device)
        return _DrySteps(state_bytes, 0 if _is_fused(optimizer) else _allocated_in_a_step(clone, device))

    try:
        with without_trace() as generators:
            return run_dry(take_steps, generators)
    except Exception as error:  # whatever a step does that was written for real tensors
        _log.debug("no dry step of %s: %s", type(optimizer).__name__, error)
    if state_bytes is None and optimizer.state:
        state_bytes = optimizer_state_bytes(optimizer, device)
    if state_bytes is None:
        state_bytes = 2 * sum(_dense_bytes(parameter, parameter.dtype) for parameter in _trained(optimizer, device))
    return _DrySteps(state_bytes, None)


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """True if one kernel steps, which allocates nothing."""
    return all(group.get("fused") for group in optimizer.param_groups)


def _allocated_in_a_step(clone: torch.optim.Optimizer, device: torch.device | str | None) -> int:
    """The most that a step allocates at once, by a copy without values whose state exists."""
    parameters = [parameter for group in clone.param_groups for parameter in group["params"]]
    kind = torch.device(device) if device is not None else parameters[0].device
    on_meta = _on_meta(clone)
    allocated = _Allocated(on_meta, kind)
    with torch.no_grad(), allocated:
        _take_step(on_meta)
    return allocated.peak_bytes


_LATER = 1000.0
"""Number of a step that is like all later ones: RAdam takes more from its sixth step on."""


def _on_meta(clone: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy without values, moved to ``meta``, where operators take a fraction of the time of fake tensors."""
    moved: torch.optim.Optimizer = object.__new__(type(clone))
    stand_ins = dict[int, torch.Tensor]()

    def on_meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in stand_ins:
            return stand_ins[id(value)]
        if not value.dim():  # a step counter, or a product such as NAdam's, which is below 1
            return torch.full((), 0.5, dtype=value.dtype)
        return torch.empty_like(value, device="meta")

    for group in clone.param_groups:
        for parameter in group["params"]:
            stand_in = nn.Parameter(on_meta(parameter.detach()), requires_grad=parameter.requires_grad)
            vars(stand_in).update({**vars(parameter), **vars(stand_in)})
            if parameter.requires_grad:
                stand_in.grad = torch.empty_like(stand_in)
            stand_ins[id(parameter)] = stand_in
    vars(moved).update(tree_map(on_meta, {key: each for key, each in vars(clone).items() if key not in _GROWING}))
    moved.param_groups = []
    for group in clone.param_groups:
        accelerated = all(parameter.device.type not in ("cpu", "meta") for parameter in group["params"])
        copied = {**tree_map(on_meta, {key: each for key, each in group.items() if key != "params"})}
        copied["params"] = [stand_ins[id(parameter)] for parameter in group["params"]]
        if "foreach" in copied and copied["foreach"] is None:  # what torch decides by the device
            copied["foreach"] = accelerated
        if "capturable" in copied:
            copied["capturable"] = False
        moved.param_groups.append(copied)
    moved.state = defaultdict(dict)
    for key, held in clone.state.items():
        copied = tree_map(on_meta, held)
        if isinstance(copied, dict) and "step" in copied:
            number = copied["step"]
            copied["step"] = torch.full((), _LATER) if isinstance(number, torch.Tensor) else type(number)(_LATER)
        moved.state[stand_ins.get(id(key), key)] = copied
    return moved


class _Allocated(AssumedValues):
    """Follows what operators allocate and nobody has freed yet: a step's variables hold what the real ones would.

    ``device`` is the real one of all tensors that are on ``meta``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        super().__init__(0.5)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._device = device
        self._older = dict(self._storages([*parameters, *gradients, *tensors_in(list(optimizer.state.values()))]))
        self._before = _level(self._older)
        self._newer: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self.answer(func, args, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._newer = _alive(self._newer)
        for identity, storage in self._storages(tensors_in(result)):
            known = self._older.get(identity)
            if known is None or known[0].expired():
                self._newer.setdefault(identity, storage)
        if _level(self._newer) > self.peak_bytes:  # if no state was freed meanwhile, and there is much of that
            freed_bytes = self._before - _level(_alive(self._older))
            self.peak_bytes = max(self.peak_bytes, _level(self._newer) - freed_bytes)
        return result

    def _storages(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, tuple[StorageWeakRef, int]]]:
        for tensor in tensors:
            if not (tensor.is_meta or is_on(tensor.device, self._device)):
                continue
            for storage in (part.untyped_storage() for part in plain_parts(tensor)):
                size_bytes = block_bytes(storage.nbytes(), self._device)
                yield private.identity_of(storage), (StorageWeakRef(storage), size_bytes)


def _alive(storages: dict[int, tuple[StorageWeakRef, int]]) -> dict[int, tuple[StorageWeakRef, int]]:
    return {identity: each for identity, each in storages.items() if not each[0].expired()}


def _level(storages: dict[int, tuple[StorageWeakRef, int]]) -> int:
    return sum(size for _, size in storages.values())


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
