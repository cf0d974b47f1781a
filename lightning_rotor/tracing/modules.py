"""The modules that a trace goes through: whose forward is running, which become one operation, where their tensors are."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager

import torch
from torch import nn

from lightning_rotor.invertible.protocol import is_invertible
from lightning_rotor.private.torch_names import is_compiler_wrapper
from lightning_rotor.sequential import has_own_call, runs_members_in_a_row

BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules of torch that are several layers, so that one wants to choose between these."""


class UntraceableError(Exception):
    """The code of a module does what a trace cannot hold."""


class _Tracing(threading.local):
    """Whether code runs of which a trace is made, and not code of one operation."""

    active = False


_tracing = _Tracing()


@contextmanager
def tracing(active: bool = True) -> Iterator[None]:
    """Context of code that is traced, or of code inside of it that is not."""
    before, _tracing.active = _tracing.active, active
    try:
        yield
    finally:
        _tracing.active = before


def require_untraced(what: str) -> None:
    """Check that nobody takes the running code down.

    Raises:
        UntraceableError: Somebody does.
    """
    if _tracing.active:
        raise UntraceableError(what)


class ModuleCalls:
    """Follows the calls of submodules while a module is traced.

    Args:
        root: The module.
        opaque: Modules whose code was found to be untraceable.
        opaque_types: Types of which the same is taken for granted.
        not_whole: Modules that are traced through although they have an inverse.

    Attributes:
        modules: The submodules by path, the root included.
        root: The module.
        opaque: What is not traced through: modules, and types.
        leaves: Modules that became one operation.
        not_whole: See above.
        culprit: The innermost module whose forward could not be traced.
    """

    def __init__(
        self, root: nn.Module, opaque: set[nn.Module], opaque_types: set[type], not_whole: Set[nn.Module]
    ) -> None:
        self.modules = dict(root.named_modules())
        self.leaves: set[nn.Module] = set()
        self.culprit: nn.Module | None = None
        self.root = root
        self.opaque = opaque, opaque_types
        self.not_whole = not_whole
        self._paths: dict[nn.Module, str] = {module: path for path, module in self.modules.items()}
        self._running = [""]

    @property
    def path(self) -> str:
        """Where the module is whose forward is running; empty for the root."""
        return self._running[-1]

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._paths

    def is_opaque(self, module: nn.Module) -> bool:
        """Whether a module was found to be untraceable, calling it does more than its code says, or it can be inverted as a whole alone."""
        opaque, opaque_types = self.opaque
        return module in opaque or type(module) in opaque_types or hides_code(module) or self.inverts_as_a_whole(module)

    def inverts_as_a_whole(self, module: nn.Module) -> bool:
        """Whether a module stays one operation for the sake of its inverse."""
        return module not in self.not_whole and is_invertible_as_a_whole(module)

    def path_of(self, module: nn.Module) -> str:
        """Where a module is that is called.

        Raises:
            UntraceableError: It is no submodule.
        """
        path = self._paths.get(module)
        if path is None:
            raise UntraceableError(
                f"{type(module).__name__} is called but is no submodule, so its parameters are hidden"
            )
        return path

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Context of a submodule's call."""
        self._running.append(self._paths[module])
        try:
            yield
        except Exception:
            if self.culprit is None and module not in self.leaves:
                self.culprit = module
            raise
        finally:
            self._running.pop()


def hides_code(module: nn.Module) -> bool:
    """Whether calling a module does more than its code says, or its code is not Python's."""
    return (
        has_own_call(module)
        or "parametrizations" in module._modules
        or isinstance(module, torch.jit.ScriptModule)
        or is_compiler_wrapper(module)
    )


def is_invertible_as_a_whole(module: nn.Module) -> bool:
    """Whether a module has an inverse, and is no row of modules, each of which may have one of its own."""
    return is_invertible(module) and not (isinstance(module, nn.Sequential) and runs_members_in_a_row(module))


def is_torchs_module(module: nn.Module) -> bool:
    """Whether a module's class is torch's own."""
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))


def tensor_slots(
    root: nn.Module,
) -> tuple[dict[str, tuple[nn.Module, str]], dict[int, tuple[torch.Tensor, str]]]:
    """Parameters, buffers and tensors in attributes: by name who has them, and by address the tensor and its first name."""
    owners: dict[str, tuple[nn.Module, str]] = {}
    names: dict[int, tuple[torch.Tensor, str]] = {}
    for path, module in root.named_modules():
        plain = {key: value for key, value in module.__dict__.items() if isinstance(value, torch.Tensor)}
        for key, tensor in (*module._parameters.items(), *module._buffers.items(), *plain.items()):
            if tensor is not None:
                name = f"{path}.{key}" if path else key
                owners[name] = (module, key)
                names.setdefault(id(tensor), (tensor, name))
    return owners, names
