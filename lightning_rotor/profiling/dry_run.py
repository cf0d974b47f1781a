"""Dry runs: a user's code on copies whose tensors have no values (``fake_copies``), for what it would do.

They take no memory and little time. The originals, the generators and the output stay as they are.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from lightning_rotor.execution.passes import repeating
from lightning_rotor.private import torch_names as private
from lightning_rotor.stages.draws import drawn_since
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.snapshot import Snapshot

T = TypeVar("T")


@contextmanager
def unlogged() -> Iterator[None]:
    """Context in which fake tensors do not log errors that they raise as well, of failed traces for example."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def without_trace(device: torch.device | None = None, modules: Iterable[nn.Module] = ()) -> Iterator[GeneratorStates]:
    """Context in which a dry run leaves generators and globals that modules refer to as they are, and is silent.

    Whoever knows from which generators it draws says so to what this yields.
    """
    # Taken twice, and the caller's may be a generator.
    modules = list(modules)
    generators = GeneratorStates(device)
    with ExitStack() as stack:
        # A copy has its own attributes, but shares globals and variables of enclosing functions.
        stack.callback(Snapshot(modules, code=True).restore)
        stack.callback(generators.restore)
        # Dry runs are of training, wherever they are asked for.
        stack.enter_context(torch.enable_grad())
        stack.enter_context(repeating())
        # The real run says it all once more, with values.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(unlogged())
        # A compiler would compile for fake tensors.
        stack.enter_context(private.uncompiled())
        yield generators


def run_dry(run: Callable[[], T], generators: GeneratorStates) -> T:
    """The result of a dry run. Of ``generators``, only those remain from which it draws, and not another thread."""
    try:
        return run()
    finally:
        # Setting back a generator that only another thread has drawn from would repeat that thread's draws.
        generators.keep_only(drawn_since(generators, partial(_attempt, run)))


def _attempt(run: Callable[[], object]) -> None:
    """Run code for its random numbers. If it fails, it has failed the first time as well."""
    with suppress(Exception):
        run()
