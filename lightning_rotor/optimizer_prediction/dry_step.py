"""A copy of an optimizer that can step without anybody noticing."""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from lightning_rotor.private.torch_names import OPTIMIZER_HOOKS, identity_of, is_traceable_wrapper_subclass
from lightning_rotor.training_state import storages_of

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
