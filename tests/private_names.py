"""Private names of torch, Lightning and torchmetrics that a Python file touches, by reading it.

Counted are imports, attributes, and names in ``getattr`` and its kin that begin with an underscore, unless the file defines them itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

OURS = "lightning_rotor"
PUBLIC_BY_HABIT = {
    "_parameters": "a module's dicts, which half the world reads",
    "_buffers": "likewise",
    "_modules": "likewise",
    "_fields": "what Python documents of named tuples",
    "_replace": "what Python documents of named tuples",
    "_getframe": "documented by Python",
    "_exit": "documented by Python",
    "_ArgumentGroup": "what argparse hands out",
}


def private_names(path: Path) -> list[str]:
    """As they are written in a file, each once, in order."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = set(_defined(tree)) | set(PUBLIC_BY_HABIT)
    found = {spelling for name, spelling in _touched(tree) if name not in own}
    return sorted(name for name in found if not any(other.startswith(f"{name}.") for other in found))


def private_names_below(folder: Path) -> dict[str, list[str]]:
    """The same for each file in a folder that has some."""
    found = {str(path.relative_to(folder)): private_names(path) for path in sorted(folder.rglob("*.py"))}
    return {name: names for name, names in found.items() if names}


def _is_private(name: str) -> bool:
    return name.startswith("_") and name.isidentifier() and not name.startswith("__") and name != "_"


def _touched(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            # Operators have names of their own kind: torch keeps those of aten as they are.
            if ".aten." not in ast.unparse(node) and not ast.unparse(node).startswith("_aten."):
                yield node.attr, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith((OURS, "_")):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from ((part, full) for part in full.split(".") if _is_private(part))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "attrgetter"):
            for argument in node.args:
                if (
                    isinstance(argument, ast.Constant)
                    and isinstance(argument.value, str)
                    and _is_private(argument.value)
                ):
                    yield argument.value, ast.unparse(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            name = node.slice.value
            if isinstance(name, str) and _is_private(name) and ast.unparse(node.value) != "self.__dict__":
                yield name, ast.unparse(node)


def _defined(tree: ast.AST) -> Iterator[str]:
    """What a file defines: functions and classes, what it assigns to, what it keeps in ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Assign) and any(ast.unparse(target) == "__slots__" for target in node.targets):
            yield from ast.literal_eval(node.value)
