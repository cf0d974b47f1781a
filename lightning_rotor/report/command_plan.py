"""The plan that a command line asks for: build the model, measure or estimate it, and plan."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_rotor.advising import Advice, Cluster, advise
from lightning_rotor.advising.advice import CONTEXT_BYTES
from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.devices import KINDS
from lightning_rotor.errors import BudgetError, OffloadError, ProfilingError, SampleError
from lightning_rotor.link import Link
from lightning_rotor.memory.device_memory import resolve_limit
from lightning_rotor.memory.resident_memory import ResidentMemory
from lightning_rotor.offload import Offload
from lightning_rotor.planned.batch_sizes import AffineCosts, BatchSizeAdvice, advice_from
from lightning_rotor.planned.offloading import offloading
from lightning_rotor.planning import Frontier, Plan
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.accelerators import GPUS, Accelerator
from lightning_rotor.profiling.estimates import estimate_profile
from lightning_rotor.profiling.input_spec import InputSpec, arguments
from lightning_rotor.profiling.models_without_memory import build_on_meta
from lightning_rotor.profiling.progress_bar import measuring_progress, planning_progress
from lightning_rotor.profiling.same_results import require_same
from lightning_rotor.report.command_options import DEFAULT_GPU
from lightning_rotor.report.named_models import model_maker, optimizers_for
from lightning_rotor.units import parse_limit

_LOOKS_UP = (nn.Embedding, nn.EmbeddingBag)
_HALF = {"bf16": torch.bfloat16, "16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A plan with the model that it is for, as it is shown.

    Attributes:
        reserved_bytes: The part of the budget that is not for the chain.
        staying: With a link, the fastest plan that moves nothing; None if there is none, or no link.
        staying_frontier: With a link, the curve of plans that move nothing.
    """

    case: _Case
    profile: Profile
    plan: Plan
    frontier: Frontier | None
    reserved_bytes: int
    staying: Plan | None = None
    staying_frontier: Frontier | None = None


def answer_to(options: Namespace) -> Answer:
    """Build the model, measure it and plan; ``RotorError`` if something is amiss or no plan fits."""
    case = _Case.of(options)
    profile = case.profile(options.inputs)
    link = case.link()
    without = case.resident.budget(case.budget_bytes)
    staying = None
    with planning_progress(len(profile.chain), enabled=sys.stderr.isatty()):
        plan = replace(without, link=link).plan(profile.chain, slots=options.slots)
        if link is not None:
            with suppress(BudgetError):
                staying = without.plan(profile.chain, slots=options.slots)
    frontier = staying_frontier = None
    # It solves the chain for many budgets, which nobody waits for unasked.
    if options.curve or options.plot_curve is not None:
        frontier = plan.frontier()
        if link is not None:
            staying_frontier = replace(plan, link=None).frontier()
    reserved_bytes = case.budget_bytes - plan.budget_bytes
    return Answer(case, profile, plan, frontier, reserved_bytes, staying, staying_frontier)


