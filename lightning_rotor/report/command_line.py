"""``lightning-rotor plan``: what can be asked, how it is planned, the answer, and errors as messages.

options ──► model, optimizer, batch ──► profile (measured or estimated) ──► plan ──► tables, JSON, pictures
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import math
import os
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from lightning_rotor import __version__
from lightning_rotor.capture.cuts import GraphCut, sequentialize
from lightning_rotor.errors import ModelError, ProfilingError, RotorError, RotorWarning, SampleError
from lightning_rotor.memory.budget import ResidentMemory, resolve_limit
from lightning_rotor.planned.batch_sizes import AffineCosts, BatchSizeAdvice, advice_from
from lightning_rotor.planning import Frontier, Plan
from lightning_rotor.planning.plan import plain_simulation
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.dry_run import require_same
from lightning_rotor.profiling.estimates import GPUS, Accelerator, InputSpec, arguments, build_on_meta, estimate_profile
from lightning_rotor.profiling.meters import measuring_progress
from lightning_rotor.report.drawing import draw_chain
from lightning_rotor.report.figures import PlotError, new_figure
from lightning_rotor.report.frontier_plot import plot_frontier
from lightning_rotor.report.tables import frontier_table, plan_table, stage_table
from lightning_rotor.report.timeline import plot_timeline
from lightning_rotor.units import format_bytes, format_seconds, parse_limit

_FAILED = 2
_WIDTH = 100  # where there is no terminal


def main(arguments: Sequence[str] | None = None, *, program: str = "lightning-rotor") -> int:
    """Run the command line of ``program``; returns 0, or 2 if there is no plan. Messages go to the error stream."""
    try:
        options = _parse(arguments, program)
    except SystemExit as end:  # argparse has said what is wrong, or helped
        return end.code if isinstance(end.code, int) else _FAILED
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RotorWarning)
            _run(options)
        for warning in caught:
            _say(f"warning: {warning.message}")
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the user's model can raise anything
        if options.traceback:
            traceback.print_exception(error)
        message = f"{type(error).__name__}: {error} (--traceback shows where)"
        _say(f"error: {error if isinstance(error, RotorError) else message}")
        return _FAILED
    return 0


def _run(options: Namespace) -> None:
    if options.batch_sizes is not None:
        advice = _find_batch_sizes(options)
        _write(_advice_as_json(advice, options.model) if options.json else [advice])
        return
    if options.plot or options.plot_curve:
        new_figure(1, 1)  # an error before minutes of measuring
    answer = _answer_to(options)
    _write(_plan_as_json(answer) if options.json else _tables(answer))
    for path, save in _pictures(answer):
        try:
            save(path)
        except (OSError, ValueError) as error:
            raise PlotError(
                f"the picture cannot be written: {error}. Expected a name that ends in .png, .svg or .pdf"
            ) from error
        _say(f"wrote {path}")


def _write(answer: dict[str, Any] | Iterable[Any]) -> None:
    """JSON, or tables and lines of text."""
    if isinstance(answer, dict):
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
        return
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH
    console = Console(file=sys.stdout, width=width, highlight=False)
    for part in answer:
        console.print(part, soft_wrap=isinstance(part, str))


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")


_EXAMPLES = """
examples:
  %(prog)s --model torchvision.models.resnet101 --input 64x3x224x224 --budget 4GiB
  %(prog)s --model gpt.py:large --input 8x1024:int64 --gpu H100 --optimizer adamw --curve
  %(prog)s --model torchvision.models.vit_b_16 --input 32x3x224x224 --gpu T4 --json
  %(prog)s --model torchvision.models.resnet50 --input 64x3x224x224 --gpu T4 --batch-sizes
"""
_DEFAULT_GPU = "A100-80GB"
_PRECISIONS = ("32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")


def _gpu_name(name: str) -> str:
    """A GPU's name as :data:`GPUS` has it, however it is written."""
    return {gpu.lower(): gpu for gpu in GPUS}.get(name.lower(), name)


