"""Code and classes of the user's, told from torch's, Python's and ours, and the globals that code names."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache, cached_property, lru_cache, partialmethod
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

OUR_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"
_TORCHS_AND_OURS = (f"{Path(torch.__file__).parent}{os.sep}", OUR_FOLDER)
_PYTHONS = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")


@cache
def is_users(filename: str) -> bool:
    """True if code is neither torch's nor Python's nor ours, nor that of a test's runner."""
    # An ``assert`` in a forward that pytest has rewritten leads to all tests of the session.
    if filename.startswith(_TORCHS_AND_OURS) or f"{os.sep}_pytest{os.sep}" in filename:
        return False
    # Installed packages lie below Python's own folder, in site-packages or dist-packages.
    return not filename.startswith(_PYTHONS) or "-packages" in filename


def _file_of(kind: type) -> str:
    """File of the module that a class comes from; empty for a notebook, which has none."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def is_own_file(filename: str) -> bool:
    """True if a file is not one of an installed package."""
    return "-packages" not in filename


def is_own(kind: type) -> bool:
    """True if a class comes from the user's own files, and not from an installed package."""
    return is_own_file(_file_of(kind))


def is_users_class(kind: type) -> bool:
    """True if a class is neither torch's nor Python's nor ours."""
    return kind.__module__ != "builtins" and is_users(_file_of(kind))


def code_of(modules: Iterable[nn.Module]) -> Iterator[FunctionType]:
    """Functions in the user's own classes of modules."""
    bases = dict.fromkeys(base for module in modules for base in type(module).__mro__)
    for base in filter(is_own, bases):
        yield from functions_of(base)


def functions_of(kind: type) -> Iterator[FunctionType]:
    """Functions in a class, also behind its static methods, class methods, properties and the like."""
    yield from (entry for entry in _entries_of(kind) if isinstance(entry, FunctionType))


def _entries_of(kind: type) -> Iterator[Any]:
    for entry in vars(kind).values():
        if isinstance(entry, (staticmethod, classmethod)):
            yield entry.__func__
        elif isinstance(entry, property):
            yield from (entry.fget, entry.fset, entry.fdel)
        elif isinstance(entry, (partialmethod, cached_property)):
            yield entry.func
        else:
            yield entry


_SETS = ("STORE_GLOBAL", "DELETE_GLOBAL")
_LOOKS_UP = ("LOAD_GLOBAL", "LOAD_NAME", *_SETS)
"""Instructions whose argument is the name of a global. Those for attributes are others."""


@lru_cache(maxsize=4096)
def globals_of(code: CodeType, *, only_set: bool = False) -> tuple[str, ...]:
    """Names that code, and functions in it, look up or set among globals. Names of attributes are not among them."""
    return tuple(dict.fromkeys(_names_in(code, _SETS if only_set else _LOOKS_UP)))


def _names_in(code: CodeType, operations: Collection[str]) -> Iterator[str]:
    # Not co_names, in which names of attributes stand as well.
    for step in dis.get_instructions(code):
        if step.opname in operations:
            yield str(step.argval)
    # Functions and comprehensions inside of a function are constants of its code.
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant, operations)
