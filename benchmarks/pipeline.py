"""Pipelines: measured on two processes against the simulator and the ideal, and simulated on up to 512 devices.

    python -m benchmarks.pipeline --measure              two gloo processes on two idle cores, about 4 minutes
    python -m benchmarks.pipeline --simulate             every model on 8, 64 and 512 devices; no GPU is needed
    python -m benchmarks.pipeline --simulate GPT:64      one of them

What each part means is in ``pipeline_measured.py`` and ``pipeline_scaling.py``. Results are put beside those of earlier runs in
``benchmarks/results/pipeline.json`` and ``pipeline.md``, with a picture of the scaling in ``pipeline.png``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from benchmarks.pipeline_measured import measured
from benchmarks.pipeline_picture import draw
from benchmarks.pipeline_scaling import DEVICES, MODELS, rows
from lightning_rotor.units import format_bytes, format_seconds

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="two processes on this machine")
    parser.add_argument("--rounds", type=int, default=15, help="of the measurement")
    parser.add_argument("--simulate", nargs="*", metavar="MODEL:DEVICES", help="all, or some")
    parser.add_argument("--draw", action="store_true", help="write table and picture again")
    asked = parser.parse_args()
    path = RESULTS / "pipeline.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"measured": [], "simulated": []}
    if asked.measure:
        results["measured"] = measured(asked.rounds)
        results["machine"] = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        results["torch"] = torch.__version__
    if asked.simulate is not None:
        for case in asked.simulate or [f"{model}:{devices}" for model in MODELS for devices in DEVICES]:
            model, devices = case.rsplit(":", 1)
            new = list(rows(model, int(devices)))
            others = [row for row in results["simulated"] if (row["model"], row["devices"]) != (model, int(devices))]
            results["simulated"] = sorted([*others, *new], key=_place)
            path.write_text(json.dumps(results, indent=1) + "\n")
    path.write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "pipeline.md").write_text(_report(results))
    if results["simulated"]:
        draw(results["simulated"]).savefig(RESULTS / "pipeline.png", dpi=200)


def _place(row: dict[str, Any]) -> tuple[int, int, str, int]:
    return MODELS.index(row["model"]), row["devices"], row["schedule"], ("rotor", "by time", "equal").index(row["way"])


def _report(results: dict[str, Any]) -> str:
    lines = ["# Pipelines", ""]
    if results["measured"]:
        lines += [
            f"Two gloo processes, one thread each, on {results['machine']['cores']} cores; torch {results['torch']}. Durations of a step, in",
            "micro-batches of one process (median over rounds, and quartiles); `pipeline_measured.py` says how.",
            "",
            "| schedule | micro-batches | measured | quartiles | simulated | ideal | measured / simulated | measured / ideal |",
            "|---|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for row in results["measured"]:
            low, high = row["quartiles"]
            lines.append(
                f"| {row['schedule']} | {row['micro_batches']} | {row['measured']:.2f} | {low:.2f} to {high:.2f} | {row['simulated']:.2f} | "
                f"{row['ideal']:.2f} | {row['measured'] / row['simulated']:.3f} | {row['measured'] / row['ideal']:.3f} |"
            )
        lines.append("")
    lines += [
        "Simulated: chains estimated for the H100, twice as many micro-batches as devices; `pipeline_scaling.py` says how. Under 1F1B all ways to",
        "cut have the same memory, and rotor plans the recomputation inside of each stage for all of them; interleaved nothing limits them. *least*",
        "is the memory per device without which the cuts cannot run, *gap* what other cuts might save at most, *solved* processor seconds.",
        "",
        "| model | stages | devices | schedule | cuts | step | bubble | recomputed | peak | memory | least | gap | solved |",
        "|---|--:|--:|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["simulated"]:
        start = f"| {row['model']} | {row['chain_stages']} | {row['devices']} | {row['schedule']} | {row['way']} |"
        if row["seconds"] is None:
            lines.append(f"{start} {row['note']}" + " |" * 8)
            continue
        gap = "" if row["gap"] is None else f"{row['gap']:.1%}"
        least = "" if row["least_bytes"] is None else format_bytes(row["least_bytes"])
        memory = "" if row["memory_bytes"] is None else format_bytes(row["memory_bytes"])
        lines.append(
            f"{start} {format_seconds(row['seconds'])} | {row['bubble']:.1%} | {row['recomputed']:.1%} | {format_bytes(row['peak_bytes'])} | "
            f"{memory} | {least} | {gap} | {row['solve_seconds']:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
