"""Options of ``lightning-rotor plan`` and ``advise``: what can be asked."""

from __future__ import annotations

import argparse
import math
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lightning_rotor import __version__
from lightning_rotor.errors import RotorError
from lightning_rotor.link import Link
from lightning_rotor.offload import Offload, is_speed, parse_offload, parse_speed
from lightning_rotor.profiling.accelerators import GPUS
from lightning_rotor.profiling.input_spec import InputSpec
from lightning_rotor.report.named_models import assignment, did_you_mean

_EXAMPLES = """
examples:
  %(prog)s --model torchvision.models.resnet101 --input 64x3x224x224 --budget 4GiB
  %(prog)s --model gpt.py:large --input 8x1024:int64 --gpu H100 --optimizer adamw --curve
  %(prog)s --model gpt.py:large --input 8x1024:int64 --gpu H100 --budget 40GiB --offload 50GB/s
  %(prog)s --model torchvision.models.vit_b_16 --input 32x3x224x224 --gpu T4 --json
  %(prog)s --model torchvision.models.resnet50 --input 64x3x224x224 --gpu T4 --batch-sizes
"""
_ADVICE_EXAMPLES = """
examples:
  %(prog)s --model gpt.py:large --input 8x1024:int64 --gpu H100 --devices 8 --precision bf16-true --batch 256
  %(prog)s --model torchvision.models.vit_l_16 --input 32x3x224x224 --gpu A100-80GB --devices 8 --nodes 4
"""
DEFAULT_GPU = "A100-80GB"
_BATCH = "samples of a step, on all devices together (default: those of --input on each)"
_PRECISIONS = ("32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")


def _gpu_name(name: str) -> str:
    """A GPU's name as :data:`GPUS` has it, however it is written."""
    return {gpu.lower(): gpu for gpu in GPUS}.get(name.lower(), name)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; how the program is used takes a screen, and is for who asks for it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and remember what was given."""
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        known = re.findall(r"--[a-z][a-z-]*", self.format_help())
        # argparse tells of a misspelled option only that another one is missing, or that this one is unrecognized.
        for word in self._given:
            option = word.partition("=")[0]
            if option.startswith("--") and not any(each.startswith(option) for each in known):
                message += did_you_mean(option, known)
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: error: {message}{end} {self.prog} --help shows how it is used\n")


def parsed_options(arguments: Sequence[str] | None, program: str) -> Namespace:
    """The command line, which its usage calls ``program``."""
    parser = _Parser(
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
    _add_options(plan)
    advise = commands.add_parser(
        "advise",
        help="say what to run on several devices",
        description="List ways to train a model on several devices that fit, fastest first, without running it.",
        epilog=_ADVICE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_advice_options(advise)
    options: Namespace
    options, unknown = parser.parse_known_args(arguments)
    # By the command's own parser, whose options are those that may have been meant.
    if unknown:
        (plan if options.command == "plan" else advise).error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command == "advise":
        return options
    # Who describes a device wants an estimate for it: on one that is here, the step is measured.
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


def _offload(text: str) -> Link | Offload | None:
    """A link of a given speed, or where plans may move what stages hold."""
    return Link(*parse_speed(text)) if is_speed(text) else parse_offload(text)


def _batch_sizes(text: str) -> tuple[int, ...]:
    return tuple(map(_positive(int), text.split(",")))


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options about the model, which each command has."""
    ask = parser.add_argument_group("the model").add_argument
    ask("--model", required=True, metavar="PATH", help="what makes it: package.module.name, or file.py:name")
    many: dict[str, Any] = {"action": "append", "dest": "model_arguments", "default": []}
    said = "argument for it, a Python literal or a string; may be repeated"
    ask("--model-arg", type=_reading(assignment), metavar="NAME=VALUE", help=said, **many)
    many = {"action": "append", "dest": "inputs", "required": True}
    said = "argument of its forward: 64x3x224x224, 8x512:int64 (token ids) or mask=8x512:bool; may be repeated"
    ask("--input", type=_reading(InputSpec.parse), metavar="[NAME=]SHAPE[:DTYPE]", help=said, **many)
    ask("--precision", choices=_PRECISIONS, default="32-true", help="as Lightning's (default: %(default)s)")
    said = "whose state counts: a class of torch.optim, such as sgd:momentum=0.9, or none (default: %(default)s)"
    ask("--optimizer", default="adamw", metavar="NAME[:ARG=VALUE,...]", help=said)


def _add_advice_options(advise: argparse.ArgumentParser) -> None:
    _add_model_options(advise)
    advise.add_argument("--batch", type=_positive(int), metavar="N", help=_BATCH)

    ask = advise.add_argument_group("the devices").add_argument
    ask("--gpu", default=DEFAULT_GPU, metavar="NAME", help="each device (default: %(default)s)")
    ask("--devices", type=int, default=1, metavar="N", help="in a node (default: %(default)s)")
    ask("--nodes", type=int, default=1, metavar="N", help="of so many devices (default: %(default)s)")
    said = "what training may hold on each device: 70GiB, 80%%. Default: all but 1 GiB"
    ask("--budget", metavar="SIZE", help=said)
    said = "measured bytes per second from one device to another of its node, instead of a data sheet's"
    ask("--link", type=_positive(float), metavar="N", help=said)
    ask("--network", type=_positive(float), metavar="N", help="likewise, to a device of another node")

    ask = advise.add_argument_group("the answer").add_argument
    ask("--json", action="store_true", help="print JSON instead of a table, with the lines of Python of all ways")
    ask("--traceback", action="store_true", help="show where an error comes from")


def _add_options(plan: argparse.ArgumentParser) -> None:
    _add_model_options(plan)
    ask = plan.add_argument_group("the memory").add_argument
    said = "what training may hold on the device: 4GiB, 10GB, 80%%. Default: what is free; of --gpu all but 1 GiB"
    ask("--budget", metavar="SIZE", help=said)
    said = "the budget is for activations and new gradients alone, as with Checkpointable"
    ask("--activations-only", action="store_true", help=said)
    said = (
        "plans may move what stages hold as well: host or host:64GiB (the default; of --gpu by its data sheet), "
        "disk:/a/folder from the cpu, or over a link of 50GB/s or 170/410GB/s (out, back)"
    )
    ask("--offload", nargs="?", const="host", type=_reading(_offload), metavar="WHERE", help=said)

    ask = plan.add_argument_group("the device").add_argument
    said = "cpu or cuda: measure there; meta: estimate from shapes for --gpu (default: meta with --gpu, or else cpu)"
    ask("--device", metavar="NAME", help=said)
    ask("--gpu", type=_gpu_name, choices=tuple(GPUS), help=f"which one to estimate for (default: {DEFAULT_GPU})")
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
