"""The example of rotor's documentation: ResNet-18 on 32 images of 224 x 224, limited to 700 MB.

    python -m benchmarks.rotor_example

rotor documents a peak of 843 MB without recomputation and a plan for 700 MB (700 MiB in its code), on its own cut of the model. Here the model
is torchvision's, unchanged. Peaks are the allocator's above weights and images, parameters' gradients included; times are medians of steps
taken in turns.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision

from benchmarks.models import real_peak, total
from lightning_rotor import Checkpointable
from lightning_rotor.planning import minimum_budget
from lightning_rotor.units import parse_bytes

RESULTS = Path(__file__).parent / "results"
ROUNDS = 7


def main() -> None:
    """Measure, and write the table."""
    torch.manual_seed(0)
    net = torchvision.models.resnet18()
    images = torch.randn(32, 3, 224, 224)
    planned = Checkpointable(net, images, show_progress=False)
    assert planned.chain is not None
    limits = {"700 MB": parse_bytes("700MB"), "least": minimum_budget(planned.chain).peak_bytes}
    plain = partial(net, images)
    rows: dict[str, dict[str, Any]] = {"none": {"peak_bytes": real_peak(net, plain), "planned_bytes": None}}
    forwards: dict[str, Any] = {"none": (plain, None)}
    for name, limit in limits.items():
        plan = planned.compute_sequence(limit)
        forwards[name] = (partial(planned, images), limit)
        rows[name] = {
            "limit_bytes": limit,
            "planned_bytes": plan.peak_bytes,
            "peak_bytes": real_peak(net, partial(planned, images)),
            "predicted_overhead": round(plan.overhead, 4),
            "schedule": str(plan.schedule),
        }
    seconds: dict[str, list[float]] = {name: [] for name in forwards}
    for _ in range(ROUNDS):
        for name, (forward, limit) in forwards.items():
            if limit is not None:
                planned.compute_sequence(limit)
            net.zero_grad()
            start = time.perf_counter()
            total(forward()).backward()
            seconds[name].append(time.perf_counter() - start)
    for name, row in rows.items():
        ratios = [mine / base for mine, base in zip(seconds[name], seconds["none"], strict=True)]
        row["time_ratio"] = round(statistics.median(ratios), 3)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rotor_example.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "rotor_example.md").write_text(table(rows, len(planned.chain), statistics.median(seconds["none"])))
    print(table(rows, len(planned.chain), statistics.median(seconds["none"])))


def table(rows: dict[str, dict[str, Any]], stages: int, seconds: float) -> str:
    """For people."""
    lines = [
        "# rotor's example: ResNet-18, 32 images of 224 x 224",
        "",
        f"{platform.machine()}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}; "
        f"`python -m benchmarks.rotor_example`; {stages} stages; {seconds:.2f} s a plain step.",
        "rotor's documentation: 843 MB without recomputation, planned into 700 MB (700 MiB in its code, into which ours fits as it is).",
        "",
        "| limit | planned peak | measured peak | predicted overhead | measured time ratio | schedule |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name, row in rows.items():
        planned = "" if row["planned_bytes"] is None else f"{row['planned_bytes'] / 1e6:.1f} MB"
        overhead = "" if row["planned_bytes"] is None else f"{row['predicted_overhead']:.1%}"
        limit = name if name != "least" else f"{row['limit_bytes'] / 1e6:.1f} MB (least)"
        lines.append(
            f"| {limit} | {planned} | {row['peak_bytes'] / 1e6:.1f} MB | {overhead} | {row['time_ratio']:.3f} | `{row.get('schedule', '')}` |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
