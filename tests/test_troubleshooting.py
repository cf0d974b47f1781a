"""docs/troubleshooting.md has an entry for every error and warning of the package, found in its source.

An entry is a row of a table: the message up to where it says what was expected, with ``…`` for what it fills in, as
``code``, and what to do. A row may name what ``…`` stands for, as in ``<layer>``, so that its reader need not guess. A
failing test prints the rows that are missing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.processes import ROOT

PACKAGE = ROOT / "lightning_rotor"
PAGE = ROOT / "docs" / "troubleshooting.md"
ENTRY = re.compile(r"^\| `(?P<message>[^`]+)` \| (?P<help>.+) \|$", re.MULTILINE)
NAMED = re.compile(r"<[a-z][^<>`]*>")
HEADING = re.compile(r"^#+ .*$", re.MULTILINE)

# Functions that make messages, and where what they made is raised or warned of without being spelled out there.
MAKERS = {
    *("_complaints", "stage_complaints", "structure_complaints", "shortage_message"),
    *("_message", "uncompiled_warning", "what_is_left_out"),
}
HANDED_ON = {"profile_chain", "warn", "warn_once"}
SPEAKING = {"critical", "error", "warn", "warn_once", "warning"}


@cache
def sources() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def classes() -> frozenset[str]:
    """Names of all errors and warnings: RotorError, RotorWarning and what derives from them."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found: set[str] = {"RotorError", "RotorWarning"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return frozenset(found)


def templates(node: ast.expr, scope: ast.AST) -> Iterator[str]:
    """The texts that an expression can be, with ``…`` for values; none if it is handed on from elsewhere."""
    match node:
        case ast.Constant(str() as text):
            yield re.sub(r"%[ds]", "…", text)
        case ast.JoinedStr():
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        case ast.BinOp(left, ast.Add(), right):
            yield from (one + other for one in templates(left, scope) for other in templates(right, scope) or [""])
        case ast.IfExp(_, one, other):
            yield from (*templates(one, scope), *templates(other, scope))
        case ast.Call(func=called) if ast.unparse(called).rpartition(".")[2] in MAKERS:
            yield ""  # counted there
        case ast.Name(name):
            for each in ast.walk(scope):
                if isinstance(each, ast.Assign) and any(ast.unparse(target) == name for target in each.targets):
                    yield from templates(each.value, scope)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def speaks(called: ast.expr) -> bool:
    name = ast.unparse(called).rpartition(".")[2]
    return name in classes() or name in SPEAKING


def spoken(function: ast.FunctionDef) -> Iterator[str]:
    """Messages that a function raises, warns of, or, if it is one of MAKERS, makes."""
    for node in ast.walk(function):
        match node:
            case ast.Call(func=called, args=[first, *_]) if speaks(called):
                yield from templates(first, function)
            case ast.Return(ast.expr() as value) | ast.Yield(ast.expr() as value) if function.name in MAKERS:
                yield from templates(value, function)


def key(message: str) -> str:
    """How an entry quotes a message: until it says what was expected, or until its first sentence ends."""
    start = re.split(r":? expected |\. (?=[A-Z])|\n", message.replace("`", ""))[0]
    return re.sub(r"(… ?)+…", "…", re.sub(r"\s+", " ", start)).strip(" .:;")


@cache
def messages() -> dict[str, str]:
    """Entries that the page must have, each with the whole message."""
    spoken_by = (text for tree in sources().values() for function in functions(tree) for text in spoken(function))
    return {key(text): text for text in spoken_by if re.search(r"\w{2}", key(text).removeprefix("RotorCallback"))}


def test_every_message_has_an_entry_that_says_what_to_do() -> None:
    entries = {NAMED.sub("…", match["message"]): match["help"] for match in ENTRY.finditer(PAGE.read_text())}
    missing = [f"| `{name}` | what it means and what to do |" for name in messages() if name not in entries]
    assert not missing, "add to docs/troubleshooting.md, in your words:\n" + "\n".join(missing)
    stale = sorted(entries.keys() - messages().keys())
    assert not stale, "drop from docs/troubleshooting.md, for nothing says it any more:\n" + "\n".join(stale)
    assert all(len(help_.split()) > 2 for help_ in entries.values())


def test_every_class_of_errors_and_warnings_has_a_heading() -> None:
    headings = " ".join(HEADING.findall(PAGE.read_text()))
    assert set(re.findall(r"`(\w+)`", headings)) == classes()


def test_no_message_is_made_where_this_test_does_not_look() -> None:
    unread = {
        function.name
        for tree in sources().values()
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and node.args and speaks(node.func)
        if not list(templates(node.args[0], function))
    }
    assert unread == HANDED_ON, "spell the message where it is raised, or name the function that makes it in MAKERS"
    assert {function.name for tree in sources().values() for function in functions(tree)} >= MAKERS


def test_messages_are_found_in_all_their_forms() -> None:
    code = """
def refuse(name):
    text = "it is " + f"{name}: expected a name"
    if name:
        raise ModelError(text)
    warnings.warn(f"nothing at {name!r}. Give one", RotorWarning)
    _log.warning("%s is late", name)
"""
    (function,) = functions(ast.parse(code))
    assert {key(text) for text in spoken(function)} == {"it is …", "nothing at …", "… is late"}
