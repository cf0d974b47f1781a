"""What can be asked on the command line."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rotor import __version__
from lightning_rotor.errors import ModelError, SampleError
from lightning_rotor.profiling.estimates import InputSpec
from lightning_rotor.profiling.roofline import GPUS

PRECISIONS = ("32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")
_EXAMPLES = """
examples:
  %(prog)s --model torchvision.models.resnet101 --input 64x3x224x224 --budget 4GiB
  %(prog)s --model gpt.py:large --input 8x1024:int64 --device meta --gpu H100 --optimizer adamw --curve
  %(prog)s --model torchvision.models.vit_b_16 --input 32x3x224x224 --device meta --gpu T4 --json
  %(prog)s --model torchvision.models.resnet50 --input 64x3x224x224 --device meta --gpu T4 --batch-sizes
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked, see :func:`parse`."""

    model: str
    model_arguments: dict[str, Any]
    inputs: tuple[InputSpec, ...]
    budget: str | None
    activations_only: bool
    optimizer: str
    device: str
    precision: str
    gpu: str
    flops: float | None
    bandwidth: float | None
    slots: int
    batch_sizes: tuple[int, ...] | None
    curve: bool
    json: bool
    plot: Path | None
    plot_curve: Path | None
    draw: Path | None
    traceback: bool


def parse(arguments: Sequence[str] | None, *, program: str) -> Options:
    """Read a command line, which its usage calls ``program``.

    Raises:
        SystemExit: It cannot be read, or help was asked for; argparse has written what there is to say.
    """
    parser = _parser(program)
    found = vars(parser.parse_args(arguments))
    del found["command"]
    try:
        found["inputs"] = tuple(InputSpec.parse(text) for text in found["inputs"])
        found["batch_sizes"] = _batch_sizes(found["batch_sizes"])
        found["model_arguments"] = dict(assignment(text) for text in found["model_arguments"])
    except ValueError as error:  # ours are ValueErrors, too
        parser.error(str(error))
    alone = [option for option in ("curve", "plot", "plot_curve", "draw") if found[option]]
    if found["batch_sizes"] is not None and alone:
        parser.error(f"--batch-sizes shows many plans: expected no --{alone[0].replace('_', '-')}, which shows one")
    return Options(**found)


def _batch_sizes(text: str | None) -> tuple[int, ...] | None:
    if not text:
        return None if text is None else ()
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise SampleError(f"batch sizes {text!r} cannot be read: expected positive integers such as 8,16,24")
    return tuple(map(int, text.split(",")))


def assignment(text: str) -> tuple[str, Any]:
    """``name=value`` with a Python literal, or failing that a string, as value.

    Raises:
        ModelError: There is no ``=``, or no name before it.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ModelError(f"{text!r} is no assignment: expected name=value, such as num_classes=10")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Train inside a memory limit: measure a model, plan the least recomputation that fits.",
    )
    parser.add_argument("--version", action="version", version=f"lightning-rotor {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="plan a training step of a model, and say what it costs",
        description="Plan a training step of a model within a budget, and say what it costs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(plan.add_argument_group("the model"))
    _add_memory(plan.add_argument_group("the memory"))
    _add_device(plan.add_argument_group("the device"))
    _add_output(plan.add_argument_group("the answer"))
    return parser


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="a class or function that makes it: package.module.name, or file.py:name",
    )
    group.add_argument(
        "--model-arg",
        dest="model_arguments",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument for it, a Python literal or a string; may be repeated",
    )
    group.add_argument(
        "--input",
        dest="inputs",
        action="append",
        required=True,
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="an argument of its forward, such as 64x3x224x224, 8x512:int64 or mask=8x512:bool; repeat for several",
    )
    group.add_argument(
        "--precision", choices=PRECISIONS, default="32-true", help="as Lightning's (default: %(default)s)"
    )


def _add_memory(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--budget",
        metavar="SIZE",
        help="what training may hold on the device: 4GiB, 10GB, 80%%. Default: what is free; for --device meta the memory of --gpu, less 1 GiB",
    )
    group.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME[:ARG=VALUE,...]",
        help="whose state counts: a class of torch.optim such as adamw or sgd:momentum=0.9, or none (default: %(default)s)",
    )
    group.add_argument(
        "--activations-only",
        action="store_true",
        help="the budget is for activations and new gradients alone, as with Checkpointable",
    )


def _add_device(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="cpu or cuda: measure there; meta: allocate nothing, and estimate from shapes for --gpu (default: %(default)s)",
    )
    group.add_argument(
        "--gpu",
        choices=tuple(GPUS),
        type=_as_listed,
        default="A100-80GB",
        help="which one to estimate for (default: %(default)s)",
    )
    group.add_argument("--flops", type=float, metavar="N", help="its floating-point operations per second, instead")
    group.add_argument("--bandwidth", type=float, metavar="N", help="its bytes per second, instead")


def _as_listed(gpu: str) -> str:
    """A name as data sheets write it, or as it is if there is none."""
    return next((name for name in GPUS if name.lower() == gpu.lower()), gpu)


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-sizes",
        nargs="?",
        const="",
        metavar="N,N,...",
        help="instead of one plan, samples per second of these batch sizes within the budget, from measurements with the inputs and with half of "
        "each; of many up to the first that does not fit, if none are named",
    )
    group.add_argument("--curve", action="store_true", help="also say what every other budget would cost")
    group.add_argument("--json", action="store_true", help="print JSON instead of tables")
    group.add_argument("--plot", type=Path, metavar="FILE", help="save memory over the step as .png, .svg or .pdf")
    group.add_argument("--plot-curve", type=Path, metavar="FILE", help="save budget against overhead likewise")
    group.add_argument("--draw", type=Path, metavar="FILE.svg", help="save a drawing of the stages")
    group.add_argument(
        "--slots", type=int, default=500, metavar="N", help="resolution of the planner (default: %(default)s)"
    )
    group.add_argument("--traceback", action="store_true", help="show where an error comes from")
