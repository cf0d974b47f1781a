"""How long planning takes and how much memory it needs: by length of the chain, number of options, and with skips.

    python -m benchmarks.planner

Every figure comes from fresh processes, several of them in turn. The fastest run counts, by the clock and by processor time of all
threads: on a machine that is busy otherwise the second says more. Memory is the peak resident set of the process (VmHWM) less the resident set
right before the first solve (VmRSS), so interpreter, NumPy and the chain itself do not count.

    table           one table
    plan at half    a plan for half of what keeping everything takes, from nothing: tables, candidates, simulations
    least budget    what more it takes to find the least budget, and a plan for two percent more than that
    curve           what more the frontier takes: every schedule of the tables that is simulated, and questions between them
    plain           the same table by the same functions as plain Python, in turn in one process

Prints a table and writes ``benchmarks/results/planner.json`` and ``planner.md``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rotor.chain import Chain, Option, Skip, StageCost
from lightning_rotor.planning import Solver, frontier_of
from lightning_rotor.planning.compilation import compiled_kernels
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.kernels import Requirements
from lightning_rotor.planning.requirements import requirements_of
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate

LENGTHS = (20, 50, 100, 197, 339)
KINDS = ((1, False), (1, True), (10, False), (10, True))
PLAIN = ((50, 1), (100, 1), (200, 1))
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


def with_options(chain: Chain, count: int) -> Chain:
    """Every stage gets options that save less and less, and recompute the rest within the backward."""
    stages = []
    for stage in chain:
        keep, options = stage.keep, [stage.keep]
        for number in range(1, count):
            part = 1 - number / count
            dropped = keep.saved_bytes - int(keep.saved_bytes * part)
            option = replace(
                keep,
                name=f"option{number}",
                saved_bytes=keep.saved_bytes - dropped,
                backward_peak_bytes=keep.backward_peak_bytes + dropped // 2,
                backward_segment_peak_bytes=keep.backward_segment_peak_bytes + dropped // 2,
                backward_held_peak_bytes=keep.backward_held_peak_bytes + dropped // 2,
                backward_seconds=keep.backward_seconds + 0.9 * (1 - part) * keep.forward_seconds,
            )
            options.append(option)
        stages.append(replace(stage, options=tuple(options)))
    return replace(chain, stages=tuple(stages))


def with_shortcuts(chain: Chain, block: int = 9) -> Chain:
    """Two shortcuts per block, as in a transformer: a norm reads and saves what the end of a half adds to its output."""
    skips: list[Skip] = []
    stages = list(chain.stages)
    for begin in range(0, len(chain) - block, block):
        for born, reader in ((begin, begin + block // 2), (begin + block // 2, begin + block)):
            size = chain.stages[born].output_bytes
            norm = stages[born + 1]
            options = tuple(replace(option, saved_skips=(len(skips),)) for option in norm.options)
            stages[born + 1] = replace(norm, options=options)
            skips.append(Skip(born, (born + 1, reader), size, (size, size)))
    return replace(chain, stages=tuple(stages), skips=tuple(skips))


def chain_of(stages: int, options: int, shortcuts: bool) -> Chain:
    """The chain of one row."""
    chain = with_options(convolutional_chain(stages), options) if options > 1 else convolutional_chain(stages)
    return with_shortcuts(chain) if shortcuts else chain


# ---------------------------------------------------------------------------------------------------- one process


def measure(stages: int, options: int, shortcuts: bool) -> dict[str, float]:
    """Plan one chain in this process."""
    chain = chain_of(stages, options, shortcuts)
    keep_all_bytes = simulate(chain, Schedule.keep_all(stages)).peak_bytes
    requirements = _requirements(chain)
    loading = _timed(_load)[0] if Table(requirements, slots=SLOTS).is_compiled else 0.0
    before_kib = _memory_kib("VmRSS")
    table_seconds, table_cpu, table = _timed(lambda: _solve(requirements))
    table_kib = _memory_kib("VmHWM") - before_kib
    del table
    solver = Solver(chain, slots=SLOTS)
    half_seconds, half_cpu, half = _timed(lambda: solver.plan(keep_all_bytes // 2))
    tight_seconds, tight_cpu, tight = _timed(lambda: solver.plan(int(1.02 * solver.minimum().peak_bytes)))
    curve_seconds, curve_cpu, curve = _timed(lambda: frontier_of(solver))
    return {
        "loading_seconds": loading,
        "table_seconds": table_seconds,
        "table_cpu_seconds": table_cpu,
        "table_mib": table_kib / 1024,
        "half_seconds": half_seconds,
        "half_cpu_seconds": half_cpu,
        "half_overhead": half.overhead,
        "tight_seconds": tight_seconds,
        "tight_cpu_seconds": tight_cpu,
        "tight_overhead": tight.overhead,
        "curve_seconds": curve_seconds,
        "curve_cpu_seconds": curve_cpu,
        "curve_points": len(curve),
        "peak_mib": (_memory_kib("VmHWM") - before_kib) / 1024,
    }


def compare(stages: int, options: int, runs: int) -> dict[str, float]:
    """The compiled kernel and the same functions as plain Python in turn, in this process."""
    requirements = _requirements(chain_of(stages, options, False))
    _load()
    found: dict[str, list[float]] = {name: [] for name in ("compiled", "compiled_cpu", "plain", "plain_cpu")}
    for _ in range(runs):
        seconds, cpu, compiled = _timed(lambda: _solve(requirements, compiled=True))
        found["compiled"].append(seconds)
        found["compiled_cpu"].append(cpu)
        seconds, cpu, plain = _timed(lambda: _solve(requirements, compiled=False))
        found["plain"].append(seconds)
        found["plain_cpu"].append(cpu)
        np.testing.assert_array_equal(compiled.seconds, plain.seconds)
    best = {name: min(values) for name, values in found.items()}
    return {**best, "ratio": best["plain"] / best["compiled"], "cpu_ratio": best["plain_cpu"] / best["compiled_cpu"]}


def _requirements(chain: Chain) -> Requirements:
    unit = simulate(chain, Schedule.keep_all(len(chain))).peak_bytes / SLOTS
    return requirements_of(chain, unit=unit, refined=len(chain) <= 40)


def _solve(requirements: Requirements, *, compiled: bool | None = None) -> Table:
    slots = SLOTS + len(requirements.endings) // 16 + 4
    table = Table(requirements, slots=slots, compiled=compiled)
    table.solve()
    return table


def _load() -> None:
    """Numba and the code that it has compiled before, which is done once per process."""
    _solve(_requirements(convolutional_chain(4)), compiled=True)


def _timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """By the clock, by processor time of all threads, and the result."""
    clock, cpu = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - clock, time.process_time() - cpu, result


def _memory_kib(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None, f"/proc/self/status has no {name}: this benchmark runs on Linux"
    return int(match[1])


# ---------------------------------------------------------------------------------------------------- all of them


def _apart(*arguments: object) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.planner", *map(str, arguments)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def _machine() -> dict[str, Any]:
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": importlib.metadata.version("numba") if compiled_kernels() else None,
    }


def main() -> None:
    """Measure every row, print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", type=int, nargs=3, metavar=("STAGES", "OPTIONS", "SKIPS"), help="measure one row here")
    parser.add_argument(
        "--plain", type=int, nargs=3, metavar=("STAGES", "OPTIONS", "RUNS"), help="compare with plain Python here"
    )
    parser.add_argument("--runs", type=int, default=3, help="processes per row")
    arguments = parser.parse_args()
    if arguments.one:
        stages, options, shortcuts = arguments.one
        print(json.dumps(measure(stages, options, bool(shortcuts))))
    elif arguments.plain:
        print(json.dumps(compare(*arguments.plain)))
    else:
        _measure_all(arguments.runs)


