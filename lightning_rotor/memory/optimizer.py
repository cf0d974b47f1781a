"""The ways to a prediction, tried from the best to the worst."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import random
import sys
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_rotor.memory.held import block_bytes, is_on, storages_of, walk_tensors
from lightning_rotor.private.torch_names import (
    OPTIMIZER_HOOKS,
    TorchDispatchMode,
    identity_of,
    is_traceable_wrapper_subclass,
)

# ----------------------------------------------------------------------------------------------------
# What a prediction says.


@dataclass(frozen=True, slots=True)
class StatePrediction:
    """Memory that an optimizer will take.

    Attributes:
        bytes: The prediction.
        exact: It is what the allocator will show; otherwise an estimate.
        reason: How it was obtained, in a few words.
    """

    bytes: int
    exact: bool
    reason: str


# ----------------------------------------------------------------------------------------------------
# A copy of an optimizer that can step without anybody noticing.


# A clone fires no hooks, and a scheduler's or compiler's replacement of ``step`` on the instance is not for it.
_NOT_COPIED = frozenset((*OPTIMIZER_HOOKS, "step", "grad_scale", "found_inf"))


def copy_optimizer(
    optimizer: torch.optim.Optimizer,
    replaced: dict[torch.Tensor, torch.Tensor],
    stand_ins: StandIns,
    *,
    state: bool = True,
) -> torch.optim.Optimizer:
    """Copy an optimizer without running its constructor, which may want arguments that nobody knows any more.

    ``Optimizer.__getstate__`` drops attributes of subclasses, hence attribute by attribute.
    """
    clone: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(old): new for old, new in replaced.items()}
    memo[id(optimizer)] = clone
    with stand_ins:
        for name, value in vars(optimizer).items():
            if name not in _NOT_COPIED and (state or name != "state"):
                vars(clone)[name] = copy.deepcopy(value, memo)
    vars(clone).update({name: OrderedDict() for name in OPTIMIZER_HOOKS})
    if not state:
        clone.state = defaultdict(dict)
    clone.defaults["differentiable"] = False
    return clone


class StandIns(TorchFunctionMode):
    """While active, deep copies of tensors have no memory, save for scalars on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._by_original: dict[int, torch.UntypedStorage] = {}
        self._devices: dict[int, torch.device] = {}
        self._alive: list[torch.UntypedStorage] = []  # identities stay unique while their owners live

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = self._stand_in(tensor)
            return memo[id(tensor)]
        if func is torch.Tensor.clone:  # how a parameter copies itself
            return self._stand_in(args[0])
        return func(*args, **(kwargs or {}))

    def add(self, tensor: torch.Tensor, stand_in: torch.Tensor) -> None:
        """Note a stand-in that exists already, for what shares memory with its original."""
        original, storage = tensor.untyped_storage(), stand_in.untyped_storage()
        if original.nbytes() == storage.nbytes():  # not so for a view of something larger
            self._note(original, storage)

    def device_of(self, storage: torch.UntypedStorage) -> torch.device | None:
        """Where the storage is that this one stands in for."""
        return self._devices.get(identity_of(storage))

    def _stand_in(self, tensor: Any) -> torch.Tensor:
        if is_cpu_scalar(tensor):
            return cast(torch.Tensor, tensor.detach().clone())
        if is_traceable_wrapper_subclass(tensor):  # a DTensor, whose own storage is as large as all shards
            stand_in: torch.Tensor = torch.empty_like(cast(torch.Tensor, tensor), device="meta")
            for mine, theirs in zip(storages_of(tensor), storages_of(stand_in), strict=True):
                self._note(mine, theirs)
            return stand_in
        original = tensor.untyped_storage()
        storage = self._by_original.get(identity_of(original))
        if storage is None:
            storage = torch.empty(original.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            self._note(original, storage)
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _note(self, original: torch.UntypedStorage, storage: torch.UntypedStorage) -> None:
        self._by_original[identity_of(original)] = storage
        self._devices[identity_of(storage)] = original.device
        self._alive += [original, storage]


def is_cpu_scalar(tensor: torch.Tensor) -> bool:
    """Copied as it is: it takes next to nothing, and a step counter among the state is read."""
    return tensor.device.type == "cpu" and tensor.dim() == 0


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Those that a backward gives a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def use_plain_kernels(clone: torch.optim.Optimizer) -> set[torch.Tensor]:
    """Switch off what checks for a real device.

    Returns:
        Parameters whose scalar state lies on their device because of what was switched off.
    """
    follow: set[torch.Tensor] = set()
    for group in clone.param_groups:
        if group.get("capturable") or group.get("fused"):
            follow.update(group["params"])
        group.update({name: False for name in ("capturable", "fused", "differentiable") if name in group})
    return follow


def take_step(clone: torch.optim.Optimizer) -> None:
    """Take one step, as the class defines it: without the profiling wrapper, which fires hooks registered for all optimizers."""
    step: Any = type(clone).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    closure = inspect.signature(step).parameters.get("closure")
    arguments = [lambda: torch.zeros(())] if closure is not None and closure.default is closure.empty else []
    with torch.no_grad():
        step(clone, *arguments)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Random numbers that a foreign step draws, and warnings that it gives, are not the user's."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


# ----------------------------------------------------------------------------------------------------
# LBFGS, whose state grows over many steps up to a size that is known.


def lbfgs_state(optimizer: torch.optim.LBFGS, device: torch.device | str | None) -> StatePrediction:
    """What a full history takes."""
    parameters = [p for p in trained_parameters(optimizer) if is_on(p.device, device)]
    history = optimizer.param_groups[0]["history_size"]
    # Two vectors per entry, the direction and the last gradient; scalars: two per entry, the scale of the Hessian, the step size.
    vectors = (2 * history + 2) * _flat_bytes(parameters)
    scalars = (2 * history + 2) * block_bytes(parameters[0].element_size(), parameters[0].device) if parameters else 0
    return StatePrediction(vectors + scalars, False, f"a full history of {history} entries, the most that LBFGS holds")


def lbfgs_step_peak(optimizer: torch.optim.LBFGS) -> StatePrediction:
    """What a step takes besides: an estimate, since the line search keeps more the longer it searches."""
    # Seen: up to 6, and 7 with a line search (gradients, directions, a copy of the parameters).
    vectors = 6 if optimizer.param_groups[0].get("line_search_fn") is None else 9
    return StatePrediction(
        vectors * _flat_bytes(trained_parameters(optimizer)), False, f"{vectors} vectors of the size of all parameters"
    )


def _flat_bytes(parameters: list[torch.Tensor]) -> int:
    """One vector of all parameters."""
    if not parameters:
        return 0
    return block_bytes(sum(p.numel() * p.element_size() for p in parameters), parameters[0].device)


# ----------------------------------------------------------------------------------------------------
# A dry step on tensors without memory.


_CPU = torch.device("cpu")
# Where torch picks its multi-tensor implementations by itself.
_FOREACH_DEVICES = frozenset(("cuda", "xpu"))


def state_on_meta(optimizer: torch.optim.Optimizer, device: torch.device | str | None, stock: bool) -> StatePrediction:
    """What the state takes after a dry step.

    Args:
        optimizer: Stays as it is.
        device: Count only what will lie there.
        stock: Its state is known not to depend on values.
    """
    clone = _clone_on_meta(optimizer)
    with _ValuesReadAsOne() as reading:
        take_step(clone.optimizer)
    size_bytes = clone.state_bytes(device)
    if reading.values_read and not stock:
        return StatePrediction(size_bytes, False, "dry step on meta tensors; values that it read were taken as 1")
    return StatePrediction(size_bytes, True, "dry step on meta tensors")


def step_peak_on_meta(optimizer: torch.optim.Optimizer) -> StatePrediction:
    """What a dry step creates and drops again."""
    clone = _clone_on_meta(optimizer)
    if all(group.get("fused") for group in optimizer.param_groups):
        return StatePrediction(0, False, "fused kernels update in place")
    for group, original in zip(clone.optimizer.param_groups, optimizer.param_groups, strict=True):
        if original.get("fused"):
            group["params"] = []
        elif group.get("foreach", False) is None:
            group["foreach"] = _picks_foreach(original)
    clone.optimizer.param_groups = [group for group in clone.optimizer.param_groups if group["params"]]
    with _AllocationCount(clone) as count:
        take_step(clone.optimizer)
        # The first step leaves its state behind; the second one shows what is temporary once the state exists.
        first = count.peak_bytes - count.live_bytes
        before = count.restart()
        take_step(clone.optimizer)
        temporary = max(first, count.peak_bytes - before)
    return StatePrediction(temporary, False, "tensors created by a dry step on meta tensors")


def _picks_foreach(group: dict[str, Any]) -> bool:
    """What torch does when the user leaves the choice between loop and multi-tensor implementation to it."""
    if group.get("differentiable") or (isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")):
        return False
    return all(p.device.type in _FOREACH_DEVICES for p in group["params"])


@dataclass(frozen=True, slots=True)
class _Clone:
    """A copy of an optimizer on ``meta``, with the devices where its tensors would really be."""

    optimizer: torch.optim.Optimizer
    homes: dict[torch.Tensor, torch.device]
    scalars_follow: frozenset[torch.Tensor]
    stand_ins: StandIns

    def state_bytes(self, device: torch.device | str | None) -> int:
        """Size of the state, by unique storages."""
        counted = {identity_of(storage) for p in self.homes for storage in storages_of(p)}
        counted |= {identity_of(storage) for p in self.homes if p.grad is not None for storage in storages_of(p.grad)}
        size_bytes = 0
        for key, state in self.optimizer.state.items():
            for tensor in walk_tensors(state):
                for storage in storages_of(tensor):
                    home = self._home(key, storage)
                    if identity_of(storage) not in counted and is_on(home, device):
                        size_bytes += block_bytes(storage.nbytes(), home)
                    counted.add(identity_of(storage))
        return size_bytes

    def _home(self, key: object, storage: torch.UntypedStorage) -> torch.device:
        original = self.stand_ins.device_of(storage)
        if original is not None:
            return original
        if isinstance(key, torch.Tensor) and key in self.homes:
            parameter_home, follows = self.homes[key], key in self.scalars_follow
        else:  # state of the optimizer as a whole
            parameter_home, follows = next(iter(self.homes.values()), _CPU), False
        return parameter_home if storage.device.type == "meta" or follows else storage.device


def _clone_on_meta(optimizer: torch.optim.Optimizer) -> _Clone:
    stand_ins = StandIns()
    replaced = {p: _parameter_on_meta(p) for group in optimizer.param_groups for p in group["params"]}
    for parameter, stand_in in replaced.items():
        stand_ins.add(parameter, stand_in)
    clone = copy_optimizer(optimizer, dict(replaced), stand_ins)
    follow = use_plain_kernels(clone)
    homes = {stand_in: parameter.device for parameter, stand_in in replaced.items()}
    return _Clone(clone, homes, frozenset(follow), stand_ins)


def _parameter_on_meta(parameter: torch.Tensor) -> torch.Tensor:
    device = _CPU if is_cpu_scalar(parameter) else "meta"
    stand_in = nn.Parameter(torch.ones_like(parameter, device=device), requires_grad=parameter.requires_grad)
    # Some optimizers look at marks that the user put on parameters.
    vars(stand_in).update(vars(parameter))
    if parameter.requires_grad:
        stand_in.grad = torch.ones_like(stand_in)
    return stand_in


class _ValuesReadAsOne(TorchDispatchMode):
    """Lets ``tensor.item()`` and ``if tensor:`` work on ``meta``, and notes that they were used."""

    def __init__(self) -> None:
        super().__init__()
        self.values_read = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.values_read = True
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


class _AllocationCount(_ValuesReadAsOne):
    """Counts the memory that new tensors would take, until they die."""

    def __init__(self, clone: _Clone) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._home = next(iter(clone.homes.values()), _CPU)
        self._known: dict[int, weakref.ref[torch.UntypedStorage] | torch.UntypedStorage] = {}
        existing = [*clone.homes, *(p.grad for p in clone.homes if p.grad is not None)]
        for tensor in (*existing, *walk_tensors(list(clone.optimizer.state.values()))):
            for storage in storages_of(tensor):
                self._known[identity_of(storage)] = storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in walk_tensors(result):
            for storage in storages_of(tensor):
                # On a GPU, scalars on the CPU are not the device's concern.
                if storage.device.type == "meta" or self._home.type == "cpu":
                    self._count(storage)
        return result

    def restart(self) -> int:
        """Forget the peak; returns what is alive."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        identity = identity_of(storage)
        if identity in self._known:
            return
        size_bytes = block_bytes(storage.nbytes(), self._home)

        def forget(_: weakref.ref[torch.UntypedStorage]) -> None:
            self.live_bytes -= size_bytes
            del self._known[identity]

        self._known[identity] = weakref.ref(storage, forget)
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


# ----------------------------------------------------------------------------------------------------
# A dry step on small tensors, scaled up.


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


@dataclass(frozen=True, slots=True)
class _Small:
    """A parameter with a prime in place of each dimension."""

    tensor: torch.Tensor
    sizes: dict[int, int] = field(default_factory=dict)

    def scaled(self, elements: int) -> int:
        """Number of elements that ``elements`` of the small tensor's state stand for."""
        scaled = 1
        for prime, size in self.sizes.items():
            while elements and elements % prime == 0:
                elements //= prime
                scaled *= size
        return elements * scaled


def _small(parameter: torch.Tensor, *, sparse: bool) -> _Small:
    # A larger dimension gets a larger prime, for steps that transpose wide matrices.
    order = sorted(range(parameter.dim()), key=lambda d: parameter.shape[d])
    primes = dict(zip((d for d in order if parameter.shape[d] != 1), _PRIMES, strict=False))
    shape = [primes.get(d, 1) for d in range(parameter.dim())]
    tensor = nn.Parameter(torch.full(shape, 0.5).to(parameter.dtype), requires_grad=parameter.requires_grad)
    vars(tensor).update(vars(parameter))
    if parameter.requires_grad:
        tensor.grad = torch.full_like(tensor, 0.01)
        if sparse or (parameter.grad is not None and parameter.grad.layout is torch.sparse_coo):
            tensor.grad = tensor.grad.to_sparse(1)
    return _Small(tensor, {prime: parameter.shape[d] for d, prime in primes.items()})


def state_on_small_tensors(
    optimizer: torch.optim.Optimizer, device: torch.device | str | None, stock: bool, *, sparse: bool
) -> StatePrediction:
    """What the state takes after a dry step that starts without any.

    Args:
        optimizer: Stays as it is.
        device: Count only what will lie there.
        stock: Its state is known to scale with its parameters.
        sparse: Give it sparse gradients.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(sum(size != 1 for size in p.shape) > len(_PRIMES) for p in parameters):
        raise ValueError(f"a parameter has more than {len(_PRIMES)} dimensions")
    small = {p: _small(p, sparse=sparse) for p in parameters}
    clone = copy_optimizer(optimizer, {p: small[p].tensor for p in parameters}, StandIns(), state=False)
    use_plain_kernels(clone)
    take_step(clone)
    size_bytes = 0
    for parameter in parameters:
        if is_on(parameter.device, device):
            for tensor in walk_tensors(clone.state.get(small[parameter].tensor, {})):
                elements = small[parameter].scaled(tensor.numel())
                size_bytes += block_bytes(elements * tensor.element_size(), parameter.device)
    # Existing state is not scaled down, so it may have come about in another way.
    return StatePrediction(
        size_bytes, stock and not optimizer.state, "dry step on small tensors, scaled to the parameters' shapes"
    )


# ----------------------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)


def predict_optimizer_state_bytes(
    optimizer: torch.optim.Optimizer, device: torch.device | str | None = None
) -> StatePrediction:
    """Predict what an optimizer's state takes after its next step.

    Args:
        optimizer: With or without state. Nothing about it changes. Every parameter that requires a gradient is taken to get one.
        device: Count only what will lie there; None counts all devices.
    Returns:
        State that exists and state that will be created, in bytes of unique storages. Exact for every optimizer of ``torch.optim``
        but LBFGS.
    Example:
        >>> weight = nn.Parameter(torch.zeros(1000))
        >>> predict_optimizer_state_bytes(torch.optim.Adam([weight])).bytes  # two moments and a step counter
        8004
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return lbfgs_state(optimizer, device)
    stock = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    with isolated():
        prediction = (
            _attempt(lambda: state_on_meta(optimizer, device, stock))
            or _attempt(lambda: state_on_small_tensors(optimizer, device, stock, sparse=False))
            or _attempt(lambda: state_on_small_tensors(optimizer, device, stock, sparse=True))
        )
    if prediction is not None:
        return prediction
    size_bytes = 2 * sum(_dense_bytes(p) for p in trained_parameters(optimizer) if is_on(p.device, device))
    return StatePrediction(size_bytes, False, "assumed to be two tensors per parameter, like Adam's: no dry step works")


def predict_optimizer_step_peak_bytes(optimizer: torch.optim.Optimizer) -> StatePrediction:
    """Predict the temporary memory of one ``step()``, beyond parameters, gradients and the state that it leaves behind.

    Multi-tensor implementations, the default on GPUs, hold a temporary of the size of all parameters; loops, the default on CPUs,
    of the largest one; fused kernels none.

    Args:
        optimizer: With or without state, its parameters on one kind of device. Nothing about it changes.
    Returns:
        An estimate: the tensors that a dry step on ``meta`` creates, not what kernels allocate inside.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return lbfgs_step_peak(optimizer)
    with isolated():
        prediction = _attempt(lambda: step_peak_on_meta(optimizer))
    if prediction is not None:
        return prediction
    size_bytes = sum(_dense_bytes(p) for p in trained_parameters(optimizer))
    return StatePrediction(
        size_bytes, False, "assumed to be one tensor per parameter: no dry step works on meta tensors"
    )


def _attempt(predict: Callable[[], StatePrediction]) -> StatePrediction | None:
    try:
        return predict()
    except Exception as error:  # whatever a step does that was written for real tensors
        _log.debug("no dry step: %s", error)
        return None


def _dense_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor's shard
    return block_bytes(local.numel() * tensor.element_size(), tensor.device)
