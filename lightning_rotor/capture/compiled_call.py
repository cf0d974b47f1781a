"""A module that was compiled as a whole, as a chain of one stage: its own compiled code, or that planned inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_rotor.private.torch_names import COMPILED_CALL, CompiledCall, is_compiler_wrapper, module_inside
from lightning_rotor.private.values import tensors_in, tree_flatten
from lightning_rotor.stages.sequential import Stage


class WholeModule(nn.Module):
    """A module that was compiled as a whole, called with all of its arguments as one value.

    It looks like a module that was compiled in place, with the settings of the user's, so that it has variants as
    compiled blocks have.
    """

    def __init__(self, module: nn.Module, call: CompiledCall) -> None:
        super().__init__()
        # A child in name alone, for those who walk modules: what runs is bound below.
        self._modules["module"] = module
        self._uncompiled = call.uncompiled
        self.__dict__[COMPILED_CALL] = _with_one_value(call)

    def forward(self, value: Any) -> Any:
        """Output of the module, uncompiled."""
        args, kwargs = value
        return self._uncompiled(*args, **kwargs)


def _with_one_value(call: CompiledCall) -> Callable[[Any], Any]:
    """A function that takes all arguments of a call as one value, and tells how the call was compiled."""

    def run(value: Any) -> Any:
        args, kwargs = value
        return call.run(*args, **kwargs)

    run.get_compiler_config = call.get_compiler_config  # type: ignore[attr-defined]
    return run


class CompiledCut:
    """A module that was compiled as a whole, as one stage whose value is all arguments of a call.

    It is for calls whose other arguments than tensors equal those of the first one.
    """

    way: ClassVar[str] = "compiled"
    inputs: ClassVar[tuple[str, ...]] = ()
    anew: ClassVar[str] = ""

    def __init__(self, module: nn.Module, call: CompiledCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.reasons: Mapping[str, str] = {}
        self.module = module
        named = module_inside(module) if is_compiler_wrapper(module) else module
        self.stages = (Stage(type(named).__name__, (WholeModule(module, call),)),)
        self._call = _besides_tensors((tuple(args), dict(kwargs)))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The arguments as one value; None if they differ in more than tensors."""
        value = tuple(args), dict(kwargs)
        if not tensors_in(value) or _besides_tensors(value) != self._call:
            return None
        return value


def _besides_tensors(value: Any) -> Any:
    """A key of the nesting of arguments, and of those that are no tensors."""
    leaves, spec = tree_flatten(value)
    others = []
    for leaf in leaves:
        is_tensor = isinstance(leaf, torch.Tensor)
        # By their text: users' objects may compare as they like.
        others.append("tensor" if is_tensor else (type(leaf), repr(leaf)))
    return spec, tuple(others)
