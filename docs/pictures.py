"""Draw the pictures of docs/how_it_works.md and docs/index.md: ``python docs/pictures.py``, a minute on any machine.

Costs are estimated for an A100 from shapes alone, so every run draws the same pictures.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text
from torch import nn

from lightning_rotor import Chain, Plan, parse_bytes, plan
from lightning_rotor.profiling.accelerators import GPUS
from lightning_rotor.profiling.estimates import estimate_profile
from lightning_rotor.profiling.input_spec import InputSpec
from lightning_rotor.profiling.models_without_memory import build_on_meta
from lightning_rotor.report import plot_frontier, plot_timeline
from lightning_rotor.report.command_line import main as command_line
from lightning_rotor.report.drawing import SVG_FORMAT
from lightning_rotor.report.figures import PHASE_COLOURS, PHASE_LABELS

FOLDER = Path(__file__).parent / "pictures"
IMAGES = "256x3x32x32"
BUDGET = "290MiB"


def model() -> nn.Sequential:
    """Four convolutions with normalization, for images ``(batch, 3, 32, 32)``."""
    return nn.Sequential(
        *_convolution(3, 64),
        *_convolution(64, 64),
        nn.MaxPool2d(2),
        *_convolution(64, 128),
        *_convolution(128, 128),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 8 * 8, 10),
    )


def _convolution(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU()


def draw_costs(chain: Chain) -> Figure:
    """What each stage hands on, and how long its forward and backward take."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    numbers = range(len(chain))
    upper.bar(numbers, [stage.output_bytes / 2**20 for stage in chain.stages], color=PHASE_COLOURS["forward"][0])
    upper.set_ylabel("output, MiB")
    forward = [1e3 * stage.options[0].forward_seconds for stage in chain.stages]
    backward = [1e3 * stage.options[0].backward_seconds for stage in chain.stages]
    lower.bar(numbers, forward, color=PHASE_COLOURS["forward"][0], label="forward")
    lower.bar(numbers, backward, bottom=forward, color=PHASE_COLOURS["backward"][0], label="backward")
    lower.set_ylabel("time, ms")
    lower.legend(frameon=False)
    lower.set_xticks(numbers, labels=[str(number) for number in numbers])
    lower.set_xlabel("stage")
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_schedule(found: Plan) -> Figure:
    """One square for each operation of a step, in order."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for phase, (colour, _) in PHASE_COLOURS.items():
        places = [(at, event.stage) for at, event in enumerate(found.simulation.events) if event.phase == phase]
        axes.scatter(*zip(*places, strict=True), marker="s", s=46, color=colour, label=PHASE_LABELS[phase])
    axes.set_xlabel("operation, from first to last")
    axes.set_ylabel("stage")
    axes.set_yticks(range(len(found.chain)))
    axes.set_title(f"{found.schedule}", family="monospace")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    return figure


def record_terminal() -> str:
    """The command of the page "Getting started" with what it prints, as a picture of a terminal."""
    command = "plan --model torchvision.models.resnet101 --input 64x3x224x224 --budget 4GiB --device meta --curve"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if command_line(command.split()) != 0:
            raise SystemExit("the command has failed")
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Text(f"$ lightning-rotor {command}\n"), Text(printed.getvalue()))
    return console.export_svg(title="lightning-rotor plan", theme=DEFAULT_TERMINAL_THEME, code_format=SVG_FORMAT)


def main() -> None:
    """Write all pictures."""
    (FOLDER / "terminal.svg").write_text(record_terminal(), encoding="utf-8")
    profile = estimate_profile(build_on_meta(model), [InputSpec.parse(IMAGES)], GPUS["A100-80GB"])
    found = plan(profile.chain, parse_bytes(BUDGET))
    figures = {
        "chain": draw_costs(profile.chain),
        "schedule": draw_schedule(found),
        "plan": plot_timeline(found),
        "curve": plot_frontier(found.frontier(), limits={"budget": found.budget_bytes}),
    }
    for name, figure in figures.items():
        figure.savefig(FOLDER / f"{name}.png", dpi=130)


if __name__ == "__main__":
    main()
