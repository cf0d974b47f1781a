"""Do tests notice small errors? Mutants of modules, the tests beside them, and which mutants survive.

    python -m benchmarks.mutants                          every module of MODULES, 60 mutants each, into results/mutants.md
    python -m benchmarks.mutants planning/step_draws --most 0  all mutants of one, only printed

A mutant is a module with one small change: another comparison, + for -, ``and`` for ``or``, a constant more or less by one, ``min`` for ``max``,
a ``not`` removed, a statement dropped. It is killed if one of its module's direct tests fails, or takes longer than the limit. This process
imports everything once and forks for each mutant, which is then put in the place of its module: a second, where a new process would take ten.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "mutants.md"
LIMIT_SECONDS = 60
IMPORTED_EARLY = "ignore::pytest.PytestAssertRewriteWarning"
"""All plugins of pytest are imported before it starts, so that no mutant waits for them."""

MODULES = {
    "planning/budget_search": ["tests/planning/test_budget_search.py"],
    "planning/joint_chain": ["tests/planning/test_joint_chain.py", "tests/planning/test_outside.py"],
    "planning/outside": ["tests/planning/test_outside.py"],
    "planning/size_bounds": ["tests/planning/test_size_bounds.py"],
    "planning/step_draws": ["tests/planning/test_step_draws.py"],
    "planning/step_phases": ["tests/planning/test_step_phases.py"],
    "simulator": ["tests/test_simulator.py"],
}
"""By module, its direct tests."""

EXPLAINED: dict[str, str] = {
    "planning/budget_search: _larger: `0` → `-1`": "Equivalent: a budget of 0 or less is no growth, which the next line refuses.",
    "planning/joint_chain: joined: `1` → `2`": "Equivalent: the output of the user's code has 0 bytes, of which 1 or 2 are saved.",
    "planning/step_draws: spread_bytes: `0` → `-1`": "Equivalent: draws are only seen once there are peaks, so the default is never read.",
    "planning/step_draws: spread_bytes: `0` → `1`": "Equivalent, likewise.",
    "planning/step_draws: module: `8` → `7`": "Equivalent: only powers of two are compared with it.",
    "planning/size_bounds: _candidates: `1` → `0`": "Equivalent: a line to a larger size is higher, so it is not taken.",
    "planning/size_bounds: _candidates: without `continue`": "Equivalent, likewise.",
    "planning/size_bounds: _candidates: `growth <= 1` → `growth < 1`": "Equivalent, likewise.",
    "planning/size_bounds: _candidates: `0` → `-1`": "Equivalent: by one byte it is as near, and the chain itself is the same.",
    "planning/size_bounds: _candidates: `0` → `1`": "Equivalent, likewise.",
    "planning/size_bounds: _share: `0.0` → `-1.0`": "Equivalent: of two sizes that are the same in all dimensions no line is asked for.",
    "planning/size_bounds: _scaled: `0` → `-1`": "Equivalent: the last of one value is the first.",
}
"""By survivor, as the result names it, why no test can or need tell it from the module."""

OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
EXTREMES = {"min": "max", "max": "min"}
DROPPABLE = (ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Break)


class Mutation(NamedTuple):
    """One change: of the node with this number in :func:`ast.walk`, made by ``change``."""

    number: int
    line: int
    name: str
    change: Callable[[ast.AST], None]


def mutations(tree: ast.Module) -> Iterator[Mutation]:
    """Every change of a module, in a fixed order."""
    skipped = _without_effect(tree)
    for number, node in enumerate(ast.walk(tree)):
        if node in skipped:
            continue
        line = getattr(node, "lineno", 0)
        for change in _changes(node):
            mutated = copy.deepcopy(node)
            change(mutated)
            before, after = _text(node), _text(mutated)
            if before != after:
                yield Mutation(number, line, f"`{before}` → `{after}`", change)


def _changes(node: ast.AST) -> Iterator[Callable[[ast.AST], None]]:
    match node:
        case ast.Compare():
            for place in range(len(node.ops)):
                yield lambda mutant, place=place: _opposite(mutant.ops, place)
        case ast.BinOp(op=ast.Add() | ast.Sub()) | ast.AugAssign(op=ast.Add() | ast.Sub()) | ast.BoolOp():
            yield lambda mutant: setattr(mutant, "op", OPPOSITES[type(mutant.op)]())
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            yield lambda mutant: setattr(mutant, "value", mutant.value + 1)
            yield lambda mutant: setattr(mutant, "value", mutant.value - 1)
        case ast.Name(id="min" | "max"):
            yield lambda mutant: setattr(mutant, "id", EXTREMES[mutant.id])
        case ast.UnaryOp(op=ast.Not()):
            yield lambda mutant: setattr(mutant, "operand", ast.UnaryOp(ast.Not(), mutant.operand))
    for field in ("body", "orelse"):
        statements = getattr(node, field, None)
        if not isinstance(statements, list):
            continue
        for place, statement in enumerate(statements):
            if _may_be_dropped(statement):
                yield lambda mutant, field=field, place=place: getattr(mutant, field).__setitem__(place, ast.Pass())


def _opposite(operators: list[ast.cmpop], place: int) -> None:
    operators[place] = OPPOSITES[type(operators[place])]()  # type: ignore[call-overload]


def _may_be_dropped(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)  # a docstring
    if isinstance(statement, ast.Assign):
        return any(isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets)
    return isinstance(statement, DROPPABLE)


def _without_effect(tree: ast.Module) -> set[ast.AST]:
    """Nodes of annotations, of messages and of what is only printed."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            skipped.update(ast.walk(node.annotation))
        elif isinstance(node, ast.FunctionDef):
            if node.returns is not None:
                skipped.update(ast.walk(node.returns))
            if node.name == "__repr__":
                skipped.update(ast.walk(node))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(ast.walk(node))
    return skipped


