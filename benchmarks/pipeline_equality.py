"""Every pipeline against one process: ten AdamW steps of small models, for all schedules, ways to recompute and numbers of processes.

    export OMP_NUM_THREADS=1
    python -m benchmarks.pipeline_equality                                    the whole grid
    python -m benchmarks.pipeline_equality --models mlp --processes 2

The table holds the largest difference found in losses and gradients of all steps and in the weights and buffers after ten, uneven and small
batches among them, in float32. The one process runs the same micro-batches one after another, as batch statistics and random numbers demand.
The test suite takes a sample of this grid (tests/test_pipeline_runner.py).
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import get_args

import torch

from benchmarks.gloo_processes import Failure, Processes
from benchmarks.pipeline_models import ten_steps
from lightning_rotor.pipeline.partition import RecomputeMode
from lightning_rotor.pipeline.pipeline_options import PipelineOptions
from lightning_rotor.pipeline.pipeline_schedule import SCHEDULES

RESULT = Path(__file__).parent / "results" / "pipeline_equality.md"
MODELS = {
    "mlp": "MLP",
    "cnn": "CNN with BatchNorm",
    "transformer": "transformer with dropout",
    "unet": "U-Net, traced",
    "skips": "@skippable layers",
}
MODES = get_args(RecomputeMode)
MICRO_BATCHES = {2: 4, 3: 3, 4: 4}
TOLERANCE = 1e-6


def difference(group: Processes, model: str, world: int, options: PipelineOptions) -> float | str:
    """The largest anywhere; or why there is no such pipeline."""
    answers = group.run(world, ten_steps, model, options)
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    if failures:
        if {failure.kind for failure in failures} != {"PipelineError"}:
            raise RuntimeError(failures[0].text)
        return failures[0].message
    return max(max(answer.values()) for answer in answers)


def table(found: dict[tuple[str, str, int, str], float | str], models: list[str], worlds: list[int]) -> list[str]:
    """In Markdown."""
    lines = [
        f"| model | schedule | processes | {' | '.join(MODES)} |",
        f"|---|---|---|{'---|' * len(MODES)}",
    ]
    reasons: list[str] = []
    for model, schedule, world in product(models, SCHEDULES, worlds):
        cells = []
        for mode in MODES:
            value = found[model, schedule, world, mode]
            if isinstance(value, str):
                reasons += [value] if value not in reasons else []
                cells.append(f"refused ({reasons.index(value) + 1})")
            else:
                cells.append("0" if value == 0 else f"{value:.0e}")
        lines.append(f"| {MODELS[model]} | {schedule} | {world} | {' | '.join(cells)} |")
    return [*lines, "", *(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))]


def main() -> None:
    """Run the grid, write the table, and fail if a difference is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--processes", nargs="+", type=int, choices=list(MICRO_BATCHES), default=list(MICRO_BATCHES))
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args()
    found: dict[tuple[str, str, int, str], float | str] = {}
    with closing(Processes(max(asked.processes), preload=["benchmarks.pipeline_models"])) as group:
        for model, schedule, world, mode in product(asked.models, SCHEDULES, asked.processes, MODES):
            per_device = 2 if schedule == "interleaved" else 1
            options = PipelineOptions(MICRO_BATCHES[world], schedule, mode, stages_per_device=per_device)
            found[model, schedule, world, mode] = value = difference(group, model, world, options)
            print(f"{model:12}{schedule:12}{world} {mode:12}{value}", flush=True)
    numbers = [value for value in found.values() if not isinstance(value, str)]
    worst = max(numbers)
    asked.out.write_text(
        "\n".join(
            [
                "# Pipelines against one process",
                "",
                f"`OMP_NUM_THREADS=1 python -m benchmarks.pipeline_equality`, on torch {torch.__version__}: the largest "
                "difference in losses and gradients of all steps, weights and buffers after ten AdamW steps on gloo processes, "
                "from one process that runs the same micro-batches, float32.",
                f"{len(numbers)} pipelines, worst {worst:.1e} (asked for: {TOLERANCE:.0e}); {len(found) - len(numbers)} are refused.",
                "",
                *table(found, asked.models, asked.processes),
                "",
            ]
        )
    )
    if worst > TOLERANCE:
        sys.exit(f"worst difference {worst:.1e} is above {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
