"""From options to a plan: build, measure or estimate, and plan what is left for activations."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_rotor.allowance import Allowance
from lightning_rotor.command_line.loading import model_maker, optimizer_maker
from lightning_rotor.command_line.options import Options
from lightning_rotor.cutting import sequentialize
from lightning_rotor.devices import resolve_limit
from lightning_rotor.errors import BudgetError, ProfilingError
from lightning_rotor.estimation import GPUS, Accelerator, build_on_meta, estimate_profile
from lightning_rotor.estimation.estimate import arguments
from lightning_rotor.planning import Frontier, Plan, Solver, frontier_of
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.progress import MeasuringProgress
from lightning_rotor.profiling.reference import require_same
from lightning_rotor.tracing import GraphCut
from lightning_rotor.training_memory import ResidentMemory
from lightning_rotor.units import parse_limit

# For the CUDA context and libraries, and for what the allocator cannot use.
_CONTEXT_BYTES = 2**30
_HALF = {"bf16": torch.bfloat16, "16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The answer.

    Attributes:
        model: Its name.
        profile: The chain and its stages.
        plan: For what is left of the budget.
        budget_bytes: The whole budget.
        resident: What training holds besides the chain, by name; empty if the budget is for activations alone.
        accelerator: If it was estimated: for what.
        frontier: If it was asked for.
    """

    model: str
    profile: Profile
    plan: Plan
    budget_bytes: int
    resident: Mapping[str, int]
    accelerator: Accelerator | None
    frontier: Frontier | None

    @property
    def reserved_bytes(self) -> int:
        """What of the budget is not for the chain."""
        return self.budget_bytes - self.plan.budget_bytes


def find_plan(options: Options) -> Found:
    """Build the model, measure it and plan.

    Raises:
        RotorError: Something is not as expected, or there is no plan for the budget.
    """
    make = model_maker(options.model, options.model_arguments)
    optimizer = optimizer_maker(options.optimizer)
    device = torch.device(_known_device(options.device))
    limit = parse_limit(options.budget)  # wrong ones are found before anything is measured
    floating = _HALF.get(options.precision.partition("-")[0]) if options.precision.endswith("-true") else None
    model = build_on_meta(make) if device.type == "meta" else make().train().to(device)
    model = model.to(floating) if floating is not None else model
    accelerator = _accelerator(options) if device.type == "meta" else None
    batch = [spec.make(device, floating=floating) for spec in options.inputs]
    made = optimizer(model)
    resident = ResidentMemory.of(model, model, [made] if made is not None else [], batch, device)
    if accelerator is not None:
        total = accelerator.memory_bytes
        budget = total - _CONTEXT_BYTES if limit is None else limit.on_device(total)
        with MeasuringProgress(enabled=sys.stderr.isatty()) as progress:
            profile = estimate_profile(
                model,
                options.inputs,
                accelerator,
                autocast=_mixed(options),
                floating=floating,
                progress=progress,
            )
    else:
        budget = resolve_limit(limit, device)
        profile = _measured(model, options, device, floating)
    allowance = Allowance(budget) if options.activations_only else resident.allowance(budget, gradients_linger=True)
    plan, frontier = _planned(profile, allowance, options)
    parts = {} if options.activations_only else _parts(resident)
    return Found(options.model, profile, plan, budget, parts, accelerator, frontier)


def _planned(profile: Profile, allowance: Allowance, options: Options) -> tuple[Plan, Frontier | None]:
    solver = Solver(
        profile.chain,
        slots=options.slots,
        gradients_exist=allowance.gradients_exist,
        lingering_bytes=allowance.lingering_bytes,
    ).refined()
    try:
        plan = solver.plan(max(allowance.budget_bytes, 1))
    except BudgetError as error:
        raise allowance.explain(error) from None
    wanted = options.curve or options.plot_curve is not None
    return plan, frontier_of(solver, budget_bytes=plan.budget_bytes) if wanted else None


def _measured(model: nn.Module, options: Options, device: torch.device, floating: torch.dtype | None) -> Profile:
    precision = _mixed(options)
    context: AbstractContextManager[Any] = (
        torch.autocast(device.type, dtype=precision) if precision is not None else nullcontext()
    )
    args, kwargs = arguments(options.inputs, device, floating=floating)
    with context, MeasuringProgress(enabled=sys.stderr.isatty()) as progress:
        cut = sequentialize(model, args, kwargs)
        if isinstance(cut, GraphCut):
            require_same(model, cut, args, kwargs)
        return profile_chain(cut.stages, cut.bind(args, kwargs), progress=progress)


def _mixed(options: Options) -> torch.dtype | None:
    return _HALF[options.precision.partition("-")[0]] if options.precision.endswith("-mixed") else None


def _accelerator(options: Options) -> Accelerator:
    found = GPUS[options.gpu]
    if options.flops is not None:
        found = replace(found, flops=options.flops, half_flops=options.flops)
    return replace(found, bandwidth=options.bandwidth) if options.bandwidth is not None else found


def _known_device(name: str) -> str:
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda", "meta"):
        raise ProfilingError(f"device {name!r} is unknown: expected cpu, cuda or meta")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ProfilingError(
            "there is no CUDA device on this machine: use --device meta with --gpu to estimate for one"
        )
    return name


def _parts(resident: ResidentMemory) -> dict[str, int]:
    return {
        "parameters": resident.parameter_bytes,
        "buffers": resident.buffer_bytes,
        "optimizer state": resident.optimizer_bytes,
        "gradients": resident.gradient_bytes,
        "batch": resident.batch_bytes,
    }
