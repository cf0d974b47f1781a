"""From options to a plan: build, measure or estimate, and plan what is left for activations."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_rotor.capture.cuts import GraphCut, sequentialize
from lightning_rotor.chain import Chain
from lightning_rotor.errors import ModelError, ProfilingError, SampleError
from lightning_rotor.memory.budget import Budget, ResidentMemory
from lightning_rotor.memory.devices import resolve_limit
from lightning_rotor.planned.batch_sizes import AffineCosts, BatchSizeAdvice, advice_from
from lightning_rotor.planning import Frontier, Plan
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.chain import Progress
from lightning_rotor.profiling.dry_run import require_same
from lightning_rotor.profiling.estimates import GPUS, Accelerator, InputSpec, arguments, build_on_meta, estimate_profile
from lightning_rotor.profiling.meters import MeasuringProgress
from lightning_rotor.units import parse_limit

# ----------------------------------------------------------------------------------------------------
# Models and optimizers by name.


_EXPECTED = "expected a class or function that makes a module"


def model_maker(path: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    """A function that makes a model, found at ``package.module.name`` or ``file.py:name``, or ``ModelError``."""
    found = _in_file(path) if ".py:" in path else _in_package(path)
    if not callable(found):
        raise ModelError(f"{path} is {type(found).__name__}: {_EXPECTED}")

    def make() -> nn.Module:
        try:
            model = found(**arguments)
        except TypeError as error:
            remedy = "Expected its arguments as --model-arg name=value"
            raise ModelError(f"{path} cannot be called: {error}. {remedy}") from error
        if not isinstance(model, nn.Module):
            raise ModelError(f"{path} makes {type(model).__name__}: expected a torch.nn.Module")
        return model

    return make


def _in_package(path: str) -> Any:
    parts = path.split(".")
    # The user's own modules are where the command is run.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if f"{name}.".startswith(f"{error.name}."):
                continue
            raise _needs(name, error) from error
        for part in parts[length:]:
            found, name = _member(found, part, name), f"{name}.{part}"
        return found
    remedy = f"pip install {parts[0]} if that is a package. Expected" if len(parts) > 1 else "expected"
    raise ModelError(
        f"there is no module for {path!r}: {remedy} package.module.name, such as torchvision.models.resnet101, "
        "or file.py:name"
    )


def _in_file(path: str) -> Any:
    file, _, name = path.rpartition(":")
    place = Path(file)
    if not place.is_file():
        raise ModelError(f"there is no file {file!r}: expected file.py:name with the name of a class or function in it")
    spec = importlib.util.spec_from_file_location(place.stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(place.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise _needs(file, error) from error
    return _member(module, name, file)


def _member(owner: Any, name: str, place: str) -> Any:
    """The member of a module or class with that name."""
    if not hasattr(owner, name):
        raise ModelError(f"{place} has no {name!r}: {_EXPECTED}")
    return getattr(owner, name)


def _needs(name: str, error: ModuleNotFoundError) -> ModelError:
    """The error for a missing dependency of a module."""
    remedy = f". Try pip install {error.name.partition('.')[0]}" if error.name else ""
    return ModelError(f"{name} cannot be imported: {error}{remedy}")


def optimizer_for(model: nn.Module, text: str) -> torch.optim.Optimizer | None:
    """The optimizer called ``adamw``, ``sgd:momentum=0.9`` or ``none`` for what learns in a model, or ModelError."""
    name, _, given = text.partition(":")
    known: dict[str, type[torch.optim.Optimizer]] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in (*known, "none"):
        raise ModelError(f"optimizer {name!r} is unknown: expected one of {', '.join(sorted(known))}, or none")
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name.lower() == "none" or not learning:
        return None
    arguments = {"lr": 1e-3} | dict(assignment(part) for part in given.split(",") if part)
    try:
        return known[name.lower()](learning, **arguments)
    except (TypeError, ValueError) as error:
        raise ModelError(f"optimizer {text!r} cannot be made: {error}") from error


def assignment(text: str) -> tuple[str, Any]:
    """The name and value of ``name=value``, a Python literal or else a string; ``ModelError`` if it is none."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ModelError(f"{text!r} is no assignment: expected name=value, such as num_classes=10")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


# ----------------------------------------------------------------------------------------------------


