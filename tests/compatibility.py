"""``make test-versions``: the core of the suite and the demo under each supported torch, and docs/compatibility.md from what came of them.

::

    python -m tests.compatibility run --environments .versions --torch 2.11.0   the core, in .versions/torch211, made if it is not there
    python -m tests.compatibility pythons --with python3.10/bin/python          the core under another Python, in an environment that is there
    python -m tests.compatibility suite --instructions AVX2                     the whole suite in this environment, under fewer instructions
    python -m tests.compatibility write                                         the document alone

Figures are kept in benchmarks/results/compatibility.json, so that each run adds its own to those of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.features import declared_features
from tests.private_names import private_names_below
from tests.processes import ROOT

TORCHS = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")
DEMO = "demo"
VERSIONS = ("python", "lightning", "torch")
DOCUMENT = ROOT / "docs" / "compatibility.md"
FIGURES = ROOT / "benchmarks" / "results" / "compatibility.json"
INSTRUCTIONS = {"own": "all that the processor has", "AVX2": "", "AVX512_CORE": ""}


def _group(*names: str) -> tuple[str, ...]:
    """The tests that show the features of some groups."""
    found = (feature for feature in declared_features() if feature.group in names and feature.file != "test_ranks.py")
    return tuple(dict.fromkeys(f"tests/{feature.file}::{feature.test}" for feature in found))


@cache
def rows() -> dict[str, tuple[str, ...]]:
    """What the core is made of: tests by the row of the table that they count in."""
    return {
        "callback": ("tests/test_callback.py",),
        "Checkpointable": ("tests/test_checkpointable.py",),
        "inversion": ("tests/test_fused_inversion.py", "tests/test_invertible_training.py"),
        "compiled blocks": ("tests/capture/test_compiled.py", *_group("torch.compile")),
        "pipeline": ("tests/test_pipeline_runner.py", "tests/test_pipeline_strategy.py"),
        "precisions": _group("Precision"),
        "tuners": _group("Tuners"),
        "loggers": _group("Loggers"),
        "settings of the forward": ("tests/test_settings.py",),
        "private names": ("tests/test_private.py", "tests/test_threads.py"),
    }


# -------------------------------------------------------------------- running


def environment(folder: Path, torch_version: str) -> Path:
    """The Python of an environment with this torch, made if it is not there."""
    home = folder / f"torch{''.join(torch_version.split('.')[:2])}"
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write("\n".join(line for line in lines if not line.startswith(("torch==", "torchvision=="))))
            constraints.flush()
            install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", constraints.name]
            subprocess.run([*install, f"torch=={torch_version}", "--editable", f"{ROOT}[dev]"], check=True)
    return python


def run_tests(python: Path | str, tests: Iterable[str], **variables: str) -> list[dict[str, str]]:
    """The tests' files, names, outcomes and reasons."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # The same examples in every run, so that versions are compared, and not luck.
        variables = {**os.environ, "CI": "1", "PYTHONPATH": str(ROOT), **variables}
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        subprocess.run(command, cwd=ROOT, env=variables, check=False)
        return outcomes(report.read_text(encoding="utf-8"))


def outcomes(report: str) -> list[dict[str, str]]:
    """What a JUnit report says of each test."""
    found = []
    for case in ET.fromstring(report).iter("testcase"):
        bad = next((part for kind in ("failure", "error", "skipped") if (part := case.find(kind)) is not None), None)
        file = case.get("classname", "").replace(".", "/") + ".py"
        name = case.get("name", "")
        outcome = "passed" if bad is None else {"skipped": "skipped"}.get(bad.tag, "failed")
        reason = "" if bad is None else (bad.get("message") or bad.text or "").strip().splitlines()[0][:200]
        found.append({"file": file, "name": name, "outcome": outcome, "reason": reason})
    return found


