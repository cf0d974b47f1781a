"""What a first batch takes, and what each later call costs before its plan runs: now, and as it was.

    OMP_NUM_THREADS=1 python -m benchmarks.first_batch                    # writes benchmarks/results/first_batch.md
    OMP_NUM_THREADS=1 python -m benchmarks.first_batch gpt2 t5
    OMP_NUM_THREADS=1 PYTHONPATH=WORKTREE:. python -m benchmarks.first_batch --before     # of another version: writes first_batch.json

The workloads of :mod:`benchmarks.predictions` under half of what can be saved. The first batch is recorded, checked, measured, planned and trained
on; the planner's kernel was compiled before, once for an installation. Binding is what a call like the last one takes until its plan is found:
whether the module has changed, guards, inputs, the plan. Seconds are those that the thread was computing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.predictions import WORKLOADS
from lightning_rotor import BudgetError, Checkpointable, simulate
from lightning_rotor.schedule import Schedule

RESULT = Path(__file__).parent / "results" / "first_batch.md"
BEFORE = RESULT.with_suffix(".json")
SHARE = 0.5
STEPS, SECONDS = 10, 2.0
"""Allowed of a first batch: plain steps, and seconds besides."""
CALLS = 200
SETTLING = 14


def measure(name: str) -> dict[str, Any]:
    """What the first batch of one workload takes, and a later call."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    module, inputs, loss = WORKLOADS[name]()

    def step(run: Any) -> float:
        module.zero_grad()
        began = time.thread_time()
        loss(run(**inputs)).backward()
        return time.thread_time() - began

    step(module)
    plain = statistics.median(step(module) for _ in range(3))
    probe = Checkpointable(module, inputs, show_progress=False)
    chain = probe.chain
    assert chain is not None
    least, most = 0, simulate(chain, Schedule.keep_all(len(chain))).peak_bytes
    try:
        probe.compute_sequence(1)
    except BudgetError as error:
        least = error.minimum_bytes
    limit = int(least + SHARE * (most - least))
    Checkpointable(module, inputs, limit, show_progress=False)  # compiles the kernel
    net = Checkpointable(module, mem_limit=limit, show_progress=False)
    first = step(net)
    for _ in range(SETTLING):  # a plan is timed in its first calls
        step(net)
    return {"stages": len(chain), "plain": plain, "first": first, "bind": binding(net, inputs)}


class _BoundError(Exception):
    """The plan of a call is found."""


def binding(net: Checkpointable, inputs: dict[str, Any]) -> float | None:
    """Seconds from a call of a known size to its plan; None for versions that do not say when they have it."""
    listener: Any = getattr(net, "_limit", None)
    told_by = next((name for name in ("hear", "on_start") if hasattr(listener, name)), None)
    if told_by is None:
        return None
    ends = []

    def stop(_: Any) -> None:
        """Hear of the call that begins: nothing else happens in a call whose plan is steady."""
        ends.append(time.thread_time())
        raise _BoundError

    setattr(listener, told_by, stop)
    seconds = []
    for _ in range(CALLS):
        began = time.thread_time()
        with suppress(_BoundError):
            net(**inputs)
        seconds.append(ends[-1] - began)
    delattr(listener, told_by)
    return statistics.median(seconds)


def row(name: str, now: dict[str, Any], before: dict[str, Any]) -> str:
    """A line of the table."""
    allowed = STEPS * now["plain"] + SECONDS
    earlier = before.get("first")
    return (
        f"| {name} | {now['stages']} | {now['plain']:.3f} s | {'' if earlier is None else f'{earlier:.1f} s'} | {now['first']:.1f} s | "
        f"{allowed:.1f} s | {'yes' if now['first'] <= allowed else '**no**'} | {1e6 * now['bind']:.0f} µs |"
    )


def main() -> None:
    """Measure, each workload in a process, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS, []], help="all by default")
    parser.add_argument("--before", action="store_true", help="keep the figures as those of an earlier version")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.workloads[0])))
        return
    found: dict[str, Any] = {}
    for name in given.workloads or WORKLOADS:
        command = [sys.executable, "-m", "benchmarks.first_batch", "--one", name]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            print(name, done.stderr.strip().splitlines()[-1], flush=True)
            continue
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, found[name], flush=True)
    if given.before:
        BEFORE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    before = json.loads(BEFORE.read_text(encoding="utf-8")) if BEFORE.exists() else {}
    inside = sum(each["first"] <= STEPS * each["plain"] + SECONDS for each in found.values())
    lines = [
        "# The first batch, and each later call",
        "",
        f"`python -m benchmarks.first_batch`, torch {torch.__version__}, {platform.machine()}, {os.environ.get('OMP_NUM_THREADS', '?')} thread, "
        f"load {os.getloadavg()[0]:.1f}; before: commit 3553f39 of 22 November 2026, the same day's machine.",
        f"Allowed are {STEPS} plain steps and {SECONDS:.0f} s: {inside} of {len(found)} first batches keep inside. Binding took 510 to 690 µs for",
        "models of the hub in that version.",
        "",
        "| workload | stages | plain step | first batch before | now | allowed | inside | binding |",
        "|---|---:|---:|---:|---:|---:|---|---:|",
        *(row(name, each, before.get(name, {})) for name, each in found.items()),
    ]
    print(*lines[5:], sep="\n")
    if not given.workloads:
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