# For the CUDA context and libraries, and for what the allocator cannot use.
_CONTEXT_BYTES = 2**30
_HALF = {"bf16": torch.bfloat16, "16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The answer; its ``budget_bytes`` are those of the chain and of what training holds besides, ``resident``."""

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


def find_plan(options: Namespace) -> Found:
    """Build the model, measure it and plan; ``RotorError`` if something is amiss or no plan fits."""
    case = _Case.of(options)
    profile = case.profile(options.inputs)
    plan = case.budget(case.resident.batch_bytes).plan(profile.chain, slots=options.slots)
    frontier = plan.frontier() if options.curve or options.plot_curve is not None else None
    parts = {} if options.activations_only else _parts(case.resident)
    return Found(options.model, profile, plan, case.budget_bytes, parts, case.accelerator, frontier)


def find_batch_sizes(options: Namespace) -> BatchSizeAdvice:
    """Build the model, measure it with the inputs and half of each, and plan every batch size, or ``RotorError``."""
    case = _Case.of(options)
    sizes = {spec.shape[0] for spec in options.inputs if spec.shape}
    if len(sizes) != 1 or max(sizes) < 2:
        raise SampleError(
            f"the inputs have first dimensions {sorted(sizes)}: "
            "expected one number of samples, at least 2, in all of them"
        )
    (size,) = sizes
    halves = tuple(replace(spec, shape=(size // 2, *spec.shape[1:])) if spec.shape else spec for spec in options.inputs)
    chains = case.profile(halves).chain, case.profile(options.inputs).chain

    def budget(_: Chain, batch_size: int) -> Budget:
        return case.budget(-(-case.resident.batch_bytes * batch_size // size))

    return advice_from(
        AffineCosts((size // 2, size), chains),
        budget,
        limit_bytes=case.budget_bytes,
        batch_sizes=options.batch_sizes or None,
        slots=options.slots,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """What is asked about; ``floating`` is the model's type in the place of float32, ``mixed`` that of autocast."""

    options: Namespace
    model: nn.Module
    accelerator: Accelerator | None
    budget_bytes: int
    resident: ResidentMemory
    floating: torch.dtype | None
    mixed: torch.dtype | None

    @classmethod
    def of(cls, options: Namespace) -> _Case:
        """Build the model and what trains it."""
        device = torch.device(_known_device(options.device))
        limit = parse_limit(options.budget)  # wrong ones are found before anything is measured
        half = _HALF.get(options.precision.partition("-")[0])
        floating, mixed = (half, None) if options.precision.endswith("-true") else (None, half)
        model = _built(options, device, floating)
        accelerator = _accelerator(options) if device.type == "meta" else None
        batch = [spec.make(device, floating=floating) for spec in options.inputs]
        optimizer = optimizer_for(model, options.optimizer)
        resident = ResidentMemory.of(model, model, [optimizer] if optimizer is not None else [], batch, device)
        if accelerator is None:
            budget = resolve_limit(limit, device)
        else:
            total = accelerator.memory_bytes
            budget = total - _CONTEXT_BYTES if limit is None else limit.on_device(total)
        return cls(options, model, accelerator, budget, resident, floating, mixed)

    def budget(self, batch_bytes: int) -> Budget:
        """What a plan may use beside a batch of that size."""
        if self.options.activations_only:
            return Budget(self.budget_bytes)
        return replace(self.resident, batch_bytes=batch_bytes).budget(self.budget_bytes)

    def profile(self, inputs: Sequence[InputSpec]) -> Profile:
        """Costs for such inputs, measured or estimated."""
        with MeasuringProgress(enabled=sys.stderr.isatty()) as progress:
            if self.accelerator is None:
                return self._measured(inputs, progress)
            # Each estimate makes the model's tensors its own.
            model = _built(self.options, torch.device("meta"), self.floating)
            return estimate_profile(
                model, inputs, self.accelerator, autocast=self.mixed, floating=self.floating, progress=progress
            )

    def _measured(self, inputs: Sequence[InputSpec], progress: Progress) -> Profile:
        device = torch.device(self.options.device)
        args, kwargs = arguments(inputs, device, floating=self.floating)
        with torch.autocast(device.type, dtype=self.mixed, enabled=self.mixed is not None):
            cut = sequentialize(self.model, args, kwargs)
            if isinstance(cut, GraphCut):
                require_same(self.model, cut, args, kwargs)
            return profile_chain(cut.stages, cut.bind(args, kwargs), progress=progress)


def _built(options: Namespace, device: torch.device, floating: torch.dtype | None) -> nn.Module:
    make = model_maker(options.model, dict(options.model_arguments))
    model = build_on_meta(make) if device.type == "meta" else make().train().to(device)
    return model.to(floating) if floating is not None else model


def _accelerator(options: Namespace) -> Accelerator:
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
        "gradients": resident.outside_gradient_bytes + resident.chain_gradient_bytes,
        "batch": resident.batch_bytes,
    }
