"""The table in ``docs/features.md``: which features of a Trainer work, each row with its test, written by a test run.

A test says what it shows: ``@pytest.mark.feature("Precision", "bf16-mixed")``, with an optional ``note`` for the reader of the table. The
arguments are literals, so that the list of features can be read from the sources without running or importing them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).parents[1] / "docs" / "features.md"

_HEAD = """# What works with RotorCallback

Written by `make features`, which runs the tests that are named here; do not edit. Each test trains with a real Trainer. Where it trains with and
without the callback, it compares weights, optimizer state, losses and random number generators bit for bit. Several processes have
[a page of their own](distributed.md).
"""
_ROW = re.compile(r"\| (?P<name>.+?) \| .+? \| \[`(?P<test>\w+)`\]\(\.\./tests/(?P<file>[\w/]+\.py)\) \|")


@dataclass(frozen=True, slots=True)
class Feature:
    """One row.

    Attributes:
        group: Heading of the table that it belongs to.
        name: What works.
        file: Of the test that shows it, below the folder of the tests.
        test: Its name.
        note: More, for readers.
    """

    group: str
    name: str
    file: str
    test: str
    note: str = ""


@cache
def declared_features(folder: Path = Path(__file__).parent) -> list[Feature]:
    """What the tests in a folder say of themselves, in the order of the files."""
    return [
        feature
        for path in sorted(folder.rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        for feature in _marks_of(node, path.relative_to(folder).as_posix())
    ]


def _marks_of(test: ast.FunctionDef, file: str) -> Iterator[Feature]:
    for decorator in test.decorator_list:
        for call in ast.walk(decorator):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.feature":
                group, name = map(ast.literal_eval, call.args)
                note = next((ast.literal_eval(entry.value) for entry in call.keywords), "")
                yield Feature(group, name, file, test.name, note)


def listed_features(text: str) -> list[Feature]:
    """The rows of a table, without their notes and results."""
    features, group = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            group = line[3:]
        elif row := _ROW.fullmatch(line):
            features.append(Feature(group, row["name"].split("<br>")[0], row["file"], row["test"]))
    return features


def feature_table(features: Iterable[Feature], results: Mapping[tuple[str, str], str]) -> str:
    """The document.

    Args:
        features: Its rows; groups appear in the order of their first one.
        results: What came of each feature's tests, by group and name.
    """
    groups: dict[str, list[Feature]] = {}
    for feature in features:
        groups.setdefault(feature.group, []).append(feature)
    lines = [_HEAD]
    for group, rows in groups.items():
        lines += [f"## {group}", "", "| feature | works | test |", "|---|---|---|"]
        for row in rows:
            name = f"{row.name}<br>*{row.note}*" if row.note else row.name
            result = results.get((row.group, row.name), "not run")
            lines.append(f"| {name} | {result} | [`{row.test}`](../tests/{row.file}) |")
        lines.append("")
    return "\n".join(lines)


class FeatureResults:
    """A plugin for pytest that collects what came of each feature, over all processes, and writes the table."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[tuple[str, str], set[str]] = {}

    def pytest_runtest_logreport(self, report: object) -> None:
        """Called in the controlling process, for tests of its own and of others."""
        outcome = report.outcome  # type: ignore[attr-defined]
        if report.when != "call" and outcome == "passed":  # type: ignore[attr-defined]
            return
        reason = str(report.longrepr[2]).removeprefix("Skipped: ") if outcome == "skipped" else outcome  # type: ignore[attr-defined]
        if outcome == "passed" and ("simulated", True) in map(tuple, report.user_properties):  # type: ignore[attr-defined]
            reason = "simulated"
        for key, value in report.user_properties:  # type: ignore[attr-defined]
            if key == "feature":
                self._outcomes.setdefault(tuple(value), set()).add(reason)

    @property
    def results(self) -> dict[tuple[str, str], str]:
        """By group and name; a feature works if all its tests pass."""
        return {feature: _verdict(outcomes) for feature, outcomes in self._outcomes.items()}

    def pytest_sessionfinish(self) -> None:
        """Write the table."""
        self._path.write_text(feature_table(declared_features(), self.results), encoding="utf-8")


def _verdict(outcomes: set[str]) -> str:
    if "failed" in outcomes:
        return "**no**"
    skipped = sorted(outcomes - {"passed", "simulated"})
    if skipped:
        return f"not run: {', '.join(skipped)}"
    return "on a simulated device" if "simulated" in outcomes else "yes"
