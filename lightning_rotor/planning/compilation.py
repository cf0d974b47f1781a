"""The dynamic program's loops in machine code, where Numba can compile them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache
from importlib import util
from pathlib import Path

from lightning_rotor.planning import kernels

_log = logging.getLogger(__name__)

_NAME = kernels.__name__.replace("kernels", "compiled_kernels")


@cache
def compiled_solve() -> Callable[..., None] | None:
    """:func:`.kernels.solve` in machine code; None where it cannot be compiled, and planning takes longer."""
    try:
        import numba
    except ImportError as error:  # Numba raises it, too, if it is too old for NumPy
        _log.debug("long chains are planned without compilation: %s", error)
        return None
    if getattr(numba.config, "DISABLE_JIT", False):  # it would run loops over slots in Python, which take far longer
        return None
    specification = util.spec_from_file_location(_NAME, kernels.__file__)
    assert specification is not None
    assert specification.loader is not None
    module = util.module_from_spec(specification)
    sys.modules[_NAME] = module  # compiled code that is kept finds its types there
    try:
        specification.loader.exec_module(module)
    except RuntimeError as error:  # no place to keep compiled code: compiling takes longer than it saves
        del sys.modules[_NAME]
        _log.info("long chains are planned without compilation, for Numba cannot keep compiled code: %s", error)
        return None
    solve: Callable[..., None] = module.solve
    if not any(Path(module.solve.stats.cache_path).glob("compiled_kernels.solve*.nbi")):
        _log.info("compiling the planner for long chains, which takes some seconds, once")
    return solve
