"""From options to a plan: build, measure or estimate, and plan what is left for activations."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_rotor.allowance import Allowance
from lightning_rotor.batch_sizes import AffineCosts, BatchSizeAdvice, advice_from
from lightning_rotor.chain import Chain
from lightning_rotor.command_line.loading import model_maker, optimizer_maker
from lightning_rotor.command_line.options import Options
from lightning_rotor.cutting import sequentialize
from lightning_rotor.devices import resolve_limit
from lightning_rotor.errors import BudgetError, ProfilingError, SampleError
from lightning_rotor.estimation import GPUS, Accelerator, InputSpec, build_on_meta, estimate_profile
from lightning_rotor.estimation.estimate import arguments
from lightning_rotor.planning import Frontier, Plan, Solver, frontier_of
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.chain import Progress
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
    case = _Case.of(options)
    profile = case.profile(options.inputs)
    plan, frontier = _planned(profile, case.allowance(case.resident.batch_bytes), options)
    parts = {} if options.activations_only else _parts(case.resident)
    return Found(options.model, profile, plan, case.budget_bytes, parts, case.accelerator, frontier)


def find_batch_sizes(options: Options) -> BatchSizeAdvice:
    """Build the model, measure it with the inputs and with half of each, and plan every batch size.

    Raises:
        RotorError: Something is not as expected, or no batch size fits the budget.
    """
    case = _Case.of(options)
    sizes = {spec.shape[0] for spec in options.inputs if spec.shape}
    if len(sizes) != 1 or max(sizes) < 2:
        raise SampleError(
            f"the inputs have first dimensions {sorted(sizes)}: expected one number of samples, at least 2, in all of them"
        )
    (size,) = sizes
    halves = tuple(replace(spec, shape=(size // 2, *spec.shape[1:])) if spec.shape else spec for spec in options.inputs)
    chains = case.profile(halves).chain, case.profile(options.inputs).chain

    def allowance(_: Chain, batch_size: int) -> Allowance:
        return case.allowance(-(-case.resident.batch_bytes * batch_size // size))

    return advice_from(
        AffineCosts((size // 2, size), chains),
        allowance,
        limit_bytes=case.budget_bytes,
        batch_sizes=options.batch_sizes or None,
        slots=options.slots,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """What is asked about.

    Attributes:
        options: As given.
        model: Built, on its device.
        accelerator: If costs are estimated: for what.
        budget_bytes: The whole budget.
        resident: What training holds besides the chain.
        floating: Type of the model in the place of float32.
    """

    options: Options
    model: nn.Module
    accelerator: Accelerator | None
    budget_bytes: int
    resident: ResidentMemory
    floating: torch.dtype | None

    @classmethod
    def of(cls, options: Options) -> _Case:
        """Build the model and what trains it."""
        optimizer = optimizer_maker(options.optimizer)
        device = torch.device(_known_device(options.device))
        limit = parse_limit(options.budget)  # wrong ones are found before anything is measured
        floating = _HALF.get(options.precision.partition("-")[0]) if options.precision.endswith("-true") else None
        model = _built(options, device, floating)
        accelerator = _accelerator(options) if device.type == "meta" else None
        batch = [spec.make(device, floating=floating) for spec in options.inputs]
        made = optimizer(model)
        resident = ResidentMemory.of(model, model, [made] if made is not None else [], batch, device)
        if accelerator is None:
            budget = resolve_limit(limit, device)
        else:
            total = accelerator.memory_bytes
            budget = total - _CONTEXT_BYTES if limit is None else limit.on_device(total)
        return cls(options, model, accelerator, budget, resident, floating)

    def allowance(self, batch_bytes: int) -> Allowance:
        """What a plan may use beside a batch of that size."""
        if self.options.activations_only:
            return Allowance(self.budget_bytes)
        return replace(self.resident, batch_bytes=batch_bytes).allowance(self.budget_bytes, gradients_linger=True)

    def profile(self, inputs: Sequence[InputSpec]) -> Profile:
        """Costs for such inputs, measured or estimated."""
        with MeasuringProgress(enabled=sys.stderr.isatty()) as progress:
            if self.accelerator is None:
                return self._measured(inputs, progress)
            return estimate_profile(
                _built(
                    self.options, torch.device("meta"), self.floating
                ),  # each estimate makes the model's tensors its own
                inputs,
                self.accelerator,
                autocast=_mixed(self.options),
                floating=self.floating,
                progress=progress,
            )

    def _measured(self, inputs: Sequence[InputSpec], progress: Progress) -> Profile:
        device, precision = torch.device(self.options.device), _mixed(self.options)
        context: AbstractContextManager[Any] = (
            torch.autocast(device.type, dtype=precision) if precision is not None else nullcontext()
        )
        args, kwargs = arguments(inputs, device, floating=self.floating)
        with context:
            cut = sequentialize(self.model, args, kwargs)
            if isinstance(cut, GraphCut):
                require_same(self.model, cut, args, kwargs)
            return profile_chain(cut.stages, cut.bind(args, kwargs), progress=progress)


def _built(options: Options, device: torch.device, floating: torch.dtype | None) -> nn.Module:
    make = model_maker(options.model, options.model_arguments)
    model = build_on_meta(make) if device.type == "meta" else make().train().to(device)
    return model.to(floating) if floating is not None else model


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
