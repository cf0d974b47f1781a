"""How long planning takes and how much memory it needs, by length of the chain.

    python benchmarks/planner.py

Each length is solved in a fresh process, several times in turn. Memory is the peak resident set of that process (VmHWM) less the
resident set right before the first solve (VmRSS), so interpreter, NumPy and the chain itself do not count. Times are of
the solved table (the part that grows with the cube of the length) and of one plan read from it; the fastest run counts, since the
machine may be busy otherwise, and the median stands beside it.

Prints a table and writes ``benchmarks/results/planner.json`` and ``planner.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.planning import Solver
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate

LENGTHS = (20, 50, 100, 200, 339)
SLOTS = 500
RESULTS = Path(__file__).parent / "results"


def convolutional_chain(stages: int, *, seed: int = 0) -> Chain:
    """A chain like a deep residual network: boundaries shrink threefold, stages save zero to three times their output."""
    rng = random.Random(seed)
    costs: list[StageCost] = []
    before = 0
    for index in range(stages):
        shrunk = 8 if index < stages // 8 else 4 if index < stages // 3 else 2 if index < 3 * stages // 4 else 1
        output = int(2**20 * shrunk * (0.9 + 0.2 * rng.random()))
        internal = output * rng.choice((0, 1, 2, 3))
        saves_output = output if rng.random() < 0.3 else 0
        seconds = 1e-4 + 1e-3 * rng.random()
        keep = Option(
            name="keep",
            saved_bytes=internal,
            saved_input_bytes=before if rng.random() < 0.7 else 0,
            saved_output_bytes=saves_output,
            saved_tensors=1,
            forward_peak_bytes=output + internal + output // 4,
            replay_peak_bytes=internal + saves_output,
            unpack_peak_bytes=output,
            unpack_bytes=output,
            backward_peak_bytes=output + before,
            backward_segment_peak_bytes=output + before,
            backward_held_peak_bytes=output + before,
            input_gradient_bytes=before,
            parameter_gradient_bytes=int(2**18 * rng.random()),
            forward_seconds=seconds,
            replay_seconds=0.8 * seconds,
            backward_seconds=2 * seconds,
        )
        costs.append(StageCost(f"stage{index}", output, output + internal // 3, seconds, (keep,)))
        before = output
    return Chain(tuple(costs), input_bytes=2**20)


def measure(stages: int) -> dict[str, float]:
    """Solve one chain in this process."""
    chain = convolutional_chain(stages)
    keep_all_bytes = simulate(chain, Schedule.keep_all(stages)).peak_bytes
    solver = Solver(chain, slots=SLOTS)
    before_kib = _memory_kib("VmRSS")
    start = time.perf_counter()
    found = solver.plan(keep_all_bytes)  # keeps everything: the table and nothing else
    table_seconds = time.perf_counter() - start
    table_kib = _memory_kib("VmHWM") - before_kib
    found = solver.plan(keep_all_bytes // 2)
    return {
        "table_seconds": table_seconds,
        "plan_seconds": found.solve_seconds,
        "memory_mib": table_kib / 1024,
        "overhead_at_half": found.overhead,
    }


def _memory_kib(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None, f"/proc/self/status has no {name}: this benchmark runs on Linux"
    return int(match[1])


def _measure_apart(stages: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", str(stages)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def _machine() -> dict[str, Any]:
    import numpy as np

    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "command": "python benchmarks/planner.py",
    }


def main() -> None:
    """Measure every length, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", type=int, help="measure one length in this process and print JSON")
    parser.add_argument("--runs", type=int, default=5, help="processes per length")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    machine = _machine()
    rows = []
    for stages in LENGTHS:
        runs = [_measure_apart(stages) for _ in range(arguments.runs)]
        times = [run["table_seconds"] for run in runs]
        rows.append(
            {
                "stages": stages,
                "slots": SLOTS,
                "runs": arguments.runs,
                "table_seconds": min(times),
                "table_seconds_median": statistics.median(times),
                "plan_seconds": min(run["plan_seconds"] for run in runs),
                "memory_mib": max(run["memory_mib"] for run in runs),
                "overhead_at_half": runs[0]["overhead_at_half"],
            }
        )
    _print(rows, machine)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "planner.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    (RESULTS / "planner.md").write_text(_markdown(rows, machine))


_COLUMNS = (
    "stages",
    "table, s (best)",
    "table, s (median)",
    "one plan, s",
    "peak memory, MiB",
    "overhead at half the memory",
)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["stages"]),
        f"{row['table_seconds']:.3f}",
        f"{row['table_seconds_median']:.3f}",
        f"{row['plan_seconds']:.3f}",
        f"{row['memory_mib']:.0f}",
        f"{row['overhead_at_half']:.1%}",
    )


def _print(rows: list[dict[str, Any]], machine: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Planning at {SLOTS} slots: {machine['cpu']}, {machine['cores']} cores")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    Console().print(table)


def _markdown(rows: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    lines = [
        f"# Planning at {SLOTS} slots",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_before']:.1f} before; Python {machine['python']}, "
        f"NumPy {machine['numpy']}; `{machine['command']}`, {rows[0]['runs']} processes per length.",
        "",
        "Memory: peak resident set of the process (VmHWM) less the resident set right before solving (VmRSS).",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + " ---: |" * len(_COLUMNS),
        *("| " + " | ".join(_cells(row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
