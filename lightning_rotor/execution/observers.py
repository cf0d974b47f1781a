"""Hooks that only look (rule 8 of ``passes``).

What they do outside of Python, such as writing a line to a file, must not happen again in a recomputation. A hook only
looks if, in the first pass, it returned nothing, changed no tensor, and set nothing that code which runs again may
read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import gt
from sys import getrefcount
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import is_made_of_others, plain_parts, same_bits, tensors_in
from lightning_rotor.stages.containers import length_of
from lightning_rotor.stages.known_layers import has_own_code
from lightning_rotor.stages.snapshot import SMALL_BYTES, Snapshot

_WAYS_AROUND_VERSIONS = frozenset(("data", "numpy", "asarray", "from_dlpack", "data_ptr", "set_"))
"""Names in code that writes to tensors without their versions."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Registered(NamedTuple):
    """A hook in its module's table, where a watched one stands in its place for a pass."""

    table: dict[int, Any]
    key: int
    watched: _Watched


class Observers:
    """Watches the hooks of some modules, or hooks that their own code may call, during one pass."""

    __slots__ = ("_modules", "_quiet", "_registered")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._registered: list[_Registered] = []
        # Tables and keys of the hooks that only look.
        self._quiet: list[tuple[dict[int, Any], int]] = []

    def watch(self) -> None:
        """Begin to watch."""
        # None stands for the hooks of all modules.
        tables_of_buffers = [module._buffers for module in self._modules if module._buffers]
        # All hooks are watched, though few only look: what a hook does can be told only from what it did.
        for module in (None, *self._modules):
            for table in private.hook_tables(module, private.HOOKS[:2]):
                for key, hook in [*table.items()]:
                    # A watch of a surrounding pass hears of it, too.
                    table[key] = watched = _Watched(hook, module, tables_of_buffers)
                    self._registered.append(_Registered(table, key, watched))

    def settle(self, before: Snapshot) -> None:
        """End the pass; ``before`` is what its code can reach, as it was."""
        for table, key, watched in self._registered:
            # Otherwise the hook is gone, or another stands in its place now.
            if table.get(key) is watched:
                table[key] = watched.hook
        quiet = [entry for entry in self._registered if not entry.watched.acted]
        quiet = self._without_collectors(quiet)
        quiet = self._without_writers(quiet, before)
        self._quiet = [(entry.table, entry.key) for entry in quiet]
        self._registered = []

    def _without_collectors(self, quiet: list[_Registered]) -> list[_Registered]:
        """Hooks that are not inside of code which may read what hooks collect."""
        # Code around hooked modules may read what hooks keep, wherever that is: transformers collects hidden states so.
        # All hooks in there run again then, for the place in the collection counts as well.
        keeping = {entry.watched.module for entry in self._registered if entry.watched.kept}
        if not keeping:
            return quiet
        around: set[nn.Module | None] = set()
        for module in filter(has_own_code, self._modules):
            # Without the module itself, whose hooks run outside of its code.
            _, *below = module.modules()
            around.update(below)
        if around.isdisjoint(keeping):
            return quiet
        return [entry for entry in quiet if entry.watched.module not in around]

    def _without_writers(self, quiet: list[_Registered], before: Snapshot) -> list[_Registered]:
        """Hooks that changed nothing which code or acting hooks can read."""
        acting = [entry.watched.innermost for entry in self._registered if entry.watched.acted]
        own_code = list(filter(has_own_code, self._modules))
        if not quiet or not (acting or own_code):
            return quiet
        # What has changed and can be read by code that runs again, or by hooks that will.
        shared = Snapshot((*own_code, *acting), hooks=False).owners & before.changed()
        silent = []
        for entry in quiet:
            hook = entry.watched
            # Attributes of modules are for whoever asks the module.
            if hook.marked:
                continue
            if shared and shared & Snapshot((hook.innermost,), hooks=False).owners:
                continue
            silent.append(entry)
        return silent

    def leave_out(self) -> None:
        """Remove the hooks that only look. The caller puts all hooks back."""
        for table, key in self._quiet:
            table.pop(key, None)