def _parse(arguments: Sequence[str] | None, program: str) -> Namespace:
    """The command line, which its usage calls ``program``."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Train inside a memory limit: measure a model, plan the least recomputation that fits.",
    )
    parser.add_argument("--version", action="version", version=f"lightning-rotor {__version__}")
    plan = parser.add_subparsers(dest="command", required=True).add_parser(
        "plan",
        help="plan a training step of a model, and say what it costs",
        description="Plan a training step of a model within a budget, and say what it costs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(plan)
    options = parser.parse_args(arguments)
    described = [name for name in ("gpu", "flops", "bandwidth") if getattr(options, name) is not None]
    options.device = options.device or ("meta" if described else "cpu")
    if described and options.device != "meta":
        plan.error(f"--{described[0]} is what --device meta estimates for: expected no --device {options.device}")
    alone = [option for option in ("curve", "plot", "plot_curve", "draw") if getattr(options, option)]
    if options.batch_sizes is not None and alone:
        plan.error(f"--batch-sizes shows many plans: expected no --{alone[0].replace('_', '-')}, which shows one")
    return options


def _reading(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Reads a value for argparse, which shows the message of this error alone."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except RotorError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _positive(kind: Callable[[str], float]) -> Callable[[str], Any]:
    """Reads a positive number for argparse."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if 0 < (number := kind(text)) < math.inf:
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not possible: expected a positive number, such as 500 or 60e12")

    return read


def _batch_sizes(text: str) -> tuple[int, ...]:
    return tuple(map(_positive(int), text.split(",")))


def _add_options(plan: argparse.ArgumentParser) -> None:
    ask = plan.add_argument_group("the model").add_argument
    ask("--model", required=True, metavar="PATH", help="what makes it: package.module.name, or file.py:name")
    many: dict[str, Any] = {"action": "append", "dest": "model_arguments", "default": []}
    said = "argument for it, a Python literal or a string; may be repeated"
    ask("--model-arg", type=_reading(_assignment), metavar="NAME=VALUE", help=said, **many)
    many = {"action": "append", "dest": "inputs", "required": True}
    said = "argument of its forward: 64x3x224x224, 8x512:int64 (token ids) or mask=8x512:bool; may be repeated"
    ask("--input", type=_reading(InputSpec.parse), metavar="[NAME=]SHAPE[:DTYPE]", help=said, **many)
    ask("--precision", choices=_PRECISIONS, default="32-true", help="as Lightning's (default: %(default)s)")

    ask = plan.add_argument_group("the memory").add_argument
    said = "what training may hold on the device: 4GiB, 10GB, 80%%. Default: what is free; of --gpu all but 1 GiB"
    ask("--budget", metavar="SIZE", help=said)
    said = "whose state counts: a class of torch.optim, such as sgd:momentum=0.9, or none (default: %(default)s)"
    ask("--optimizer", default="adamw", metavar="NAME[:ARG=VALUE,...]", help=said)
    said = "the budget is for activations and new gradients alone, as with Checkpointable"
    ask("--activations-only", action="store_true", help=said)

    ask = plan.add_argument_group("the device").add_argument
    said = "cpu or cuda: measure there; meta: estimate from shapes for --gpu (default: meta with --gpu, or else cpu)"
    ask("--device", metavar="NAME", help=said)
    ask("--gpu", type=_gpu_name, choices=tuple(GPUS), help=f"which one to estimate for (default: {_DEFAULT_GPU})")
    ask("--flops", type=_positive(float), metavar="N", help="its floating-point operations per second, instead")
    ask("--bandwidth", type=_positive(float), metavar="N", help="its bytes per second, instead")

    ask = plan.add_argument_group("the answer").add_argument
    said = (
        "instead of one plan, samples per second of these batch sizes within the budget, from measurements with "
        "the inputs and with half of each; of many up to the first that does not fit, if none are named"
    )
    ask("--batch-sizes", nargs="?", const=(), type=_batch_sizes, metavar="N,N,...", help=said)
    ask("--curve", action="store_true", help="also say what every other budget would cost")
    ask("--json", action="store_true", help="print JSON instead of tables")
    ask("--plot", type=Path, metavar="FILE", help="save memory over the step as .png, .svg or .pdf")
    ask("--plot-curve", type=Path, metavar="FILE", help="save budget against overhead likewise")
    ask("--draw", type=Path, metavar="FILE.svg", help="save a drawing of the stages")
    said = "resolution of the planner (default: %(default)s)"
    ask("--slots", type=_positive(int), default=500, metavar="N", help=said)
    ask("--traceback", action="store_true", help="show where an error comes from")