def find_batch_sizes(options: Namespace) -> BatchSizeAdvice:
    """Build the model, measure it with the inputs and half of each, and plan every batch size, or ``RotorError``."""
    case = _Case.of(options)
    sizes = {spec.shape[0] for spec in options.inputs if spec.shape}
    if len(sizes) != 1 or max(sizes) < 2:
        raise SampleError(
            f"the inputs have first dimensions {sorted(sizes)}: "
            "expected one number of samples, at least 2, in all of them"
        )
    # Costs at two sizes are enough for those at any other, as bytes and seconds of a stage grow by the sample.
    (size,) = sizes
    halves = [replace(spec, shape=(size // 2, *spec.shape[1:])) if spec.shape else spec for spec in options.inputs]
    chains = case.profile(halves).chain, case.profile(options.inputs).chain
    return advice_from(
        AffineCosts((size // 2, size), chains),
        case.resident,
        limit_bytes=case.budget_bytes,
        batch_sizes=options.batch_sizes or None,
        slots=options.slots,
        link=case.link(),
    )


def advice_for(options: Namespace) -> Advice:
    """Ways to train the model on the devices; ``RotorError`` if something is amiss or nothing fits."""
    # First, so that a wrong one is found before the model is made.
    cluster = Cluster.of(options.gpu, options.devices, options.nodes, link=options.link, network=options.network)
    make = model_maker(options.model, dict(options.model_arguments))
    with (
        measuring_progress(enabled=sys.stderr.isatty()) as progress,
        _hint_of_token_ids(lambda: build_on_meta(make), options.inputs),
    ):
        return advise(
            make,
            options.inputs,
            lambda model: optimizers_for(model, options.optimizer),
            cluster,
            batch=options.batch,
            precision=options.precision,
            mem_limit=options.budget,
            progress=progress,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """A model with what trains it.

    ``floating`` is the model's type in the place of float32, ``mixed`` that of autocast.
    """

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
        kind = options.device.partition(":")[0]
        if kind not in KINDS:
            *others, last = KINDS
            known = f"{', '.join(others)} or {last}"
            raise ProfilingError(f"device {options.device!r} is unknown: expected {known}")
        if KINDS[kind].trains and not KINDS[kind].is_available():
            raise ProfilingError(
                "there is no CUDA device on this machine: use --device meta with --gpu to estimate for one"
            )
        device = torch.device(options.device)
        # Now, so that a wrong one is found before anything is measured.
        limit = parse_limit(options.budget)
        # Lightning's names: "bf16-true" is a model in bfloat16, "bf16-mixed" one in float32 under autocast.
        half = _HALF.get(options.precision.partition("-")[0])
        floating: torch.dtype | None = None
        mixed: torch.dtype | None = None
        if options.precision.endswith("-true"):
            floating = half
        else:
            mixed = half
        model = _built(options, device, floating)
        batch = [spec.make(device, floating=floating) for spec in options.inputs]
        resident = ResidentMemory()
        if not options.activations_only:
            resident = ResidentMemory.of(model, model, optimizers_for(model, options.optimizer), batch, device)
        if kind != "meta":
            return cls(options, model, None, resolve_limit(limit, device), resident, floating, mixed)
        # A user's own figure counts in every precision: it is what the model at hand reaches.
        given = {"flops": options.flops, "half_flops": options.flops, "bandwidth": options.bandwidth}
        described = {name: value for name, value in given.items() if value is not None}
        accelerator = replace(GPUS[options.gpu or DEFAULT_GPU], **described)
        total = accelerator.memory_bytes
        # The driver and its libraries take memory of the device, too, which no tensor can have.
        budget = total - CONTEXT_BYTES if limit is None else limit.on_device(total)
        return cls(options, model, accelerator, budget, resident, floating, mixed)

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """Bytes that training holds beside the chain and that count against the budget, by name."""
        if self.options.activations_only:
            return {}
        held = self.resident
        return {
            "parameters": held.parameter_bytes,
            "buffers": held.buffer_bytes,
            "optimizer state": held.optimizer_bytes,
            "gradients": held.outside_gradient_bytes + held.chain_gradient_bytes,
            "batch": held.batch_bytes,
        }

    def link(self) -> Link | None:
        """The link over which the plan may move what stages hold; None if it is to move nothing."""
        asked: Link | Offload | None = self.options.offload
        if asked is None or isinstance(asked, Link):
            return asked
        if self.accelerator is None:
            return offloading(asked, torch.device(self.options.device)).link
        if asked.folder is not None:
            raise OffloadError(
                f'offload="{asked.target}" moves from the CPU to a file, and the plan is for {self.accelerator.name}: '
                "expected --offload host, or the speed of the link, such as --offload 50GB/s"
            )
        return replace(self.accelerator.host_link, room_bytes=asked.limit_bytes)

    def profile(self, inputs: Sequence[InputSpec]) -> Profile:
        """Costs for such inputs, measured or estimated."""
        device = torch.device(self.options.device)
        with (
            measuring_progress(enabled=sys.stderr.isatty()) as progress,
            _hint_of_token_ids(lambda: self.model, inputs),
        ):
            if self.accelerator is not None:
                # Another one for each estimate, which makes the model's tensors its own.
                model = _built(self.options, device, self.floating)
                return estimate_profile(
                    model, inputs, self.accelerator, autocast=self.mixed, floating=self.floating, progress=progress
                )
            args, kwargs = arguments(inputs, device, floating=self.floating)
            with torch.autocast(device.type, dtype=self.mixed, enabled=self.mixed is not None):
                cut = sequentialize(self.model, args, kwargs)
                # A recording may miss what the module does, and then its costs would be another module's.
                if isinstance(cut, GraphCut):
                    require_same(self.model, cut, args, kwargs)
                return profile_chain(cut.stages, cut.bind(args, kwargs), progress=progress)


@contextmanager
def _hint_of_token_ids(model: Callable[[], nn.Module], inputs: Sequence[InputSpec]) -> Iterator[None]:
    """Context in which an error is explained if the model looks up token ids, and got none."""
    try:
        yield
    # Any error: torch's own operators and the code of models have different ones for indices that are no whole numbers.
    except Exception as error:
        embeddings = [name for name, module in model().named_modules() if isinstance(module, _LOOKS_UP)]
        if not embeddings or any(not spec.dtype.is_floating_point for spec in inputs):
            raise
        shape = "x".join(map(str, inputs[0].shape)) or "8x512"
        raise SampleError(
            f"the model looks up token ids in {embeddings[0]!r}, and no input holds whole numbers: expected a type "
            f"behind the shape of that input, such as --input {shape}:int64 ({error})"
        ) from error


def _built(options: Namespace, device: torch.device, floating: torch.dtype | None) -> nn.Module:
    make = model_maker(options.model, dict(options.model_arguments))
    model = build_on_meta(make) if device.type == "meta" else make().train().to(device)
    return model.to(floating) if floating is not None else model
