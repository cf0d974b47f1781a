"""Modules inside of a recorded one: which call is running, and which of them become one operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn

from lightning_rotor.capture.operations import UntraceableError
from lightning_rotor.errors import InverseError
from lightning_rotor.private.lightning_names import TRAINERS
from lightning_rotor.private.sharding import units_in
from lightning_rotor.private.torch_names import is_compiler_wrapper
from lightning_rotor.stages.containers import same_list
from lightning_rotor.stages.inverses import is_invertible
from lightning_rotor.stages.known_layers import does_more_than_forward, runs_members_in_a_row


class ModuleCalls:
    """Follows the calls of submodules while a module is recorded.

    Attributes:
        leaves: Submodules that were one operation.
        culprit: The innermost module that could not be recorded.
    """

    def __init__(self, root: nn.Module) -> None:
        self.leaves: set[nn.Module] = set()
        self.culprit: nn.Module | None = None
        self._paths: dict[nn.Module, str] = {module: path for path, module in root.named_modules()}
        self._tensors: dict[nn.Module, list[torch.Tensor | None]] = {}
        # The root is called by the recorder itself, so its path is there from the beginning.
        self._running = [""]

    @property
    def path(self) -> str:
        """Path of the module whose forward is running; empty for the root."""
        return self._running[-1]

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._paths

    def path_of(self, module: nn.Module) -> str:
        """The path of a called module; ``UntraceableError`` if it is no submodule."""
        path = self._paths.get(module)
        if path is None:
            kind = type(module).__name__
            raise UntraceableError(f"{kind} is called but is no submodule, so its parameters are hidden")
        return path

    def note_tensors(self) -> None:
        """Note the parameters and buffers that modules hold."""
        # FSDP2 replaces the parameters of its units at each call.
        if not units_in(self._paths):
            self._tensors = {module: _tensors_of(module) for module in self._paths}

    def has_its_tensors(self, module: nn.Module) -> bool:
        """False if a module or one inside of it was lent other parameters or buffers, as functional_call does."""
        for each in module.modules():
            noted = self._tensors.get(each)
            if noted is not None and not same_list(_tensors_of(each), noted):
                return False
        return True

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Context of a submodule's call."""
        self._running.append(self._paths[module])
        try:
            yield
        except InverseError as error:
            # A module knows its type and not where it is. One further inside may have said so already.
            if error.stage != type(module).__name__:
                raise
            raise error.located(self._paths[module]) from error
        except Exception:
            # The first that sees the error is the innermost.
            if self.culprit is None and module not in self.leaves:
                self.culprit = module
            raise
        finally:
            self._running.pop()


def _tensors_of(module: nn.Module) -> list[torch.Tensor | None]:
    """Parameters and buffers that a module holds by itself."""
    return [*module._parameters.values(), *module._buffers.values()]


def hides_code(module: nn.Module) -> bool:
    """True if calling a module does more than its code says, or its code is not Python's."""
    return (
        does_more_than_forward(module)
        # torch.nn.utils.parametrize computes weights in a property, at each read.
        or "parametrizations" in module._modules
        or isinstance(module, torch.jit.ScriptModule)
        or is_compiler_wrapper(module)
    )


def is_invertible_as_a_whole(module: nn.Module) -> bool:
    """True if a module has an inverse, and is no row of modules, each of which may have one of its own."""
    if not is_invertible(module):
        return False
    is_row = isinstance(module, nn.Sequential) and runs_members_in_a_row(module)
    return not is_row


def is_torchs_module(module: nn.Module) -> bool:
    """True if a module's class is torch's own."""
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))


Slot: TypeAlias = tuple[nn.Module, str]
"""A module and the name of an attribute, a parameter or a buffer in it."""


def tensor_slots(root: nn.Module) -> dict[int, tuple[torch.Tensor, str, Slot]]:
    """Parameters and buffers by ``id``: the tensor, its first dotted name, and its slot.

    Ids are used again once a tensor is gone, so that who looks one up compares the tensor itself.
    """
    slots: dict[int, tuple[torch.Tensor, str, Slot]] = {}
    for path, module in root.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                dotted = f"{path}.{name}" if path else name
                slots.setdefault(id(tensor), (tensor, dotted, (module, name)))
    return slots


def tensor_attributes(root: nn.Module) -> tuple[Slot, ...]:
    """Attributes that hold a tensor which is neither parameter nor buffer."""
    # A buffer may also stand in an attribute. It is read where it is, and no input.
    registered = tensor_slots(root)
    attributes: list[Slot] = []
    for module in root.modules():
        for name, value in module.__dict__.items():
            if type(value) is torch.Tensor and id(value) not in registered:
                attributes.append((module, name))
    return tuple(attributes)


class _Hidden:
    """Stands in for a Trainer, whose answers change in every step."""

    def __getattr__(self, name: str) -> NoReturn:
        raise UntraceableError(
            f"it asks the Trainer for {name!r} (as self.global_step, self.current_epoch and self.log do), which is "
            "another in every step"
        )


def hide_trainers(module: nn.Module, is_opaque: Callable[..., bool]) -> None:
    """Put an object without answers in the place of Trainers, for a recording. The caller puts them back."""
    attributes: dict[str, Any] = module.__dict__
    for name in TRAINERS:
        if attributes.get(name) is not None:
            attributes[name] = _Hidden()
    for child in module._modules.values():
        # One that is an operation runs at every call, and may ask its Trainer then.
        if child is not None and not is_opaque(child):
            hide_trainers(child, is_opaque)