_EXPECTED = "expected a class or function that makes a module"


def _model_maker(path: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    """A function that makes a model, maker at ``package.module.name`` or ``file.py:name``, or ``ModelError``."""
    maker = _named(path)
    if not callable(maker):
        raise ModelError(f"{path} is {type(maker).__name__}: {_EXPECTED}")

    def make() -> nn.Module:
        try:
            model = maker(**arguments)
        except TypeError as error:
            remedy = "Expected its arguments as --model-arg name=value"
            raise ModelError(f"{path} cannot be called: {error}. {remedy}") from error
        if not isinstance(model, nn.Module):
            raise ModelError(f"{path} makes {type(model).__name__}: expected a torch.nn.Module")
        return model

    return make


def _named(path: str) -> Any:
    """The object called ``package.module.name`` or ``file.py:name``."""
    in_file = ".py:" in path
    place, _, name = path.rpartition(":" if in_file else ".")
    file = Path(place)
    if in_file and not file.is_file():
        raise ModelError(
            f"there is no file {place!r}: expected file.py:name with the name of a class or function in it"
        )
    # The user's own modules are where the command is run, or beside the file.
    sys.path.insert(0, str(file.resolve().parent if in_file else Path.cwd()))
    if in_file:
        sys.modules.pop(file.stem, None)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(file.stem if in_file else place)
    except (ModuleNotFoundError, ValueError) as error:
        package = str(getattr(error, "name", None) or path).partition(".")[0]
        raise ModelError(
            f"{place or path} cannot be imported: {error}. Try pip install {package} if that is a package. Expected "
            "package.module.name, such as torchvision.models.resnet101, or file.py:name"
        ) from error
    if not hasattr(module, name):
        raise ModelError(f"{place} has no {name!r}: {_EXPECTED}")
    return getattr(module, name)


def _optimizers_for(model: nn.Module, text: str) -> list[torch.optim.Optimizer]:
    """The optimizer called ``adamw``, ``sgd:momentum=0.9`` or ``none`` for what learns in a model, or ModelError."""
    name, _, given = text.partition(":")
    base = torch.optim.Optimizer
    kinds: dict[str, type[torch.optim.Optimizer]] = {}
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base:
            kinds[kind.__name__.lower()] = kind
    if name.lower() not in (*kinds, "none"):
        raise ModelError(f"optimizer {name!r} is unknown: expected one of {', '.join(sorted(kinds))}, or none")
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name.lower() == "none" or not learning:
        return []
    arguments: dict[str, Any] = {"lr": 1e-3} | dict(_assignment(part) for part in given.split(",") if part)
    try:
        return [kinds[name.lower()](learning, **arguments)]
    except (TypeError, ValueError) as error:
        raise ModelError(f"optimizer {text!r} cannot be made: {error}") from error


def _assignment(text: str) -> tuple[str, Any]:
    """The name and value of ``name=value``, a Python literal or else a string; ``ModelError`` if it is none."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ModelError(f"{text!r} is no assignment: expected name=value, such as num_classes=10")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


# For the CUDA context and libraries, and for what the allocator cannot use.
_CONTEXT_BYTES = 2**30
_HALF = {"bf16": torch.bfloat16, "16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """A plan with the model that it is for, as it is shown."""

    case: _Case
    profile: Profile
    plan: Plan
    frontier: Frontier | None
    reserved_bytes: int  # what of the budget is not for the chain


def _answer_to(options: Namespace) -> _Answer:
    """Build the model, measure it and plan; ``RotorError`` if something is amiss or no plan fits."""
    case = _Case.of(options)
    profile = case.profile(options.inputs)
    plan = case.resident.budget(case.budget_bytes).plan(profile.chain, slots=options.slots)
    frontier = plan.frontier() if options.curve or options.plot_curve is not None else None
    return _Answer(case, profile, plan, frontier, case.budget_bytes - plan.budget_bytes)


def _find_batch_sizes(options: Namespace) -> BatchSizeAdvice:
    """Build the model, measure it with the inputs and half of each, and plan every batch size, or ``RotorError``."""
    case = _Case.of(options)
    sizes = {spec.shape[0] for spec in options.inputs if spec.shape}
    if len(sizes) != 1 or max(sizes) < 2:
        raise SampleError(
            f"the inputs have first dimensions {sorted(sizes)}: "
            "expected one number of samples, at least 2, in all of them"
        )
    (size,) = sizes
    halves = [replace(spec, shape=(size // 2, *spec.shape[1:])) if spec.shape else spec for spec in options.inputs]
    chains = case.profile(halves).chain, case.profile(options.inputs).chain
    return advice_from(
        AffineCosts((size // 2, size), chains),
        case.resident,
        limit_bytes=case.budget_bytes,
        batch_sizes=options.batch_sizes or None,
        slots=options.slots,
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
        if kind not in ("cpu", "cuda", "meta"):
            raise ProfilingError(f"device {options.device!r} is unknown: expected cpu, cuda or meta")
        if kind == "cuda" and not torch.cuda.is_available():
            raise ProfilingError(
                "there is no CUDA device on this machine: use --device meta with --gpu to estimate for one"
            )
        device = torch.device(options.device)
        limit = parse_limit(options.budget)  # wrong ones are found before anything is measured
        half = _HALF.get(options.precision.partition("-")[0])
        floating, mixed = (half, None) if options.precision.endswith("-true") else (None, half)
        model = _built(options, device, floating)
        batch = [spec.make(device, floating=floating) for spec in options.inputs]
        resident = ResidentMemory()
        if not options.activations_only:
            resident = ResidentMemory.of(model, model, _optimizers_for(model, options.optimizer), batch, device)
        if kind != "meta":
            return cls(options, model, None, resolve_limit(limit, device), resident, floating, mixed)
        given = {"flops": options.flops, "half_flops": options.flops, "bandwidth": options.bandwidth}
        described = {name: value for name, value in given.items() if value is not None}
        accelerator = replace(GPUS[options.gpu or _DEFAULT_GPU], **described)
        total = accelerator.memory_bytes
        budget = total - _CONTEXT_BYTES if limit is None else limit.on_device(total)
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

    def profile(self, inputs: Sequence[InputSpec]) -> Profile:
        """Costs for such inputs, measured or estimated."""
        device = torch.device(self.options.device)
        with measuring_progress(enabled=sys.stderr.isatty()) as progress:
            if self.accelerator is not None:
                model = _built(self.options, device, self.floating)  # each estimate makes its tensors its own
                return estimate_profile(
                    model, inputs, self.accelerator, autocast=self.mixed, floating=self.floating, progress=progress
                )
            args, kwargs = arguments(inputs, device, floating=self.floating)
            with torch.autocast(device.type, dtype=self.mixed, enabled=self.mixed is not None):
                cut = sequentialize(self.model, args, kwargs)
                if isinstance(cut, GraphCut):
                    require_same(self.model, cut, args, kwargs)
                return profile_chain(cut.stages, cut.bind(args, kwargs), progress=progress)


def _built(options: Namespace, device: torch.device, floating: torch.dtype | None) -> nn.Module:
    make = _model_maker(options.model, dict(options.model_arguments))
    model = build_on_meta(make) if device.type == "meta" else make().train().to(device)
    return model.to(floating) if floating is not None else model


def _tables(answer: _Answer) -> Iterator[Any]:
    """The plan, what it does with the stages, the curve if there is one, and notes."""
    gpu, held = answer.case.accelerator, answer.case.held_bytes
    rows = {"Step, as planned": f"{format_seconds(answer.plan.seconds)} forward and backward"}
    if held:
        rows["Training holds"] = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items() if size)
    if gpu is not None:
        rows["Estimated for"] = f"{gpu.name} with {format_bytes(gpu.memory_bytes)}"
    yield plan_table(answer.plan, reserved_bytes=answer.reserved_bytes, extra_rows=rows.items())
    yield stage_table(answer.plan)
    if answer.frontier is not None:
        yield frontier_table(answer.frontier, reserved_bytes=answer.reserved_bytes)
        if answer.plan.overhead > 0:
            yield answer.frontier.gain("1GiB").describe(reserved_bytes=answer.reserved_bytes)
    if gpu is not None:
        yield (
            "Estimated from shapes: activations and gradients to the byte, times by a roofline. What kernels allocate "
            "for themselves (workspaces of convolutions, for one) is not known and comes on top."
        )
    if held:
        yield "The loss and the optimizer's temporary memory are not part of the model, and not in the budget."


def _plan_as_json(answer: _Answer) -> dict[str, Any]:
    """Everything that the tables show, and every stage and point of the curve; sizes in bytes, durations in seconds."""
    plan, reserved, gpu = answer.plan, answer.reserved_bytes, answer.case.accelerator
    of_stages = ("saved_bytes", "saved_input_bytes", "saved_output_bytes", "forward_seconds", "backward_seconds")
    points = [
        {"budget_bytes": reserved + point.peak_bytes, "seconds": point.seconds}
        | {"overhead": point.overhead, "schedule": str(point.schedule)}
        for point in answer.frontier or ()
    ] or None
    return {
        "model": answer.case.options.model,
        "device": plan.chain.device if gpu is None else "meta",
        "estimated_for": None if gpu is None else gpu.name,
        "budget_bytes": answer.case.budget_bytes,
        "reserved_bytes": reserved,
        "peak_bytes": reserved + plan.peak_bytes,
        "plain_peak_bytes": reserved + plain_simulation(plan).peak_bytes,
        "seconds": plan.seconds,
        "plain_seconds": plan.chain.step_seconds,
        "overhead": plan.overhead,
        "gap": plan.gap,
        "schedule": str(plan.schedule),
        "resident_bytes": dict(answer.case.held_bytes),
        "stages": [
            {"name": stage.name, "output_bytes": stage.output_bytes}
            | {name: getattr(stage.keep, name) for name in of_stages}
            | {"recomputed": number in plan.recomputed}
            for number, stage in enumerate(plan.chain)
        ],
        "frontier": points,
    }


def _advice_as_json(advice: BatchSizeAdvice, model: str) -> dict[str, Any]:
    """Speed and memory of each batch size."""
    return {
        "model": model,
        "budget_bytes": advice.limit_bytes,
        "measured_batch_sizes": list(advice.measured),
        "best_batch_size": advice.best.batch_size,
        "batch_sizes": [
            {
                "batch_size": option.batch_size,
                "samples_per_second": option.samples_per_second,
                "peak_bytes": option.peak_bytes,
                "overhead": option.plan.overhead,
                "recomputed_stages": len(option.plan.recomputed),
                "schedule": str(option.plan.schedule),
            }
            for option in advice.options
        ],
    }


def _pictures(answer: _Answer) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """Where to save the pictures that were asked for, and what saves them."""
    plan, reserved, options, gpu = answer.plan, answer.reserved_bytes, answer.case.options, answer.case.accelerator
    title = options.model.rpartition(".")[2].rpartition(":")[2]
    if options.model_arguments:  # all models of timm come from ``create_model``: arguments say which one
        title += f"({', '.join(str(value) for _, value in options.model_arguments)})"
    shapes = ["×".join(map(str, spec.shape)) or "scalar" for spec in options.inputs]
    title += f", {' and '.join(shapes)}"
    if options.plot is not None:
        figure = plot_timeline(plan, reserved_bytes=reserved, title=title)
        yield options.plot, partial(figure.savefig, dpi=200)
    if options.plot_curve is not None and answer.frontier is not None:
        limits = {} if gpu is None else {gpu.name: gpu.memory_bytes}
        figure = plot_frontier(answer.frontier, reserved_bytes=reserved, limits=limits, title=title)
        yield options.plot_curve, partial(figure.savefig, dpi=200)
    if options.draw is not None:
        yield options.draw, draw_chain(plan.chain, answer.profile.stages, schedule=plan.schedule, title=title).save