class _Watched:
    """A hook, and what it has done.

    Attributes:
        acted: It has not only looked: it has returned something, or changed a tensor or a buffer.
        marked: It has set attributes of its module.
        kept: It has kept one of the tensors that it was given.
        module: The module whose hook it is; None for a hook of all modules.
    """

    __slots__ = ("_tables_of_buffers", "acted", "hook", "kept", "marked", "module")

    def __init__(
        self,
        hook: Callable[..., Any],
        module: nn.Module | None,
        tables_of_buffers: Sequence[dict[str, torch.Tensor | None]],
    ) -> None:
        self.hook, self.module = hook, module
        self._tables_of_buffers = tables_of_buffers
        self.acted = self.marked = self.kept = False

    @property
    def innermost(self) -> Callable[..., Any]:
        """The user's own hook."""
        hook = self.hook
        while isinstance(hook, _Watched):
            hook = hook.hook
        return hook

    def __call__(self, *arguments: Any) -> Any:
        """Call the hook."""
        looks, unseen = self._looks_of(arguments), self._values_of(arguments)
        marks = _marks_on(arguments[0])
        tensors = tensors_in(arguments)
        # Whoever keeps a tensor holds a reference to it.
        # A list that collects outputs changes nothing else that could be seen.
        holders = list(map(getrefcount, tensors))
        result = self._call(*arguments)
        # Once it has done something it stays so: a module may be called several times in one pass.
        self.acted = self.acted or result is not None or looks != self._looks_of(arguments)
        # Comparing values takes longer, so it comes last.
        self.acted = self.acted or not all(map(_is_as_it_was, unseen))
        self.marked = self.marked or marks != _marks_on(arguments[0])
        self.kept = self.kept or any(map(gt, map(getrefcount, tensors), holders))
        return result

    def _looks_of(self, arguments: Iterable[Any]) -> list[tuple[int, int, bool]]:
        """A value that changes if one of its tensors does, or a buffer of any module, which it may reach."""
        looks = _looks_of(tensors_in(tuple(arguments)))
        for table in self._tables_of_buffers:
            for buffer in table.values():
                if buffer is not None:
                    # Another may stand in its place, or it is written to.
                    looks.append((id(buffer), 0 if buffer.is_inference() else private.version_of(buffer), False))
        return looks

    def _values_of(self, arguments: Iterable[Any]) -> list[tuple[torch.Tensor, Any]]:
        """Tensors that the hook may write to without a version that tells, and what stands in them.

        A write by ``buffer.data`` or NumPy is of that kind. To compare values takes memory and makes a GPU wait, and
        most hooks only look. So it is done where the code of the hook names such a way.
        """
        if not _goes_around_versions(self.innermost):
            return []
        tensors = tensors_in(tuple(arguments))
        for table in self._tables_of_buffers:
            tensors += [buffer for buffer in table.values() if buffer is not None]
        return [(tensor, _value_of(tensor)) for tensor in tensors if _is_comparable(tensor)]

    def _call(self, *arguments: Any) -> Any:
        hooks = private.hooks_for_saved_tensors()
        if hooks is None:
            return self.hook(*arguments)
        pack, unpack = hooks

        def note(tensor: torch.Tensor) -> Any:
            # It computes with gradients, so a replay without it would save fewer tensors (rule 10).
            self.acted = True
            return pack(tensor)

        with saved_tensors_hooks(note, unpack):
            return self.hook(*arguments)


def _goes_around_versions(hook: Any) -> bool:
    """True if code that a hook may run names a way to write to tensors without their versions."""
    for function in _functions_of(hook):
        if not _WAYS_AROUND_VERSIONS.isdisjoint(function.__code__.co_names):
            return True
    return False


def _functions_of(hook: Any) -> list[FunctionType]:
    """A hook's own function, functions that it names, and methods of the objects that it holds: one step far."""
    holders = [hook.__self__, hook.__func__] if isinstance(hook, MethodType) else [hook]
    own = holders[-1]
    if isinstance(own, FunctionType):
        for cell in own.__closure__ or ():
            # Of a variable that was deleted it is empty.
            with suppress(ValueError):
                holders.append(cell.cell_contents)
        holders += map(own.__globals__.get, own.__code__.co_names)
    functions = []
    for holder in holders:
        values = [holder] if isinstance(holder, FunctionType) else vars(type(holder)).values()
        functions += [value for value in values if isinstance(value, FunctionType)]
    return functions


def _is_comparable(tensor: torch.Tensor) -> bool:
    """True if the values of a tensor can be asked for, which those of tensors made of others cannot."""
    return not is_made_of_others(tensor) and tensor.layout is torch.strided and not tensor.is_meta


def _value_of(tensor: torch.Tensor) -> Any:
    """A copy of a small tensor; of a larger one a value that changes with its content, as a copy would take memory."""
    tensor = tensor.detach()
    if tensor.nbytes <= SMALL_BYTES:
        return tensor.clone()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # By bits, so that NaNs count, and by value, as changes of the sign of all could cancel in the bits.
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    return torch.stack([bits.sum().double(), tensor.sum(dtype=torch.float64).nan_to_num()])


def _is_as_it_was(before: tuple[torch.Tensor, Any]) -> bool:
    tensor, value = before
    now = _value_of(tensor)
    return now.shape == value.shape and same_bits(now, value)


def _marks_on(module: nn.Module) -> list[tuple[str, int, int]]:
    """A value that changes if an attribute of the user's is set, or a container in one grows."""
    marks = []
    for name, value in vars(module).items():
        # Torch's own bookkeeping, in which watched hooks stand for now.
        if name in private.STRUCTURE:
            continue
        length = 0
        if isinstance(value, (list, dict, set, deque)):
            length = length_of(value)
        marks.append((name, id(value), length))
    return marks


def _looks_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int, bool]]:
    """A value that changes if a tensor does."""
    looks = []
    for tensor in tensors:
        parts: Iterable[torch.Tensor] = (tensor,)
        if is_made_of_others(tensor):
            parts = plain_parts(tensor)
        for part in parts:
            # The address tells of ``tensor.data = ...``, the version of writes in place.
            address = part.data_ptr() if part.layout is torch.strided else 0
            # Tensors of inference mode count no writes.
            version = 0 if part.is_inference() else private.version_of(part)
            looks.append((address, version, tensor.requires_grad))
    return looks