def _measure_all(runs: int) -> None:
    machine = {
        **_machine(),
        "command": f"python -m benchmarks.planner --runs {runs}",
        "slots": SLOTS,
        "processes_per_row": runs,
    }
    found: dict[tuple[int, int, bool], list[dict[str, float]]] = {}
    for _ in range(runs):  # in turn, so that a busy minute harms no row alone
        for stages in LENGTHS:
            for options, shortcuts in KINDS:
                result = _apart("--one", stages, options, int(shortcuts))
                found.setdefault((stages, options, shortcuts), []).append(result)
    rows = [
        {"stages": stages, "options": options, "skips": shortcuts, **_best(results)}
        for (stages, options, shortcuts), results in found.items()
    ]
    plain = [
        {"stages": stages, "options": options, **_apart("--plain", stages, options, 1 if stages > 100 else runs)}
        for stages, options in PLAIN
    ]
    machine["load_after"] = os.getloadavg()[0]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "planner.json").write_text(
        json.dumps({"machine": machine, "rows": rows, "plain": plain}, indent=2) + "\n"
    )
    (RESULTS / "planner.md").write_text(_markdown(rows, plain, machine))
    print(_markdown(rows, plain, machine))


def _best(results: list[dict[str, float]]) -> dict[str, float]:
    """The least of each duration, the most of each memory, and the median of the clock beside it."""
    best = {name: (max if name.endswith("_mib") else min)(each[name] for each in results) for name in results[0]}
    return {**best, "table_seconds_median": statistics.median(each["table_seconds"] for each in results)}


def _markdown(rows: list[dict[str, Any]], plain: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    lines = [
        f"# Planning at {SLOTS} slots",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_before']:.1f} before and {machine['load_after']:.1f} after; "
        f"Python {machine['python']}, NumPy {machine['numpy']}, "
        f"{'Numba ' + machine['numba'] if machine['numba'] else 'no Numba'}; `{machine['command']}`, best of "
        f"{machine['processes_per_row']} processes.",
        "",
        "Seconds by the clock / of processor time over all threads. A load above the number of cores means that others ran: then the clock says "
        "how long we waited for them, and processor time still contains what they did to the caches. Chains of 60 stages and more are planned by "
        f"machine code where there is Numba; loading it takes {max(row['loading_seconds'] for row in rows):.1f} s once per process, which is not "
        "in the table.",
        "",
        "| stages | options | skips | table | plan at half | least budget | curve | table, MiB | all, MiB | overhead at half | near the least |",
        "|" + " ---: |" * 11,
    ]
    for row in rows:
        times = [
            f"{row[f'{name}_seconds']:.2f} / {row[f'{name}_cpu_seconds']:.2f}"
            for name in ("table", "half", "tight", "curve")
        ]
        lines.append(
            f"| {row['stages']} | {row['options']} | {'yes' if row['skips'] else 'no'} | {' | '.join(times)} | {row['table_mib']:.0f} | "
            f"{row['peak_mib']:.0f} | {row['half_overhead']:.1%} | {row['tight_overhead']:.1%} |"
        )
    lines += [
        "",
        "## Compiled code against plain Python",
        "",
        "The same table, equal bit by bit, by the same functions of `planning/kernels.py`, in turn in one process.",
        "",
        "| stages | options | compiled | plain | ratio |",
        "|" + " ---: |" * 5,
    ]
    lines += [
        f"| {row['stages']} | {row['options']} | {row['compiled']:.2f} / {row['compiled_cpu']:.2f} | {row['plain']:.2f} / {row['plain_cpu']:.2f} | "
        f"{row['ratio']:.1f} / {row['cpu_ratio']:.1f} |"
        for row in plain
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
