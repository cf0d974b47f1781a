"""A dry step on tensors without memory."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_rotor.optimizer_prediction.dry_step import (
    StandIns,
    copy_optimizer,
    is_cpu_scalar,
    take_step,
    use_plain_kernels,
)
from lightning_rotor.optimizer_prediction.state_prediction import StatePrediction
from lightning_rotor.private.torch_names import TorchDispatchMode, identity_of
from lightning_rotor.training_state import block_bytes, is_on, storages_of, walk_tensors

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
