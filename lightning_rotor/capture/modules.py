"""The modules and the call that a recording is made of: whose forward runs, and which become one operation."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

import torch
from torch import nn

from lightning_rotor.errors import InverseError, ModelError
from lightning_rotor.private.lightning_names import TRAINERS
from lightning_rotor.private.torch_names import is_compiler_wrapper
from lightning_rotor.private.values import TreeSpec, flatten, keystr, tree_flatten_with_path, tree_unflatten
from lightning_rotor.stages.sequential import has_own_call, is_invertible, runs_members_in_a_row


class UntraceableError(Exception):
    """The code of a module does what a recording cannot hold."""


def words(*lines: str) -> frozenset[str]:
    """Names, several to a line."""
    return frozenset(" ".join(lines).split())


class ModuleCalls:
    """Follows the calls of submodules while a module is recorded.

    Attributes:
        leaves: Those that were one operation.
        culprit: The innermost module that could not be recorded.
    """

    def __init__(self, root: nn.Module) -> None:
        self.leaves: set[nn.Module] = set()
        self.culprit: nn.Module | None = None
        self._paths: dict[nn.Module, str] = {module: path for path, module in root.named_modules()}
        self._running = [""]

    @property
    def path(self) -> str:
        """Where the module is whose forward is running; empty for the root."""
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

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Context of a submodule's call."""
        self._running.append(self._paths[module])
        try:
            yield
        except InverseError as error:
            if error.stage != type(module).__name__:  # a module inside has said where it is
                raise
            raise error.located(self._paths[module]) from error
        except Exception:
            if self.culprit is None and module not in self.leaves:
                self.culprit = module
            raise
        finally:
            self._running.pop()


def hides_code(module: nn.Module) -> bool:
    """True if calling a module does more than its code says, or its code is not Python's."""
    return (
        has_own_call(module)
        or "parametrizations" in module._modules
        or isinstance(module, torch.jit.ScriptModule)
        or is_compiler_wrapper(module)
    )


def is_invertible_as_a_whole(module: nn.Module) -> bool:
    """True if a module has an inverse, and is no row of modules, each of which may have one of its own."""
    return is_invertible(module) and not (isinstance(module, nn.Sequential) and runs_members_in_a_row(module))


def is_torchs_module(module: nn.Module) -> bool:
    """True if a module's class is torch's own."""
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))


def tensor_slots(root: nn.Module) -> dict[int, tuple[torch.Tensor, str, Any]]:
    """Parameters and buffers by address: their first names, and the module and the name in it."""
    slots: dict[int, tuple[torch.Tensor, str, Any]] = {}
    for path, module in root.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                slots.setdefault(id(tensor), (tensor, f"{path}.{key}" if path else key, (module, key)))
    return slots


def tensor_attributes(root: nn.Module) -> tuple[tuple[nn.Module, str], ...]:
    """Attributes that hold a tensor which is no parameter or buffer: the module, and the name in it."""
    slots = tensor_slots(root)
    return tuple(
        (module, name)
        for module in root.modules()
        for name, value in module.__dict__.items()
        if type(value) is torch.Tensor and id(value) not in slots
    )


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
    attributes.update({name: _Hidden() for name in TRAINERS if attributes.get(name) is not None})
    for child in module.children():
        if not is_opaque(child):
            hide_trainers(child, is_opaque)


# ----------------------------------------------------------------------------------------------------
# One call of a module: which of its arguments are tensors, and which a recording takes for granted.


PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), enum.Enum, slice),
    *(torch.dtype, torch.device, torch.memory_format, torch.Size, FunctionType, BuiltinFunctionType, type),
)


