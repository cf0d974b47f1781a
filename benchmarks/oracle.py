"""How far plans are from the true optimum, and how far the lower bound is: on chains short enough to know.

    python -m benchmarks.oracle

The true optimum is the fastest of all executions, not only of those that a schedule tree describes (``benchmarks/optimum.py``). Chains are
random (:mod:`benchmarks.random_chains`: heterogeneous, equal stages, stages with two options) or like a convolutional network, of 4 to 10 stages.
Budgets lie between the least peak of a plan and the peak without recomputation. Segments take no host time here, since the optimum knows no
segments. For chains of up to six stages also the best of all schedule trees, which tells what the planner misses from what trees miss.

Prints tables and writes ``benchmarks/results/oracle.json`` and ``oracle.md``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import re
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from benchmarks.linear_relaxation import relaxation_seconds
from benchmarks.optimum import Optimum
from benchmarks.planner import convolutional_chain
from benchmarks.random_chains import random_chain
from benchmarks.reference import judge_all
from lightning_rotor.chain import Chain
from lightning_rotor.planning import Solver, fine_slots, lower_bound_seconds
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate

# Between the least budget of a plan and what keeps everything.
FRACTIONS = (0.0, 0.05, 0.1, 0.25, 0.5)
# Chains of each kind; the last two are like convolutional networks.
CHAINS = {"heterogeneous": 500, "transformer": 250, "options": 250, "cnn": 100, "resnet": 100}
CNN_LIKE = ("cnn", "resnet")
STAGES = (4, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10)
MOST_STAGES_FOR_TREES = 6
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """One chain at one budget; durations relative to the optimum's."""

    kind: str
    seed: int
    stages: int
    fraction: float
    plan: float
    bound: float
    relaxation: float
    tree: float | None
    schedule: str


def chain_of(kind: str, seed: int) -> Chain:
    """A chain by name."""
    rng = random.Random(f"{kind} {seed}")
    stages = rng.choice(STAGES)
    if kind == "resnet":
        return convolutional_chain(stages, seed=seed)
    return replace(random_chain(rng, stages, kind, grain=1000), segment_seconds=0.0)  # type: ignore[arg-type]


def cases_of(job: tuple[str, int]) -> list[Case]:
    """All budgets of one chain."""
    kind, seed = job
    chain = chain_of(kind, seed)
    n = len(chain)
    solver, optimum = Solver(chain, slots=fine_slots(n)), Optimum(chain)
    trees = judge_all(chain) if n <= MOST_STAGES_FOR_TREES else []
    least, most = solver.minimum().peak_bytes, simulate(chain, Schedule.keep_all(n)).peak_bytes
    cases = []
    for fraction in FRACTIONS:
        budget = least + int(fraction * (most - least))
        best, plan = optimum.seconds(budget), solver.plan(budget)
        tree = min((each.seconds for each in trees if each.peak_bytes <= budget), default=None)
        bounds = [lower_bound_seconds(chain, budget) / best, relaxation_seconds(chain, budget) / best]
        cases.append(
            Case(kind, seed, n, fraction, plan.seconds / best, *bounds, tree and tree / best, str(plan.schedule))
        )
    return cases


# ---------------------------------------------------------------------------------------------------- figures


def summary(cases: list[Case]) -> dict[str, float]:
    """What a row of a table says."""
    excess = sorted(case.plan - 1 for case in cases)
    return {
        "cases": len(cases),
        "optimal": sum(each < 1e-9 for each in excess) / len(cases),
        "mean": statistics.mean(excess),
        "p95": excess[min(int(0.95 * len(excess)), len(excess) - 1)],
        "max": excess[-1],
        "bound_mean": statistics.mean(case.bound for case in cases),
        "bound_min": min(case.bound for case in cases),
        "relaxation_mean": statistics.mean(case.relaxation for case in cases),
        "relaxation_min": min(case.relaxation for case in cases),
    }


def rows_of(cases: list[Case]) -> dict[str, dict[str, float]]:
    """Rows by name."""
    random_cases = [case for case in cases if case.kind not in CNN_LIKE]
    cnn_cases = [case for case in cases if case.kind in CNN_LIKE]
    rows = {"all random chains": summary(random_cases), "all CNN-like chains": summary(cnn_cases)}
    for kind in CHAINS:
        rows[kind] = summary([case for case in cases if case.kind == kind])
    for fraction in FRACTIONS:
        rows[f"budget at {fraction:.0%}"] = summary([case for case in cases if case.fraction == fraction])
    for stages in sorted(set(STAGES)):
        rows[f"{stages} stages"] = summary([case for case in cases if case.stages == stages])
    return rows


def against_trees(cases: list[Case]) -> dict[str, float]:
    """Which part of the excess is due to the language of schedule trees."""
    known = [case for case in cases if case.tree is not None]
    return {
        "cases": len(known),
        "plan_is_the_best_tree": sum(case.plan <= case.tree * (1 + 1e-9) for case in known) / len(known),
        "mean_excess_of_plans": statistics.mean(case.plan - 1 for case in known),
        "mean_excess_of_best_trees": statistics.mean(case.tree - 1 for case in known),
    }


