"""The limit of a whole training process, and what a plan for its chain may use of it.

What the process holds on the device besides the chain, and when::

                        forward          backward            optimizer step
    parameters, buffers ██████████████████████████████████████████████████
    optimizer state     ██████████████████████████████████████████████████   predicted before it exists
    batch               ██████████████████████████████████████████████████
    messages            ██████████████████████████████████████████████████   buckets of gradients under DDP
    gradients           ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒      ▁▂▃▄▅▆▇████████████████████   ▒: of the step before, if it lingers
    chain                      ▁▂▃▄▅▆▇███▇▆▅▄▃▂▁
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_rotor.chain import Chain
from lightning_rotor.devices import HOST, KINDS, DeviceKind, kind_of
from lightning_rotor.errors import BudgetError, ProfilingError, RotorWarning
from lightning_rotor.memory import held
from lightning_rotor.planning import Plan, plan
from lightning_rotor.planning.effort import DEFAULT_SLOTS
from lightning_rotor.planning.outside import Foresight
from lightning_rotor.planning.solver import cause_and_remedy
from lightning_rotor.simulator import Conditions
from lightning_rotor.units import MemoryLimit, format_bytes

# Plans that are foreseen to exceed, before one has to show it. Each is solved for.
_MOST_FORESEEN = 3


def limit_error(
    limit_bytes: int,
    minimum_bytes: int,
    *,
    needs: str,
    stage: str,
    remedy: str,
    gradient_bytes: int = 0,
    error: type[BudgetError] = BudgetError,
) -> BudgetError:
    """The error for a limit that training cannot keep, in whichever way that has shown.

    ``needs`` says what takes the minimum and ends with what sets it, ``stage`` is the name of that.
    """
    return error(
        f"mem_limit {format_bytes(limit_bytes)} is below the minimum {format_bytes(minimum_bytes)} "
        f"({minimum_bytes:,} bytes) for this model and batch: {needs}. {remedy[0].upper()}{remedy[1:]}",
        budget_bytes=limit_bytes,
        minimum_bytes=minimum_bytes,
        stage=stage,
        gradient_bytes=gradient_bytes,
    )


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of a device that a plan may use.

    Attributes:
        available_bytes: Most that the chain may allocate in one step, beyond what is allocated when its forward begins.
        reserved_bytes: The part of the user's limit that is not for the chain; only error messages need it.
        guessed_bytes: What of it is a guess, and not worth an error.
        is_provisional: It is small on purpose, since other calls share the step. That nothing fits is no error: the
            plan that takes least runs, until a plan for all calls follows.
        foresight: Peak of the process in steps under a plan for this chain, as a measured step foretells it; None if
            none was measured.
    """

    available_bytes: int
    gradients_exist: bool = False
    lingering_bytes: int = 0
    reserved_bytes: int = 0
    reserved_for: str = ""
    guessed_bytes: int = 0
    is_provisional: bool = False
    foresight: Foresight | None = None
    error: type[BudgetError] = BudgetError

    @property
    def limit_bytes(self) -> int:
        """The user's limit."""
        return self.available_bytes + self.reserved_bytes

    @property
    def conditions(self) -> Conditions:
        """The step around the chain, for the planner."""
        return {"gradients_exist": self.gradients_exist, "lingering_bytes": self.lingering_bytes}

    def plan(self, chain: Chain, *, slots: int = DEFAULT_SLOTS) -> Plan:
        """The fastest plan within the budget; ``BudgetError`` in terms of the user's limit if there is none."""
        try:
            fastest = self._plan(chain, self.available_bytes, slots)
        except BudgetError as error:
            if error.minimum_bytes <= self.available_bytes + self.guessed_bytes:
                return self._plan(chain, error.minimum_bytes, slots)
            raise (self.refusal(error.minimum_bytes, error) if self.reserved_bytes else error) from None
        return self._as_foreseen(fastest, slots)

    def _as_foreseen(self, fastest: Plan, slots: int) -> Plan:
        """The plan, or a smaller one if the step is foreseen to exceed the limit under it.

        What was measured around a chain is one number for the whole of it, from the moment at which the plan of then
        was at its peak. Another plan peaks at another moment.
        """
        chosen = fastest
        for _ in range(_MOST_FORESEEN if self.foresight else 0):
            assert self.foresight is not None
            excess_bytes = self.foresight(chosen) - self.limit_bytes
            if excess_bytes <= 0:
                break
            try:
                chosen = self._plan(chosen.chain, chosen.peak_bytes - excess_bytes, slots)
            except BudgetError:
                break  # a measured step says whether the limit can be kept
        return chosen

    def least_plan(self, chain: Chain, error: BudgetError, *, slots: int) -> Plan:
        """The plan that takes least, after :meth:`plan` has said that none fits."""
        return self._plan(chain, error.minimum_bytes - self.reserved_bytes, slots)

    def _plan(self, chain: Chain, size_bytes: int, slots: int) -> Plan:
        return plan(chain, max(size_bytes, 1), slots=slots, **self.conditions)

    def capped(self, ceiling_bytes: int | None) -> Budget:
        """This budget with at most ``ceiling_bytes``, because the device turned out to have no more."""
        if ceiling_bytes is None or self.available_bytes <= ceiling_bytes:
            return self
        return self.reduced_to(ceiling_bytes, "memory that the device did not have")

    def reduced_to(self, available_bytes: int, reason: str) -> Budget:
        """This budget with less for the chain, and the rest kept for something else."""
        missing_bytes = self.available_bytes - available_bytes
        missing = f"{reason} ({format_bytes(missing_bytes)})"
        return replace(
            self,
            available_bytes=available_bytes,
            reserved_bytes=self.reserved_bytes + missing_bytes,
            reserved_for=f"{self.reserved_for}, {missing}" if self.reserved_for else missing,
        )

    def fits(self, plan: Plan) -> bool:
        """True if a plan is what would be planned with this budget."""
        return plan.budget_bytes == max(self.available_bytes, 1) and plan.conditions == self.conditions

    def refusal(self, least_bytes: int, error: BudgetError, *, stage: str | None = None) -> BudgetError:
        """The error, in terms of the limit that the user set, if no plan for the chain takes less than so much.

        ``stage`` is what sets the minimum, if that is not what the error says.
        """
        stage = stage or error.stage
        cause, remedy = cause_and_remedy(self.available_bytes, least_bytes, stage, error.gradient_bytes)
        return limit_error(
            self.limit_bytes,
            least_bytes + self.reserved_bytes,
            needs=f"{format_bytes(self.reserved_bytes)} for {self.reserved_for}, and at least "
            f"{format_bytes(least_bytes)} for activations and new gradients ({cause})",
            stage=stage,
            remedy=remedy,
            gradient_bytes=error.gradient_bytes,
            error=self.error,
        )


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """The memory that a training process holds on a device while a chain runs, in bytes.

    Attributes:
        optimizer_bytes: As large as it will be after the first step of all optimizers, and while a closure runs.
        outside_gradient_bytes: Gradients of all parameters outside of the planned module.
        other_bytes: What else a GPU's allocator has given out when the chain's forward begins: workspaces, for one.
        temporary_bytes: What the optimizers' steps allocate and free again; None if that is not known yet.
        gradients_linger: The loop frees the gradients of one step between the forward and the backward of the next, as
            Lightning's automatic optimization does. Otherwise they may be there throughout (accumulation).
    """

    parameter_bytes: int = 0
    buffer_bytes: int = 0
    optimizer_bytes: int = 0
    outside_gradient_bytes: int = 0
    chain_gradient_bytes: int = 0
    batch_bytes: int = 0
    communication_bytes: int = 0
    other_bytes: int = 0
    temporary_bytes: int | None = 0
    gradients_linger: bool = True

    @classmethod
    def of(
        cls,
        model: nn.Module,
        target: nn.Module,
        optimizers: Iterable[Optimizer],
        batch: Iterable[torch.Tensor],
        device: torch.device,
    ) -> ResidentMemory:
        """Count what is there, and predict what will be."""
        inside = held.gradient_bytes(target, device)
        optimizers = list(optimizers)
        closure_bytes = sum(held.predict_closure_bytes(each, device) for each in optimizers)
        temporary = [held.predict_optimizer_temporary_bytes(each, device) for each in optimizers]
        known = [each for each in temporary if each is not None]
        temporary_bytes = max(known, default=0) - closure_bytes if len(known) == len(temporary) else None
        return cls(
            parameter_bytes=held.parameter_bytes(model, device),
            buffer_bytes=held.buffer_bytes(model, device),
            optimizer_bytes=sum(held.predict_optimizer_state_bytes(each, device) for each in optimizers)
            + closure_bytes,
            outside_gradient_bytes=held.gradient_bytes(model, device) - inside,
            chain_gradient_bytes=inside,
            batch_bytes=held.storage_bytes(batch, device),
            temporary_bytes=temporary_bytes,
        )

    @property
    def staying_bytes(self) -> int:
        """Bytes that are there when an optimizer steps, all gradients included."""
        return (
            self.parameter_bytes
            + self.buffer_bytes
            + self.optimizer_bytes
            + self.outside_gradient_bytes
            + self.chain_gradient_bytes
            + self.batch_bytes
            + self.communication_bytes
            + self.other_bytes
        )

    def budget(self, limit_bytes: int, *, correction_bytes: int = 0) -> Budget:
        """The rest, for the chain; ``correction_bytes`` were found to be used by something else (the loss, say)."""
        staying_gradients = 0 if self.gradients_linger else self.chain_gradient_bytes
        parts = {
            "parameters": self.parameter_bytes + self.buffer_bytes,
            "optimizer state": self.optimizer_bytes,
            "gradients": self.outside_gradient_bytes + staying_gradients,
            "the batch": self.batch_bytes,
            "messages between processes": self.communication_bytes,
            "workspaces and what the step holds already": self.other_bytes,
            "the rest of the step": correction_bytes,
        }
        reserved_bytes = sum(parts.values())
        return Budget(
            available_bytes=limit_bytes - reserved_bytes,
            gradients_exist=not self.gradients_linger,
            lingering_bytes=self.chain_gradient_bytes - staying_gradients,
            reserved_bytes=reserved_bytes,
            reserved_for=", ".join(f"{name} ({format_bytes(size)})" for name, size in parts.items() if size),
        )


