"""Hooks that only look: what they do outside of Python's reach (a line in a file) must not happen again in a recomputation.

A forward hook is an observer in a pass if it returned None each time, changed no tensor that it was given, and saved nothing for the backward.
It stays one only as long as nothing that runs again reads what it has changed: a pre-hook that keeps the input for a hook which adds it to the
output is called again with that one, and its effects are put back (:mod:`.snapshot`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.private import torch_names as private
from lightning_rotor.sequential import has_own_code
from lightning_rotor.snapshot import Snapshot
from lightning_rotor.tensors import tensors_in


class Observers:
    """Watches the hooks of some modules during one pass.

    Args:
        modules: All whose hooks may be called, or whose own code may run.
    """

    __slots__ = ("_modules", "_quiet", "_watched")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._watched: list[tuple[dict[int, Any], int, _Watched]] = []
        self._quiet: list[tuple[dict[int, Any], int]] = []

    def watch(self) -> None:
        """Begin."""
        for table in (table for module in (None, *self._modules) for table in private.forward_hook_tables(module)):
            for key, hook in [*table.items()]:
                # One in another pass around this one hears of it, too.
                table[key] = watched = _Watched(hook)
                self._watched.append((table, key, watched))

    def settle(self, before: Snapshot) -> None:
        """The pass is over.

        Args:
            before: What its code can reach, as it was.
        """
        for table, key, watched in self._watched:
            if table.get(key) is watched:  # else it is gone, or is another now
                table[key] = watched.hook
        quiet = [each for each in self._watched if not each[2].acted]
        self._quiet = [(table, key) for table, key, _ in quiet]
        acting = [watched.innermost for _, _, watched in self._watched if watched.acted]
        own_code = [module for module in self._modules if has_own_code(module)]
        if quiet and (acting or own_code):
            again = Snapshot((*own_code, *acting), hooks=False)
            shared = again.owners & before.changed()
            self._quiet = [
                (table, key)
                for table, key, watched in quiet
                if not (watched.marked or (shared and shared & Snapshot((watched.innermost,), hooks=False).owners))
            ]
        self._watched = []

    def leave_out(self) -> None:
        """Take the observers away. The caller puts all hooks back."""
        for table, key in self._quiet:
            table.pop(key, None)
        # A recomputation ends with an error where it has all that it needs, which is none that a hook should hear of.
        for module in (None, *self._modules):
            private.forget_always_called_hooks(module)


class _Watched:
    """A hook that notes what it does.

    Attributes:
        hook: It.
        acted: Whether it has done more than look.
        marked: Whether it has left something in attributes of its module, where others may read it.
    """

    __slots__ = ("acted", "hook", "marked")

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.acted = self.marked = False

    @property
    def innermost(self) -> Callable[..., Any]:
        """The user's."""
        hook = self.hook
        while isinstance(hook, _Watched):
            hook = hook.hook
        return hook

    def __call__(self, *given: Any) -> Any:
        """Call it."""
        before, marks = _looks_of(given), _marks_on(given[0])
        hooks = private.hooks_for_saved_tensors()
        if hooks is None:
            result = self.hook(*given)
        else:
            pack, unpack = hooks

            def note(tensor: torch.Tensor) -> Any:
                self.acted = True
                return pack(tensor)

            with saved_tensors_hooks(note, unpack):
                result = self.hook(*given)
        self.acted = self.acted or result is not None or before != _looks_of(given)
        self.marked = self.marked or marks != _marks_on(given[0])
        return result


def _marks_on(module: nn.Module) -> list[tuple[str, int, int]]:
    """Comparable: changes if an attribute of the user's is set, or a container in one grows."""
    return [
        (name, id(value), len(value) if isinstance(value, (list, dict, set, deque)) else 0)
        for name, value in vars(module).items()
        if name not in private.STRUCTURE
    ]


def _looks_of(given: Iterable[Any]) -> list[Any]:
    """Comparable: changes if a tensor does."""
    return [
        (
            tensor.data_ptr() if tensor.layout is torch.strided else 0,
            0 if tensor.is_inference() else private.version_of(tensor),
            tensor.requires_grad,
        )
        for tensor in tensors_in(tuple(given))
    ]
