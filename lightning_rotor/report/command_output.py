"""The answer as tables, as JSON and as pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from lightning_rotor.planned.batch_sizes import BatchSizeAdvice
from lightning_rotor.planning import baselines
from lightning_rotor.planning.tables import plain_simulation
from lightning_rotor.report import (
    PlotError,
    draw_chain,
    frontier_table,
    plan_table,
    plot_frontier,
    plot_timeline,
    stage_table,
)
from lightning_rotor.report.command_options import Options
from lightning_rotor.report.command_planning import Found
from lightning_rotor.simulator import simulate
from lightning_rotor.units import format_bytes, format_seconds

_WIDTH = 100  # where there is no terminal


def write_batch_sizes(advice: BatchSizeAdvice, options: Options, stream: TextIO) -> None:
    """What each batch size is worth, as a table or as JSON."""
    if not options.json:
        _console(stream).print(advice)
        return
    sizes = [
        {
            "batch_size": option.batch_size,
            "samples_per_second": option.samples_per_second,
            "peak_bytes": option.peak_bytes,
            "overhead": option.plan.overhead,
            "recomputed_stages": len(option.plan.recomputed),
            "schedule": str(option.plan.schedule),
        }
        for option in advice.options
    ]
    answer = {
        "model": options.model,
        "budget_bytes": advice.limit_bytes,
        "measured_batch_sizes": list(advice.measured),
        "best_batch_size": advice.best.batch_size,
        "batch_sizes": sizes,
    }
    json.dump(answer, stream, indent=1)
    stream.write("\n")


def _console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH, highlight=False)


def write_tables(found: Found, stream: TextIO) -> None:
    """The plan, what it does with the stages, and the curve if there is one."""
    console = _console(stream)
    console.print(plan_table(found.plan, reserved_bytes=found.reserved_bytes, extra_rows=_rows(found)))
    console.print(stage_table(found.plan))
    if found.frontier is not None:
        console.print(frontier_table(found.frontier, reserved_bytes=found.reserved_bytes))
        if found.plan.overhead > 0:
            console.print(found.frontier.gain("1GiB").describe(reserved_bytes=found.reserved_bytes), soft_wrap=True)
    for note in _notes(found):
        console.print(note, soft_wrap=True)


def _rows(found: Found) -> Iterator[tuple[str, str]]:
    yield "Step, as planned", f"{format_seconds(found.plan.seconds)} forward and backward"
    if found.resident:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.resident.items() if size)
        yield "Training holds", listed
    if found.accelerator is not None:
        yield "Estimated for", f"{found.accelerator.name} with {format_bytes(found.accelerator.memory_bytes)}"


def _notes(found: Found) -> Iterator[str]:
    if found.accelerator is not None:
        yield (
            "Estimated from shapes: activations and gradients to the byte, times by a roofline. What kernels allocate for themselves "
            "(workspaces of convolutions, for one) is not known and comes on top."
        )
    if found.resident:
        yield "The loss and the optimizer's temporary memory are not part of the model, and not in the budget."


# -------------------------------------------------------------------- JSON


def write_json(found: Found, stream: TextIO) -> None:
    """Everything that the tables show, and every stage and point of the curve; sizes in bytes, durations in seconds."""
    json.dump(as_json(found), stream, indent=1)
    stream.write("\n")


def as_json(found: Found) -> dict[str, Any]:
    """The answer as plain types."""
    plan, reserved = found.plan, found.reserved_bytes
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
            {
                "name": stage.name,
                "output_bytes": stage.output_bytes,
                "saved_bytes": stage.keep.saved_bytes,
                "saved_input_bytes": stage.keep.saved_input_bytes,
                "saved_output_bytes": stage.keep.saved_output_bytes,
                "forward_seconds": stage.keep.forward_seconds,
                "backward_seconds": stage.keep.backward_seconds,
                "recomputed": number in plan.recomputed,
            }
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


# -------------------------------------------------------------------- pictures


def draw(found: Found, options: Options) -> Iterator[Path]:
    """Save the pictures that were asked for; yields where they are.

    Raises:
        PlotError: matplotlib is missing, or the file cannot be written.
    """
    title = f"{_name(options)}, {' and '.join(_shape(spec) for spec in options.inputs)}"
    if options.plot is not None:
        yield _save(options.plot, plot_timeline(found.plan, reserved_bytes=found.reserved_bytes, title=title))
    if options.plot_curve is not None and found.frontier is not None:
        rivals = {
            name: simulate(
                found.plan.chain,
                schedule,
                gradients_exist=found.plan.gradients_exist,
                lingering_bytes=found.plan.lingering_bytes,
            )
            for name, schedule in baselines(found.plan.chain).items()
            if name != "keep_all"
        }
        limits = {} if found.accelerator is None else {found.accelerator.name: found.accelerator.memory_bytes}
        figure = plot_frontier(
            found.frontier, reserved_bytes=found.reserved_bytes, rivals=rivals, limits=limits, title=title
        )
        yield _save(options.plot_curve, figure)
    if options.draw is not None:
        text = draw_chain(found.plan.chain, found.profile.stages, schedule=found.plan.schedule, title=title)
        try:
            options.draw.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PlotError(f"the drawing cannot be written: {error}") from error
        yield options.draw


def _shape(spec: Any) -> str:
    return "×".join(map(str, spec.shape)) or "scalar"


def _save(path: Path, figure: Any) -> Path:
    try:
        figure.savefig(path, dpi=200)
    except (OSError, ValueError) as error:
        raise PlotError(
            f"the picture cannot be written: {error}. Expected a name that ends in .png, .svg or .pdf"
        ) from error
    return path


def _name(options: Options) -> str:
    """What makes the model, with its arguments: all models of timm come from ``create_model``."""
    made_by = options.model.rpartition(".")[2].rpartition(":")[2]
    arguments = ", ".join(str(value) for value in options.model_arguments.values())
    return f"{made_by}({arguments})" if arguments else made_by