def _text(node: ast.AST) -> str:
    """A node in one line; of a block what differs, its statements."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.If | ast.For | ast.While | ast.With):
        statements = [*getattr(node, "body", []), *getattr(node, "orelse", [])]
        return " ; ".join(ast.unparse(statement).splitlines()[0] for statement in statements)
    return " ".join(ast.unparse(node).split()) if not isinstance(node, ast.operator | ast.cmpop) else ""


def mutated(tree: ast.Module, mutation: Mutation) -> ast.Module:
    """The module with one change."""
    mutant = copy.deepcopy(tree)
    for number, node in enumerate(ast.walk(mutant)):
        if number == mutation.number:
            mutation.change(node)
            break
    return ast.fix_missing_locations(mutant)


def put_in_place(module: ModuleType, mutant: ast.Module) -> None:
    """Run a mutant as the module, and give its functions and classes to all that have imported the old ones."""
    old = dict(vars(module))
    exec(compile(mutant, str(module.__file__), "exec"), vars(module))
    new = {id(old[name]): value for name, value in vars(module).items() if name in old and value is not old[name]}
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith("lightning_rotor"):
            for name, value in list(vars(other).items()):
                if id(value) in new and callable(value):
                    setattr(other, name, new[id(value)])


def started(module: ModuleType, mutant: ast.Module, tests: list[str]) -> int:
    """Number of a new process that runs tests with a mutant, and ends with 0 if all pass."""
    child = os.fork()
    if child:
        return child
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        import pytest

        put_in_place(module, mutant)
        options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-W", IMPORTED_EARLY]
        os._exit(int(pytest.main([*options, *tests])))
    finally:
        os._exit(99)


def survives(process: int, limit_seconds: float) -> bool:
    """True if all tests of a started process pass within the limit."""
    end = time.monotonic() + limit_seconds
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return False


class Outcome(NamedTuple):
    """Mutants of one module."""

    name: str
    possible: int
    tried: int
    survivors: list[str]


def tried(name: str, tests: list[str], most: int, limit_seconds: float, at_once: int) -> Outcome:
    """Mutants of one module against its tests; ``most`` of them at random, or all if it is 0."""
    path = ROOT / "lightning_rotor" / f"{name}.py"
    module = importlib.import_module(f"lightning_rotor.{name.replace('/', '.')}")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not survives(started(module, tree, tests), 10 * limit_seconds):
        raise SystemExit(f"the tests of {name} fail without any mutant")
    every = list(mutations(tree))
    chosen = random.Random(name).sample(every, min(most or len(every), len(every)))
    chosen.sort(key=lambda mutation: (mutation.line, mutation.name))
    survivors = []
    running: deque[tuple[Mutation, int]] = deque()
    for mutation in [*chosen, *[None] * at_once]:
        if mutation is not None:
            running.append((mutation, started(module, mutated(tree, mutation), tests)))
        if running and (mutation is None or len(running) == at_once):
            oldest, process = running.popleft()
            if survives(process, limit_seconds):
                survivors.append(f"{_place(tree, oldest)}: {_shortest(oldest.name)}")
                print(f"{name}:{oldest.line} {survivors[-1]}", flush=True)
    return Outcome(name, len(every), len(chosen), survivors)


def _place(tree: ast.Module, mutation: Mutation) -> str:
    """Name of the innermost function or class with a node: lines would change with every comment."""
    place = "module"
    target = _node(tree, mutation)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and target in ast.walk(node):
            place = node.name
    return place


def _node(tree: ast.Module, mutation: Mutation) -> ast.AST:
    return next(node for number, node in enumerate(ast.walk(tree)) if number == mutation.number)


def _shortest(name: str) -> str:
    """A change of a block without the statements that are alike."""
    before, _, after = (part.strip("`") for part in name.partition("` → `"))
    if after.count(" ; ") or "pass" in after.split(" ; "):
        gone = [statement for statement in before.split(" ; ") if statement not in after.split(" ; ")]
        return f"without `{' ; '.join(gone)}`"
    return name


def report(outcomes: list[Outcome]) -> str:
    """The result as Markdown."""
    lines = [
        "# Mutants",
        "",
        "`python -m benchmarks.mutants`: one small change of a module at a time, against the tests beside it.",
        "",
        "| module | mutants | tried | survived | of them explained |",
        "|---|--:|--:|--:|--:|",
    ]
    for outcome in outcomes:
        share = len(outcome.survivors) / max(outcome.tried, 1)
        explained = sum(f"{outcome.name}: {survivor}" in EXPLAINED for survivor in outcome.survivors)
        survived = f"{len(outcome.survivors)} ({share:.0%})"
        lines.append(f"| {outcome.name} | {outcome.possible} | {outcome.tried} | {survived} | {explained} |")
    lines += ["", "## Survivors", ""]
    for outcome in outcomes:
        for survivor in outcome.survivors:
            key = f"{outcome.name}: {survivor}"
            lines.append(f"- {key}. {EXPLAINED.get(key, 'Not looked at yet.')}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the command line, try mutants, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help=f"some of {', '.join(MODULES)}; by default all, and a result file")
    parser.add_argument("--most", type=int, default=60, help="mutants of a module; 0 for all")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for the tests of one mutant")
    parser.add_argument("--at-once", type=int, default=2, help="processes beside one another")
    options = parser.parse_args()
    os.environ["CI"] = "1"  # hypothesis draws the same examples for every mutant
    for needed in ("pytest", "hypothesis", "lightning_rotor", "tests.conftest"):
        importlib.import_module(needed)
    compilation = importlib.import_module("lightning_rotor.planning.compilation")
    compilation.compiled_kernels()
    outcomes = []
    for name in options.modules or MODULES:
        begin = time.monotonic()
        outcomes.append(tried(name, MODULES[name], options.most, options.limit, options.at_once))
        print(
            f"{name}: {len(outcomes[-1].survivors)} of {outcomes[-1].tried} survive, {time.monotonic() - begin:.0f} s",
            flush=True,
        )
    if not options.modules:
        RESULT.write_text(report(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