_SIMPLE = frozenset((torch.Tensor, nn.Parameter, bool, int, float, str, type(None)))


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of a call as they were given, flattened. Leaves that are no tensors are baked into a recording.

    ``key`` is equal for calls that one recording could serve: the structure, and leaves without tensors. ``inputs`` are
    the tensors, and behind them ``attributes`` of modules that may be others at each call: tensors and numbers.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    key: Any
    leaves: tuple[Any, ...]
    attributes: tuple[tuple[nn.Module, str], ...]
    _spec: TreeSpec | None
    _keywords: tuple[str, ...]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        attributes: tuple[tuple[nn.Module, str], ...] = (),
    ) -> Call:
        """Flatten arguments; ``ModelError`` if one may hide tensors. This runs at every training call."""
        flat, spec, structure = [*args, *kwargs.values()], None, ""
        if not _SIMPLE.issuperset(map(type, flat)):
            flat, spec = flatten((tuple(args), dict(kwargs)))
            structure = str(spec)
        more = [owner.__dict__.get(name) for owner, name in attributes]
        inputs = (*[leaf for leaf in flat if isinstance(leaf, torch.Tensor)], *more)
        key = (len(args), *kwargs), structure, tuple(map(_spelled, flat))
        leaves = tuple([None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat])
        call = cls(module, inputs, key, leaves, attributes, spec, tuple(kwargs))
        for number, leaf in enumerate(leaves if spec is not None else ()):
            if not isinstance(leaf, PLAIN):
                raise ModelError(
                    f"the forward of {type(module).__name__} takes {type(leaf).__name__} as "
                    f"{call._paths()[number]}: expected tensors and plain values, or tuples, lists, "
                    "dicts, dataclasses and attrs objects of them (register others with torch.utils._pytree)"
                )
        return call

    def _paths(self) -> list[str]:
        """The argument that each leaf is in, and the place in it; ``TypeError`` if the forward takes no such call."""
        args, kwargs = self._unflatten(list(range(len(self.leaves))))
        arguments = inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs).arguments
        found, _ = tree_flatten_with_path(dict(list(arguments.items())[1:]))
        named = {number: f"{getattr(path[0], 'key', None)!r}{keystr(path[1:])}" for path, number in found}
        return [named[number] for number in range(len(self.leaves))]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in messages; ``TypeError`` if the forward takes no such call."""
        kinds = zip(self._paths(), self.key[-1], strict=True)
        named = [f"input {path}" for path, kind in kinds if kind is torch.Tensor]
        paths = {module: path for path, module in self.module.named_modules()}
        found = (f"{paths[owner]}.{name}" if paths[owner] else name for owner, name in self.attributes)
        return (*named, *(f"attribute {path!r}" for path in found))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the inputs."""
        return [value for value in self.inputs if isinstance(value, torch.Tensor)]

    @property
    def signature(self) -> Any:
        """Shapes, and what else code can tell of tensors without values, besides dimensions, types and devices."""
        return tuple([(tuple(tensor.shape), (_layout(tensor), tensor.requires_grad)) for tensor in self.tensors])

    def with_tensors(self, replacements: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, as they were given, with other values in the place of the tensors."""
        pending = iter(replacements)
        kinds = zip(self.key[-1], self.leaves, strict=True)
        return self._unflatten([next(pending) if kind is torch.Tensor else leaf for kind, leaf in kinds])

    def _unflatten(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._spec is not None:
            args, kwargs = tree_unflatten(leaves, self._spec)
            return args, kwargs
        positional = len(leaves) - len(self._keywords)
        return tuple(leaves[:positional]), dict(zip(self._keywords, leaves[positional:], strict=True))


def firsts_of(values: Sequence[Any]) -> tuple[int, ...]:
    """For each value, the number of the first one that is the same object."""
    addresses = [id(value) for value in values]
    return tuple(map(addresses.index, addresses))


def _spelled(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.Tensor
    return type(leaf), repr(leaf) if isinstance(leaf, (slice, float)) else leaf


def _layout(tensor: torch.Tensor) -> Any:
    """A value that is equal for tensors of other sizes with the same memory layout."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.layout
    return True if tensor.is_contiguous() else tensor.stride()
