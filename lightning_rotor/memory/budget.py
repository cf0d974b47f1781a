"""The limit of a whole training process, turned into what a plan for its chain may use.

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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from lightning_rotor.errors import BudgetError
from lightning_rotor.memory.devices import resolve_limit, usable_bytes
from lightning_rotor.memory.held import (
    buffer_bytes,
    existing_gradient_bytes,
    gradient_bytes,
    optimizer_state_bytes,
    parameter_bytes,
    storage_bytes,
)
from lightning_rotor.memory.optimizer import predict_optimizer_state_bytes
from lightning_rotor.planning import Plan, menu, minimum_budget, plan
from lightning_rotor.profiling import Profile
from lightning_rotor.schedule import Schedule
from lightning_rotor.units import MemoryLimit, format_bytes

# ----------------------------------------------------------------------------------------------------
# What a plan may use of a device's memory, and how an error says so in terms of the user's limit.


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a plan may use.

    Attributes:
        budget_bytes: Most that the chain may allocate in one step, beyond what is allocated when its forward begins.
        gradients_exist: As in :func:`~lightning_rotor.simulator.simulate`.
        lingering_bytes: As in :func:`~lightning_rotor.simulator.simulate`.
        reserved_bytes: The part of the user's limit that is not for the chain; only error messages need it.
        reserved_for: What that part is for.
        guessed_bytes: What of it is a guess, and not worth an error.
        error: What to raise where the limit is too low.
    """

    budget_bytes: int
    gradients_exist: bool = False
    lingering_bytes: int = 0
    reserved_bytes: int = 0
    reserved_for: str = ""
    guessed_bytes: int = 0
    error: type[BudgetError] = BudgetError

    @property
    def limit_bytes(self) -> int:
        """The user's limit."""
        return self.budget_bytes + self.reserved_bytes

    def capped(self, ceiling_bytes: int | None) -> Allowance:
        """The same with a budget of at most ``ceiling_bytes``, because the device turned out to have no more."""
        if ceiling_bytes is None or self.budget_bytes <= ceiling_bytes:
            return self
        missing_bytes = self.budget_bytes - ceiling_bytes
        missing = f"memory that the device did not have ({format_bytes(missing_bytes)})"
        return replace(
            self,
            budget_bytes=ceiling_bytes,
            reserved_bytes=self.reserved_bytes + missing_bytes,
            reserved_for=f"{self.reserved_for}, {missing}" if self.reserved_for else missing,
        )

    def fits(self, plan: Plan) -> bool:
        """Whether a plan is what would be planned with this allowance."""
        return (plan.budget_bytes, plan.gradients_exist, plan.lingering_bytes) == (
            max(self.budget_bytes, 1),
            self.gradients_exist,
            self.lingering_bytes,
        )

    def explain(self, error: BudgetError) -> BudgetError:
        """The planner's error in terms of the limit that the user set."""
        if not self.reserved_bytes:
            return error
        limit_bytes, minimum_bytes = self.limit_bytes, error.minimum_bytes + self.reserved_bytes
        return self.error(
            f"mem_limit {format_bytes(limit_bytes)} is below the minimum {format_bytes(minimum_bytes)} ({minimum_bytes:,} bytes) for this model "
            "and batch: "
            f"{format_bytes(self.reserved_bytes)} for {self.reserved_for}, and at least {format_bytes(error.minimum_bytes)} for activations "
            f"and new gradients (set by {error.stage!r}). Raise mem_limit or lower the batch size",
            budget_bytes=limit_bytes,
            minimum_bytes=minimum_bytes,
            stage=error.stage,
        )


class AllowanceSource(Protocol):
    """Says what a plan may use, once the chain has been measured."""

    def __call__(self, profile: Profile) -> Allowance:
        """Called before each plan."""


# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """What a training process holds on a device while a chain runs, in bytes.

    Attributes:
        parameter_bytes: Parameters of the whole model.
        buffer_bytes: Buffers of the whole model.
        optimizer_bytes: State of all optimizers, as large as it will be after their first step.
        gradient_bytes: Gradients of all parameters.
        chain_gradient_bytes: The part of them that belongs to the planned module.
        batch_bytes: The batch.
        communication_bytes: What a strategy keeps for messages between processes.
        other_bytes: What else the allocator of a GPU has given out when the chain's forward begins: workspaces of libraries, what the step
            holds already.
    """

    parameter_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    chain_gradient_bytes: int
    batch_bytes: int
    communication_bytes: int = 0
    other_bytes: int = 0

    @classmethod
    def of(
        cls,
        model: nn.Module,
        target: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        batch: Iterable[torch.Tensor],
        device: torch.device,
    ) -> ResidentMemory:
        """Count what is there, and predict what will be."""
        return cls(
            parameter_bytes=parameter_bytes(model, device),
            buffer_bytes=buffer_bytes(model, device),
            optimizer_bytes=sum(predict_optimizer_state_bytes(optimizer, device) for optimizer in optimizers),
            gradient_bytes=gradient_bytes(model, device),
            chain_gradient_bytes=gradient_bytes(target, device),
            batch_bytes=storage_bytes(batch, device),
        )

    @property
    def steady_bytes(self) -> int:
        """Held from one step to the next, gradients not counted."""
        return (
            self.parameter_bytes
            + self.buffer_bytes
            + self.optimizer_bytes
            + self.batch_bytes
            + self.communication_bytes
            + self.other_bytes
        )

    def allowance(self, limit_bytes: int, *, gradients_linger: bool, correction_bytes: int = 0) -> Allowance:
        """What remains for the chain.

        Args:
            limit_bytes: For the whole process.
            gradients_linger: The loop frees the gradients of one step between the forward and the backward of the next, as Lightning's
                automatic optimization does. Otherwise they may be there throughout (accumulation, manual optimization).
            correction_bytes: Found to be used by something else, the loss for one.
        """
        outside_bytes = self.gradient_bytes - self.chain_gradient_bytes
        chain_gradients = 0 if gradients_linger else self.chain_gradient_bytes
        reserved = self.steady_bytes + outside_bytes + chain_gradients + correction_bytes
        parts = [
            ("parameters", self.parameter_bytes + self.buffer_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("gradients", outside_bytes + chain_gradients),
            ("the batch", self.batch_bytes),
            ("messages between processes", self.communication_bytes),
            ("workspaces and what the step holds already", self.other_bytes),
            ("the rest of the step", correction_bytes),
        ]
        return Allowance(
            budget_bytes=limit_bytes - reserved,
            gradients_exist=not gradients_linger,
            lingering_bytes=self.chain_gradient_bytes if gradients_linger else 0,
            reserved_bytes=reserved,
            reserved_for=", ".join(f"{name} ({format_bytes(size)})" for name, size in parts if size),
        )


def allocated_bytes(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Iterable[torch.Tensor],
    device: torch.device,
) -> int:
    """What training holds on a device at this moment: on CUDA all that the allocator gave out, on the CPU what can be named."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return named_bytes(model, optimizers, batch, device)


def named_bytes(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Iterable[torch.Tensor],
    device: torch.device,
) -> int:
    """What parameters, buffers, gradients, optimizers and the batch take at this moment."""
    return (
        parameter_bytes(model, device)
        + buffer_bytes(model, device)
        + existing_gradient_bytes(model, device)
        + sum(optimizer_state_bytes(optimizer, device) for optimizer in optimizers)
        + storage_bytes(batch, device)
    )