def by_row(results: Iterable[Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """How many tests of each row passed, and which did not and why."""
    counted: dict[str, dict[str, Any]] = {}
    for row, tests in rows().items():
        mine = [
            result
            for result in results
            if result["file"] in tests or f"{result['file']}::{result['name'].split('[')[0]}" in tests
        ]
        counted[row] = {
            "passed": sum(result["outcome"] == "passed" for result in mine),
            "others": [[f"{r['outcome']}: {r['name']}", r["reason"]] for r in mine if r["outcome"] != "passed"],
        }
    return counted


def run_core(python: Path, wanted: Iterable[str]) -> dict[str, Any]:
    """Figures of one environment, for some rows."""
    tests = {row: tests for row, tests in rows().items() if row in wanted}
    results = run_tests(python, [test for some in tests.values() for test in some]) if tests else []
    asked = (
        "import lightning, platform, torch; print(platform.python_version(), lightning.__version__, torch.__version__)"
    )
    versions = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    figures: dict[str, Any] = dict(zip(VERSIONS, versions, strict=True))
    figures["rows"] = {row: found for row, found in by_row(results).items() if row in tests}
    if DEMO in wanted:
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        demo = subprocess.run([str(python), "examples/mnist/train.py"], cwd=ROOT, env=variables, check=False)
        figures[DEMO] = "same weights" if demo.returncode == 0 else f"**exit status {demo.returncode}**"
    return figures


def run_suite(instructions: str) -> dict[str, Any]:
    """Figures of the whole suite under some of the processor's instructions. What fails runs once more, alone."""
    start = time.perf_counter()
    variables = {} if instructions == "own" else {"ONEDNN_MAX_CPU_ISA": instructions}
    results = run_tests(sys.executable, ["tests"], **variables)
    minutes = round((time.perf_counter() - start) / 60, 1)
    failed = {f"{r['file']}::{r['name']}": r["reason"] for r in results if r["outcome"] == "failed"}
    again = run_tests(sys.executable, ["-n0", *failed], **variables) if failed else []
    alone = {f"{r['file']}::{r['name']}" for r in again if r["outcome"] == "passed"}
    return {
        **{kind: sum(r["outcome"] == kind for r in results) for kind in ("passed", "failed", "skipped")},
        "failures": [[name, f"passes alone; {why}" if name in alone else why] for name, why in failed.items()],
        "processor": _processor(),
        "minutes": minutes,
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor())


# -------------------------------------------------------------------- the document


def document(figures: Mapping[str, Any]) -> str:
    """docs/compatibility.md."""
    cores = {f"torch {version}": figures["torch"].get(version) for version in TORCHS}
    lines = [
        "# Versions and processors",
        "",
        "Written by `make test-versions`; do not edit. Supported are torch 2.11 to 2.15, lightning 2.6 on, and Python 3.10 to 3.14.",
        "",
        "## The core of the suite under each torch",
        "",
        "Tests that passed, of those that ran. The demo trains twice and compares the weights bit for bit.",
        "",
        *_table(cores),
        *_pythons(figures.get("pythons", {})),
        "## The whole suite under fewer instructions",
        "",
        "`ONEDNN_MAX_CPU_ISA` takes instructions away from the kernels of a processor, which then need other temporaries.",
        "",
        "| instructions | passed | failed | skipped | minutes | processor |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name in INSTRUCTIONS:
        run = figures["instructions"].get(name)
        cells = (
            [str(run[key]) for key in ("passed", "failed", "skipped", "minutes", "processor")]
            if run
            else ["not run"] + [""] * 4
        )
        lines.append(f"| {name}{(run or {}).get('part', '')} | " + " | ".join(cells) + " |")
        lines += [f"| | | {test}: {reason} | | | |" for test, reason in (run or {}).get("failures", ())]
    return "\n".join([*lines, "", _LIMITS + _SETTINGS, *_private()])


def _pythons(cores: Mapping[str, Any]) -> list[str]:
    """The section of interpreters, if any were run beside the one of the first table."""
    if not cores:
        return []
    return [
        "## The core of the suite under each Python",
        "",
        "The table above is of Python 3.11. Python 3.14 is declared, and every dependency has packages for it, but no interpreter was "
        "at hand to run it.",
        "",
        *_table(
            {f"Python {each}": cores[each] for each in sorted(cores, key=lambda each: [*map(int, each.split("."))])}
        ),
    ]


def _table(cores: Mapping[str, Any]) -> list[str]:
    """A row for each part of the core, a column for each environment, and below what did not pass."""
    lines = ["| | " + " | ".join(cores) + " |", "|---|" + "---|" * len(cores)]
    for row in rows():
        cells = (
            "not run" if core is None or row not in core["rows"] else _cell(core["rows"][row])
            for core in cores.values()
        )
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    for row in (DEMO, *VERSIONS):
        cells = ("not run" if core is None else core.get(row, "not run") for core in cores.values())
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return [*lines, "", *_reasons(cores)]


def _cell(row: Mapping[str, Any]) -> str:
    failed = sum(name.startswith("failed") for name, _ in row["others"])
    return f"**{row['passed']} of {row['passed'] + failed}**" if failed else str(row["passed"])


def _reasons(cores: Mapping[str, Any]) -> list[str]:
    lines = [
        f"- {environment}, {row}: {name.replace('failed', '**failed**')} ({reason})"
        for environment, core in cores.items()
        if core is not None
        for row, found in core["rows"].items()
        for name, reason in found["others"]
    ]
    return ["Not passed:", "", *lines, ""] if lines else []


_LIMITS = """## What torch itself does not do

`nn.Sequential(...).compile()` compiles nothing on torch < 2.14, with this package or without it: compile its blocks, or call `torch.compile`.

"""
_SETTINGS = """## Settings of the forward

A recomputation runs under these settings of its forward, whatever is set when the backward comes: default dtype and default device,
`use_deterministic_algorithms` with `warn_only`, autocast, grad mode, float32 precision (TF32, bfloat16) by backend and operation and by the older
names, sums in half precision, `sdpa_kernel` with its order, and the flags of cuDNN and oneDNN. `tests/test_settings.py` has a test for each.

To look at them takes about 5 µs of a segment's forward, and 11 µs of its recomputation, of some 80 µs in all. Not followed: the number of
threads, and choices of libraries (`preferred_linalg_library` and the like).
"""


def _private() -> list[str]:
    found = private_names_below(ROOT / "lightning_rotor")
    return [
        "## Private names of torch and Lightning",
        "",
        f"{sum(map(len, found.values()))} in {len(found)} files, each with its reason there. `tests/test_private.py` asks each what it must do.",
        "",
        "| file | names |",
        "|---|---|",
        *(f"| {file} | {', '.join(f'`{name}`' for name in names)} |" for file, names in found.items()),
        "",
    ]


def main() -> None:
    """Run what the command line says, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--environments", type=Path, default=ROOT / ".versions")
    run.add_argument("--torch", nargs="+", default=TORCHS)
    pythons = commands.add_parser("pythons")
    pythons.add_argument("--with", nargs="+", type=Path, required=True, dest="interpreters")
    for command in (run, pythons):
        command.add_argument(
            "--rows", nargs="+", default=(*rows(), DEMO), choices=(*rows(), DEMO), help="others stay as they are"
        )
    suite = commands.add_parser("suite")
    suite.add_argument("--instructions", nargs="+", default=tuple(INSTRUCTIONS), choices=tuple(INSTRUCTIONS))
    commands.add_parser("write")
    given = parser.parse_args()
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    for version in given.torch if given.command == "run" else ():
        _add_core(figures, "torch", version, environment(given.environments, version), given.rows)
    for python in given.interpreters if given.command == "pythons" else ():
        asked = [str(python), "-c", "import platform; print(platform.python_version())"]
        version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        _add_core(figures, "pythons", version, python, given.rows)
    for instructions in given.instructions if given.command == "suite" else ():
        figures["instructions"][instructions] = run_suite(instructions)
        _save(figures)
    _save(figures)


def _add_core(figures: dict[str, Any], kind: str, version: str, python: Path, wanted: Iterable[str]) -> None:
    """Run rows of the core; what is measured stays, whatever becomes of the next row."""
    for row in wanted:
        environments = figures.setdefault(kind, {})
        before, found = environments.get(version, {}), run_core(python, (row,))
        environments[version] = {**before, **found, "rows": {**before.get("rows", {}), **found["rows"]}}
        _save(figures)


def _save(figures: Mapping[str, Any]) -> None:
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    DOCUMENT.write_text(document(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
