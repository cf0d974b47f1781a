"""What only a GPU can tell, in one command of at most nine minutes, as one table.

    python -m benchmarks.gpu                                                     writes benchmarks/results/gpu.md
    python -m tests.cuda_device -m benchmarks.gpu --small --to FILE              tries the command on the simulated device

========  =========================================================================  ===================================
tests     those marked ``gpu``                                                       ``make test-gpu`` runs them alone
peaks     of a step, predicted and measured, for six models                          :mod:`cuda_memory`
race      against what people use today, eager, on three models                      :mod:`frontier` runs all of it
overhead  of the callback where its plan recomputes nothing                          :mod:`overhead`
========  =========================================================================  ===================================

Each is a process of its own with its share of the time. One that fails, or takes longer, leaves what it has found until then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.frontier_report import body

HERE = Path(__file__).parent
RACE = ("gpt8", "resnet101", "unet")
METHODS = ("block", "sequential", "selective", "ours")  # what needs no compiler, which takes minutes


def main() -> None:
    """Run all parts and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="little of each, to see that the command works")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="all by default")
    parser.add_argument("--to", type=Path, default=HERE / "results" / "gpu.md", help="file to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "there is no CUDA device: python -m tests.cuda_device -m benchmarks.gpu --small --to FILE uses a simulated one"
        )
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=HERE, capture_output=True, text=True, check=False).stdout
    lines = [
        f"# On one {torch.cuda.get_device_name()}",
        "",
        f"`python -m benchmarks.gpu{' --small' * options.small}`, {time.strftime('%Y-%m-%d')}, commit {commit.strip()}, Python "
        f"{sys.version.split()[0]}, torch {torch.__version__}, {torch.cuda.mem_get_info()[1] / 2**30:.1f} GiB.",
    ]
    for name in options.parts:
        began = time.monotonic()
        found = PARTS[name](options.small)
        lines += ["", f"## {name.capitalize()}", "", *found, "", f"{time.monotonic() - began:.0f} s."]
        options.to.write_text("\n".join([*lines, ""]), encoding="utf-8")


def tests(small: bool) -> list[str]:
    """What failed, and how many did not."""
    # Not the whole folder: other files import packages of which a lent machine knows nothing.
    marked = sorted(str(file) for file in (HERE.parent / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text())
    chosen = ["tests/test_cuda.py"] if small else marked
    output, problem = run(small, 110, "-m", "pytest", "-n0", "-m", "gpu", "-q", "-p", "no:cacheprovider", *chosen)
    summary = [line for line in output if line.startswith(("FAILED", "ERROR", "SKIPPED")) or " passed" in line]
    return [*(f"    {line}" for line in summary), *problem]


def peaks(small: bool) -> list[str]:
    """Of training steps, in bytes."""
    chosen = ["--models", "U-Net"] if small else ["--times", "8"]
    output, problem = run(small, 80, "-m", "benchmarks.cuda_memory", *chosen)
    return [*rows(output), *problem]


def race(small: bool) -> list[str]:
    """Memory against time."""
    found, problems = {}, []
    for name in RACE[:1] if small else RACE:
        command = ["-m", "benchmarks.frontier", "--one", name, "--device", "cuda"]
        command += ["--methods", "block", "ours", "--between"] if small else ["--methods", *METHODS]
        command += (
            ["--rounds", "1", "--final-rounds", "1", "--small"] if small else ["--rounds", "2", "--final-seconds", "10"]
        )
        output, problem = run(small, 95, *command)
        problems += problem
        if not problem:
            found[name] = json.loads(output[-1])
    lines = body(found) if found else []
    return [*(f"#{line}" if line.startswith("#") else line for line in lines), *problems]


def overhead(small: bool) -> list[str]:
    """Of the callback."""
    chosen = ["--rounds", "1", "--models", "200 layers in an nn.Sequential"] if small else ["--rounds", "100"]
    output, problem = run(small, 60, "-m", "benchmarks.overhead", "--device", "cuda", "--to", os.devnull, *chosen)
    titles = [
        "| model | plain step | plain again adds | the callback adds | that is | Python calls in a step |",
        "|---|---|---|---|---|---|",
    ]
    return [*titles, *rows(output), *problem]


def rows(output: Sequence[str]) -> list[str]:
    """Those lines that belong to a table."""
    return [line for line in output if line.startswith("|")]


def run(small: bool, seconds: float, *command: str) -> tuple[list[str], list[str]]:
    """Lines that a Python process printed, and a line that says what went wrong, if anything did."""
    seconds = 300 if small else seconds  # a simulated device is slow
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has started
        output, _ = process.communicate()
        print(output, flush=True)
        return output.splitlines(), ["", f"**Not finished in {seconds:.0f} s.**"]
    found = output.splitlines()
    if process.returncode:
        print(output, flush=True)  # what failed, in full
    return found, [
        "",
        f"**Ended with {process.returncode}:** `{found[-1] if found else ''}`",
    ] if process.returncode else []


PARTS = {"tests": tests, "peaks": peaks, "race": race, "overhead": overhead}

if __name__ == "__main__":
    main()