def process_limit_bytes(
    limit: MemoryLimit | None,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Iterable[torch.Tensor],
    device: torch.device,
    *,
    sharing: int = 1,
) -> int:
    """A user's limit for the whole process; None is what is usable, and what training has taken already. On a GPU no limit is more.

    Args:
        limit: As the user gave it.
        model: Everything that trains; its memory is not free, but is part of what the process may use.
        optimizers: Likewise.
        batch: Likewise.
        device: Where they are.
        sharing: Number of processes that divide what is free.
    """
    limit_bytes = None if limit is None else resolve_limit(limit, device)
    if limit_bytes is not None and device.type != "cuda":
        return limit_bytes
    available_bytes = usable_bytes(device) // sharing + allocated_bytes(model, optimizers, batch, device)
    return available_bytes if limit_bytes is None else min(limit_bytes, available_bytes)


def take_workspaces(device: torch.device) -> None:
    """Let cuBLAS take the workspaces that it keeps for each thread: the forward's, and autograd's for a GPU."""
    if device.type == "cuda":
        with torch.enable_grad():
            matrix = torch.ones(8, 8, device=device, requires_grad=True)
            torch.autograd.grad((matrix @ matrix).sum(), matrix)


# ----------------------------------------------------------------------------------------------------
# From costs to a plan, inside what a plan may use at this moment.


class AllowedPlans:
    """Plans chains of one module.

    Args:
        source: Says what a plan may use.
        slots: Resolution of the dynamic program.
        on_infeasible: Called if no schedule fits; then there is the plan that takes least. By default there is an error.
    Attributes:
        slots: As given.
        ceiling_bytes: The most that any plan may take since the device ran out of memory, or None if it never did.
    """

    def __init__(
        self, source: AllowanceSource, *, slots: int, on_infeasible: Callable[[BudgetError], None] | None = None
    ) -> None:
        self._source = source
        self._on_infeasible = on_infeasible
        self.slots = slots
        self.ceiling_bytes: int | None = None

    def allowance(self, profile: Profile) -> Allowance:
        """What a plan may use."""
        return self.allowance_without_ceiling(profile).capped(self.ceiling_bytes)

    def allowance_without_ceiling(self, profile: Profile) -> Allowance:
        """What a plan might use if the device had as much as it seemed to have."""
        allowance = self._source(profile)
        return replace(allowance, lingering_bytes=allowance.lingering_bytes + profile.copied_bytes)

    def allows(self, plan: Plan) -> bool:
        """Whether a plan keeps below the ceiling."""
        return self.ceiling_bytes is None or plan.peak_bytes <= self.ceiling_bytes

    def lower_ceiling(self, plan: Plan, *, to_the_least: bool = False) -> bool:
        """Let all plans from now on take less than one that was too much for the device. Whether that is possible.

        Args:
            plan: That one.
            to_the_least: As little as a plan can do with, rather than halfway to that.
        """
        least = minimum_budget(
            plan.chain, slots=self.slots, gradients_exist=plan.gradients_exist, lingering_bytes=plan.lingering_bytes
        ).peak_bytes
        if plan.peak_bytes <= least:
            return False
        self.ceiling_bytes = least if to_the_least else (plan.peak_bytes + least) // 2
        return True

    def solve(self, profile: Profile, allowance: Allowance) -> Plan | BudgetError:
        """The fastest plan inside an allowance, or why there is none."""

        def solve(budget_bytes: int) -> Plan:
            return plan(
                profile.chain,
                max(budget_bytes, 1),
                slots=self.slots,
                gradients_exist=allowance.gradients_exist,
                lingering_bytes=allowance.lingering_bytes,
            )

        try:
            return solve(allowance.budget_bytes)
        except BudgetError as error:
            if error.minimum_bytes <= allowance.budget_bytes + allowance.guessed_bytes:
                return solve(error.minimum_bytes)
            explained = allowance.explain(error)
            if self._on_infeasible is None:
                return explained
            self._on_infeasible(explained)
            return solve(error.minimum_bytes)

    def menu(self, profile: Profile, allowance: Allowance) -> tuple[Schedule, ...]:
        """Schedules that may do for chains like this one, from fast to small."""
        return menu(
            profile.chain,
            slots=self.slots,
            gradients_exist=allowance.gradients_exist,
            lingering_bytes=allowance.lingering_bytes,
        )
