"""The answer of a command line: tables and lines of text, JSON, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightning_rotor.planned.batch_sizes import BatchSizeAdvice
from lightning_rotor.planning import Plan
from lightning_rotor.planning.plan import plain_simulation
from lightning_rotor.report.command_plan import Answer
from lightning_rotor.report.drawing import draw_chain
from lightning_rotor.report.frontier_plot import plot_frontier
from lightning_rotor.report.tables import frontier_table, plan_table, stage_table
from lightning_rotor.report.timeline import plot_timeline
from lightning_rotor.units import format_bytes, format_seconds


def answer_tables(answer: Answer) -> Iterator[Any]:
    """The plan, what it does with the stages, the curve if there is one, and notes."""
    gpu, held = answer.case.accelerator, answer.case.held_bytes
    rows = {"Step, as planned": f"{format_seconds(answer.plan.seconds)} forward and backward"}
    if held:
        rows["Training holds"] = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items() if size)
    if gpu is not None:
        rows["Estimated for"] = f"{gpu.name} with {format_bytes(gpu.memory_bytes)}"
    yield plan_table(answer.plan, reserved_bytes=answer.reserved_bytes, extra_rows=rows.items())
    yield stage_table(answer.plan)
    if answer.plan.link is not None:
        yield _gain_of_moving(answer.plan, answer.staying)
    if answer.frontier is not None:
        yield frontier_table(answer.frontier, reserved_bytes=answer.reserved_bytes, staying=answer.staying_frontier)
        if answer.plan.overhead > 0:
            yield answer.frontier.gain("1GiB").describe(reserved_bytes=answer.reserved_bytes)
    if gpu is not None:
        yield (
            "Estimated from shapes: activations and gradients to the byte, times by a roofline. What kernels allocate "
            "for themselves (workspaces of convolutions, for one) is not known and comes on top."
        )
    if held:
        yield "The loss and the optimizer's temporary memory are not part of the model, and not in the budget."


def _gain_of_moving(plan: Plan, staying: Plan | None) -> str:
    """Gain of a plan by moving, beside the fastest that moves nothing."""
    if staying is None:
        return f"Without moving, no plan fits; with it, the overhead is {plan.overhead:.1%}"
    if plan.seconds >= staying.seconds:
        return f"Moving over this link gains nothing at this limit: the overhead stays at {staying.overhead:.1%}"
    return f"Moving over this link lowers the overhead from {staying.overhead:.1%} to {plan.overhead:.1%}"


def plan_as_json(answer: Answer) -> dict[str, Any]:
    """Everything that the tables show, and every stage and point of the curve; sizes in bytes, durations in seconds."""
    plan, reserved, gpu = answer.plan, answer.reserved_bytes, answer.case.accelerator
    of_stages = ("saved_bytes", "saved_input_bytes", "saved_output_bytes", "forward_seconds", "backward_seconds")
    # None without --curve: an empty list would be a curve without points.
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
        "offload": _moves_as_json(answer),
        "resident_bytes": dict(answer.case.held_bytes),
        "stages": [
            {"name": stage.name, "output_bytes": stage.output_bytes}
            | {name: getattr(stage.keep, name) for name in of_stages}
            | {"recomputed": number in plan.recomputed, "moved": number in plan.moved}
            for number, stage in enumerate(plan.chain)
        ],
        "frontier": points,
    }


def _moves_as_json(answer: Answer) -> dict[str, Any] | None:
    """The stages that move, and the link; None without a link."""
    plan, link = answer.plan, answer.plan.link
    if link is None:
        return None
    return {
        "out_bytes_per_second": link.out,
        "back_bytes_per_second": link.back,
        "latency_seconds": link.latency,
        "room_bytes": link.room_bytes,
        "carried_share": plan.carried_share,
        "moved_stages": len(plan.moved),
        "host_bytes": plan.host_bytes,
        "stall_seconds": plan.stall_seconds,
        "overhead_without_moves": None if answer.staying is None else answer.staying.overhead,
    }


def batch_sizes_as_json(advice: BatchSizeAdvice, model: str) -> dict[str, Any]:
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


def answer_pictures(answer: Answer) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """Where to save the pictures that were asked for, and what saves them."""
    plan, reserved, options, gpu = answer.plan, answer.reserved_bytes, answer.case.options, answer.case.accelerator
    title = options.model.rpartition(".")[2].rpartition(":")[2]
    # All models of timm come from ``create_model``: arguments say which one.
    if options.model_arguments:
        title += f"({', '.join(str(value) for _, value in options.model_arguments)})"
    shapes = ["×".join(map(str, spec.shape)) or "scalar" for spec in options.inputs]
    title += f", {' and '.join(shapes)}"
    if options.plot is not None:
        figure = plot_timeline(plan, reserved_bytes=reserved, title=title)
        yield options.plot, partial(figure.savefig, dpi=200)
    if options.plot_curve is not None and answer.frontier is not None:
        limits = {} if gpu is None else {gpu.name: gpu.memory_bytes}
        figure = plot_frontier(
            answer.frontier, reserved_bytes=reserved, limits=limits, staying=answer.staying_frontier, title=title
        )
        yield options.plot_curve, partial(figure.savefig, dpi=200)
    if options.draw is not None:
        yield options.draw, draw_chain(plan.chain, answer.profile.stages, schedule=plan.schedule, title=title).save
