"""Names that stand in code, read from its bytecode: what it may read is one of them, unless it computes names."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from types import CodeType
from typing import Any

_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_LOOKS_UP_MODULES = frozenset(("modules", "import_module", "__import__"))
"""Names by which code gets hold of modules without importing them."""


# Code objects never change, and looking at bytecode takes much longer than looking an answer up. The caches are bounded
# for notebooks and closures, which make new code all the time.
@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Names of attributes and globals in code, and its strings: ``getattr(args, "scale", 1)`` names one, too."""
    return frozenset(code.co_names) | frozenset(_strings_in(code.co_consts))


def _strings_in(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if type(constant) is str:
            # operator.attrgetter("model.scale") names both.
            yield from constant.split(".")
            if "{" in constant:
                # "{0.scale}".format(config)
                yield from _IDENTIFIER.findall(constant)
        elif type(constant) in (tuple, frozenset):
            yield from _strings_in(constant)


@lru_cache(maxsize=4096)
def imports_in(code: CodeType) -> tuple[str, ...]:
    """Names of modules that code imports or looks up by a text; a relative one has a dot in front for each level."""
    names = []
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    # The level stands two instructions before, then the names that are taken from the module.
    for level, _, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME":
            names.append("." * int(level.argval) + str(step.argval))
    if not _LOOKS_UP_MODULES.isdisjoint(code.co_names):
        names += [constant for constant in code.co_consts if type(constant) is str]
    return tuple(names)


@lru_cache(maxsize=4096)
def names_of_others(code: CodeType) -> frozenset[str]:
    """Names of attributes in code that it reads of anything but its first argument, which is mostly ``self``.

    Names of methods that it calls are left out. With ``getattr`` in the code its strings are among them.
    """
    # CPython 3.11 and newer keep caches between instructions.
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    own = code.co_varnames[:1] if code.co_argcount else ()
    names = set()
    for before, step in pairwise(steps):
        is_own = before.opname.startswith("LOAD_FAST") and before.argval in own
        if step.opname == "LOAD_ATTR" and not is_own and not _is_of_a_call(step):
            names.add(str(step.argval))
    # Which of the strings are names, nobody knows. One too many costs a comparison.
    if "getattr" in code.co_names:
        names.update(_strings_in(code.co_consts))
    return frozenset(names)


def _is_of_a_call(step: dis.Instruction) -> bool:
    """True if an attribute is loaded to be called, as a method is, and by an instruction that loads others, too."""
    # Before Python 3.12, methods have an instruction of their own, LOAD_METHOD.
    return sys.version_info >= (3, 12) and bool((step.arg or 0) & 1)


_WHOLE = frozenset(("vars", "__dict__", "asdict", "astuple", "fields", "__getattribute__", "eval", "exec", "locals"))
"""Names of functions and attributes that read attributes without their names."""


@lru_cache(maxsize=4096)
def reads_whole_objects(code: CodeType) -> bool:
    """True if code takes objects apart without naming their attributes."""
    if not _WHOLE.isdisjoint(code.co_names):
        return True
    # ``case Config(rate)`` reads attributes that __match_args__ names.
    return any(step.opname == "MATCH_CLASS" for step in dis.get_instructions(code))


@lru_cache(maxsize=4096)
def names_attribute(code: CodeType, position: int) -> bool:
    """True if the call of ``getattr`` at this place in code names the attribute there."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PRECALL")]
    steps = [step for step in steps if step.offset <= position]
    # The arguments were loaded by the instructions right before the call, unless one was computed.
    call = steps[-1]
    if not call.opname.startswith("CALL") or call.arg not in (2, 3):
        return False
    if call.arg == 3 and not steps[-2].opname.startswith("LOAD"):
        # The default is computed, by who knows how many steps.
        return False
    name = steps[-call.arg :][:1]
    return bool(name) and name[0].opname == "LOAD_CONST" and type(name[0].argval) is str