def allocated_bytes(
    model: nn.Module, optimizers: Sequence[Optimizer], batch: Iterable[torch.Tensor], device: torch.device
) -> int:
    """Bytes that training holds on a device: on CUDA all that the allocator gave out, on the CPU what can be named."""
    kind = kind_of(device)
    if kind.tells_allocated:
        return kind.allocated_bytes(device)
    return named_bytes(model, optimizers, batch, device)


def named_bytes(
    model: nn.Module, optimizers: Sequence[Optimizer], batch: Iterable[torch.Tensor], device: torch.device
) -> int:
    """Bytes of parameters, buffers, gradients, optimizers and the batch at this moment."""
    return (
        held.parameter_bytes(model, device)
        + held.buffer_bytes(model, device)
        + held.existing_gradient_bytes(model, device)
        + sum(held.optimizer_state_bytes(optimizer, device) for optimizer in optimizers)
        + held.storage_bytes(batch, device)
    )


# ------------------------------------- How much memory a device has and has free, and what a user's limit means on it.

# The size of the segments from which CUDA's caching allocator takes blocks of 1 to 10 MiB.
_SEGMENT_BYTES = 20 * 2**20
_ROOT = Path("/")  # where ``proc`` and ``sys`` are


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory that this process may ever have on a device, and what it can still allocate there."""

    total_bytes: int
    free_bytes: int


def device_memory(device: torch.device | str) -> DeviceMemory:
    """Memory of a CPU or CUDA device; ``ProfilingError`` if it cannot be read.

    A GPU has what ``set_per_process_memory_fraction`` leaves, and what its caching allocator keeps for reuse is free. A
    CPU has what the machine or the tightest control group has; files that nobody has read lately are free.
    """
    device = torch.device(device)
    kind = KINDS.get(device.type)
    if kind is HOST:
        every = [_machine(), *_control_groups()]
        return DeviceMemory(min(each.total_bytes for each in every), max(0, min(each.free_bytes for each in every)))
    if kind is not None and kind.trains:
        return _accelerator(kind, device)
    raise ProfilingError(
        f"the memory of device {str(device)!r} cannot be read: expected a CPU or CUDA device; for another one give the "
        "memory limit in bytes"
    )


def _accelerator(kind: DeviceKind, device: torch.device) -> DeviceMemory:
    if not kind.is_available():
        raise ProfilingError(
            f"device {str(device)!r} is not available here: move the model to one that is, or install a torch that "
            "supports it"
        )
    driver_free, total = kind.driver_memory(device)
    allocated = kind.allocated_bytes(device)
    allowed = int(kind.process_share(device) * total)
    unused = driver_free + kind.reserved_bytes(device) - allocated
    return DeviceMemory(allowed, max(0, min(unused, allowed - allocated)))


def _machine() -> DeviceMemory:
    sizes = _read_sizes(_ROOT / "proc/meminfo")
    if "MemAvailable" in sizes:
        return DeviceMemory(sizes["MemTotal"] * 1024, sizes["MemAvailable"] * 1024)
    try:  # macOS, Windows and the rest
        import psutil  # type: ignore[import-untyped,unused-ignore]  # not a dependency: only where /proc is missing
    except ImportError as error:
        raise ProfilingError(
            "this machine's memory cannot be read: install psutil, or give the memory limit in bytes"
        ) from error
    memory = psutil.virtual_memory()
    return DeviceMemory(int(memory.total), int(memory.available))


# Version 2 slows a group down, to a standstill if need be, over memory.high: for training that is a limit, too.
_VERSION_1 = "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
_VERSION_2 = "", ("memory.max", "memory.high"), "memory.current", "inactive_file"
"""Folder, and in it the files of limits and usage, and what of ``memory.stat`` can be reclaimed."""


def _control_groups() -> Iterator[DeviceMemory]:
    """Every control group with a limit that this process is in.

    They nest, and the tightest one decides::

        /sys/fs/cgroup           memory.max = max
          └─ kubepods            memory.max = 64 GiB   memory.current = 60 GiB   <- 4 GiB left for everyone below
               └─ pod1234        memory.max = 16 GiB   memory.current =  2 GiB
    """
    for line in _read(_ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        kind, limit_names, usage_name, reclaimable = _VERSION_1 if controllers else _VERSION_2
        top = _ROOT / "sys/fs/cgroup" / kind
        # A container that mounts only its own group may name it as the host does: then only the mount is there.
        own = top / os.path.normpath(path).lstrip("/")
        for folder in (own, *own.parents[: len(own.parts) - len(top.parts)]):
            limits = [int(text) for name in limit_names if (text := _read(folder / name).strip()).isdigit()]
            usage = _read(folder / usage_name).strip()
            if limits and usage.isdigit():
                reclaimable_bytes = _read_sizes(folder / "memory.stat").get(reclaimable, 0)
                yield DeviceMemory(min(limits), min(limits) - int(usage) + reclaimable_bytes)


def _read_sizes(path: Path) -> dict[str, int]:
    """Lines such as ``MemTotal:  16318 kB`` or ``inactive_file 4096`` as a mapping; empty without the file."""
    words = (line.replace(":", " ").split() for line in _read(path).splitlines())
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def usable_bytes(device: torch.device | str) -> int:
    """Bytes that tensors of this process can still take on a device, without any allocation that fails."""
    device = torch.device(device)
    kind = KINDS.get(device.type)
    if kind is None or not kind.has_own_memory:
        return device_memory(device).free_bytes
    # CUDA's caching allocator may reserve more than it gives out: room in segments in use, two segments filled in part,
    # and a twentieth for holes that no block fits.
    kind.empty_cache()
    free = device_memory(device).free_bytes
    in_segments = kind.reserved_bytes(device) - kind.allocated_bytes(device)
    return max(0, free - in_segments - 2 * _SEGMENT_BYTES - free // 20)


def resolve_limit(limit: MemoryLimit | None, device: torch.device | str) -> int:
    """A user's limit in bytes; None is :func:`usable_bytes`, fractions are of the total. Warns above the device.

    Example:
        >>> resolve_limit(MemoryLimit(size_bytes=2**20), "cpu")
        1048576
    """
    if limit is None:
        return usable_bytes(device)
    size_bytes = limit.size_bytes
    if size_bytes is None:
        return limit.on_device(device_memory(device).total_bytes)
    try:
        available_bytes = device_memory(device).total_bytes
    except ProfilingError:
        return size_bytes  # a limit in bytes needs nothing from the device
    if size_bytes > available_bytes:
        warnings.warn(
            f"the memory limit of {format_bytes(size_bytes)} is more than the {format_bytes(available_bytes)} that "
            f"{device} has for this process: training can run out of memory inside the limit. Lower it, or leave it "
            "out to use what is free",
            RotorWarning,
            stacklevel=2,
        )
    return size_bytes