def broken(cases: list[Case]) -> list[Case]:
    """Cases that contradict a proof: there must be none."""
    return [
        case
        for case in cases
        if max(case.bound, case.relaxation) > 1 + 1e-9 or min(case.plan, case.tree or case.plan) < 1 - 1e-9
    ]


# ---------------------------------------------------------------------------------------------------- output

_COLUMNS = {
    "": "chains and budgets",
    "cases": "cases",
    "optimal": "plan is optimal",
    "mean": "plan above optimum: mean",
    "p95": "95th percentile",
    "max": "maximum",
    "bound_mean": "bound / optimum: mean",
    "bound_min": "minimum",
    "relaxation_mean": "linear relaxation / optimum: mean",
    "relaxation_min": "minimum",
}


def _cell(name: str, value: float) -> str:
    if name == "cases":
        return f"{value:,.0f}"
    if name.startswith(("bound", "relaxation")):
        return f"{value:.3f}"
    return f"{value:.1%}" if name == "optimal" else f"{value:.2%}"


def _markdown(
    rows: dict[str, dict[str, float]], trees: dict[str, float], worst: list[Case], machine: dict[str, Any]
) -> str:
    lines = [
        "# Plans against the true optimum",
        "",
        f"{machine['cpu']}, {machine['cores']} cores; Python {machine['python']}, NumPy {machine['numpy']}, SciPy {machine['scipy']}; "
        f"`{machine['command']}`, {machine['seconds']:.0f} s on {machine['processes']} processes.",
        "",
        f"{sum(CHAINS[kind] for kind in CHAINS if kind not in CNN_LIKE):,} random and {sum(CHAINS[kind] for kind in CNN_LIKE)} CNN-like chains "
        f"of {min(STAGES)} to {max(STAGES)} stages, each at {len(FRACTIONS)} budgets: 0 % is the least peak of a plan, 100 % that without "
        "recomputation. The optimum is over all executions at the granularity of stages, not only over schedule trees. "
        "All figures are of whole steps.",
        "",
        "| " + " | ".join(_COLUMNS.values()) + " |",
        "| :--- |" + " ---: |" * (len(_COLUMNS) - 1),
        *(
            f"| {name} | " + " | ".join(_cell(key, row[key]) for key in _COLUMNS if key) + " |"
            for name, row in rows.items()
        ),
        "",
        f"On the {trees['cases']:,.0f} cases of up to {MOST_STAGES_FOR_TREES} stages, where all schedule trees can be tried, the plan is the "
        f"best tree in {trees['plan_is_the_best_tree']:.1%}. Plans are {trees['mean_excess_of_plans']:.3%} above the optimum in the mean, best trees "
        f"{trees['mean_excess_of_best_trees']:.3%}: what is missing, a search for better trees would not find.",
        "",
        "The worst cases:",
        "",
        "| kind | seed | stages | budget | plan above optimum | schedule |",
        "| :--- | ---: | ---: | ---: | ---: | :--- |",
        *(
            f"| {case.kind} | {case.seed} | {case.stages} | {case.fraction:.0%} | {case.plan - 1:.1%} | `{case.schedule}` |"
            for case in worst
        ),
    ]
    return "\n".join(lines) + "\n"


def _print(rows: dict[str, dict[str, float]], trees: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Plans against the true optimum")
    for column in _COLUMNS.values():
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(_cell(key, row[key]) for key in _COLUMNS if key))
    Console(width=180).print(table, trees)


def _machine(processes: int, seconds: float) -> dict[str, Any]:
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "command": "python -m benchmarks.oracle",
        "processes": processes,
        "seconds": seconds,
    }


def main() -> None:
    """Run every chain, print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--share", type=float, default=1.0, help="part of the chains, for a quick look; writes nothing below 1"
    )
    arguments = parser.parse_args()
    jobs = [(kind, seed) for kind, count in CHAINS.items() for seed in range(max(int(count * arguments.share), 1))]
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        cases = [case for found in pool.imap_unordered(cases_of, jobs) for case in found]
    cases.sort(key=lambda case: (case.kind, case.seed, case.fraction))
    if contradictions := broken(cases):
        raise SystemExit(f"{len(contradictions)} cases contradict a proof, such as {contradictions[0]}")
    rows, trees = rows_of(cases), against_trees(cases)
    _print(rows, trees)
    if arguments.share < 1:
        return
    machine = _machine(arguments.processes, time.perf_counter() - start)
    worst = sorted(cases, key=lambda case: case.plan, reverse=True)[:10]
    RESULTS.mkdir(exist_ok=True)
    result = {"machine": machine, "rows": rows, "against_trees": trees, "worst": [asdict(case) for case in worst]}
    (RESULTS / "oracle.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "oracle.md").write_text(_markdown(rows, trees, worst, machine))


if __name__ == "__main__":
    main()
