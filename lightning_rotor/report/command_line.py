"""``lightning-rotor plan``: what can be asked, the answer as tables, JSON and pictures, and errors as messages."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_rotor import __version__
from lightning_rotor.errors import RotorError, RotorWarning, SampleError
from lightning_rotor.planned.batch_sizes import BatchSizeAdvice
from lightning_rotor.planning import baselines
from lightning_rotor.planning.tables import plain_simulation
from lightning_rotor.profiling.estimates import GPUS, InputSpec
from lightning_rotor.report import (
    PlotError,
    draw_chain,
    frontier_table,
    plan_table,
    plot_frontier,
    plot_timeline,
    stage_table,
)
from lightning_rotor.report.command_planning import Found, assignment, find_batch_sizes, find_plan
from lightning_rotor.report.timeline import require_matplotlib
from lightning_rotor.simulator import simulate
from lightning_rotor.units import format_bytes, format_seconds

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
    except RotorError as error:
        return _fail(error, f"error: {error}", options)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the user's model can raise anything
        return _fail(error, f"error: {type(error).__name__}: {error} (--traceback shows where)", options)
    return 0


def _run(options: Namespace) -> None:
    if options.batch_sizes is not None:
        advice = find_batch_sizes(options)
        _write(advice_as_json(advice, options.model) if options.json else [advice])
        return
    if options.plot or options.plot_curve:
        require_matplotlib()  # before minutes of measuring
    found = find_plan(options)
    _write(plan_as_json(found) if options.json else _tables(found))
    for path in _draw(found, options):
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


def _fail(error: Exception, message: str, options: Namespace) -> int:
    if options.traceback:
        traceback.print_exception(error, file=sys.stderr)
    _say(message)
    return _FAILED


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")


# -------------------------------------------------------------------- the question


_EXAMPLES = """
examples:
  %(prog)s --model torchvision.models.resnet101 --input 64x3x224x224 --budget 4GiB
  %(prog)s --model gpt.py:large --input 8x1024:int64 --device meta --gpu H100 --optimizer adamw --curve
  %(prog)s --model torchvision.models.vit_b_16 --input 32x3x224x224 --device meta --gpu T4 --json
  %(prog)s --model torchvision.models.resnet50 --input 64x3x224x224 --device meta --gpu T4 --batch-sizes
"""
_PRECISIONS = ("32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")


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
    _ask_for_step(plan)
    _ask_for_answer(plan.add_argument_group("the answer"))
    options = parser.parse_args(arguments)
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


def _batch_sizes(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise SampleError(f"batch sizes {text!r} cannot be read: expected positive integers such as 8,16,24")
    return tuple(map(int, text.split(",")))


def _ask_for_step(plan: argparse.ArgumentParser) -> None:
    ask = plan.add_argument_group("the model").add_argument
    said = "a class or function that makes it: package.module.name, or file.py:name"
    ask("--model", required=True, metavar="PATH", help=said)
    said = "argument for it, a Python literal or a string; may be repeated"
    many: dict[str, Any] = {"action": "append", "dest": "model_arguments", "default": []}
    ask("--model-arg", type=_reading(assignment), metavar="NAME=VALUE", help=said, **many)
    said = "an argument of its forward, such as 64x3x224x224, 8x512:int64 or mask=8x512:bool; repeat for several"
    many = {"action": "append", "dest": "inputs", "required": True}
    ask("--input", type=_reading(InputSpec.parse), metavar="[NAME=]SHAPE[:DTYPE]", help=said, **many)
    ask("--precision", choices=_PRECISIONS, default="32-true", help="as Lightning's (default: %(default)s)")

    ask = plan.add_argument_group("the memory").add_argument
    said = (
        "what training may hold on the device: 4GiB, 10GB, 80%%. Default: what is free; for --device meta the memory "
    )
    ask("--budget", metavar="SIZE", help=f"{said}of --gpu, less 1 GiB")
    said = (
        "whose state counts: a class of torch.optim such as adamw or sgd:momentum=0.9, or none (default: %(default)s)"
    )
    ask("--optimizer", default="adamw", metavar="NAME[:ARG=VALUE,...]", help=said)
    said = "the budget is for activations and new gradients alone, as with Checkpointable"
    ask("--activations-only", action="store_true", help=said)

    ask = plan.add_argument_group("the device").add_argument
    said = (
        "cpu or cuda: measure there; meta: allocate nothing, and estimate from shapes for --gpu (default: %(default)s)"
    )
    ask("--device", default="cpu", metavar="NAME", help=said)
    said = "which one to estimate for (default: %(default)s)"
    ask("--gpu", choices=tuple(GPUS), type=_gpu, default="A100-80GB", help=said)
    ask("--flops", type=float, metavar="N", help="its floating-point operations per second, instead")
    ask("--bandwidth", type=float, metavar="N", help="its bytes per second, instead")


def _ask_for_answer(group: argparse._ArgumentGroup) -> None:
    ask = group.add_argument
    said = (
        "instead of one plan, samples per second of these batch sizes within the budget, from measurements with "
        "the inputs and with half of each; of many up to the first that does not fit, if none are named"
    )
    ask("--batch-sizes", nargs="?", const=(), type=_reading(_batch_sizes), metavar="N,N,...", help=said)
    ask("--curve", action="store_true", help="also say what every other budget would cost")
    ask("--json", action="store_true", help="print JSON instead of tables")
    ask("--plot", type=Path, metavar="FILE", help="save memory over the step as .png, .svg or .pdf")
    ask("--plot-curve", type=Path, metavar="FILE", help="save budget against overhead likewise")
    ask("--draw", type=Path, metavar="FILE.svg", help="save a drawing of the stages")
    ask("--slots", type=int, default=500, metavar="N", help="resolution of the planner (default: %(default)s)")
    ask("--traceback", action="store_true", help="show where an error comes from")


def _gpu(name: str) -> str:
    """A GPU's name as its table has it, whatever the case."""
    return next((known for known in GPUS if known.lower() == name.lower()), name)


# -------------------------------------------------------------------- the answer


def _tables(found: Found) -> Iterator[Any]:
    """The plan, what it does with the stages, the curve if there is one, and notes."""
    yield plan_table(found.plan, reserved_bytes=found.reserved_bytes, extra_rows=_rows(found))
    yield stage_table(found.plan)
    if found.frontier is not None:
        yield frontier_table(found.frontier, reserved_bytes=found.reserved_bytes)
        if found.plan.overhead > 0:
            yield found.frontier.gain("1GiB").describe(reserved_bytes=found.reserved_bytes)
    if found.accelerator is not None:
        yield (
            "Estimated from shapes: activations and gradients to the byte, times by a roofline. What kernels allocate "
            "for themselves (workspaces of convolutions, for one) is not known and comes on top."
        )
    if found.resident:
        yield "The loss and the optimizer's temporary memory are not part of the model, and not in the budget."


def _rows(found: Found) -> Iterator[tuple[str, str]]:
    yield "Step, as planned", f"{format_seconds(found.plan.seconds)} forward and backward"
    if found.resident:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.resident.items() if size)
        yield "Training holds", listed
    if found.accelerator is not None:
        yield "Estimated for", f"{found.accelerator.name} with {format_bytes(found.accelerator.memory_bytes)}"


def plan_as_json(found: Found) -> dict[str, Any]:
    """Everything that the tables show, and every stage and point of the curve; sizes in bytes, durations in seconds."""
    plan, reserved = found.plan, found.reserved_bytes
    of_stages = ("saved_bytes", "saved_input_bytes", "saved_output_bytes", "forward_seconds", "backward_seconds")
    return {
        "model": found.model,
        "device": "meta" if found.accelerator is not None else plan.chain.device,
        "estimated_for": found.accelerator.name if found.accelerator is not None else None,
        "budget_bytes": found.budget_bytes,
        "reserved_bytes": reserved,
        "peak_bytes": reserved + plan.peak_bytes,
        "plain_peak_bytes": reserved + plain_simulation(plan).peak_bytes,
        "seconds": plan.seconds,
        "plain_seconds": plan.chain.step_seconds,
        "overhead": plan.overhead,
        "gap": plan.gap,
        "schedule": str(plan.schedule),
        "resident_bytes": dict(found.resident),
        "stages": [
            {"name": stage.name, "output_bytes": stage.output_bytes}
            | {name: getattr(stage.keep, name) for name in of_stages}
            | {"recomputed": number in plan.recomputed}
            for number, stage in enumerate(plan.chain)
        ],
        "frontier": None
        if found.frontier is None
        else [
            {
                "budget_bytes": reserved + point.peak_bytes,
                "seconds": point.seconds,
                "overhead": point.overhead,
                "schedule": str(point.schedule),
            }
            for point in found.frontier
        ],
    }


def advice_as_json(advice: BatchSizeAdvice, model: str) -> dict[str, Any]:
    """What each batch size is worth."""
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


# -------------------------------------------------------------------- pictures


def _draw(found: Found, options: Namespace) -> Iterator[Path]:
    """Save the pictures that were asked for; yields where they are."""
    plan, reserved = found.plan, found.reserved_bytes
    title = options.model.rpartition(".")[2].rpartition(":")[2]
    if options.model_arguments:  # all models of timm come from ``create_model``: arguments say which one
        title += f"({', '.join(str(value) for _, value in options.model_arguments)})"
    shapes = ["×".join(map(str, spec.shape)) or "scalar" for spec in options.inputs]
    title += f", {' and '.join(shapes)}"
    if options.plot is not None:
        yield _save(options.plot, plot_timeline(plan, reserved_bytes=reserved, title=title))
    if options.plot_curve is not None and found.frontier is not None:
        rivals = {
            name: simulate(plan.chain, schedule, **plan.conditions)
            for name, schedule in baselines(plan.chain).items()
            if name != "keep_all"
        }
        limits = {} if found.accelerator is None else {found.accelerator.name: found.accelerator.memory_bytes}
        figure = plot_frontier(found.frontier, reserved_bytes=reserved, rivals=rivals, limits=limits, title=title)
        yield _save(options.plot_curve, figure)
    if options.draw is not None:
        text = draw_chain(plan.chain, found.profile.stages, schedule=plan.schedule, title=title)
        try:
            options.draw.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PlotError(f"the drawing cannot be written: {error}") from error
        yield options.draw


def _save(path: Path, figure: Any) -> Path:
    try:
        figure.savefig(path, dpi=200)
    except (OSError, ValueError) as error:
        raise PlotError(
            f"the picture cannot be written: {error}. Expected a name that ends in .png, .svg or .pdf"
        ) from error
    return path
